#!/bin/sh
# REAL with crops, soft labels and four pictures in an image: what each adds to random images.
#
#     sh benchmarks/soft_labels.sh fashion_mnist          # or mnist: 24 runs of a few seconds to half a minute
#     QUICK=1 sh benchmarks/soft_labels.sh                # one split, one seed, ten epochs
#
# The board's records, clients, network and training (4,000 records, ten clients, ten images a class; ten local epochs).
# Stopped and started again, it goes on.
set -eu
SEEDS=${QUICK:+0}
EPOCHS=${QUICK:+10}
DATA=${1:-fashion_mnist}
ROWS="real client client-crops-4 server"
for split in classes:1 dirichlet:0.1; do
    name=$(echo "$split" | tr ':.' '--')
    labels=""
    flags=""
    for row in $ROWS; do
        labels="$labels $row-$name=real"
        case $row in *crops*) flags="$flags --$row-$name.choice crops" ;; esac
        case $row in client* | server*) flags="$flags --$row-$name.soft-labels ${row%%-*}" ;; esac
        case $row in *-4) flags="$flags --$row-$name.formation 2" ;; esac
    done
    fedstill compare $labels --data "$DATA" --partition "$split" --clients 10 --limit 4000 --workers 0 \
        --seeds ${SEEDS:-0 1 2} \
        --model convnet:width=16 --each.ipc 10 --each.training.epochs ${EPOCHS:-100} --each.training.batch-size 64 \
        --each.teacher.epochs 10 --each.teacher.batch-size 64 --each.teacher.lr 0.03 --each.training.lr 0.03 \
        --each.training.augment color_crop_cutout_scale_rotate $flags --out "runs/soft-labels${QUICK:+-quick}/$DATA"
    [ -z "${QUICK:-}" ] || exit 0
done
python reproduce/collect.py "real-soft-$DATA" "runs/soft-labels/$DATA" --to "benchmarks/results/real-soft-$DATA.json"
