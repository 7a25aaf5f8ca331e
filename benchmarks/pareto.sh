#!/bin/sh
# Accuracy against bytes up: ten clients with one class each; distilled images, averages, sums of features and heads.
#
#     sh benchmarks/pareto.sh mnist               # or fashion_mnist, or cifar10: 4,000 records, one seed
#     RECORDS=all sh benchmarks/pareto.sh mnist   # all records, the test set, seeds 0, 1 and 2; one to three hours
#
# With 4,000 records accuracies are those on 1,000 others that are held out of the training set, never on the test set.
# Stopped and started again, it goes on where it was. The front is then in OUT/report; before, fedstill report OUT --pareto
# shows the runs that have finished. PARTS names the parts to run.
set -eu
DATA=${1:-mnist}
RECORDS=${RECORDS:-4000}
PARTS=${PARTS:-sums private mixtures real images-1 images-10 fedd3 feddm averages images-50 report}
OUT=${OUT:-runs/pareto-$DATA-$RECORDS}
SETTING="--data $DATA --partition classes:1 --clients 10 --workers ${WORKERS:-0} --quiet"
ONE= # a closed form of the sums of all records does not depend on the seed
AUGMENT=color_crop_cutout_scale_rotate
[ "$DATA" != cifar10 ] || AUGMENT=color_crop_cutout_flip_scale_rotate
NET="--model convnet:width=32"
if [ "$RECORDS" = all ]; then
    SETTING="$SETTING --seeds ${SEEDS:-0 1 2}"
    ONE="--seeds 0"
    SIZES="16 32 64 128 256 512 1024"
    FOUR="--each.matching.formation 2 --each.matching.distance convolutions" # four images in the bytes of one
    NETS=${NETS:-60} # for FedGM; 150 and 300 were level with 60 (docs/methods/fedgm.md)
    # the vectors are computed once for all runs; public images: generated ones, in the task's shape, or CIFAR-100
    if [ "$DATA" = cifar10 ]; then
        FEATURES="--features patches:public=cifar100,centroids=1024 --model linear --public cifar100:unlabeled"
        FEATURES="$FEATURES --each.space.ridge 0.0003 --each.space.records 10000"
    else
        mkdir -p "$OUT"
        [ -f "$OUT/noise.npz" ] || python -c '
import sys
import numpy, fedstill
from fedstill.data import public
like = fedstill.load_data(sys.argv[1]).train
noise = public.load("noise=10000", like.shape, like.normalisation)
numpy.savez(sys.argv[2], x_train=noise.images[:, 0].numpy(), y_train=noise.labels.numpy())' "$DATA" "$OUT/noise.npz"
        FEATURES="--features scattering --model linear --public $OUT/noise.npz:unlabeled --each.space.records 10000"
    fi
else
    SETTING="$SETTING --limit $((RECORDS * 5 / 4)) --validation 0.2"
    SIZES="16 32 64 128 256 512"
    FOUR=""
    NETS=${NETS:-20}
    FEATURES="--model scattering --public noise=1000 --each.extractor.pretrain none"
    if [ "$DATA" = cifar10 ]; then
        FEATURES="--model patches:centroids=256 --public cifar100:unlabeled --each.extractor.pretrain none"
        FEATURES="$FEATURES --each.space.ridge 0.0003 --each.space.records 1000"
    fi
fi

# sums of features at several sizes, with and without privacy; private heads and mixtures
flags=""
sums=""
for method in afl fedcgs; do
    for dims in $SIZES; do
        sums="$sums $method-$dims=$method"
        flags="$flags --$method-$dims.space.dims $dims"
    done
done
part_sums() {
    fedstill compare $sums $SETTING $ONE $FEATURES --each.epsilon None $flags --out "$OUT/sums"
}
part_private() {
    fedstill compare fedcgs-eps1=fedcgs fedcgs-eps4=fedcgs fedcgs-eps8=fedcgs heads-eps1=fedavg-p heads-eps8=fedavg-p \
        $SETTING $FEATURES --each.space.dims 64 --fedcgs-eps1.epsilon 1 --fedcgs-eps4.epsilon 4 \
        --fedcgs-eps8.epsilon 8 --heads-eps1.epsilon 1 --heads-eps8.epsilon 8 --out "$OUT/private"
}
part_mixtures() {
    fedstill compare fedpft-diag=fedpft fedpft-full=fedpft safle $SETTING $FEATURES --each.epsilon None \
        --each.space.dims 64 --fedpft-full.mixture.covariance full --fedpft-full.mixture.components 1 \
        --out "$OUT/mixtures"
}

# few images, and many
part_images() {
    four=$FOUR
    [ "$1" -le 10 ] || four=""
    fedstill compare "fedgm-$1=fedgm" $SETTING $NET "--fedgm-$1.ipc" "$1" --each.matching.nets "$NETS" $four \
        --each.matching.augment $AUGMENT --each.training.augment $AUGMENT --out "$OUT/images-$1"
}
part_real() {
    fedstill compare real-1=real real-10=real $SETTING $NET --real-1.ipc 1 --real-10.ipc 10 \
        --each.training.augment $AUGMENT --each.training.epochs 300 --out "$OUT/images-real"
}
part_fedd3() {
    fedstill compare fedd3 $SETTING $NET --fedd3.images 10 --out "$OUT/images-fedd3"
}
part_feddm() {
    fedstill compare feddm $SETTING $NET --feddm.rounds 1 --feddm.ipc 10 --feddm.matching.steps 100 \
        --feddm.training.epochs 200 --out "$OUT/images-feddm"
}

# averages after 1 to 20 rounds
part_averages() {
    averages=""
    flags=""
    for rounds in 1 2 5 10 20; do
        averages="$averages fedavg-$rounds=fedavg"
        flags="$flags --fedavg-$rounds.rounds $rounds"
    done
    fedstill compare $averages $SETTING $NET --each.local.lr 0.01 --each.local.max-steps 10 --each.local.epochs 1000 \
        --evaluate-every 20 $flags --out "$OUT/averages"
}

for part in $PARTS; do
    case $part in
        images-*) part_images "${part#images-}" ;;
        report) fedstill report "$OUT" --pareto --out "$OUT/report" ;;
        *) "part_$part" ;;
    esac
done
