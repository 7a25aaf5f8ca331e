#!/bin/sh
# DENSE's tables: sh reproduce/dense/run.sh DATA ALPHA CLIENTS DEVICE SCALE [MODELS]
set -eu
DATA=${1:-mnist} ALPHA=${2:-0.3} CLIENTS=${3:-5} DEVICE=${4:-cuda} SCALE=${5:-paper} MODELS=${6:-}
case $DATA in
    mnist) MODEL=dense-mnist PUBLIC=fashion_mnist ;;
    fashion_mnist) MODEL=dense-mnist PUBLIC=mnist ;;
    *) MODEL=dense-cnn2 PUBLIC=cifar100 ;;
esac
[ -z "$MODELS" ] || MODEL=resnet18
METHODS="feddf fed-dafl fed-adi dense"
case $SCALE in
    paper) SEEDS=${SEEDS:-0 1 2} EPOCHS=200 EXTRA="--fed-adi.inversion.steps 2000" ;;
    cpu) SEEDS=${SEEDS:-0} EPOCHS=20 EXTRA="--limit 8000 --workers 0 --feddf.distillation.epochs 1
        --dense.epochs 15 --dense.generation.steps 8 --dense.generation.batch-size 64 --dense.generation.ngf 16 --dense.start mean
        --fed-dafl.epochs 15 --fed-dafl.generation.steps 8 --fed-dafl.generation.batch-size 64 --fed-dafl.start mean
        --fed-adi.epochs 6 --fed-adi.inversion.steps 80 --fed-adi.inversion.batch-size 64 --fed-adi.start mean" ;;
esac
EXTRA="$EXTRA --feddf.distillation.outputs probabilities"
for method in $METHODS; do EXTRA="$EXTRA --$method.local.epochs $EPOCHS"; done
[ -z "$MODELS" ] || EXTRA="$EXTRA --models $MODELS"
# shellcheck disable=SC2086
exec fedstill compare $METHODS --data "$DATA" --public "$PUBLIC:unlabeled" --partition "dirichlet-capped:$ALPHA" --clients "$CLIENTS" \
    --model "$MODEL" --device "$DEVICE" --seeds $SEEDS $EXTRA --out "runs/reproduce-dense/$SCALE-$DATA-$ALPHA-$CLIENTS"
