#!/bin/sh
# FedAUXfdp's tables 2 to 4 and figure 2: [HEAD=0.5] [LAMBDA=0.01] [METHODS="LABEL ..."] [SEEDS="0 1 2"]
# sh reproduce/fedauxfdp/run.sh ALPHA BACKBONE PUBLIC DEVICE SCALE
set -eu
ALPHA=${1:-0.01} BACKBONE=${2:-shufflenet} PUBLIC=${3:-cifar100} DEVICE=${4:-cuda} SCALE=${5:-paper}
HEAD=${HEAD:-0.5} LAMBDA=${LAMBDA:-0.01} SCORES=0.1 # epsilon of the class heads and of the certainty scores
EPSILON=$(awk "BEGIN {print $HEAD + $SCORES}") SHARE=$(awk "BEGIN {print $SCORES / ($HEAD + $SCORES)}")
case $SCALE in
    paper) EPOCHS=100 BATCH=512 SEEDS=${SEEDS:-0 1 2} STUDENT="--LABEL.student fresh" EXTRA="" ;;
    cpu) EPOCHS=10 BATCH=256 SEEDS=${SEEDS:-0} STUDENT="--LABEL.distillation.epochs 3 --LABEL.distillation.lr 5e-4" EXTRA="--workers 0" ;;
esac
COMPARED=""
for label in ${METHODS:-fedavg-p fedd-p fedauxfdp paper-fedavg-p paper-fedd-p paper-fedauxfdp repository-fedauxfdp fedaux-f}; do
    method=${label#paper-} method=${method#repository-}
    COMPARED="$COMPARED $label=$method"
    EXTRA="$EXTRA --$label.extractor.simclr.epochs $EPOCHS --$label.extractor.simclr.batch-size $BATCH"
    case $method in
        fedaux-f) EXTRA="$EXTRA --$label.epsilon $SCORES" ;; # its scores have the budget to themselves
        *) EXTRA="$EXTRA --$label.epsilon $EPSILON" ;;
    esac
    case $method in fedauxfdp) EXTRA="$EXTRA --$label.scores.share $SHARE" ;; esac
    case $method in fedavg-p) ;; *) EXTRA="$EXTRA $(echo "$STUDENT" | sed "s/LABEL/$label/g")" ;; esac
    case $label in
        paper-* | repository-*)
            EXTRA="$EXTRA --$label.privacy published --$label.space.whiten False --$label.head.lam $LAMBDA --$label.head.scaling ${label%%-*}"
            ;;
    esac
done
# shellcheck disable=SC2086
exec fedstill compare $COMPARED --data cifar10 --public "$PUBLIC:unlabeled" --clients 20 \
    --partition "balanced-dirichlet:$ALPHA" --model "$BACKBONE" --device "$DEVICE" --seeds $SEEDS --delta 2e-5 $EXTRA \
    --out "runs/reproduce-fedauxfdp/$SCALE-$BACKBONE-$(basename "$PUBLIC" .npz)-$ALPHA-$HEAD-$LAMBDA"
