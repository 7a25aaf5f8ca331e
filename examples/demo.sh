#!/bin/sh
# The main job on the digits that come with scikit-learn: ten clients, each holding one digit only, one upload each.
# One-shot FedAvg (learning rate and epochs tuned on validation records), REAL (as many real images) and FedGM with one
# image a class, three seeds.
exec fedstill compare fedavg real fedgm --data digits --partition classes:1 --clients 10 --model convnet:width=32,depth=2 \
    --fedavg.rounds 1 --fedavg.local.lr 0.1 --real.ipc 1 --fedgm.ipc 1 --fedgm.matching.nets 100 --seeds 0 1 2 --out runs/demo "$@"
