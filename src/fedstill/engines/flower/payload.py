"""fedstill's bytes in the arrays of a message of Flower, for programs that do without PyTorch.

While Flower builds an array from chunks it needs three times the array's bytes and twice the message's other bytes.
Cut into many arrays, a message costs its receiver only twice its bytes.
"""

from collections.abc import Sequence

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

from fedstill.base.errors import FedstillError

MOST = 1 << 34
"""Maximum bytes of a message if nobody gives a smaller limit."""
PIECE = 2 << 20
"""Maximum bytes of an array, and of the replies that share a message."""


def cut(data: bytes) -> list[bytes]:
    """The bytes in pieces, at least one, which may be empty."""
    return [data[start : start + PIECE] for start in range(0, len(data), PIECE)] or [b""]


def record(pieces: Sequence[bytes], **facts: int | str | float | list[int]) -> RecordDict:
    """The content of a message from bytes in pieces."""
    arrays = {
        str(number): Array(dtype="uint8", shape=(len(piece),), stype="fedstill", data=piece)
        for number, piece in enumerate(pieces)
    }
    found = RecordDict({"message": ArrayRecord(arrays)})
    if facts:
        found["facts"] = ConfigRecord(dict(facts))
    return found


def content(data: bytes, **facts: int | str | float | list[int]) -> RecordDict:
    """The content of a message: bytes, and config values.

    A message with the replies of several clients has their bytes one after the other, and their sizes in ``sizes``.
    """
    return record(cut(data), **facts)


class TooLarge(FedstillError):
    """A message has more bytes than its receiver accepts."""


def take_bytes(message: Message, at_most: int = MOST) -> bytes:
    """Take the bytes out of a message, whose objects may stay in memory for a while in reference cycles.

    Raises:
        KeyError, AttributeError, TypeError: the message was not made by `content`.
        TooLarge: it has more than ``at_most`` bytes. Equal arrays cross once, so few bytes may become many here.
    """
    arrays = message.content.array_records["message"]
    pieces = [arrays[str(number)] for number in range(max(1, len(arrays)))]
    if (size := sum(len(piece.data) for piece in pieces)) > at_most:
        raise TooLarge(f"the message has {size:,} bytes; the limit is {at_most:,}")
    data = b"".join(piece.data for piece in pieces)
    for piece in pieces:
        piece.data = b""
    return data
