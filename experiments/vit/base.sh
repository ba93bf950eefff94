#!/bin/sh
# vit base: image-classification, 86,567,656 parameters; a checkpoint is 990.7 MiB.
#
# Expected memory of a rank with the preset's batch and the copy that a checkpoint is
# written from, and what of a checkpoint it saves:
#
# ranks  --parallel  --precision       holds       saves
#     1  none        fp32            3.5 GiB   990.7 MiB
#     8  ddp         fp32            2.5 GiB   123.8 MiB
#     8  fsdp2       fp32            1.5 GiB   123.8 MiB
#     8  zero1       bf16            1.8 GiB   123.8 MiB
#     8  zero2       bf16            1.5 GiB   123.8 MiB
#     8  zero3       bf16            1.5 GiB   123.8 MiB
#
# Each of several ranks builds the whole model before it keeps its share, in
# 1.0 GiB of host memory. --hostfile FILE starts ranks on several hosts.
exec asymlab train vit --size base --steps 1000 --every 50 --run runs/vit-base "$@"
