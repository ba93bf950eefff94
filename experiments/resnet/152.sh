#!/bin/sh
# resnet 152: image-classification, 60,192,808 parameters; a checkpoint is 689.4 MiB.
#
# Expected memory of a rank with the preset's batch and the copy that a checkpoint is
# written from, and what of a checkpoint it saves:
#
# ranks  --parallel  --precision       holds       saves
#     1  none        fp32            2.8 GiB   689.4 MiB
#     8  ddp         fp32            2.2 GiB    86.7 MiB
#     8  fsdp2       fp32            2.0 GiB    86.7 MiB
#     8  zero1       bf16            1.5 GiB    86.7 MiB
#     8  zero2       bf16            1.5 GiB    86.7 MiB
#     8  zero3       bf16            1.5 GiB    86.7 MiB
#
# Each of several ranks builds the whole model before it keeps its share, in
# 768.0 MiB of host memory. --hostfile FILE starts ranks on several hosts.
exec asymlab train resnet --size 152 --steps 1000 --every 50 --run runs/resnet-152 "$@"
