#!/bin/sh
# FedGM with one and with four images in the bytes of one: CIFAR-10, ten one-class clients.
#
#     sh benchmarks/formation.sh                  # a small scale: 12 runs, about 15 minutes of a core
#     QUICK=1 sh benchmarks/formation.sh          # one seed, few networks and epochs
#     sh benchmarks/formation.sh full             # all records: 5 runs, an hour and a half of a core
#
# Stopped and started again, it goes on where it was.
set -eu
ALL=color_crop_cutout_flip_scale_rotate
TASK="--data cifar10 --partition classes:1 --clients 10 --workers 0"
if [ "${1:-small}" = full ]; then
    four="--four.ipc 10 --four.matching.formation 2 --four.matching.distance convolutions"
    four="$four --four.matching.augment $ALL --four.training.augment $ALL"
    fedstill compare four=fedgm $TASK --model convnet:width=32 --seeds 0 1 2 $four --out runs/cifar10-formation-32
    exec fedstill compare four=fedgm $TASK --model convnet:width=64 --seeds 0 1 $four --out runs/cifar10-formation-64
fi
SEEDS=${QUICK:+0}
NETS=${QUICK:+1}
EPOCHS=${QUICK:+5}
small() {
    echo "--$1.ipc 10 --$1.matching.nets ${NETS:-10} --$1.matching.batch-size 16 --$1.matching.pool 128" \
        "--$1.matching.augment $ALL --$1.training.augment $ALL $2"
}
fedstill compare once=fedgm four=fedgm long=fedgm cutmix=fedgm $TASK \
    --limit 2000 --model convnet:width=16 --seeds ${SEEDS:-0 1 2} --out runs/cifar10-formation${QUICK:+-quick} \
    $(small once "--once.training.epochs ${EPOCHS:-60}") \
    $(small four "--four.training.epochs ${EPOCHS:-60}") --four.matching.formation 2 \
    $(small long "--long.training.epochs ${EPOCHS:-120}") \
    $(small cutmix "--cutmix.training.epochs ${EPOCHS:-60}") --cutmix.matching.formation 2 --cutmix.training.cutmix 0.5
