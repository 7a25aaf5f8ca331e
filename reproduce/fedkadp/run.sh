#!/bin/sh
# FedKADP's figures 5 to 7: [METHODS="METHOD ..."] [SEEDS="0 1 2"] [CLIP=1] [SHARDS=1] [RUNS=FOLDER] [MORE="--FLAG ..."]
# sh reproduce/fedkadp/run.sh DATA SIGMA BUDGET [SHARE] [DEVICE] [SCALE]
set -eu
DATA=${1:-mnist} SIGMA=${2:-5} BUDGET=${3:-0.8} SHARE=${4:-0.1} DEVICE=${5:-cpu} SCALE=${6:-paper}
case $DATA in mnist | fashion_mnist) MODEL=kadp-mnist RECORDS=600 ;; *) MODEL=kadp-cifar RECORDS=500 ;; esac
case $SCALE in
    paper) SEEDS=${SEEDS:-0 1 2} ROUNDS=100 EXTRA="" ;;
    cpu) SEEDS=${SEEDS:-0} ROUNDS=100 EXTRA="--evaluate-every 5 --workers 0" ;;
    small) SEEDS=${SEEDS:-0} ROUNDS=40 EXTRA="--evaluate-every 10 --workers 0" ;;
esac
METHODS=${METHODS:-dp-fl adap-dp-fl fedkd fedkadp}
for method in $METHODS; do
    [ -z "${CLIP:-}" ] || EXTRA="$EXTRA --$method.local.clip $CLIP"
    EXTRA="$EXTRA --$method.rounds $ROUNDS --$method.noise-multiplier $SIGMA --$method.participation $SHARE
        --$method.local.supposed-records $RECORDS"
done
# shellcheck disable=SC2086
exec fedstill compare $METHODS --data "$DATA" --partition "shards:${SHARDS:-1}" --clients 100 --model "$MODEL" --public held=1000 --budget "$BUDGET" \
    --device "$DEVICE" --seeds $SEEDS $EXTRA ${MORE:-} \
    --out "${RUNS:-runs/reproduce-fedkadp}/$SCALE-$DATA-$SIGMA-$SHARE${CLIP:+-clip-$CLIP}${SHARDS:+-shards-$SHARDS}"
