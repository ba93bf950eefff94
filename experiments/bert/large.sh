#!/bin/sh
# bert large: span-qa, 334,094,338 parameters.
# Expected memory: 9.8 GiB on one rank in fp32, with the copy that a
# checkpoint is written from. A checkpoint: 3.7 GiB.
exec asymlab train bert --size large --steps 1000 --every 50 --run runs/bert-large "$@"
