#!/bin/sh
# FedGM's tables 1 and 2 and figures 6 and 7: [METHODS="LABEL ..."] [SEEDS="0 1 2"] [SCHEDULE=ours] [MORE="--FLAG ..."]
# sh reproduce/fedgm/run.sh DATA PARTITION IPC DEVICE; SCHEDULE=ours: fedstill's settings of matching and training
set -eu
DATA=${1:-mnist} PARTITION=${2:-classes:1} IPC=${3:-50} DEVICE=${4:-cuda}
case $DATA in # DC's strategies
    mnist) AUGMENT=color_crop_cutout_scale_rotate PUBLIC=fashion_mnist ;;
    fashion_mnist) AUGMENT=color_crop_cutout_flip_scale_rotate PUBLIC=mnist ;;
    *) AUGMENT=color_crop_cutout_flip_scale_rotate PUBLIC=cifar100 ;;
esac
COMPARED="" EXTRA=""
SCHEDULE=${SCHEDULE:-paper}
for label in ${METHODS:-fedavg fedprox fednova scaffold fedgm real}; do
    method=${label%%-*} COMPARED="$COMPARED $label=${label%%-*}"
    case $SCHEDULE-$method in
        ours-fedgm)
            EXTRA="$EXTRA --$label.ipc $IPC --$label.matching.augment $AUGMENT --$label.training.augment $AUGMENT"
            continue
            ;;
        ours-real)
            EXTRA="$EXTRA --$label.ipc $IPC --$label.training.augment $AUGMENT"
            continue
            ;;
    esac
    case $method in
        fedavg | fedprox | fednova | scaffold)
            EXTRA="$EXTRA --$label.rounds 50 --$label.local.lr 0.01 --$label.local.momentum 0.9 --$label.local.batch-size 128 --$label.local.epochs 10"
            ;;
        fedgm)
            EXTRA="$EXTRA --$label.ipc $IPC --$label.matching.nets 300 --$label.matching.steps 100 --$label.matching.net-epochs 1
                --$label.matching.lr $(awk "BEGIN {print 0.01 / $IPC}") --$label.matching.anneal False --$label.matching.batch-size 128
                --$label.matching.interval 10 --$label.matching.augment none"
            ;;
        real) EXTRA="$EXTRA --$label.ipc $IPC" ;;
        feddm) EXTRA="$EXTRA --$label.ipc $IPC --$label.rounds 1" ;; # table 2 is one-shot
        fedd3) EXTRA="$EXTRA --$label.images $((IPC * 10))" ;; # of ten classes
        feddf | dense) EXTRA="$EXTRA --$label.local.epochs 200" ;;
    esac
    case $label in
        scaffold) EXTRA="$EXTRA --$label.weighting records" ;;
        fedgm-random) EXTRA="$EXTRA --$label.matching.choose random" ;; # figure 11
        fedgm) EXTRA="$EXTRA --$label.matching.choose representatives" ;;
    esac
    case $method in
        fedgm | real) EXTRA="$EXTRA --$label.training.epochs 1000 --$label.training.lr 0.01 --$label.training.augment $AUGMENT" ;;
    esac
done
case "$COMPARED" in *=feddf*) EXTRA="$EXTRA --public $PUBLIC:unlabeled" ;; esac
# shellcheck disable=SC2086
exec fedstill compare $COMPARED --data "$DATA" --partition "$PARTITION" --clients 10 --model convnet --device "$DEVICE" \
    --seeds ${SEEDS:-0 1 2} $EXTRA ${MORE:-} --out "runs/reproduce-fedgm/$DATA-$PARTITION-$IPC-$SCHEDULE"
