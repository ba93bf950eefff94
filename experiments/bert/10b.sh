#!/bin/sh
# bert 10b: span-qa, 3,698,580,482 parameters; a checkpoint is 41.3 GiB.
# The name counts parameters and two moments.
#
# Expected memory of a rank with the preset's batch and the copy that a checkpoint is
# written from, and what of a checkpoint it saves:
#
# ranks  --parallel  --precision       holds       saves
#     1  none        fp32           98.0 GiB    41.3 GiB
#     8  ddp         fp32           61.8 GiB     5.2 GiB
#     8  fsdp2       fp32           14.0 GiB     5.2 GiB
#     8  zero1       bf16           25.2 GiB     5.2 GiB
#     8  zero2       bf16           19.2 GiB     5.2 GiB
#     8  zero3       bf16           13.5 GiB     5.2 GiB
#    32  zero3       bf16            4.5 GiB     1.3 GiB
#
# Each of several ranks builds the whole model before it keeps its share, in
# 14.5 GiB of host memory. --hostfile FILE starts ranks on several hosts.
exec asymlab train bert --size 10b --steps 1000 --every 50 --run runs/bert-10b --parallel zero3 --precision bf16 "$@"
