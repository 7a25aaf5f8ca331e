#!/bin/sh
# Ten clients with one class each, or two: FedGM and REAL with ten images a class, averaging after 1 and 20 rounds.
#
#     sh benchmarks/one_class.sh mnist            # or fashion_mnist, or cifar10 (FedGM and REAL only, with flips)
#     sh benchmarks/one_class.sh mnist classes:2  # or fashion_mnist, there also dirichlet-capped:0.5
#     SEEDS="3 4" sh benchmarks/one_class.sh ...  # seeds other than 0 1 2
#     QUICK=1 sh benchmarks/one_class.sh          # 1,000 records, one seed, few networks and epochs, and no 20 rounds
#
# Every method has the same network (ConvNet-3 with 32 filters). A client of an averaging method takes 10 steps of batch
# 64 in a round; its learning rate is the best of four on validation records (benchmarks/tune.yaml, whose results are
# results/tune-*.json). Stopped and started again, it goes on where it was.
set -eu
DATA=${1:-mnist} PARTITION=${2:-classes:1}
OUT=runs/$DATA-$(echo "$PARTITION" | tr : -)${QUICK:+-quick}
SEEDS=${SEEDS:-${QUICK:+0}}
FEW=${QUICK:+--fedgm.matching.nets 2 --each.training.epochs 10}
SETTING="--data $DATA --partition $PARTITION --clients 10 --model convnet:width=32 --seeds ${SEEDS:-0 1 2} --out $OUT"
SETTING="$SETTING ${QUICK:+--limit 1000}"
case $DATA-$PARTITION in # rates of FedAvg, FedProx, FedNova and SCAFFOLD
    mnist-classes:1) ONE="0.01 0.03 0.01 0.1" TWENTY="0.01 0.01 0.01 0.3" ;;
    fashion_mnist-classes:1) ONE="0.01 0.01 0.01 0.1" TWENTY="0.01 0.01 0.01 0.03" ;;
    mnist-classes:2) ONE="0.03 0.03 0.03 0.1" TWENTY="0.1 0.03 0.1 0.3" ;;
    fashion_mnist-classes:2) ONE="0.01 0.03 0.01 0.1" TWENTY="0.01 0.03 0.03 0.1" ;;
    fashion_mnist-dirichlet-capped:0.5) ONE="0.003 0.003 0.003 0.03" TWENTY="0.1 0.1 0.1 0.1" ;;
    cifar10-*)
        FULL=color_crop_cutout_flip_scale_rotate
        exec fedstill compare fedgm real $SETTING --fedgm.ipc 10 --real.ipc 10 --fedgm.matching.augment $FULL \
            --fedgm.training.augment $FULL --real.training.augment $FULL $FEW
        ;;
    *)
        echo "no rates were tuned for $DATA with $PARTITION; add them here" >&2
        exit 2
        ;;
esac
local_steps() { echo "--$1.rounds $2 --$1.local.lr $3 --$1.local.max-steps 10 --$1.local.epochs 1000"; }
averaging() { # rounds, and the rate of each method
    fedstill compare "fedavg-$1=fedavg" "fedprox-$1=fedprox" "fednova-$1=fednova" "scaffold-$1=scaffold" $SETTING \
        --evaluate-every 5 $(local_steps "fedavg-$1" "$1" "$2") \
        $(local_steps "fedprox-$1" "$1" "$3") "--fedprox-$1.mu" 0.1 \
        $(local_steps "fednova-$1" "$1" "$4") \
        $(local_steps "scaffold-$1" "$1" "$5") "--scaffold-$1.local.momentum" 0
}

fedstill compare fedgm real $SETTING --fedgm.ipc 10 --real.ipc 10 $FEW
averaging 1 $ONE
[ -z "${QUICK:-}" ] || exit 0
averaging 20 $TWENTY
fedstill report "$OUT" --out "$OUT/report"
