#!/bin/sh
# gpt2 10b: causal-lm, 3,327,956,992 parameters; a checkpoint is 37.2 GiB.
# The name counts parameters and two moments.
#
# Expected memory of a rank with the preset's batch and the copy that a checkpoint is
# written from, and what of a checkpoint it saves:
#
# ranks  --parallel  --precision       holds       saves
#     1  none        fp32           90.5 GiB    37.2 GiB
#     8  ddp         fp32           57.8 GiB     4.6 GiB
#     8  fsdp2       fp32           15.8 GiB     4.6 GiB
#     8  zero1       bf16           24.0 GiB     4.6 GiB
#     8  zero2       bf16           18.8 GiB     4.6 GiB
#     8  zero3       bf16           13.8 GiB     4.6 GiB
#    32  zero3       bf16            5.8 GiB     1.2 GiB
#
# Each of several ranks builds the whole model before it keeps its share, in
# 13.0 GiB of host memory. --hostfile FILE starts ranks on several hosts.
exec asymlab train gpt2 --size 10b --steps 1000 --every 50 --run runs/gpt2-10b --parallel zero3 --precision bf16 "$@"
