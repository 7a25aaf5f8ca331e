#!/bin/sh
# FedAUXfdp's tables 2 to 4: sh reproduce/fedauxfdp/run.sh ALPHA BACKBONE PUBLIC DEVICE SCALE
set -eu
ALPHA=${1:-0.01} BACKBONE=${2:-shufflenet} PUBLIC=${3:-cifar100} DEVICE=${4:-cuda} SCALE=${5:-paper}
METHODS="fedavg-p fedd-p fedauxfdp published-paper=fedauxfdp published-repository=fedauxfdp fedaux-f"
LABELS="fedavg-p fedd-p fedauxfdp published-paper published-repository fedaux-f"
case $SCALE in
    paper) EPOCHS=100 BATCH=512 SEEDS="0 1 2" STUDENT="--LABEL.student fresh" EXTRA="" ;;
    cpu) EPOCHS=10 BATCH=256 SEEDS="0" STUDENT="--LABEL.distillation.epochs 3 --LABEL.distillation.lr 5e-4" EXTRA="--workers 0" ;;
esac
for label in $LABELS; do
    EXTRA="$EXTRA --$label.epsilon 0.6 --$label.extractor.simclr.epochs $EPOCHS --$label.extractor.simclr.batch-size $BATCH"
done
for label in fedd-p fedauxfdp published-paper published-repository fedaux-f; do
    EXTRA="$EXTRA $(echo "$STUDENT" | sed "s/LABEL/$label/g")"
done
for label in published-paper published-repository; do
    EXTRA="$EXTRA --$label.privacy published --$label.space.whiten False"
done
# shellcheck disable=SC2086
exec fedstill compare $METHODS --data cifar10 --public "$PUBLIC:unlabeled" --clients 20 \
    --partition "balanced-dirichlet:$ALPHA" --model "$BACKBONE" --device "$DEVICE" --seeds $SEEDS --delta 2e-5 \
    --published-paper.head.scaling paper --published-repository.head.scaling repository $EXTRA \
    --out "runs/reproduce-fedauxfdp/$SCALE-$BACKBONE-$PUBLIC-$ALPHA"
