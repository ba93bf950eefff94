#!/bin/sh
# roberta tiny: masked-lm, 142,208 parameters.
# Expected memory: 512.0 MiB on one rank in fp32, with the copy that a
# checkpoint is written from. A checkpoint: 1.6 MiB.
exec asymlab train roberta --size tiny --steps 200 --every 20 --run runs/roberta-tiny "$@"
