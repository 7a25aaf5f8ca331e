#!/bin/sh
# DENSE's table 2 in a size for two cores: [SEEDS="0 1 2"] [METHODS="dense-p ..."] sh reproduce/dense/mixed.sh [EPOCHS at the server] [DEVICE]
set -eu
EPOCHS=${1:-10} DEVICE=${2:-cpu} EXTRA="" COMPARED=""
for label in ${METHODS:-dense-p dense feddf-p fed-dafl-p}; do
    COMPARED="$COMPARED $label=${label%-p}"
    EXTRA="$EXTRA --$label.local.epochs 10"
    case $label in
        feddf-p)
            EXTRA="$EXTRA --$label.distillation.outputs probabilities --$label.distillation.epochs 1"
            continue
            ;;
        *-p) EXTRA="$EXTRA --$label.average probabilities" ;;
    esac
    EXTRA="$EXTRA --$label.epochs $EPOCHS --$label.generation.steps 8 --$label.generation.batch-size 64"
    case $label in dense*) EXTRA="$EXTRA --$label.generation.ngf 16" ;; esac
done
# shellcheck disable=SC2086
exec fedstill compare $COMPARED --data fashion_mnist --public mnist:unlabeled \
    --partition dirichlet-capped:0.5 --clients 5 --model dense-cnn2 --models dense-mnist dense-cnn1 dense-cnn2 wrn:depth=16 dense-cnn2 \
    --limit 4000 --workers 0 --device "$DEVICE" --seeds ${SEEDS:-0} $EXTRA --out "runs/reproduce-dense/mixed-$EPOCHS"
