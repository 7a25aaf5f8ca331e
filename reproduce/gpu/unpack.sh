#!/bin/sh
# Unpack what pack.sh packed: sh unpack.sh FROM TO; then . TO/env. Again when a further part has come: whole files appear.
set -eu
FROM=$1 TO=$2
mkdir -p "$TO/parts" "$TO/code" "$TO/site" "$TO/bin" "$TO/data"
tar -xzf "$FROM/code.tar.gz" -C "$TO/code"
for part in "$FROM"/part.*; do
    [ ! -e "$part" ] || cp "$part" "$TO/parts"
done
cat "$TO"/parts/part.* | tar -x -C "$TO" --skip-old-files 2>/dev/null || true # the last file may go on in a part to come
last=$(cat "$TO"/parts/part.* | tar -t 2>/dev/null | tail -1)
cat "$TO"/parts/part.* | tar -t >/dev/null 2>&1 || rm -f "$TO/$last"
new=$(find "$TO/wheels" -name '*.whl' 2>/dev/null | while read -r wheel; do [ -e "$wheel.done" ] || echo "$wheel"; done)
if [ -n "$new" ]; then
    # shellcheck disable=SC2086
    python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$TO/site" $new
    for wheel in $new; do : >"$wheel.done"; done
fi
printf '#!/bin/sh\nexec python3 -m fedstill "$@"\n' >"$TO/bin/fedstill"
chmod +x "$TO/bin/fedstill"
cat >"$TO/env" <<END
export PATH="$TO/bin:\$PATH" PYTHONPATH="$TO/code/src:$TO/site" FEDSTILL_DATA="$TO/data" FEDSTILL_CACHE="$TO/cache"
export OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1
END
ls "$TO/data"
