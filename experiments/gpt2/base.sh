#!/bin/sh
# gpt2 base: causal-lm, 124,439,808 parameters.
# Expected memory: 4.2 GiB on one rank in fp32, with the copy that a
# checkpoint is written from. A checkpoint: 1.4 GiB.
exec asymlab train gpt2 --size base --steps 1000 --every 50 --run runs/gpt2-base "$@"
