"""Records that are vectors: what readers take and refuse, and whose numbers scale their columns."""

import json
from datetime import datetime
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from fedstill import Experiment, FedAvg, Job, run
from fedstill.base.records import Normalisation
from fedstill.cli import main
from fedstill.data import from_torch, load, public, sources
from fedstill.data.decode import from_table
from fedstill.data.readers import read_npz
from fedstill.experiment.task import share_out

COLUMNS = {
    "size": [1.5, 2.5, 3.5, 4.5, 5.5, 6.5, 7.5, 8.5, 9.5, 10.5],
    "count": [3, 1, 4, 1, 5, 9, 2, 6, 5, 3],
    "smokes": [True, False] * 5,
    "hospital": ["north", "south"] * 5,
    "label": [0, 1] * 5,
}


def written(folder: Path, name: str = "table.parquet", **changes: object) -> str:
    columns = {key: values for key, values in {**COLUMNS, **changes}.items() if values is not None}
    pq.write_table(pa.table(columns), folder / name)
    return str(folder / name)


def rows(**columns: object) -> np.ndarray:
    return np.stack([np.asarray(values, np.float32) for values in columns.values()], 1)


def test_a_table_s_vectors_are_its_numbers_in_order_and_its_texts_are_columns(tmp_path):
    data = load(written(tmp_path))
    whole = {tuple(row) for row in rows(**{k: COLUMNS[k] for k in ("size", "count", "smokes")}).tolist()}
    assert {tuple(row) for row in torch.cat([data.train.images, data.test.images]).tolist()} == whole
    assert data.train.are_vectors and data.train.shape == (3,) and data.train.images.dtype == torch.float32
    assert set(data.columns) == {"hospital", "count"} and data.measured == ("scale", "number of classes")


@pytest.mark.parametrize("index", [None, "number"])
def test_the_index_of_a_pandas_table_is_no_feature_and_no_column(tmp_path, index):
    table = pd.DataFrame(COLUMNS).sample(frac=1, random_state=0)  # sorted by class before: its index tells the class
    table.index.name = index
    table.to_parquet(tmp_path / "shuffled.parquet")
    assert "number" in pq.read_schema(tmp_path / "shuffled.parquet").names or index is None
    data = load(str(tmp_path / "shuffled.parquet"))
    assert data.features == ("size", "count", "smokes") and set(data.columns) == {"hospital", "count"}
    clean = pq.read_table(written(tmp_path))
    data = load(written(tmp_path, "by_name.parquet", __index_level_0__=list(range(10))))
    assert data.features == ("size", "count", "smokes") and clean.schema.pandas_metadata is None


def test_data_show_names_the_columns_of_the_vectors(tmp_path, capsys):
    main(["data", "show", written(tmp_path), "--clients", "2"])
    assert "vectors of the columns: size, count, smokes\n" in capsys.readouterr().out
    wide = {f"c{i}": np.arange(10.0) for i in range(50)}
    main(["data", "show", written(tmp_path, "wide.parquet", **wide), "--clients", "2"])
    text = " ".join(capsys.readouterr().out.split())
    assert "size, count, smokes, c0, c1, c2, c3, c4, c5, c6, ..., c40, c41," in text


def test_a_run_and_data_show_say_which_hospital_each_client_is(tmp_path, capsys):
    place = written(tmp_path)
    main(["data", "show", place, "--partition", "by:hospital", "--clients", "2"])
    lines = [line.split()[:3] for line in capsys.readouterr().out.splitlines()]
    assert ["client", "hospital", "records"] in lines and ["1", "south", "4"] in lines
    task = Experiment(data=place, clients=2, partition="by:hospital", model="linear", workers=0)
    run(Job(task, FedAvg(rounds=1), tmp_path / "run"))
    content = json.loads((tmp_path / "run" / "partition.json").read_text())
    assert content["values"] == {"hospital": [["north"], ["south"]]} and len(content["counts"]) == 2


def test_data_show_prints_no_control_characters_and_no_markup_of_names(tmp_path, capsys):
    names = {"label": ["\x1b[2Ja", "[red]b"] * 5, "hospital": ["\x1b[31mnorth", "south"] * 5, "\x1bn": [1, 2] * 5}
    main(["data", "show", written(tmp_path, **names), "--partition", "by:hospital", "--clients", "2"])
    text = capsys.readouterr().out
    assert "\x1b" not in text and "?[2Ja" in text and "[red]b" in text and "?[31mnorth" in text and "?n" in text


