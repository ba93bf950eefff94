#!/bin/sh
# gpt2 tiny: causal-lm, 34,688 parameters.
# Expected memory: 512.0 MiB on one rank in fp32, with the copy that a
# checkpoint is written from. A checkpoint: 406.5 KiB.
exec asymlab train gpt2 --size tiny --steps 200 --every 20 --run runs/gpt2-tiny "$@"
