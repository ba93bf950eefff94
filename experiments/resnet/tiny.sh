#!/bin/sh
# resnet tiny: image-classification, 43,578 parameters.
# Expected memory: 512.0 MiB on one rank in fp32, with the copy that a
# checkpoint is written from. A checkpoint: 512.6 KiB.
exec asymlab train resnet --size tiny --steps 200 --every 20 --run runs/resnet-tiny "$@"
