#!/bin/sh
# FENS with raw and with standardised inputs of its aggregator, in the cells of the board where it predicts one class.
#
#     sh benchmarks/stacking.sh mnist          # or fashion_mnist: 12 runs, four minutes of a core
#     QUICK=1 sh benchmarks/stacking.sh        # one split and one seed
#
# The board's records, clients, network and settings (4,000 records, ten clients). Stopped and started again, it goes on.
set -eu
SEEDS=${QUICK:+0}
DATA=${1:-mnist}
settings() {
    echo "--$1.local.epochs 10 --$1.local.batch-size 64 --$1.local.lr 0.03 --$1.rounds 100 --$1.optimiser.lr 0.01"
}
for split in classes:1 dirichlet:0.1; do
    name=$(echo "$split" | tr ':.' '--')
    fedstill compare "raw-$name=fens" "standardised-$name=fens" --data "$DATA" --partition "$split" --clients 10 \
        --limit 4000 --model convnet:width=16 --workers 0 \
        --seeds ${SEEDS:-0 1 2} --out "runs/stacking${QUICK:+-quick}/$DATA" \
        $(settings "raw-$name") $(settings "standardised-$name") "--standardised-$name.standardise" true
    [ -z "${QUICK:-}" ] || exit 0
done
python reproduce/collect.py "fens-inputs-$DATA" "runs/stacking/$DATA" --to "benchmarks/results/fens-inputs-$DATA.json"
