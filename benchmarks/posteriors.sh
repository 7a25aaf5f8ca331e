#!/bin/sh
# FedLPA's forms from the same uploads, beside their mean and their ensemble: 48 runs, of which 12 ask the clients.
#
#     sh benchmarks/posteriors.sh              # half an hour of a core
#     QUICK=1 sh benchmarks/posteriors.sh      # the linear model, one split and one seed
#
# 10,000 records of Fashion-MNIST, ten clients, the authors' network and training (20 epochs, the second of their five
# budgets), and a linear model. Stopped and started again, it goes on.
set -eu
OUT=runs/posteriors${QUICK:+-quick}
SEEDS=${QUICK:+0}
for model in linear lenet; do
    for split in iid dirichlet:0.1; do
        name=$model-$(echo "$split" | tr ':.' '--')
        fedstill compare "exact-$name=fedlpa" "expectation-$name=fedlpa" "more-$name=fedlpa" "less-$name=fedlpa" \
            --data fashion_mnist --limit 10000 --partition "$split" --clients 10 --model "$model" --workers 0 \
            --seeds ${SEEDS:-0 1 2} --each.local.epochs 20 "--expectation-$name.solution" expectation \
            "--more-$name.damping" 1e-2 "--less-$name.damping" 1e-4 --out "$OUT"
        [ -z "${QUICK:-}" ] || exit 0
    done
done
python reproduce/collect.py fedlpa-fashion_mnist "$OUT" --to benchmarks/results/fedlpa-fashion_mnist.json
