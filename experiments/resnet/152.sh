#!/bin/sh
# resnet 152: image-classification, 60,192,808 parameters.
# Expected memory: 2.8 GiB on one rank in fp32, with the copy that a
# checkpoint is written from. A checkpoint: 689.4 MiB.
exec asymlab train resnet --size 152 --steps 1000 --every 50 --run runs/resnet-152 "$@"
