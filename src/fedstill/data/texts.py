"""Texts as two arrays, which a cache can map: UTF-8 bytes one after the other, and where each ends."""

from collections.abc import Mapping, Sequence

import numpy as np


def packed(texts: Sequence[str], name: str) -> dict[str, np.ndarray]:
    """The arrays of ``texts``, for `unpacked` with the same ``name``."""
    encoded = [text.encode(errors="replace") for text in texts]
    ends = np.cumsum([len(text) for text in encoded], dtype=np.int64)
    return {f"{name}-texts": np.frombuffer(b"".join(encoded), np.uint8), f"{name}-ends": ends}


def unpacked(arrays: Mapping[str, np.ndarray], name: str) -> list[str]:
    """The texts of `packed` arrays."""
    content, ends = arrays[f"{name}-texts"].tobytes(), arrays[f"{name}-ends"].tolist()
    return [content[start:end].decode() for start, end in zip([0, *ends], ends, strict=False)]
