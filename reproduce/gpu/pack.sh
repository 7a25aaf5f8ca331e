#!/bin/sh
# What a machine with a GPU and no network needs, in pieces of at most 58 MiB: sh reproduce/gpu/pack.sh [WHAT ...]
# WHAT: a data set in $FEDSTILL_DATA, or a package for pip to download (NAME==VERSION). Order decides which piece it is in.
# Leaves .gpu/code.tar.gz and .gpu/part.00, .gpu/part.01, ...; unpack.sh is the other side. PYTHON=3.12 is the other side's.
set -eu
cd "$(dirname "$0")/../.."
TO=${TO:-.gpu} DATA=${FEDSTILL_DATA:-../shared/data} PYTHON=${PYTHON:-3.12}
mkdir -p "$TO"
STAGE=$(mktemp -d "$TO/stage.XXXXXX")
trap 'rm -rf "$STAGE"' EXIT
git rev-parse HEAD >"$STAGE/COMMIT"
git diff --quiet HEAD -- src reproduce tests || echo "with changes" >>"$STAGE/COMMIT"
tar -czf "$TO/code.tar.gz" --exclude='*.pyc' --exclude=__pycache__ --exclude=results src reproduce tests pyproject.toml -C "$STAGE" COMMIT
[ $# -gt 0 ] || exit 0
mkdir "$STAGE/wheels" "$STAGE/data"
: >"$STAGE/order"
for what in "$@"; do
    if [ -d "$DATA/$what" ]; then
        ln -s "$(cd "$DATA" && pwd)/$what" "$STAGE/data/$what"
        echo "data/$what" >>"$STAGE/order"
    else
        mkdir "$STAGE/one"
        platforms=$(for n in 28 27 24 17; do printf ' --platform manylinux_2_%s_x86_64' $n; done)
        # shellcheck disable=SC2086
        pip download -q --no-deps --only-binary=:all: --python-version "$PYTHON" --implementation cp $platforms \
            --platform manylinux2014_x86_64 --platform manylinux1_x86_64 -d "$STAGE/one" "$what"
        (cd "$STAGE/one" && for wheel in *; do echo "wheels/$wheel"; done) >>"$STAGE/order"
        mv "$STAGE/one"/* "$STAGE/wheels"
        rmdir "$STAGE/one"
    fi
done
rm -f "$TO"/part.*
tar -chf - -C "$STAGE" --files-from="$STAGE/order" | split -b 58m -d - "$TO/part."
ls -l "$TO"
