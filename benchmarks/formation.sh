#!/bin/sh
# FedGM with one and with four images in the bytes of one: CIFAR-10, ten one-class clients, a small scale.
#
#     sh benchmarks/formation.sh                  # 12 runs, about 15 minutes of a core
#
# Stopped and started again, it goes on where it was.
set -eu
ALL=color_crop_cutout_flip_scale_rotate
small() {
    echo "--$1.ipc 10 --$1.matching.nets 10 --$1.matching.batch-size 16 --$1.matching.pool 128" \
        "--$1.matching.augment $ALL --$1.training.augment $ALL $2"
}
fedstill compare once=fedgm four=fedgm long=fedgm cutmix=fedgm \
    --data cifar10 --limit 2000 --partition classes:1 --clients 10 --model convnet:width=16 --seeds 0 1 2 \
    --workers 0 --out runs/cifar10-formation \
    $(small once "--once.training.epochs 60") $(small four "--four.training.epochs 60") --four.matching.formation 2 \
    $(small long "--long.training.epochs 120") \
    $(small cutmix "--cutmix.training.epochs 60") --cutmix.matching.formation 2 --cutmix.training.cutmix 0.5
