#!/bin/sh
# bloom 10b: causal-lm, 4,261,381,120 parameters.
# Expected memory: 119.0 GiB on one rank in fp32, with the copy that a
# checkpoint is written from. A checkpoint: 47.6 GiB.
# On 8 ranks with ZeRO-3 and half precision each holds 7.9 GiB and saves
# 6.0 GiB. The name counts parameters and two moments.
exec asymlab train bloom --size 10b --steps 1000 --every 50 --run runs/bloom-10b "$@"
