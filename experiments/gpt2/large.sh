#!/bin/sh
# gpt2 large: causal-lm, 774,030,080 parameters.
# Expected memory: 21.5 GiB on one rank in fp32, with the copy that a
# checkpoint is written from. A checkpoint: 8.7 GiB.
exec asymlab train gpt2 --size large --steps 1000 --every 50 --run runs/gpt2-large "$@"
