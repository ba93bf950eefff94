#!/bin/sh
# roberta base: masked-lm, 124,697,433 parameters; a checkpoint is 1.4 GiB.
#
# Expected memory of a rank with the preset's batch and the copy that a checkpoint is
# written from, and what of a checkpoint it saves:
#
# ranks  --parallel  --precision       holds       saves
#     1  none        fp32            4.2 GiB     1.4 GiB
#     8  ddp         fp32            3.0 GiB   178.4 MiB
#     8  fsdp2       fp32            1.8 GiB   178.4 MiB
#     8  zero1       bf16            1.8 GiB   178.4 MiB
#     8  zero2       bf16            1.5 GiB   178.4 MiB
#     8  zero3       bf16            1.5 GiB   178.4 MiB
#
# Each of several ranks builds the whole model before it keeps its share, in
# 1.0 GiB of host memory. --hostfile FILE starts ranks on several hosts.
exec asymlab train roberta --size base --steps 1000 --every 50 --run runs/roberta-base "$@"
