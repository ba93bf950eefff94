#!/bin/sh
# vit large: image-classification, 304,326,632 parameters; a checkpoint is 3.4 GiB.
#
# Expected memory of a rank with the preset's batch and the copy that a checkpoint is
# written from, and what of a checkpoint it saves:
#
# ranks  --parallel  --precision       holds       saves
#     1  none        fp32            8.8 GiB     3.4 GiB
#     8  ddp         fp32            5.8 GiB   435.3 MiB
#     8  fsdp2       fp32            2.0 GiB   435.3 MiB
#     8  zero1       bf16            3.0 GiB   435.3 MiB
#     8  zero2       bf16            2.5 GiB   435.3 MiB
#     8  zero3       bf16            2.0 GiB   435.3 MiB
#
# Each of several ranks builds the whole model before it keeps its share, in
# 1.8 GiB of host memory. --hostfile FILE starts ranks on several hosts.
exec asymlab train vit --size large --steps 1000 --every 50 --run runs/vit-large "$@"
