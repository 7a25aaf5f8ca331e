#!/bin/sh
# Ten clients with one class each: FedGM and REAL with ten images a class, the averaging methods after 1 and 20 rounds.
#
#     sh benchmarks/one_class.sh mnist            # or fashion_mnist, or cifar10 (FedGM and REAL only, with flips)
#     QUICK=1 sh benchmarks/one_class.sh          # 1,000 records, one seed, few networks and epochs, and no 20 rounds
#
# Every method has the same network (ConvNet-3 with 32 filters). A client of an averaging method takes 10 steps of batch
# 64 in a round; its learning rate is the best of four on validation records (benchmarks/tune.yaml, whose results are
# results/tune-*.json). Stopped and started again, it goes on where it was.
set -eu
DATA=${1:-mnist}
OUT=runs/$DATA-one-class${QUICK:+-quick}
SEEDS=${QUICK:+0}
FEW=${QUICK:+--fedgm.matching.nets 2 --each.training.epochs 10}
SETTING="--data $DATA --partition classes:1 --clients 10 --model convnet:width=32 --seeds ${SEEDS:-0 1 2} --out $OUT"
SETTING="$SETTING ${QUICK:+--limit 1000}"
local_steps() { echo "--$1.rounds $2 --$1.local.lr $3 --$1.local.max-steps 10 --$1.local.epochs 1000"; }
case $DATA in
    mnist) PROX_1=0.03 SCAFFOLD_20=0.3 ;;
    cifar10)
        FULL=color_crop_cutout_flip_scale_rotate
        exec fedstill compare fedgm real $SETTING --fedgm.ipc 10 --real.ipc 10 --fedgm.matching.augment $FULL \
            --fedgm.training.augment $FULL --real.training.augment $FULL $FEW
        ;;
    *) PROX_1=0.01 SCAFFOLD_20=0.03 ;;
esac

fedstill compare fedgm real $SETTING --fedgm.ipc 10 --real.ipc 10 $FEW
fedstill compare fedavg-1=fedavg fedprox-1=fedprox fednova-1=fednova scaffold-1=scaffold $SETTING \
    $(local_steps fedavg-1 1 0.01) $(local_steps fedprox-1 1 $PROX_1) --fedprox-1.mu 0.1 \
    $(local_steps fednova-1 1 0.01) $(local_steps scaffold-1 1 0.1) --scaffold-1.local.momentum 0
[ -z "${QUICK:-}" ] || exit 0
fedstill compare fedavg-20=fedavg fedprox-20=fedprox fednova-20=fednova scaffold-20=scaffold $SETTING \
    --evaluate-every 5 \
    $(local_steps fedavg-20 20 0.01) $(local_steps fedprox-20 20 0.01) --fedprox-20.mu 0.1 \
    $(local_steps fednova-20 20 0.01) $(local_steps scaffold-20 20 $SCAFFOLD_20) --scaffold-20.local.momentum 0
fedstill report "$OUT" --out "$OUT/report"
