#!/bin/sh
# FedKADP's table 2 on one schedule: FedAvg and FedKADP take the same steps, and LiRA attacks a client of each.
#
#     sh reproduce/attacks/same_schedule.sh           # seeds 0 to 4; some minutes for each of ten runs
#     SEEDS="0 1" sh reproduce/attacks/same_schedule.sh
set -eu
OUT=${OUT:-runs/same-schedule}
for seed in ${SEEDS:-0 1 2 3 4}; do
    for name in fedavg fedkadp; do
        case $name in
            fedavg) flags="--local.max-steps 40 --local.epochs 1000 --local.momentum 0" ;;
            fedkadp) flags="--participation 1 --local.steps 40 --local.supposed-records 400 --noise-multiplier 1
                --public held=100 --budget 9" ;;
        esac
        # shellcheck disable=SC2086
        fedstill run "$name" --data fashion_mnist --limit 800 --partition iid --workers 0 --clients 2 \
            --model kadp-mnist --rounds 4 --seed "$seed" --quiet $flags --local.batch-size 40 --local.lr 0.1 \
            --out "$OUT/$name-$seed"
        fedstill attack "$OUT/$name-$seed" --client 0 --shadows 16
    done
done
python "$(dirname "$0")/../collect.py" fedkadp-fedavg-same-schedule "$OUT" --to "$OUT.json"
