#!/bin/sh
# bloom 560m: causal-lm, 559,214,592 parameters.
# Expected memory: 18.0 GiB on one rank in fp32, with the copy that a
# checkpoint is written from. A checkpoint: 6.2 GiB.
exec asymlab train bloom --size 560m --steps 1000 --every 50 --run runs/bloom-560m "$@"
