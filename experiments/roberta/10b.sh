#!/bin/sh
# roberta 10b: masked-lm, 3,759,661,145 parameters.
# Expected memory: 100.0 GiB on one rank in fp32, with the copy that a
# checkpoint is written from. A checkpoint: 42.0 GiB.
# On 8 ranks with ZeRO-3 and half precision each holds 7.0 GiB and saves
# 5.3 GiB. The name counts parameters and two moments.
exec asymlab train roberta --size 10b --steps 1000 --every 50 --run runs/roberta-10b "$@"
