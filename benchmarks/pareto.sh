#!/bin/sh
# Accuracy against bytes up: ten clients with one class each; distilled images, averages, sums of features and heads.
#
#     sh benchmarks/pareto.sh mnist               # or fashion_mnist, or cifar10
#     RECORDS=50000 sh benchmarks/pareto.sh mnist # all clients' records; 4,000 by default
#
# Accuracies are those on records held out of the training set (a fifth of RECORDS * 5 / 4), never on the test set.
# Stopped and started again, it goes on where it was. The front is then in OUT/report; before, fedstill report OUT --pareto
# shows the runs that have finished.
set -eu
DATA=${1:-mnist}
RECORDS=${RECORDS:-4000}
OUT=${OUT:-runs/pareto-$DATA-$RECORDS}
HELD="--limit $((RECORDS * 5 / 4)) --validation 0.2"
SETTING="--data $DATA --partition classes:1 --clients 10 $HELD --workers ${WORKERS:-0} --quiet"
FEATURES="--model scattering --public noise=1000"
SIZES="16 32 64 128 256 512"
AUGMENT=color_crop_cutout_scale_rotate
if [ "$DATA" = cifar10 ]; then
    FEATURES="--model patches:centroids=256 --public cifar100:unlabeled --each.space.ridge 0.0003 --each.space.records 1000"
    AUGMENT=color_crop_cutout_flip_scale_rotate
fi

# sums of features at six sizes, with and without privacy; private heads and mixtures
sums=""
flags=""
for method in afl fedcgs; do
    for dims in $SIZES; do
        sums="$sums $method-$dims=$method"
        flags="$flags --$method-$dims.space.dims $dims"
    done
done
fedstill compare $sums $SETTING $FEATURES --each.extractor.pretrain none --each.epsilon None $flags --out "$OUT/sums"
fedstill compare fedcgs-eps1=fedcgs fedcgs-eps4=fedcgs fedcgs-eps8=fedcgs heads-eps1=fedavg-p heads-eps8=fedavg-p \
    $SETTING $FEATURES --each.extractor.pretrain none --each.space.dims 64 --fedcgs-eps1.epsilon 1 \
    --fedcgs-eps4.epsilon 4 --fedcgs-eps8.epsilon 8 --heads-eps1.epsilon 1 --heads-eps8.epsilon 8 --out "$OUT/private"
fedstill compare fedpft-diag=fedpft fedpft-full=fedpft safle $SETTING $FEATURES --each.extractor.pretrain none \
    --each.epsilon None --each.space.dims 64 --fedpft-full.mixture.covariance full --fedpft-full.mixture.components 1 \
    --out "$OUT/mixtures"

# few images
NET="--model convnet:width=32"
NETS=${NETS:-20} # for FedGM; its default is 300
for images in 10 1; do
    fedstill compare fedgm-$images=fedgm $SETTING $NET --fedgm-$images.ipc $images --each.matching.nets $NETS \
        --each.matching.augment $AUGMENT --each.training.augment $AUGMENT --out "$OUT/images-$images"
done
fedstill compare real-1=real real-10=real $SETTING $NET --real-1.ipc 1 --real-10.ipc 10 \
    --each.training.augment $AUGMENT --each.training.epochs 300 --out "$OUT/images-real"
fedstill compare fedd3 $SETTING $NET --fedd3.images 10 --out "$OUT/images-fedd3"
fedstill compare feddm $SETTING $NET --feddm.rounds 1 --feddm.ipc 10 --feddm.matching.steps 100 \
    --feddm.training.epochs 200 --out "$OUT/images-feddm"

# averages after 1 to 20 rounds, and many images
averages=""
flags=""
for rounds in 1 2 5 10 20; do
    averages="$averages fedavg-$rounds=fedavg"
    flags="$flags --fedavg-$rounds.rounds $rounds"
done
fedstill compare $averages $SETTING $NET --each.local.lr 0.01 --each.local.max-steps 10 --each.local.epochs 1000 \
    --evaluate-every 20 $flags --out "$OUT/averages"
fedstill compare fedgm-50=fedgm $SETTING $NET --fedgm-50.ipc 50 --each.matching.nets $NETS \
    --each.matching.augment $AUGMENT --each.training.augment $AUGMENT --out "$OUT/images-50"
fedstill report "$OUT" --pareto --out "$OUT/report"
