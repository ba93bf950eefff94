#!/bin/sh
# bert base: span-qa, 108,893,186 parameters.
# Expected memory: 4.5 GiB on one rank in fp32, with the copy that a
# checkpoint is written from. A checkpoint: 1.2 GiB.
exec asymlab train bert --size base --steps 1000 --every 50 --run runs/bert-base "$@"
