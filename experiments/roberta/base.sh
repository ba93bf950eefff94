#!/bin/sh
# roberta base: masked-lm, 124,697,433 parameters.
# Expected memory: 4.2 GiB on one rank in fp32, with the copy that a
# checkpoint is written from. A checkpoint: 1.4 GiB.
exec asymlab train roberta --size base --steps 1000 --every 50 --run runs/roberta-base "$@"
