#!/bin/sh
# FedRD's table 1: [SEEDS="0 1 2"] [METHODS="fedrd feddm ..."] [RUNS=FOLDER] [MORE="--FLAG ..."] sh reproduce/fedrd/run.sh DATA DEVICE SCALE
set -eu
DATA=${1:-fashion_mnist} DEVICE=${2:-cuda} SCALE=${3:-paper}
case $DATA in fashion_mnist | mnist) DPC=10 ;; *) DPC=30 ;; esac
ALL="fedavg fedprox fednova fedrep fedavg-ft feddm fedrd"
case $SCALE in
    paper) SEEDS=${SEEDS:-0 1 2} ROUNDS=20 EPOCHS=10 STEPS=1000 TRAINING=500 WIDTH=128 EXTRA="" ALL="$ALL fedrd-published" ;;
    bytes) # the paper's sizes, hardly trained: what one round's messages weigh
        ALL="fedavg feddm-values feddm fedrd" SEEDS=${SEEDS:-0} ROUNDS=1 EPOCHS=1 STEPS=1 TRAINING=1 WIDTH=128 EXTRA="--workers 0" ;;
    cpu) SEEDS=${SEEDS:-0} ROUNDS=5 EPOCHS=2 STEPS=50 TRAINING=50 WIDTH=32 EXTRA="--limit 6000 --workers 0" ;;
esac
COMPARED=""
for label in ${METHODS:-$ALL}; do
    method=${label%-values} method=${method%-published}
    COMPARED="$COMPARED $label=$method" EXTRA="$EXTRA --$label.rounds $ROUNDS"
    case $method in
        fedavg | fedprox | fednova | fedavg-ft) EXTRA="$EXTRA --$label.local.epochs $EPOCHS" ;;
        feddm | fedrd) EXTRA="$EXTRA --$label.matching.steps $STEPS --$label.training.epochs $TRAINING" ;;
    esac
    case $SCALE-$label in
        *-fedrd) EXTRA="$EXTRA --$label.dpc $DPC" ;;
        *-fedrd-published) # the paper's constants
            EXTRA="$EXTRA --$label.dpc $DPC --$label.matching.squared False --$label.matching.momentum 0 --$label.matching.init noise"
            ;;
        *-feddm-values) EXTRA="$EXTRA --$label.pixels float32" ;;
        cpu-feddm) EXTRA="$EXTRA --$label.matching.lr 0.1" ;; # with 1, the default, images of this network run away
    esac
    case $SCALE-$label in bytes-fedrd) EXTRA="$EXTRA --$label.projection.epochs 1" ;; esac
done
# shellcheck disable=SC2086
exec fedstill compare $COMPARED --data "$DATA" --partition dirichlet-capped:0.1 --clients 10 --local-test 0.2 --model "projected:width=$WIDTH" \
    --device "$DEVICE" --seeds $SEEDS $EXTRA ${MORE:-} --out "${RUNS:-runs/reproduce-fedrd}/$SCALE-$DATA"
