#!/bin/sh
# bloom 560m: causal-lm, 559,214,592 parameters; a checkpoint is 6.2 GiB.
#
# Expected memory of a rank with the preset's batch and the copy that a checkpoint is
# written from, and what of a checkpoint it saves:
#
# ranks  --parallel  --precision       holds       saves
#     1  none        fp32           18.0 GiB     6.2 GiB
#     8  ddp         fp32           12.5 GiB   800.0 MiB
#     8  fsdp2       fp32            5.8 GiB   800.0 MiB
#     8  zero1       bf16            4.8 GiB   800.0 MiB
#     8  zero2       bf16            3.8 GiB   800.0 MiB
#     8  zero3       bf16            4.2 GiB   800.0 MiB
#
# Each of several ranks builds the whole model before it keeps its share, in
# 2.8 GiB of host memory. --hostfile FILE starts ranks on several hosts.
exec asymlab train bloom --size 560m --steps 1000 --every 50 --run runs/bloom-560m "$@"
