#!/bin/sh
# bloom 10b: causal-lm, 4,261,381,120 parameters; a checkpoint is 47.6 GiB.
# The name counts parameters and two moments.
#
# Expected memory of a rank with the preset's batch and the copy that a checkpoint is
# written from, and what of a checkpoint it saves:
#
# ranks  --parallel  --precision       holds       saves
#     1  none        fp32          119.0 GiB    47.6 GiB
#     8  ddp         fp32           77.2 GiB     6.0 GiB
#     8  fsdp2       fp32           22.2 GiB     6.0 GiB
#     8  zero1       bf16           29.2 GiB     6.0 GiB
#     8  zero2       bf16           22.2 GiB     6.0 GiB
#     8  zero3       bf16           18.5 GiB     6.0 GiB
#    32  zero3       bf16            8.2 GiB     1.5 GiB
#
# Each of several ranks builds the whole model before it keeps its share, in
# 16.5 GiB of host memory. --hostfile FILE starts ranks on several hosts.
exec asymlab train bloom --size 10b --steps 1000 --every 50 --run runs/bloom-10b --parallel zero3 --precision bf16 "$@"
