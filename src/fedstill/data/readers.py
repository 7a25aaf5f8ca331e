"""Readers of each kind of source: the decoded train split, and the test split if there is one."""

import re
import tempfile
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedstill.data.decode import Split, from_table
from fedstill.data.names import Known

if TYPE_CHECKING:
    import datasets
    import pyarrow as pa

Splits = tuple[Split, Split | None]

_IMAGE_COLUMNS = ("image", "img")
_LABEL_COLUMNS = ("label", "labels", "fine_label")
_TEST_SPLITS = ("test", "validation", "valid", "val")


def read_digits() -> Splits:
    """scikit-learn's 1,797 digits of 8 x 8 pixels, 0..16 scaled to 0..255; no test split."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    pixels = np.rint(digits.images * 255 / 16).astype(np.uint8)
    return Split(pixels[:, None], digits.target.astype(np.int64)), None


def read_folder(path: Path, known: Known | None) -> Splits:
    """A folder of parquet files in the hub's layout, or of images in class folders."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    config = path / known.config if known and known.config else path
    files: dict[str, list[Path]] = {}
    for file in sorted((config if config.is_dir() else path).rglob("*.parquet")):
        files.setdefault(re.split(r"[-.]", file.name)[0], []).append(file)
    if not files:
        return _read_image_folder(path, known)

    def table(split: str) -> "pa.Table":
        try:
            return pa.concat_tables(pq.read_table(file, partitioning=None) for file in files[split])
        except (pa.ArrowException, OSError) as error:
            raise ValueError(
                f"the split {split!r} of {str(path)!r} cannot be read ({_first_line(error)}); copy its files again"
            ) from error

    return _read_tables(files, table, str(path), known, path)


def _read_image_folder(path: Path, known: Known | None) -> Splits:
    for folder in sorted(folder for folder in (path, *path.rglob("*")) if folder.is_dir()):
        if not any(folder.iterdir()):
            raise ValueError(
                f"the folder {str(folder)!r} is empty, but each class needs at least 1 image; add images or delete it"
            )
    with tempfile.TemporaryDirectory() as scratch:  # `datasets` writes a table of paths, which our cache replaces
        load = partial(_load_dataset, "imagefolder", data_dir=str(path), cache_dir=scratch)
        return _read_datasets(load, str(path), known, "lay the images out as train/<class>/<image>")


def read_hub(hub: str, known: Known | None, local: Path) -> Splits:
    """A repository on the Hugging Face hub; ``local`` is the place of a local copy, for the error message."""
    load = partial(_load_dataset, hub, known.config if known else None)
    return _read_datasets(load, hub, known, f"check the id and the network, or put a copy at {str(local)!r}")


def _load_dataset(*arguments: Any, **options: Any) -> "datasets.DatasetDict":
    import datasets  # imported here because it takes 0.7 s

    local = "data_dir" in options
    if local:  # a folder is read quickly, without progress bars
        datasets.disable_progress_bars()
    try:
        return datasets.load_dataset(*arguments, **options)
    finally:
        if local:
            datasets.enable_progress_bars()


def _read_datasets(load: Callable[[], "datasets.DatasetDict"], where: str, known: Known | None, advice: str) -> Splits:
    try:
        splits = load()
    except Exception as error:  # `datasets` passes on any error of the network, the hub and the parsers
        raise ValueError(f"{where!r} cannot be loaded ({_first_line(error)}); {advice}") from error

    def table(split: str) -> "pa.Table":
        from datasets import Image

        data = splits[split]
        for name, feature in data.features.items():
            if isinstance(feature, Image):
                data = data.cast_column(name, Image(decode=False))
        return data.with_format("arrow")[:]

    return _read_tables(splits, table, where, known)


def _read_tables(
    names: Iterable[str], table: Callable[[str], "pa.Table"], where: str, known: Known | None, folder: Path = Path()
) -> Splits:
    """Choose the train and the test split among ``names`` and decode them."""
    names = list(names)
    train = names[0] if len(names) == 1 else "train"
    if train not in names:
        raise ValueError(f"{where!r} has the splits {', '.join(names)}, but 'train' is needed; rename one of them")
    test_splits = ((known.test,) if known else ()) + _TEST_SPLITS
    test = next((name for name in test_splits if name in names and name != train), None)

    def read(split: str) -> Split:
        image, label = ((known.image,), (known.label,)) if known else ((), ())
        return from_table(
            table(split),
            f"the split {split!r} of {where!r}",
            image=image + _IMAGE_COLUMNS,
            label=label + _LABEL_COLUMNS,
            folder=folder,
        )

    return read(train), read(test) if test else None


def read_npz(path: Path) -> Splits:
    """``x_train, y_train, x_test, y_test`` as Keras names them; other 1-d arrays as long as ``y_train`` are columns."""
    try:
        # never unpickle: a pickle from another machine can run any program
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file}
    except Exception as error:  # zipfile, zlib and NumPy raise different kinds of errors
        raise ValueError(
            f"{str(path)!r} is not a readable .npz file of plain arrays ({_first_line(error)}); write it with "
            "numpy.savez(path, x_train=..., y_train=..., x_test=..., y_test=...)"
        ) from error
    splits = {split: _npz_split(arrays, split, path) for split in ("train", "test") if f"x_{split}" in arrays}
    if "train" not in splits:
        raise ValueError(
            f"{str(path)!r} holds the arrays {', '.join(arrays) or 'none'}, but x_train and y_train are needed; "
            "rename them"
        )
    return splits["train"], splits.get("test")


def _npz_split(arrays: dict[str, np.ndarray], split: str, path: Path) -> Split:
    images, labels = arrays[f"x_{split}"], arrays.get(f"y_{split}", np.empty(0, np.int64))
    if images.dtype != np.uint8 or not (images.ndim == 3 or (images.ndim == 4 and images.shape[3] in (1, 3))):
        raise ValueError(
            f"x_{split} in {str(path)!r} is {images.dtype} of shape {images.shape}, but images are uint8 (0..255) of "
            "shape (n, h, w) or (n, h, w, 1 or 3); convert them"
        )
    if labels.shape not in ((len(images),), (len(images), 1)) or not np.issubdtype(labels.dtype, np.integer):
        raise ValueError(
            f"y_{split} in {str(path)!r} is {labels.dtype} of shape {labels.shape}, but {len(images)} integers from 0 "
            f"are needed, one for each image of x_{split}; number the classes"
        )
    columns = {
        name: array
        for name, array in arrays.items()
        if name[:2] not in ("x_", "y_") and array.shape == (len(images),) and array.dtype.kind in "iuU"
    }
    images = images.reshape(*images.shape[:3], -1).transpose(0, 3, 1, 2)
    return Split(np.ascontiguousarray(images), labels.reshape(-1).astype(np.int64), columns=columns)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no reason given'}"
