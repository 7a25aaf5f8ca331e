"""Write ``tests/vectors/masked_sums.json``: ``PYTHONPATH=tests/support python tests/support/sum_vectors.py``.

All secrets in it are made up here, so that everybody can repeat every byte but those of the client's key, which is new
in each upload. A case has the terms of a sum, one client's upload as a helper sees it, this helper's key, and whether
it is to be accepted: its signature must be good and its box must open.
"""

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from fedstill.sums import masks
from fedstill.sums.masks import Terms, Upload, add_mask, mask, opened, packed, public_bytes

HELPER = 2


def secret(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


def case(
    name: str, terms: Terms, upload: Upload, good: bool, opening: X25519PrivateKey, client: Ed25519PrivateKey
) -> Any:
    found: dict[str, Any] = {
        "name": name,
        "good": good,
        "run": terms.run.hex(),
        "exchange": terms.exchange,
        "boxes": [key.hex() for key in terms.boxes],
        "signers": [key.hex() for key in terms.signers],
        "traitors": terms.traitors,
        "least": terms.least,
        "length": terms.length,
        "width": terms.width,
        "terms": terms.digest.hex(),
        "client": upload.client,
        "client_key": public_bytes([client])[0].hex(),
        "digest": upload.digest.hex(),
        "key": upload.key.hex(),
        "sealed": [box.hex() for box in upload.boxes],
        "signature": upload.signature.hex(),
        "helper": HELPER,
        "open_key": opening.private_bytes_raw().hex(),
    }
    if good:
        seeds = opened(upload, terms, HELPER, opening)
        total = np.zeros(terms.length, np.uint64)
        add_mask(total, seeds[min(seeds)], terms.width)
        found |= {"seeds": {str(n): seed.hex() for n, seed in seeds.items()}, "mask": packed(total, terms.width).hex()}
    return found


def main() -> None:
    opening = [X25519PrivateKey.from_private_bytes(secret(f"open {i}")) for i in range(4)]
    signing = [Ed25519PrivateKey.from_private_bytes(secret(f"sign {i}")) for i in range(4)]
    client = Ed25519PrivateKey.from_private_bytes(secret("client 7"))
    terms = Terms(secret("run"), 3, public_bytes(opening), public_bytes(signing), 1, 5, 6, 5)
    seeds = iter(secret(f"seed {i}") for i in range(1000))
    masks.os.urandom = lambda size: next(seeds)  # type: ignore[assignment]
    numbers = np.array([0, 1, -1, 10**9, -(10**9), 42])
    _, good = mask(numbers, terms, 7, client.sign)
    changed = bytes([good.boxes[HELPER][0] ^ 1]) + good.boxes[HELPER][1:]
    boxes = (*good.boxes[:HELPER], changed, *good.boxes[HELPER + 1 :])
    tampered = good._replace(boxes=boxes)
    resigned = tampered._replace(signature=client.sign(masks.signed_text(terms, tampered)))
    swapped = good._replace(boxes=(*good.boxes[:2], good.boxes[3], good.boxes[2]))
    stranger = Ed25519PrivateKey.from_private_bytes(secret("stranger"))
    by_stranger = stranger.sign(masks.signed_text(terms, good))
    cases = [
        ("an upload", terms, good, True),
        ("a changed box", terms, tampered, False),
        ("a changed box, signed again", terms, resigned, False),
        ("two boxes in each other's place", terms, swapped, False),
        ("an upload replayed in the next request", replace(terms, exchange=4), good, False),
        ("a least number of clients that was lowered", replace(terms, least=2), good, False),
        ("another run", replace(terms, run=secret("another run")), good, False),
        ("the numbers of another upload", terms, good._replace(digest=secret("others")), False),
        ("another client's number", terms, good._replace(client=8), False),
        (
            "a stranger's signature",
            terms,
            good._replace(signature=by_stranger),
            False,
        ),
        ("a helper left out", replace(terms, boxes=terms.boxes[:3], signers=terms.signers[:3]), good, False),
        ("another width", replace(terms, width=4), good, False),
    ]
    place = Path(__file__).parents[1] / "vectors/masked_sums.json"
    place.write_text(json.dumps([case(*one, opening[HELPER], client) for one in cases], indent=1) + "\n")


if __name__ == "__main__":
    main()
