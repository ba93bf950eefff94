#!/bin/sh
# bert base: span-qa, 108,893,186 parameters; a checkpoint is 1.2 GiB.
#
# Expected memory of a rank with the preset's batch and the copy that a checkpoint is
# written from, and what of a checkpoint it saves:
#
# ranks  --parallel  --precision       holds       saves
#     1  none        fp32            4.5 GiB     1.2 GiB
#     8  ddp         fp32            3.2 GiB   155.8 MiB
#     8  fsdp2       fp32            2.2 GiB   155.8 MiB
#     8  zero1       bf16            2.0 GiB   155.8 MiB
#     8  zero2       bf16            1.8 GiB   155.8 MiB
#     8  zero3       bf16            1.8 GiB   155.8 MiB
#
# Each of several ranks builds the whole model before it keeps its share, in
# 1.0 GiB of host memory. --hostfile FILE starts ranks on several hosts.
exec asymlab train bert --size base --steps 1000 --every 50 --run runs/bert-base "$@"
