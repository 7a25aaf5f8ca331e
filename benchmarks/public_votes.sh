#!/bin/sh
# Sim-PE beside AFL on the same features and the same public records: open and masked sums.
#
#     sh benchmarks/public_votes.sh           # 33 runs of about half a minute each
#     QUICK=1 sh benchmarks/public_votes.sh   # masked sums with one seed
#
# 4,000 training records of MNIST; 2,000 more are public, without their labels. Stopped and started again, it goes on.
set -eu
OUT=runs/public-votes${QUICK:+-quick}
SEEDS=${QUICK:+0}
cells() {  # sums, labels, settings, public records, folder
    fedstill compare $2 --data mnist --partition dirichlet:0.1 --clients 10 --limit 4000 --public "$4" \
        --model scattering:angles=4,groups=25 --each.extractor.pretrain none --seeds ${SEEDS:-0 1 2} --workers 0 \
        --sums "$1" --out "$OUT/$5" $3
}
cells masked "pe=sim-pe pe-eps4=sim-pe pe-eps1=sim-pe afl=afl afl-eps4=afl afl-eps1=afl" \
    "--pe.epsilon None --pe-eps4.epsilon 4 --pe-eps1.epsilon 1 --pe.candidates 500 --pe-eps4.candidates 200
    --pe-eps1.candidates 200 --afl.epsilon None --afl-eps4.epsilon 4 --afl-eps1.epsilon 1 --afl.space.dims 256
    --afl-eps4.space.dims 128 --afl-eps1.space.dims 64" held=2000 masked
[ -z "${QUICK:-}" ] || exit 0
cells open "pe-open-eps4=sim-pe pe-open-eps1=sim-pe afl-open-eps4=afl afl-open-eps1=afl" \
    "--pe-open-eps4.epsilon 4 --pe-open-eps1.epsilon 1 --pe-open-eps4.candidates 200 --pe-open-eps1.candidates 100
    --afl-open-eps4.epsilon 4 --afl-open-eps1.epsilon 1 --afl-open-eps4.space.dims 64 --afl-open-eps1.space.dims 32" \
    held=2000 open
cells masked "pe-textures=sim-pe" "--pe-textures.epsilon None --pe-textures.candidates 500" \
    noise=2000 masked-noise
python reproduce/collect.py sim-pe-mnist "$OUT" --to benchmarks/results/sim-pe-mnist.json
