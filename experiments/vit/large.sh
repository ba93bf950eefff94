#!/bin/sh
# vit large: image-classification, 304,326,632 parameters.
# Expected memory: 8.8 GiB on one rank in fp32, with the copy that a
# checkpoint is written from. A checkpoint: 3.4 GiB.
exec asymlab train vit --size large --steps 1000 --every 50 --run runs/vit-large "$@"
