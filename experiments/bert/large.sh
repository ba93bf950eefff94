#!/bin/sh
# bert large: span-qa, 334,094,338 parameters; a checkpoint is 3.7 GiB.
#
# Expected memory of a rank with the preset's batch and the copy that a checkpoint is
# written from, and what of a checkpoint it saves:
#
# ranks  --parallel  --precision       holds       saves
#     1  none        fp32            9.8 GiB     3.7 GiB
#     8  ddp         fp32            6.5 GiB   477.9 MiB
#     8  fsdp2       fp32            2.2 GiB   477.9 MiB
#     8  zero1       bf16            3.0 GiB   477.9 MiB
#     8  zero2       bf16            2.5 GiB   477.9 MiB
#     8  zero3       bf16            2.2 GiB   477.9 MiB
#
# Each of several ranks builds the whole model before it keeps its share, in
# 1.8 GiB of host memory. --hostfile FILE starts ranks on several hosts.
exec asymlab train bert --size large --steps 1000 --every 50 --run runs/bert-large "$@"