def test_lists_arrays_and_saved_data_sets_give_the_same_vectors(tmp_path):
    import datasets

    values, labels = rows(a=COLUMNS["size"], b=COLUMNS["count"]), np.array(COLUMNS["label"])
    np.savez(tmp_path / "v.npz", x_train=values, y_train=labels)
    lists = {"features": values.tolist(), "label": labels.tolist()}
    pq.write_table(pa.table(lists), tmp_path / "v.parquet", row_group_size=3)
    datasets.Dataset.from_dict(lists).save_to_disk(tmp_path / "saved")
    one, *others = (load(str(tmp_path / name)) for name in ("v.npz", "v.parquet", "saved"))
    others.append(from_torch((torch.from_numpy(values), torch.from_numpy(labels))))
    for other in others:
        assert torch.equal(other.train.images, one.train.images) and torch.equal(other.test.images, one.test.images)
        assert other.fingerprint == one.fingerprint and other.train.normalisation == one.train.normalisation


def test_the_measured_scale_gives_mean_0_and_deviation_1(tmp_path):
    rng = np.random.default_rng(0)
    values = (rng.normal(size=(20_500, 2)) * [1e-3, 1e4] + [5, -1e6]).astype(np.float32)
    np.savez(tmp_path / "v.npz", x_train=values, y_train=np.arange(20_500) % 2)
    inputs = load(str(tmp_path / "v.npz")).train.inputs().double()
    assert inputs.mean(0).abs().max() < 2e-2  # six digits of a mean of -1e6 are 1, a ten-thousandth of the deviation
    assert torch.allclose(inputs.std(0), torch.ones(2, dtype=torch.float64), atol=1e-3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"size": [1.0, float("nan"), *[2.0] * 8]},
            "record 1 of .* has nan in column 'size'; each value must",
        ),
        ({"size": [1.0] * 9 + [1e39]}, r"record 9 of .* has 1e\+39 in column 'size'"),
        ({"size": [1.0, None, *[2.0] * 8]}, "column 'size' of .* has 1 gaps; fill them"),
        (
            {"day": [datetime(2026, 1, day + 1) for day in range(10)]},
            r"column 'day' of .* has type timestamp\[us\], which no vector has; turn it into numbers or drop",
        ),
        ({"v": [[1.0, 2.0]] * 9 + [[1.0]]}, "record 9 in column 'v' of .* has 1 numbers, but record 0 has 2"),
        ({"v": [[1.0, 2.0]] * 9 + [[1.0, None]]}, "column 'v' of .* has 1 gaps inside its lists"),
        ({"v": [[1.0]] * 10, "w": [[1.0]] * 10}, "lists of numbers in 2 columns .v, w."),
        (
            {"size": None, "count": None, "smokes": None},
            "the records of .* are texts; turn them into vectors with --features",
        ),
        (
            {"size": None, "count": None, "smokes": None, "note": ["x"] * 10},
            "has texts in 2 columns .hospital, note.; name the one with the records 'text'",
        ),
    ],
)
def test_a_table_that_does_not_fit_is_refused_in_a_sentence(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message) as refused:
        load(written(tmp_path, **changes))
    assert "\n" not in str(refused.value)


def test_categories_of_pandas_are_their_values(tmp_path):
    table = pd.DataFrame({**COLUMNS, "label": ["ill", "well"] * 5, "grade": [3, 5] * 5})
    for name in ("label", "hospital", "grade"):
        table[name] = table[name].astype("category")
    table.to_parquet(tmp_path / "t.parquet")
    data = load(str(tmp_path / "t.parquet"))
    assert data.class_names == ("ill", "well") and set(data.columns) == {"hospital", "count", "grade"}
    assert data.features == ("size", "count", "smokes", "grade")
    assert data.train.images[:, 3].tolist() == [(3.0, 5.0)[label] for label in data.train.labels.tolist()]


