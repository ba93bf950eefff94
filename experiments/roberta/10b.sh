#!/bin/sh
# roberta 10b: masked-lm, 3,759,661,145 parameters; a checkpoint is 42.0 GiB.
# The name counts parameters and two moments.
#
# Expected memory of a rank with the preset's batch and the copy that a checkpoint is
# written from, and what of a checkpoint it saves:
#
# ranks  --parallel  --precision       holds       saves
#     1  none        fp32          100.0 GiB    42.0 GiB
#     8  ddp         fp32           63.2 GiB     5.3 GiB
#     8  fsdp2       fp32           15.2 GiB     5.3 GiB
#     8  zero1       bf16           25.8 GiB     5.3 GiB
#     8  zero2       bf16           19.8 GiB     5.3 GiB
#     8  zero3       bf16           14.2 GiB     5.3 GiB
#    32  zero3       bf16            5.0 GiB     1.3 GiB
#
# Each of several ranks builds the whole model before it keeps its share, in
# 14.5 GiB of host memory. --hostfile FILE starts ranks on several hosts.
exec asymlab train roberta --size 10b --steps 1000 --every 50 --run runs/roberta-10b --parallel zero3 --precision bf16 "$@"
