#!/bin/sh
# resnet 50: image-classification, 25,557,032 parameters; a checkpoint is 292.7 MiB.
#
# Expected memory of a rank with the preset's batch and the copy that a checkpoint is
# written from, and what of a checkpoint it saves:
#
# ranks  --parallel  --precision       holds       saves
#     1  none        fp32            2.5 GiB   292.7 MiB
#     8  ddp         fp32            2.2 GiB    36.8 MiB
#     8  fsdp2       fp32            2.2 GiB    36.8 MiB
#     8  zero1       bf16            1.5 GiB    36.8 MiB
#     8  zero2       bf16            1.5 GiB    36.8 MiB
#     8  zero3       bf16            1.5 GiB    36.8 MiB
#
# Each of several ranks builds the whole model before it keeps its share, in
# 768.0 MiB of host memory. --hostfile FILE starts ranks on several hosts.
exec asymlab train resnet --size 50 --steps 1000 --every 50 --run runs/resnet-50 "$@"