def test_a_test_split_with_other_columns_is_refused(tmp_path):
    written(tmp_path, "train-0.parquet")
    written(tmp_path, "test-0.parquet", size=None, width=COLUMNS["size"])
    with pytest.raises(ValueError, match="the column 'size' of numbers is in the train split of .* alone"):
        load(str(tmp_path))
    written(tmp_path, "test-0.parquet", width=COLUMNS["size"])
    with pytest.raises(ValueError, match="the column 'width' of numbers is in the test split of .* alone"):
        load(str(tmp_path))


def test_wide_arrays_and_texts_are_named(tmp_path):
    np.savez(tmp_path / "wide.npz", x_train=np.zeros((2, 10_001), np.float32), y_train=np.arange(2))
    with pytest.raises(ValueError, match="has 10001 columns, but vectors have 1 to 10,000"):
        read_npz(tmp_path / "wide.npz")
    np.savez(tmp_path / "text.npz", x_train=np.array([["a", "b"]]), y_train=np.arange(1))
    with pytest.raises(ValueError, match=r"is <U1 of shape \(1, 2\), but images are uint8"):
        read_npz(tmp_path / "text.npz")


@pytest.mark.parametrize("kind", [np.float64, np.int64, np.int32, np.float32])
def test_a_column_that_float32_does_not_tell_apart_is_refused_unless_it_came_so(tmp_path, kind):
    values = np.stack([np.arange(200) % 7, 1_700_000_000 + np.arange(200)], 1).astype(kind)
    np.savez(tmp_path / "v.npz", x_train=values, y_train=np.arange(200) % 2)
    table = {"number": values[:, 0], "time": values[:, 1], "label": np.arange(200) % 2}
    pq.write_table(pa.table(table), tmp_path / "v.parquet")
    if kind == np.float32:
        assert load(str(tmp_path / "v.npz")).train.shape == (2,)
        return
    message = "has a standard deviation of .* around 1.7e.09, which float32 rounds by up to 64; subtract a constant"
    with pytest.raises(ValueError, match=f"column 1 of .* {message}"):
        load(str(tmp_path / "v.npz"))
    with pytest.raises(ValueError, match=f"column 'time' of .* {message}"):
        load(str(tmp_path / "v.parquet"))
    values[:, 1] -= 1_700_000_000
    values = np.concatenate([values, np.full((200, 1), 0.1)], 1)  # a constant column loses nothing
    np.savez(tmp_path / "v.npz", x_train=values, y_train=np.arange(200) % 2)
    assert load(str(tmp_path / "v.npz")).train.images[:, 1].unique().numel() > 150


def test_test_records_of_a_short_time_are_measured_by_the_deviation_of_the_train_records(tmp_path):
    year, minute = 1_700_000_000 + np.arange(200) * 150_000, 1_700_000_000 + np.arange(20) % 60
    train, test = (np.stack([times % 7, times], 1) for times in (year, minute))
    np.savez(tmp_path / "v.npz", x_train=train, y_train=np.arange(200) % 2, x_test=test, y_test=np.arange(20) % 2)
    assert len(load(str(tmp_path / "v.npz")).test) == 20
    assert sources.load_part(str(tmp_path / "v.npz"), cache_dir=tmp_path / "cache").test[0].shape == (20, 2)


def test_an_image_column_comes_before_numbers():
    table = pa.table({"image": [b"no image"], "size": [1.0], "label": [0]})
    with pytest.raises(ValueError, match="image 0 of t cannot be read"):
        from_table(table, "t", image=["image"], label=["label"])


# The scale -----------------------------------------------------------------------------------------------------------


