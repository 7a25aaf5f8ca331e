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
    paper) SEEDS="0 1 2" EPOCHS=200 EXTRA="--fed-adi.inversion.steps 2000" ;;
    cpu) SEEDS="0" EPOCHS=10 EXTRA="--limit 10000 --workers 0 --dense.epochs 50 --dense.generation.ngf 16 --fed-dafl.epochs 50
        --feddf.distillation.epochs 5 --fed-adi.epochs 10 --fed-adi.inversion.steps 100 --fed-adi.inversion.batch-size 128" ;;
esac
for method in $METHODS; do EXTRA="$EXTRA --$method.local.epochs $EPOCHS"; done
if [ -n "$MODELS" ]; then
    EXTRA="$EXTRA --models $MODELS"
else # FedAvg, too
    METHODS="fedavg $METHODS"
    EXTRA="$EXTRA --fedavg.rounds 1 --fedavg.weighting uniform --fedavg.local.batch-size 128 --fedavg.local.epochs $EPOCHS"
fi
# shellcheck disable=SC2086
exec fedstill compare $METHODS --data "$DATA" --public "$PUBLIC:unlabeled" --partition "dirichlet-capped:$ALPHA" --clients "$CLIENTS" \
    --model "$MODEL" --device "$DEVICE" --seeds $SEEDS $EXTRA --out "runs/reproduce-dense/$SCALE-$DATA-$ALPHA-$CLIENTS"
