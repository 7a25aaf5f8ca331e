"""A data set in an ``.npz`` file, with the names of Keras or of MedMNIST."""

import zipfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedstill.data import vectors
from fedstill.data.decode import Split, with_all_names
from fedstill.data.readers import first_line

_NAMES = {
    "train": (("x_train", "y_train"), ("train_images", "train_labels")),
    "test": (("x_test", "y_test"), ("test_images", "test_labels")),
}
"""Names of a split's records and labels: Keras', then MedMNIST's, whose validation records are left out."""
_NO_COLUMNS = {name for pairs in _NAMES.values() for pair in pairs for name in pair} | {"val_images", "val_labels"}


def read_npz(path: Path) -> tuple[Split, Split | None]:
    """``x_train, y_train, x_test, y_test``, or ``train_images, train_labels, ...``: images, or vectors ``(n, d)``.

    Other 1-d arrays as long as the train labels are columns.

    Raises:
        ValueError: the file cannot be read, or an array is missing or does not fit; one sentence.
    """
    if path.suffix.lower() == ".csv":
        raise ValueError(
            f"{str(path)!r} is a CSV file, which is not read; convert it, as with "
            f"pandas.read_csv({path.name!r}).to_parquet({path.with_suffix('.parquet').name!r})"
        )
    try:
        if not zipfile.is_zipfile(path):
            raise ValueError("it is no zip archive")
        # never unpickle: a pickle from another machine can run any program
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file}
        if other := next((name for name, array in arrays.items() if not isinstance(array, np.ndarray)), None):
            raise ValueError(f"{other} is no array")
    except Exception as error:  # zipfile, zlib and NumPy raise different kinds of errors
        raise ValueError(
            f"{str(path)!r} is not a readable .npz file of plain arrays ({first_line(error)}); write it with "
            "numpy.savez(path, x_train=..., y_train=..., x_test=..., y_test=...)"
        ) from error
    train = _split(arrays, "train", path)
    if train is None:
        raise ValueError(
            f"{str(path)!r} holds the arrays {', '.join(arrays) or 'none'}, but x_train and y_train are needed; "
            "rename them"
        )
    test = _split(arrays, "test", path)
    return (train, None) if test is None else with_all_names(train, test, str(path))


def _split(arrays: dict[str, np.ndarray], split: str, path: Path) -> Split | None:
    """One split, or None without its records."""
    x, y = next((names for names in _NAMES[split] if names[0] in arrays), ("", ""))
    if not x:
        return None
    images, where = arrays[x], f"{x} in {str(path)!r}"
    are_vectors = images.ndim == 2 and images.dtype.kind in "biuf"
    if not are_vectors and (
        images.dtype != np.uint8 or not (images.ndim == 3 or (images.ndim == 4 and images.shape[3] in (1, 3)))
    ):
        raise ValueError(
            f"{where} is {images.dtype} of shape {images.shape}, but images are uint8 (0..255) of shape (n, h, w) or "
            "(n, h, w, 1 or 3), and vectors are numbers of shape (n, d); convert them"
        )
    if not images.size:
        raise ValueError(f"{where} has the shape {images.shape}: there is no record in it; add records")
    if y not in arrays:
        raise ValueError(f"{str(path)!r} has {x}, but no {y}; add it, with the class of each record ({len(images)})")
    labels, class_names = _classes(arrays[y], len(images), f"{y} in {str(path)!r}")
    columns = {
        name: array
        for name, array in arrays.items()
        if name[:2] not in ("x_", "y_")
        and name not in _NO_COLUMNS
        and array.shape == (len(images),)
        and array.dtype.kind in "iuU"
    }
    rounding = None
    if are_vectors:
        found = vectors.of_array(images, where)
        rounding = vectors.rounding(images, found)
    else:
        found = np.ascontiguousarray(images.reshape(*images.shape[:3], -1).transpose(0, 3, 1, 2))
    return Split(found, labels, class_names, columns, bool(class_names), rounding=rounding)


def _classes(labels: np.ndarray, number: int, where: str) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """The class of each record, and the classes' names, sorted, if the labels are names."""
    if labels.shape not in ((number,), (number, 1)):
        raise ValueError(
            f"{where} has the shape {labels.shape}, but there are {number} records; give one label for each, in the "
            "order of the records"
        )
    labels = labels.reshape(-1)
    if labels.dtype.kind == "U":
        names, numbers = np.unique(labels, return_inverse=True)
        return numbers.astype(np.int64), tuple(names.tolist())
    if labels.dtype.kind not in "iu":
        raise ValueError(
            f"{where} is {labels.dtype}, but classes are integers from 0 or names; convert it, as with "
            ".astype(int) if they are whole numbers, and divide measured values into bins"
        )
    return labels.astype(np.int64), ()
