#!/bin/sh
# bloom tiny: causal-lm, 165,760 parameters.
# Expected memory: 512.0 MiB on one rank in fp32, with the copy that a
# checkpoint is written from. A checkpoint: 1.9 MiB.
exec asymlab train bloom --size tiny --steps 200 --every 20 --run runs/bloom-tiny "$@"
