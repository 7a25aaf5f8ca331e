#!/bin/sh
# The demo: ten clients with one digit each, one upload each, on the digits that come with scikit-learn, three seeds.
# Methods: one-shot FedAvg (learning rate and epochs tuned on validation records), REAL (as many real images as FedGM
# sends synthetic ones) and FedGM with one image per class.
exec fedstill compare fedavg real fedgm --data digits --partition classes:1 --clients 10 --model convnet:width=32,depth=2 \
    --fedavg.rounds 1 --fedavg.local.lr 0.1 --real.ipc 1 --fedgm.ipc 1 --fedgm.matching.nets 100 --seeds 0 1 2 --out runs/demo "$@"