def test_a_scale_is_given_or_from_public_records_before_it_is_measured(tmp_path, monkeypatch):
    place = written(tmp_path)
    task = share_out(Experiment(data=place, clients=2), None)
    assert "scale" in task.measured and isinstance(task.source, str)
    task = share_out(Experiment(data=place, clients=2, mean=(6.0, 4.0, 0.5), std=(3.0, 2.5, 0.5)), None)
    assert "scale" not in task.measured
    assert task.train.normalisation == task.test.normalisation == Normalisation((6.0, 4.0, 0.5), (3.0, 2.5, 0.5))
    task = share_out(Experiment(data=place, clients=2, public="held=4"), None)
    assert "scale" not in task.measured and task.public is not None
    held = task.train.images[torch.from_numpy(task.public)]
    assert np.allclose(task.train.normalisation.mean, held.mean(0), rtol=1e-5)
    assert np.allclose(task.test.normalisation.std, held.std(0, correction=0), rtol=1e-5)
    other = written(tmp_path, "other.parquet", size=[1.0, 2.0] * 5)
    task = share_out(Experiment(data=place, clients=2, public=other), None)
    assert np.allclose(task.train.normalisation.mean, [1.5, 3.9, 0.5], rtol=1e-5)
    monkeypatch.chdir(tmp_path)
    Path(other).rename("noise_levels.parquet")  # a file, not the synthetic records
    task = share_out(Experiment(data=place, clients=2, public="noise_levels.parquet"), None)
    assert np.allclose(task.train.normalisation.mean, [1.5, 3.9, 0.5], rtol=1e-5)
    assert "scale" in share_out(Experiment(data=place, clients=2, public="noise=50"), None).measured


def test_a_constant_column_has_no_scale_unless_one_is_given(tmp_path):
    place = written(tmp_path, size=[2.0] * 10)
    for public_records in (None, "held=4"):
        with pytest.raises(ValueError, match="column ('size'|0 of the public records) has the same value in all"):
            share_out(Experiment(data=place, clients=2, public=public_records), None)
    share_out(Experiment(data=place, clients=2, mean=(0.0,), std=(1.0,)), None)


def test_a_scale_that_does_not_fit_is_refused(tmp_path):
    with pytest.raises(ValueError, match="--mean has 2 numbers and --std 1, but vectors have 3 columns"):
        share_out(Experiment(data=written(tmp_path), mean=(0.0, 1.0), std=(1.0,)), None)
    with pytest.raises(ValueError, match="--mean is 1.5, but the pixels of images lie in .0, 1."):
        share_out(Experiment(data="digits", mean=(1.5,), std=(1.0,)), None)


# Public records ------------------------------------------------------------------------------------------------------


def test_public_vectors_are_those_of_the_same_length_or_noise_of_the_scale(tmp_path):
    place, scale = written(tmp_path), Normalisation((6.0, 4.0, 0.5), (3.0, 2.0, 0.5))
    records = public.load(place, (3,), scale)
    assert len(records) == 10 and records.num_classes == 2
    assert public.load(f"{place}:unlabeled", (3,), scale).num_classes == 1
    noise = public.load("noise=4000", (3,), scale).inputs()
    assert noise.shape == (4000, 3) and noise.mean(0).abs().max() < 0.1 and (noise.std(0) - 1).abs().max() < 0.1
    with pytest.raises(ValueError, match="are vectors of 3 numbers, but the task's are vectors of 4 numbers"):
        public.load(place, (4,), scale)
    with pytest.raises(ValueError, match="are images of 1 x 8 x 8, but the task's are vectors of 3 numbers"):
        public.load("digits", (3,), scale)


# Tensors and torch's data sets ---------------------------------------------------------------------------------------


