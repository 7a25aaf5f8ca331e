#!/bin/sh
# FedCOF beside FedCGS: class means alone, with one or twenty means of each class, and both with noise.
#
#     sh benchmarks/class_means.sh            # 63 runs of a few seconds each
#     QUICK=1 sh benchmarks/class_means.sh    # one cell and one seed
#
# The board's records, features and test set (4,000 records of MNIST), and one cell with a hundred clients, as in the
# paper. Widths were chosen on validation records, FedCGS's by the board. Stopped and started again, it goes on.
set -eu
OUT=runs/class-means${QUICK:+-quick}
SEEDS=${QUICK:+0}
cell() {  # split, clients
    name=$(echo "$1-$2" | tr ':.' '--')
    labels="cgs-$name=fedcgs cgs-eps4-$name=fedcgs cgs-eps1-$name=fedcgs cof-$name=fedcof cof-20-$name=fedcof"
    labels="$labels cof-eps4-$name=fedcof cof-eps1-$name=fedcof"
    dims="--cgs-$name.space.dims 256 --cgs-eps4-$name.space.dims 128 --cgs-eps1-$name.space.dims 64"
    dims="$dims --cof-$name.space.dims 256 --cof-20-$name.space.dims 256 --cof-eps4-$name.space.dims 128"
    dims="$dims --cof-eps1-$name.space.dims 128"
    epsilons="--cgs-$name.epsilon None --cgs-eps4-$name.epsilon 4 --cgs-eps1-$name.epsilon 1"
    epsilons="$epsilons --cof-eps4-$name.epsilon 4 --cof-eps1-$name.epsilon 1 --cof-20-$name.means 20"
    fedstill compare $labels --data mnist --partition "$1" --clients "$2" --limit 4000 --workers 0 \
        --seeds ${SEEDS:-0 1 2} \
        --model patches:centroids=128,stride=2 --public noise=1000 --each.extractor.pretrain none $dims $epsilons \
        --out "$OUT"
}
cell classes:1 10
[ -z "${QUICK:-}" ] || exit 0
cell dirichlet:0.1 10
cell dirichlet:0.1 100
python reproduce/collect.py fedcof-mnist "$OUT" --to benchmarks/results/fedcof-mnist.json
