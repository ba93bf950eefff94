#!/bin/sh
# vit base: image-classification, 86,567,656 parameters.
# Expected memory: 3.5 GiB on one rank in fp32, with the copy that a
# checkpoint is written from. A checkpoint: 990.7 MiB.
exec asymlab train vit --size base --steps 1000 --every 50 --run runs/vit-base "$@"