class Items(Dataset):
    def __init__(self, *items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


def test_a_torch_data_set_and_its_tensors_are_the_same(digits):
    x, y = torch.randn(20, 5), torch.arange(20) % 2
    one, other = from_torch((x, y)), from_torch(TensorDataset(x, y))
    assert one.fingerprint == other.fingerprint and one.measured == ("scale", "number of classes")
    some = digits.train[:50]
    pixels = from_torch((some.pixels(), some.labels), (some.images, some.labels), class_names=list("abcdefghij"))
    assert torch.equal(pixels.train.images, some.images) and torch.equal(pixels.test.images, some.images)
    assert pixels.class_names == tuple("abcdefghij") and pixels.measured == ("normalisation",)


@pytest.mark.parametrize(
    ("train", "message"),
    [
        (Items((torch.zeros(2), 0), (torch.zeros(3), 1)), r"record 1 of .* has shape \(3,\), but record 0 has \(2,\)"),
        (Items(torch.zeros(2)), "item 0 of .* is a Tensor, but a pair"),
        (Items(), "has 0 records"),
        ((torch.zeros(2, 4, 8, 8), torch.arange(2)), r"have shape \(4, 8, 8\); images are"),
        ((torch.rand(2, 1, 8, 8), torch.arange(2)), "are floats other than k / 255"),
        ((torch.zeros(2, 1, 8, 8, dtype=torch.int64), torch.arange(2)), "are int64; they must be uint8"),
        ((torch.full((2, 3), torch.inf), torch.arange(2)), "record 0 of .* has inf in column 0"),
        ((torch.zeros(2, 3), torch.arange(3)), r"shape \(3,\), but there are 2 records; give each one label"),
        ((torch.zeros(2, 3), torch.tensor([0, 2])), "class 1 .1. of 'own' has 0 train records"),
    ],
)
def test_what_is_neither_images_nor_vectors_is_refused(train, message):
    with pytest.raises(ValueError, match=message):
        from_torch(train, (torch.zeros(1, 3), torch.zeros(1, dtype=torch.int64)))


@pytest.mark.parametrize(
    ("label", "shown"),
    [
        (1.7, r"1\.7"),
        (torch.tensor(0.5), r"tensor\(0\.5000\)"),
        (np.float32("nan"), r"np\.float32\(nan\)"),
        (torch.tensor([0, 1]), r"tensor\(\[0, 1\]\)"),
        (None, "None"),
        (2**70, "1180591620717411303424"),
    ],
)
def test_a_label_that_is_no_class_is_refused_with_its_item(label, shown):
    items = [(torch.zeros(2), 0), (torch.ones(2), label)]
    with pytest.raises(ValueError, match=f"item 1 of the train split of 'own' has the label {shown}, but a class is"):
        from_torch(items)


def test_real_valued_targets_are_not_cut_off_to_classes():
    with pytest.raises(ValueError, match=r"item 0 of .* has the label 0\.2"):
        from_torch([(torch.randn(3), [0.2, 1.7][i % 2]) for i in range(20)])
    with pytest.raises(ValueError, match=r"item 1 of .* has the label 0\.5"):
        from_torch((torch.randn(20, 3), torch.arange(20) / 2))


def test_labels_that_are_names_are_numbered_as_those_of_files():
    x = torch.randn(20, 3)
    words = ["cat", "ant"] * 10
    items, pair = from_torch(list(zip(x, words, strict=True))), from_torch((x, words))
    numbers = from_torch((x, [1, 0] * 10), class_names=("ant", "cat"))
    assert items.class_names == pair.class_names == ("ant", "cat") and items.fingerprint == pair.fingerprint
    assert torch.equal(items.train.labels, numbers.train.labels)
    assert "list of classes" in items.measured and "list of classes" not in numbers.measured
    stated = from_torch((x, words), class_names=("cat", "ant"))
    assert "list of classes" not in stated.measured and torch.equal(stated.train.labels, 1 - items.train.labels)
    both = from_torch((x, words), (x[:2], ["cat", "cat"]))
    assert both.class_names == ("ant", "cat") and both.test.labels.tolist() == [1, 1]


@pytest.mark.parametrize(
    ("train", "test", "names", "message"),
    [
        (["a", 1], ["a", "b"], (), "item 1 of the train split of 'own' has the label 1, but item 0 has 'a'"),
        (["a", "b"], [0, 1], (), "one split of 'own' has names as labels and the other numbers"),
        (["a", "b"], ["a", "c"], ("a", "b"), "item 1 of the test split of 'own' has the label 'c', which is none of"),
    ],
)
def test_names_that_do_not_go_together_are_refused(train, test, names, message):
    x = torch.zeros(2, 3)
    with pytest.raises(ValueError, match=message):
        from_torch(Items(*zip(x, train, strict=True)), Items(*zip(x, test, strict=True)), class_names=names)


def test_columns_of_the_train_split_partition_it(tmp_path):
    train, test = (torch.randn(6, 2), torch.arange(6) % 2), (torch.randn(2, 2), torch.arange(2))
    task = share_out(
        Experiment(data="own", partition="by:h", clients=3), from_torch(train, test, columns={"h": list("aabbcc")})
    )
    assert sorted(tuple(own) for own, _ in task.parts) == [(0, 1), (2, 3), (4, 5)]
    with pytest.raises(ValueError, match="column 'h' of 'own' has 3 values, but there are 6 train records"):
        from_torch(train, test, columns={"h": list("abc")})
