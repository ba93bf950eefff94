#!/bin/sh
# resnet tiny: image-classification, 43,578 parameters; a checkpoint is 512.6 KiB.
#
# Expected memory of a rank with the preset's batch and the copy that a checkpoint is
# written from, and what of a checkpoint it saves:
#
# ranks  --parallel  --precision       holds       saves
#     1  none        fp32          512.0 MiB   512.6 KiB
#     8  ddp         fp32          512.0 MiB    65.8 KiB
#     8  fsdp2       fp32          512.0 MiB    65.8 KiB
#     8  zero1       bf16          512.0 MiB    65.8 KiB
#     8  zero2       bf16          512.0 MiB    65.8 KiB
#     8  zero3       bf16          512.0 MiB    65.8 KiB
#
# Each of several ranks builds the whole model before it keeps its share, in
# 512.0 MiB of host memory. --hostfile FILE starts ranks on several hosts.
exec asymlab train resnet --size tiny --steps 200 --every 20 --run runs/resnet-tiny "$@"
