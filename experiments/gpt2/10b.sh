#!/bin/sh
# gpt2 10b: causal-lm, 3,327,956,992 parameters.
# Expected memory: 90.5 GiB on one rank in fp32, with the copy that a
# checkpoint is written from. A checkpoint: 37.2 GiB.
# On 8 ranks with ZeRO-3 and half precision each holds 6.2 GiB and saves
# 4.6 GiB. The name counts parameters and two moments.
exec asymlab train gpt2 --size 10b --steps 1000 --every 50 --run runs/gpt2-10b "$@"
