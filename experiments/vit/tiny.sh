#!/bin/sh
# vit tiny: image-classification, 72,266 parameters.
# Expected memory: 512.0 MiB on one rank in fp32, with the copy that a
# checkpoint is written from. A checkpoint: 846.9 KiB.
exec asymlab train vit --size tiny --steps 200 --every 20 --run runs/vit-tiny "$@"
