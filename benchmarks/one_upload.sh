#!/bin/sh
# Methods whose clients upload once, with the same networks and records: FedAvg, DENSE, Co-Boosting, FENS, FedCVAE,
# FAFI, FedSD2C.
#
#     sh benchmarks/one_upload.sh                 # digits: 18 + 6 + 9 runs, about 20 minutes of a core
#     QUICK=1 sh benchmarks/one_upload.sh         # one seed, two epochs
#
# Five clients of a capped Dirichlet split, ten local epochs. DENSE and Co-Boosting have the same number of images and
# steps at the server; "-p" is the mean of probabilities. Stopped and started again, it goes on where it was.
set -eu
OUT=runs/digits-one-upload${QUICK:+-quick}
SEEDS=${QUICK:+0}
EPOCHS=${QUICK:+2}
EPOCHS=${EPOCHS:-10}
SETTING="--data digits --partition dirichlet-capped:0.3 --clients 5 --model convnet:width=16,depth=2,norm=batch"
SETTING="$SETTING --seeds ${SEEDS:-0 1 2} --workers 0"
epochs() {
    echo "--$1.epochs $((EPOCHS * 5 / 2)) --$1.generation.steps 10 --$1.generation.batch-size 128" \
        "--$1.generation.ngf 16"
}
server() { echo "--$1.local.epochs $EPOCHS --$1.start mean $(epochs "$1")"; }
decoders() { echo "--$1.local.epochs $EPOCHS --$1.images 1000"; }

fedstill compare fedavg dense dense-p=dense co-boosting co-boosting-p=co-boosting fens $SETTING --out "$OUT" \
    --fedavg.rounds 1 --fedavg.local.epochs $EPOCHS --fedavg.local.batch-size 128 \
    $(server dense) $(server dense-p) --dense-p.average probabilities \
    $(server co-boosting) $(server co-boosting-p) --co-boosting-p.average probabilities \
    --fens.local.epochs $EPOCHS --fens.rounds 200
fedstill compare fedcvae fedcvae-kd=fedcvae $SETTING --out "$OUT" \
    $(decoders fedcvae) $(decoders fedcvae-kd) --fedcvae-kd.aggregate distilled --fedcvae-kd.truncation 1
# Crops of 8 x 8 pixels show nothing, so FedSD2C takes whole images.
views() { echo "--$1.local.batch-size 128 --$1.views.flip 0"; }
latents() { echo "--$1.local.epochs $EPOCHS --$1.ipc 10 --$1.core.crops 1 --$1.core.smallest 1"; }
fedstill compare fafi fafi-i=fafi fedsd2c $SETTING --out "$OUT" --public noise=1000 \
    $(views fafi) --fafi.local.epochs $EPOCHS \
    $(views fafi-i) --fafi-i.local.epochs $EPOCHS --fafi-i.fusion informative \
    $(latents fedsd2c)
