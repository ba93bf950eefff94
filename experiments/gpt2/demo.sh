#!/bin/sh
# gpt2 demo: causal-lm, 3,257,856 parameters.
# Expected memory: 768.0 MiB on one rank in fp32, with the copy that a
# checkpoint is written from. A checkpoint: 37.3 MiB.
exec asymlab train gpt2 --size demo --steps 200 --every 20 --run runs/gpt2-demo "$@"
