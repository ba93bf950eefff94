#!/bin/sh
# resnet 50: image-classification, 25,557,032 parameters.
# Expected memory: 2.5 GiB on one rank in fp32, with the copy that a
# checkpoint is written from. A checkpoint: 292.7 MiB.
exec asymlab train resnet --size 50 --steps 1000 --every 50 --run runs/resnet-50 "$@"
