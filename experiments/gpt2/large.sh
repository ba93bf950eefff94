#!/bin/sh
# gpt2 large: causal-lm, 774,030,080 parameters; a checkpoint is 8.7 GiB.
#
# Expected memory of a rank with the preset's batch and the copy that a checkpoint is
# written from, and what of a checkpoint it saves:
#
# ranks  --parallel  --precision       holds       saves
#     1  none        fp32           21.5 GiB     8.7 GiB
#     8  ddp         fp32           14.0 GiB     1.1 GiB
#     8  fsdp2       fp32            4.2 GiB     1.1 GiB
#     8  zero1       bf16            6.2 GiB     1.1 GiB
#     8  zero2       bf16            4.8 GiB     1.1 GiB
#     8  zero3       bf16            4.0 GiB     1.1 GiB
#
# Each of several ranks builds the whole model before it keeps its share, in
# 3.5 GiB of host memory. --hostfile FILE starts ranks on several hosts.
exec asymlab train gpt2 --size large --steps 1000 --every 50 --run runs/gpt2-large "$@"
