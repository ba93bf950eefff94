#!/bin/sh
# bert 20b: span-qa, 6,110,776,322 parameters; a checkpoint is 68.3 GiB.
# The name counts parameters and two moments.
#
# Expected memory of a rank with the preset's batch and the copy that a checkpoint is
# written from, and what of a checkpoint it saves:
#
# ranks  --parallel  --precision       holds       saves
#     1  none        fp32          160.8 GiB    68.3 GiB
#     8  ddp         fp32          101.0 GiB     8.5 GiB
#     8  fsdp2       fp32           22.5 GiB     8.5 GiB
#     8  zero1       bf16           41.0 GiB     8.5 GiB
#     8  zero2       bf16           31.0 GiB     8.5 GiB
#     8  zero3       bf16           21.8 GiB     8.5 GiB
#    32  zero3       bf16            6.8 GiB     2.1 GiB
#
# Each of several ranks builds the whole model before it keeps its share, in
# 23.5 GiB of host memory. --hostfile FILE starts ranks on several hosts.
exec asymlab train bert --size 20b --steps 1000 --every 50 --run runs/bert-20b --parallel zero3 --precision bf16 "$@"
