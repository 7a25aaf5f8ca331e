#!/bin/sh
# The paper-size runs as pieces of at most nine minutes, the most telling first: sh reproduce/gpu/queue.sh [PIECE ...]
# [JOBS=8] pieces at a time, [DEVICE=cuda], [LIMIT=540] seconds for one, [RUNS=runs/gpu], [RESULTS=reproduce/gpu/results], [SCALE=tiny].
# A finished piece is skipped, one that was cut off goes on where it was: start it again until `queue.sh left` is silent.
# sh reproduce/gpu/queue.sh list | left | one PIECE | collect (of pieces under way, what they have so far)
set -eu
cd "$(dirname "$0")/../.."
export DEVICE="${DEVICE:-cuda}" RUNS="${RUNS:-runs/gpu}" RESULTS="${RESULTS:-reproduce/gpu/results}" SCALE="${SCALE:-paper}" LIMIT="${LIMIT:-540}"

pieces() {
    echo smoke
    for alpha in 0.1 0.3 0.5; do echo "dense-mnist-$alpha-authors-0"; done
    echo dense-readme
    for alpha in 0.1 0.3 0.5; do echo "dense-mnist-$alpha-ours-0"; done
    for seed in 1 2; do
        for alpha in 0.1 0.3 0.5; do echo "dense-mnist-$alpha-authors-$seed"; done
    done
    for data in cifar10 fashion_mnist; do
        for alpha in 0.1 0.3 0.5; do echo "dense-$data-$alpha-authors-0"; done
    done
    for data in cifar10 fashion_mnist; do
        for seed in 1 2; do
            for alpha in 0.1 0.3 0.5; do echo "dense-$data-$alpha-authors-$seed"; done
        done
    done
    for data in fashion_mnist cifar10; do
        for method in fedrd fedrep fedavg-ft fedavg feddm; do echo "fedrd-$data-$method-0"; done
    done
    for data in mnist fashion_mnist; do
        for seed in 0 1 2; do
            for alpha in 0.1 0.3 0.5; do echo "dense-$data-$alpha-ours-$seed"; done
        done
    done
}

left() {
    for piece in $(pieces | awk '!seen[$0]++'); do
        grep -qs '^ "finished": true' "$RESULTS/$piece.json" || echo "$piece"
    done
}

# Flags that make a piece tiny, for a try on a CPU: the last of two equal flags counts.
tiny() {
    for label in $1; do
        case $label in
            feddf*) echo "--$label.local.epochs 2 --$label.distillation.epochs 1" ;;
            fed-adi*) echo "--$label.local.epochs 2 --$label.epochs 1 --$label.inversion.steps 2" ;;
            fed-dafl* | *dense*) echo "--$label.local.epochs 2 --$label.epochs 2 --$label.generation.steps 2" ;;
            fedrd* | feddm) echo "--$label.rounds 1 --$label.matching.steps 2 --$label.training.epochs 1" ;;
            *) echo "--$label.rounds 1" ;;
        esac
    done
    echo "--limit 2000"
}

dense() { # DATA ALPHA CLIENTS SEED
    METHODS="${METHODS:-feddf dense fed-dafl fed-adi feddf-p dense-p}"
    case $1-$METHODS in cifar10-*) METHODS="dense fed-dafl dense-published dense-p" ;; esac
    case $3 in authors) AUTHORS=1 ;; *) AUTHORS="" ;; esac
    [ "$SCALE" = paper ] || MORE=$(tiny "$METHODS")
    export METHODS MORE AUTHORS
    SEEDS=$4 RUNS=$FOLDER sh reproduce/dense/run.sh "$1" "$2" 5 "$DEVICE" paper
}

readme() { # what the README of zj-jayzhang/DENSE runs, on its very partition
    python3 reproduce/gpu/authors_split.py "$RUNS/cifar10-readme.npz"
    LABELS="dense-published dense dense-p fed-dafl" FLAGS=""
    for label in dense dense-p fed-dafl; do
        FLAGS="$FLAGS --$label.local.epochs 400 --$label.local-view crop_flip --$label.local-norm frozen-after-first"
    done
    [ "$SCALE" = paper ] || FLAGS="$FLAGS $(tiny "$LABELS")"
    # shellcheck disable=SC2086
    fedstill compare dense-published=dense dense dense-p=dense fed-dafl --data "$RUNS/cifar10-readme.npz" --partition by:client --clients 5 \
        --model dense-cnn2 --device "$DEVICE" --seeds 1 --dense-p.average probabilities $(sh reproduce/dense/published.sh dense-published) $FLAGS --out "$FOLDER"
}

fedrd() { # DATA METHOD SEED
    METHODS=$2
    [ "$SCALE" = paper ] || MORE=$(tiny "$METHODS")
    export METHODS MORE
    SEEDS=$3 RUNS=$FOLDER sh reproduce/fedrd/run.sh "$1" "$DEVICE" paper
}

one() {
    FOLDER="$RUNS/$1"
    case $1 in
        smoke) python3 -m pytest -q -m gpu -p no:cacheprovider -W default $(python3 -c 'import xdist; print("-n 6")') tests/methods/test_methods_common.py ;;
        dense-readme) readme ;;
        *)
            IFS=- read -r kind data a b c <<END
$(echo "$1" | sed 's/fedavg-ft/fedavg_ft/')
END
            "$kind" "$data" "$(echo "$a" | sed 's/_/-/')" "$b" "${c:-}"
            ;;
    esac
}

case ${1:-} in
    list) pieces | awk '!seen[$0]++' ;;
    left) left ;;
    one)
        mkdir -p "$RUNS/$2" "$RESULTS"
        start=$(date +%s) status=0
        timeout -k 10 "$LIMIT" sh "$0" inside "$2" >>"$RUNS/$2/log" 2>&1 || status=$?
        python3 reproduce/collect.py "$2" "$RUNS/$2" --status "$status" --seconds "$(($(date +%s) - start))" --to "$RESULTS/$2.json"
        ;;
    inside) one "$2" ;;
    collect)
        for folder in "$RUNS"/*/; do
            piece=$(basename "$folder")
            grep -qs '^ "finished": true' "$RESULTS/$piece.json" ||
                python3 reproduce/collect.py "$piece" "$folder" --status 99 --seconds 0 --to "$RESULTS/$piece.json"
        done
        ;;
    *)
        mkdir -p "$RUNS" "$RESULTS"
        if [ $# -gt 0 ]; then printf '%s\n' "$@"; else left; fi | xargs -P "${JOBS:-8}" -I '{}' sh "$0" one '{}'
        ;;
esac
