#!/bin/sh
# FedGM's table 1 at the paper's size: sh reproduce/fedgm/run.sh DATA PARTITION IPC DEVICE
set -eu
DATA=${1:-mnist} PARTITION=${2:-classes:1} IPC=${3:-50} DEVICE=${4:-cuda}
LOCAL="--local.lr 0.01 --local.momentum 0.9 --local.batch-size 64 --local.epochs 10"
flags() { echo "$LOCAL" | sed "s/--local/--$1.local/g"; }
exec fedstill compare fedavg fedprox fednova scaffold fedgm real \
    --data "$DATA" --partition "$PARTITION" --clients 10 --model convnet --device "$DEVICE" --seeds 0 1 2 \
    --fedavg.rounds 50 $(flags fedavg) --fedprox.rounds 50 $(flags fedprox) --fednova.rounds 50 $(flags fednova) \
    --scaffold.rounds 50 $(flags scaffold) --scaffold.weighting records \
    --fedgm.ipc "$IPC" --fedgm.matching.nets 300 --fedgm.matching.steps 100 --fedgm.matching.net-epochs 1 \
    --fedgm.matching.lr "$(awk "BEGIN {print 0.01 / $IPC}")" --fedgm.matching.anneal False --fedgm.matching.choose representatives \
    --fedgm.matching.batch-size 128 --fedgm.matching.interval 10 --fedgm.matching.augment none \
    --fedgm.training.epochs 1000 --fedgm.training.lr 0.01 --real.ipc "$IPC" --real.training.epochs 1000 \
    --real.training.lr 0.01 --out "runs/reproduce-fedgm/$DATA-$PARTITION-$IPC"
