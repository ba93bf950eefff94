#!/bin/sh
# bert 20b: span-qa, 6,110,776,322 parameters.
# Expected memory: 160.8 GiB on one rank in fp32, with the copy that a
# checkpoint is written from. A checkpoint: 68.3 GiB.
# On 8 ranks with ZeRO-3 and half precision each holds 11.4 GiB and saves
# 8.5 GiB. The name counts parameters and two moments.
exec asymlab train bert --size 20b --steps 1000 --every 50 --run runs/bert-20b "$@"
