#!/bin/sh
# bert tiny: span-qa, 141,058 parameters.
# Expected memory: 768.0 MiB on one rank in fp32, with the copy that a
# checkpoint is written from. A checkpoint: 1.6 MiB.
exec asymlab train bert --size tiny --steps 200 --every 20 --run runs/bert-tiny "$@"
