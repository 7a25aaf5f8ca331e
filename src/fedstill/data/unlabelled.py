"""Records of which nobody has told the class: rows of a table's file, and pictures below a folder."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedstill.base.errors import first_line
from fedstill.base.lookup import nfc, repeated
from fedstill.data import pictures, walk
from fedstill.data.csv_files import read_csv
from fedstill.data.decode import composed_names, plain_types

if TYPE_CHECKING:
    import pyarrow as pa


def is_table(path: Path) -> bool:
    """Whether a file is read as a table, by its ending."""
    return path.is_file() and path.suffix.lower() in (*walk.TABLES, *walk.CSV)


def rows(path: Path, *, as_text: bool) -> "pa.Table":
    """All rows of a table's file, in its order.

    Args:
        path: a CSV or a parquet file.
        as_text: whether the values of a CSV file stay texts, for a schema.

    Raises:
        ValueError: it cannot be read, has no rows, or two columns of one name.
    """
    import pyarrow as pa
    from pyarrow import parquet

    if path.suffix.lower() in walk.CSV:
        table = read_csv(path, as_text=as_text, fewest=1, gaps=True)
    else:
        try:
            table = parquet.read_table(path, partitioning=None)
        except (pa.ArrowException, OSError) as error:
            raise ValueError(f"{str(path)!r} is no readable parquet ({first_line(error)}); write it anew") from error
    return plain(table, f"{str(path)!r} has")


def plain(table: "pa.Table", has: str) -> "pa.Table":
    """A table with composed names and plain types; ``has`` are the words before what is wrong with it.

    Raises:
        ValueError: it has no rows, or two columns of one name.
    """
    if twice := repeated([nfc(name) for name in table.column_names]):
        raise ValueError(f"{has} two columns {twice!r}; rename or drop one")
    if not table.num_rows:
        raise ValueError(f"{has} 0 records; give at least 1")
    return plain_types(composed_names(table))


class Pictures(NamedTuple):
    """Pictures below a folder, or one.

    Attributes:
        root: the folder.
        files: their paths below it, sorted.
        unread: a sentence on other files; empty without any.
    """

    root: Path
    files: list[Path]
    unread: str

    @classmethod
    def below(cls, path: Path) -> "Pictures":
        """Those of a folder with all folders in it, or the file itself.

        Raises:
            ValueError: there are none, or there are tables beside them.
        """
        if not path.is_dir():
            return cls(path.parent, [path.relative_to(path.parent)], "")
        found = walk.walk(path)
        tables = [str(file) for file in found.tables]
        if not found.pictures:
            some = f"tables alone ({walk.some(tables)}); give one of them" if tables else "no pictures; give some"
            raise ValueError(f"{str(path)!r} has {some}")
        if tables:
            raise ValueError(f"{str(path)!r} has pictures and tables ({walk.some(tables)}); give one of the two")
        return cls(path, found.pictures, found.unread)

    def pixels(self, channels: int | None, side: int | None) -> Iterator[tuple[NDArray[np.uint8], list[str]]]:
        """Each picture as uint8 ``(c, h, w)``, and what was done to it, in words.

        Args:
            channels: 1 or 3; None for those of the first picture.
            side: height and width of those that do not have it or are no opaque pictures of 8 bits; None if all stay
                as they are.

        Raises:
            ValueError: a picture cannot be read, is in colour where gray is needed, or cannot stay as it is.
        """
        shape: tuple[int, ...] = ()
        for file in self.files:
            name = f"the picture {str(self.root / file)!r}"
            image, done = pictures.opened(self.root / file, name), list[str]()
            try:
                found = pictures.exact(image, name)
            except ValueError:
                if side is None:
                    raise
                done.append("were made opaque, gray or RGB, of 8 bits")
            if side is not None and image.size != (side, side):
                done.append(f"were cropped and resized to {side} x {side}")
            if side is not None and done:
                found = pictures.fitted(image, side, name)
            channels = channels or found.shape[2]
            if channels == 1 and (found != found[:, :, :1]).any():
                raise ValueError(f"{name} is in colour, but the model takes gray pictures; convert it")
            found = pictures.with_channels(found, channels, name)
            shape = shape or found.shape
            if found.shape != shape:
                wanted, own = (f"{height} x {width}" for height, width, _ in (shape, found.shape))
                raise ValueError(f"{name} has height x width {own}, the first picture {wanted}; give all one size")
            yield found.transpose(2, 0, 1), done
