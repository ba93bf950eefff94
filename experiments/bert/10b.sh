#!/bin/sh
# bert 10b: span-qa, 3,698,580,482 parameters.
# Expected memory: 98.0 GiB on one rank in fp32, with the copy that a
# checkpoint is written from. A checkpoint: 41.3 GiB.
# On 8 ranks with ZeRO-3 and half precision each holds 6.9 GiB and saves
# 5.2 GiB. The name counts parameters and two moments.
exec asymlab train bert --size 10b --steps 1000 --every 50 --run runs/bert-10b "$@"
