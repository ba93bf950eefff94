#!/bin/sh
# gpt2 demo: causal-lm, 3,257,856 parameters; a checkpoint is 37.3 MiB.
#
# Expected memory of a rank with the preset's batch and the copy that a checkpoint is
# written from, and what of a checkpoint it saves:
#
# ranks  --parallel  --precision       holds       saves
#     1  none        fp32          768.0 MiB    37.3 MiB
#     8  ddp         fp32          768.0 MiB     4.7 MiB
#     8  fsdp2       fp32          768.0 MiB     4.7 MiB
#     8  zero1       bf16          768.0 MiB     4.7 MiB
#     8  zero2       bf16          768.0 MiB     4.7 MiB
#     8  zero3       bf16          768.0 MiB     4.7 MiB
#
# Each of several ranks builds the whole model before it keeps its share, in
# 768.0 MiB of host memory. --hostfile FILE starts ranks on several hosts.
exec asymlab train gpt2 --size demo --steps 200 --every 20 --run runs/gpt2-demo "$@"
