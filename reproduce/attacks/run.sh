#!/bin/sh
# The table of docs/attacks.md, or some of its rows: sh reproduce/attacks/run.sh [NAME ...]
set -eu
ONCE="--clients 4 --public noise=500 --extractor.pretrain none --model scattering --epsilon 2"
IMAGES="--clients 4 --model convnet:width=16"
ROUNDS="--clients 2 --model kadp-mnist --rounds 4 --participation 1 --local.steps 40 --local.supposed-records 400
    --local.batch-size 40 --local.lr 0.1 --noise-multiplier 1"
for name in ${*:-dense fedavg feddm fedgm fedgm-labels fedavg-p fedd-p fedauxfdp fedgm-records fedrd-records dp-fl fedkd fedkadp adap-dp-fl ldp-fedavg}; do
    case $name in
        dense) flags="--clients 4 --model dense-mnist --local.epochs 30 --epochs 10 --generation.steps 8 --generation.batch-size 64
            --generation.ngf 16 --start mean" ;;
        fedavg) flags="--clients 2 --model dense-mnist --rounds 8 --local.epochs 8" ;;
        feddm) flags="$IMAGES --rounds 1 --ipc 10 --matching.steps 60 --training.epochs 40" ;;
        fedgm) flags="$IMAGES --ipc 5 --matching.nets 15 --training.epochs 60" ;;
        fedgm-labels) flags="$IMAGES --ipc 5 --matching.nets 10 --training.epochs 40 --epsilon 2" ;;
        fedgm-records) flags="$IMAGES --nets 4 --fitting.steps 150 --training.epochs 60 --epsilon 2" ;;
        fedrd-records) flags="--clients 4 --model projected:width=16 --nets 4 --fitting.steps 100 --training.epochs 40 --epsilon 2" ;;
        fedavg-p) flags="$ONCE --public noise=200" ;;
        fedd-p | fedauxfdp) flags="$ONCE --distillation.epochs 5" ;;
        dp-fl | fedkd) flags=$ROUNDS ;;
        fedkadp | adap-dp-fl) flags="$ROUNDS --public held=100 --budget 9" ;;
        ldp-fedavg) flags="--clients 2 --model convnet:width=16 --epsilon 8 --local.epochs 5" ;;
        *) echo "there is no row '$name' here" >&2; exit 2 ;;
    esac
    # shellcheck disable=SC2086
    fedstill run "$name" --data fashion_mnist --limit 800 --partition iid --workers 0 $flags --out "runs/attacks/$name"
    fedstill attack "runs/attacks/$name" --client 0 --shadows 16
done
