#!/bin/sh
# FedRD's table 1: sh reproduce/fedrd/run.sh DATA DEVICE SCALE
set -eu
DATA=${1:-fashion_mnist} DEVICE=${2:-cuda} SCALE=${3:-paper}
case $DATA in fashion_mnist | mnist) DPC=10 ;; *) DPC=30 ;; esac
METHODS="fedavg fedprox fednova fedrep fedavg-ft feddm fedrd"
case $SCALE in
    paper) SEEDS=${SEEDS:-0 1 2} ROUNDS=20 EPOCHS=10 STEPS=1000 WIDTH=128 EXTRA="--fedrd.training.epochs 500" ;;
    bytes) # the paper's sizes, hardly trained: what one round's messages weigh
        METHODS="fedavg feddm-values feddm fedrd" SEEDS=${SEEDS:-0} ROUNDS=1 EPOCHS=1 STEPS=1 WIDTH=128
        EXTRA="--workers 0 --feddm-values.pixels float32 --feddm-values.matching.steps 1 --fedrd.projection.epochs 1"
        for method in feddm-values feddm fedrd; do EXTRA="$EXTRA --$method.training.epochs 1"; done
        ;;
    cpu) SEEDS=${SEEDS:-0} ROUNDS=5 EPOCHS=2 STEPS=50 WIDTH=32 EXTRA="--limit 6000 --workers 0 --fedrd.training.epochs 50 --feddm.training.epochs 50" ;;
esac
for method in $METHODS; do EXTRA="$EXTRA --$method.rounds $ROUNDS"; done
for method in fedavg fedprox fednova fedavg-ft; do
    case " $METHODS " in *" $method "*) EXTRA="$EXTRA --$method.local.epochs $EPOCHS" ;; esac
done
METHODS=$(echo "$METHODS" | sed "s/feddm-values/feddm-values=feddm/")
# shellcheck disable=SC2086
exec fedstill compare $METHODS --data "$DATA" --partition dirichlet-capped:0.1 --clients 10 --local-test 0.2 --model "projected:width=$WIDTH" \
    --device "$DEVICE" --seeds $SEEDS --fedrd.dpc "$DPC" --fedrd.matching.steps "$STEPS" --feddm.matching.steps "$STEPS" $EXTRA \
    --out "runs/reproduce-fedrd/$SCALE-$DATA"
