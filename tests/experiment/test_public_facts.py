"""Facts of the task that come from private records end the guarantee, unless they are stated."""

from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from PIL import Image

from fedstill import DataSet, Experiment, Job, from_torch, methods, run
from fedstill.data import sources
from fedstill.experiment import checks
from fedstill.experiment.overlap import twins
from fedstill.experiment.task import share_out
from fedstill.privacy import guarantee
from fedstill.report import guarantees, spending
from fedstill.report.record import read_run
from fedstill.sites.site.policy import SitePolicy


def write(place: Path, white: bool = False, seed: int = 0) -> Path:
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 200, (120, 8, 8), dtype=np.uint8)
    if white:
        images[0] = 255
    labels = np.arange(120) % 3
    np.savez(place, x_train=images, y_train=labels, x_test=255 - images[:9], y_test=labels[:9])
    return place


def result(place: Path, out: Path, **facts: Any) -> dict[str, Any]:
    method = methods.find("fedavg-p")(extractor={"pretrain": "none"}, space={"dims": 4})
    task = {"model": "convnet:width=4,depth=1", "clients": 2, "workers": 0, "public": "noise=40", **facts}
    return run(Job(Experiment(data=str(place), **task), method, out))


def test_a_normalisation_from_private_pixels_ends_the_guarantee(tmp_path: Path) -> None:
    plain, white = write(tmp_path / "plain.npz"), write(tmp_path / "white.npz", white=True)
    assert sources.load(str(plain)).measured == ("normalisation", "number of classes")
    found = result(plain, tmp_path / "1")["guarantee"]
    assert not found["holds"] and found["epsilon"] is None
    assert "the normalisation and the number of classes of the task came from the records" in found["reason"]
    stated = {"mean": (0.5,), "std": (0.25,), "num_classes": 4}
    assert result(plain, tmp_path / "2", **stated)["guarantee"]["holds"]
    # the public set-up of neighbouring data sets: equal where it is stated, else not
    specs = [
        [share_out(Experiment(data=str(place), clients=2, **facts), None).train for place in (plain, white)]
        for facts in (stated, {})
    ]
    assert specs[0][0].normalisation == specs[0][1].normalisation and specs[0][0].num_classes == 4
    assert specs[1][0].normalisation != specs[1][1].normalisation


def test_a_data_set_of_ones_own_says_which_of_its_facts_are_private() -> None:
    """Its normalisation may come from private records, so silence is no claim that it is public."""
    digits = sources.load("digits")
    facts: dict[str, Any] = {
        "name": "hospital", "train": digits.train, "test": digits.test, "class_names": digits.class_names,
        "fingerprint": "0" * 64,
    }  # fmt: skip
    with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'measured'"):
        DataSet(**facts)
    with pytest.raises(TypeError, match="positional argument"):
        DataSet(*facts.values(), ("normalisation",))  # type: ignore[call-arg, misc]
    task = {"model": "convnet:width=4,depth=1", "clients": 2, "workers": 0, "public": "noise=40", "limit": 200}
    settings = {"extractor": {"pretrain": "none"}, "space": {"dims": 4}, "epsilon": 1.0}
    private = DataSet(**facts, measured=("normalisation",))
    assert not run("fedavg-p", data=private, **task, **settings).guarantee.holds
    assert run("fedavg-p", data=private, **task, **settings, mean=(0.5,), std=(0.25,)).guarantee.holds
    assert run("fedavg-p", data=DataSet(**facts, measured=()), **task, **settings).guarantee.holds
    torchs = from_torch((digits.train.images, digits.train.labels), class_names=list("abcdefghij"))
    assert torchs.measured == ("normalisation",)


@pytest.mark.slow
def test_stated_facts_reach_every_worker(tmp_path: Path) -> None:
    place = write(tmp_path / "data.npz")
    stated = {"mean": (0.1,), "std": (0.7,)}
    one = result(place, tmp_path / "1", **stated)
    two = result(place, tmp_path / "2", **stated, workers=1)
    assert one["accuracy"] == two["accuracy"]
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in "12"]
    assert weights[0] == weights[1] and b'mean\\":[0.1]' in weights[0]


@pytest.mark.parametrize(
    ("facts", "sentence"),
    [
        ({"mean": (0.5,)}, "--mean has 1 numbers and --std 0, but images have 1 channels; give both"),
        ({"mean": (0.5, 0.5), "std": (1.0, 1.0)}, "--mean has 2 numbers and --std 2"),
        ({"num_classes": 2}, "--num-classes is 2, but the labels go up to 2; take 3"),
        ({"class_names": ("a", "b")}, "--class-names has 2 names, but the labels go up to 2; give 3"),
        ({"class_names": ("a", "b", "a")}, "--class-names has 'a' twice"),
        ({"class_names": ("a", "b", "c"), "num_classes": 4}, "--num-classes is 4, but --class-names has 3"),
    ],
)
def test_facts_that_do_not_fit_are_refused(facts: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=sentence):
        result(write(tmp_path / "data.npz"), tmp_path / "run", **facts)


def pictures(folder: Path, classes: dict[str, int]) -> Path:
    """A folder of ``classes`` with as many pictures each."""
    for name, count in classes.items():
        (folder / name).mkdir(parents=True)
        for i in range(count):
            Image.new("L", (8, 8), 40 * i).save(folder / name / f"{i}.png")
    return folder


def test_a_list_of_classes_from_private_labels_ends_the_guarantee(tmp_path: Path) -> None:
    """One record of a new class changes the names in the model's file and the size of every reply."""
    grey: dict[str, Any] = {"mean": (0.5,), "std": (0.25,)}
    without = pictures(tmp_path / "without", {"flu": 5, "cold": 5, "none": 5})
    with_one = pictures(tmp_path / "with", {"flu": 5, "cold": 5, "none": 5, "hiv": 1})
    assert sources.load(str(without)).measured == ("normalisation", "list of classes")
    found = result(without, tmp_path / "1", **grey)["guarantee"]
    assert not found["holds"] and "the list of classes of the task came from the records" in found["reason"]
    stated = {**grey, "class_names": ("none", "cold", "flu", "hiv")}
    for place in (without, with_one):
        assert result(place, tmp_path / f"run-{place.name}", **stated)["guarantee"]["holds"]
        task = share_out(Experiment(data=str(place), clients=2, **stated), None)
        assert task.class_names == stated["class_names"] and task.train.num_classes == 4
        named = sources.load(str(place))
        old, new = named.class_names, stated["class_names"]
        assert [old[i] for i in named.train.labels] == [new[i] for i in task.train.labels]
        assert [old[i] for i in named.test.labels] == [new[i] for i in task.test.labels]


def test_folders_with_numbers_as_names_keep_their_pictures(tmp_path: Path) -> None:
    for name in "012":
        (tmp_path / "data" / name).mkdir(parents=True)
        for i in range(5):
            Image.new("L", (8, 8), 100 * int(name) + i).save(tmp_path / "data" / name / f"{i}.png")
    stated = Experiment(data=str(tmp_path / "data"), clients=2, mean=(0.5,), std=(0.25,), class_names=("2", "1", "0"))
    train = share_out(stated, None).train
    assert all(image.float().mean() < 50 for image in train.images[train.labels == 2])  # of the folder "0"


def test_names_that_a_table_declares_are_public(tmp_path: Path) -> None:
    declared = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["flu", "cold"])})
    rows = {"image": [Image.new("L", (8, 8), i) for i in range(20)], "label": [i % 2 for i in range(20)]}
    datasets.Dataset.from_dict(rows, features=declared).to_parquet(tmp_path / "declared.parquet")
    assert sources.load(str(tmp_path / "declared.parquet")).measured == ("normalisation",)
    said = datasets.Dataset.from_dict({**rows, "label": ["flu", "cold"] * 10}, features=datasets.Features(
        {"image": datasets.Image(), "label": datasets.Value("string")}))  # fmt: skip
    said.to_parquet(tmp_path / "said.parquet")
    assert sources.load(str(tmp_path / "said.parquet")).measured == ("normalisation", "list of classes")


@pytest.mark.parametrize("public", ["{data}:unlabeled", "{data}"])
def test_public_records_that_are_the_clients_own_end_the_guarantee(public: str, tmp_path: Path) -> None:
    place = write(tmp_path / "data.npz")
    stated = {"mean": (0.5,), "std": (0.25,), "num_classes": 4}
    found = result(place, tmp_path / "1", **stated, public=public.format(data=place))["guarantee"]
    assert not found["holds"]
    assert "all 120 records of the clients are among the public or the test records" in found["reason"]


def test_some_records_that_are_public_too_are_named(tmp_path: Path) -> None:
    place, stated = write(tmp_path / "data.npz"), {"mean": (0.5,), "std": (0.25,), "num_classes": 4}
    own = dict(np.load(place))
    own["x_train"][30:] = 255 - own["x_train"][30:]
    np.savez(tmp_path / "public.npz", **own)
    found = result(place, tmp_path / "1", **stated, public=f"{tmp_path / 'public.npz'}:unlabeled")["guarantee"]
    assert found["holds"] and "nothing protects 30 of the clients' 120 records" in found["reason"]
    assert found["exposed"] == 30
    said = "eps 0, 30 exposed" if found["unit"] is None else f"per {found['unit']}, 30 exposed"
    assert guarantees.words(guarantee.Guarantee(**found)).endswith(said)
    other = result(place, tmp_path / "2", **stated, public="noise=40")["guarantee"]
    assert other["holds"] and other["exposed"] == 0


@pytest.mark.parametrize("share", [12, 120])
def test_test_records_that_are_the_clients_own_are_counted(share: int, tmp_path: Path) -> None:
    """The server has the test records, and the report shows some of them."""
    own = dict(np.load(write(tmp_path / "data.npz")))
    own |= {"x_test": own["x_train"][:share], "y_test": own["y_train"][:share]}
    np.savez(tmp_path / "data.npz", **own)
    found = result(tmp_path / "data.npz", tmp_path / "1", mean=(0.5,), std=(0.25,), num_classes=4)["guarantee"]
    assert found["holds"] is (share < 120) and found["exposed"] == share
    assert ("nothing protects 12 of" if share < 120 else "all 120 records of the clients are among") in found["reason"]


def test_what_will_leave_no_guarantee_is_said_before_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    place, stated = write(tmp_path / "data.npz"), {"mean": (0.5,), "std": (0.25,), "num_classes": 4}
    result(place, tmp_path / "1", **stated, delta=1e-3)
    assert not caplog.messages
    result(place, tmp_path / "2", **stated, delta=0.9)
    assert [m.split(":")[0] for m in caplog.messages] == ["delta is 0.9, and clients have up to 60 records"]
    caplog.clear()
    assert not result(place, tmp_path / "3", mean=(0.5,), std=(0.25,))["guarantee"]["holds"]
    assert "no privacy guarantee, as the number of classes of the task came from the records" in caplog.text


@pytest.mark.parametrize(
    ("name", "facts", "delta", "said"),
    [
        ("fedgm-labels", {"num_classes": 4}, 0.5, []),  # randomised response has no delta, and images are public
        ("fedgm-labels", {}, 0.5, ["no privacy guarantee, as the number of classes of", "state it (--num-classes or"]),
        ("ldp-fedavg", {"mean": (0.5,), "std": (0.25,), "num_classes": 4}, 0.1, []),
        ("ldp-fedavg", {"mean": (0.5,), "std": (0.25,), "num_classes": 4}, 0.5, ["and there are 2 clients: at 1 / c"]),
        ("ldp-fedavg", {"num_classes": 4}, 1e-5, ["as the normalisation of", "state it (--mean 0.5 --std 0.25)"]),
        ("fedavg-p", {}, 1e-5, ["state them (--mean 0.5 --std 0.25, --num-classes or --class-names)"]),
    ],
)
def test_the_warning_is_of_the_unit_that_the_method_protects(
    name: str, facts: dict[str, Any], delta: float, said: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    task = Experiment(
        data=str(write(tmp_path / "data.npz")), clients=2, workers=0, public="noise=9", delta=delta, **facts
    )
    checks.check_records(Job(task, name, tmp_path / "run"), share_out(task, None))
    assert bool(caplog.messages) is bool(said)
    assert all(words in caplog.text for words in said)


def test_twins_are_equal_in_every_number() -> None:
    rows = torch.arange(12).reshape(4, 3).repeat(1, 400).float()
    others = rows.clone()
    others[1, 1] += 1
    assert twins(rows, others).tolist() == [True, False, True, True]
    assert twins(rows, others[:0]).tolist() == twins(rows, others[:, :9]).tolist() == [False] * 4
    assert twins(rows, others.double()).tolist() == [False] * 4


@pytest.mark.timeout(20)
def test_records_that_differ_in_few_places_take_no_time_of_pairs() -> None:
    rows = torch.zeros(20_000, 1, 28, 28, dtype=torch.uint8)
    rows[:, 0, 0, 1] = torch.arange(20_000) % 250
    others = rows.clone()
    others[:, 0, 0, 2] = 7
    assert not twins(rows, others).any() and twins(rows, rows).all()


def test_features_learnt_from_the_clients_images_end_the_guarantee(tmp_path: Path) -> None:
    place = write(tmp_path / "data.npz")
    backbone = f"patches:centroids=8,public={place}:unlabeled"
    other = write(tmp_path / "other.npz", seed=1)
    stated = {"num_classes": 4, "model": "linear", "public": f"{other}:unlabeled"}
    found = result(place, tmp_path / "1", **stated, features=backbone)["guarantee"]
    assert not found["holds"]
    assert "all 120 records of the clients are among the public or the test records" in found["reason"]
    backbone = f"patches:centroids=8,public={other}:unlabeled"
    assert result(place, tmp_path / "2", **stated, features=backbone)["guarantee"]["holds"]


def test_a_file_called_noise_is_not_taken_for_synthetic_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    place = write(Path("noise_levels.npz"))
    stated = {"num_classes": 4, "model": "linear", "public": f"{write(Path('other.npz'), seed=1)}:unlabeled"}
    backbone = f"patches:centroids=8,public={place}:unlabeled"
    found = result(place, tmp_path / "1", **stated, features=backbone)["guarantee"]
    assert not found["holds"] and "all 120 records of the clients are among the public" in found["reason"]


@pytest.mark.parametrize(
    ("facts", "sentence"),
    [
        ({"num_classes": 3}, "--num-classes is 3, but the classes are names; give all with --class-names"),
        ({"class_names": ("flu", "none")}, "--class-names lacks the class 'cold', which has records"),
    ],
)
def test_names_that_do_not_fit_are_refused(facts: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=sentence):
        result(pictures(tmp_path / "data", {"flu": 4, "cold": 4}), tmp_path / "run", **facts)


def test_known_data_have_known_facts_and_labels_public_images() -> None:
    digits = sources.load("digits")
    assert digits.measured == ()
    pixels = digits.train.pixels().double()
    assert digits.train.normalisation.mean[0] == pytest.approx(float(pixels.mean()), abs=1e-6)
    assert digits.train.normalisation.std[0] == pytest.approx(float(pixels.std(correction=0)), abs=1e-6)
    assert torch.equal(digits.train.labels.unique(), torch.arange(10))
    held = guarantee.Guarantee(True, "label", "a", 1.0, 0.0, "b", "c", "d", False)
    assert guarantee.beside(held, ["normalisation"]) == held
    assert not guarantee.beside(held, ["number of classes"]).holds
    assert "protects the 60 records that --public held=60 took" in guarantee.beside(held, [], 60).reason


def test_real_noise_promises_no_delta_beyond_its_tails() -> None:
    with pytest.raises(ValueError, match="delta is 1e-12, but real noise has tails to 1e-10 only"):
        Experiment(noise="entropy", delta=1e-12)
    assert Experiment(noise="entropy", delta=1e-10).delta == Experiment(delta=1e-10).delta
    with pytest.raises(ValueError, match="greater than or equal to"):
        SitePolicy(client=0, data=Path("d"), state=Path("s"), methods=("fedavg-p",), delta=1e-14)


def hospitals(count: int) -> DataSet:
    """Records of three hospitals, with a test split of their own; the last one belongs to hospital 2."""
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 200, (121, 8, 8), dtype=np.uint8), np.arange(121) % 3
    train, test = (images[:count], labels[:count]), (255 - images[:9], labels[:9])
    return from_torch(train, test, columns={"hospital": np.minimum(np.arange(count) // 40, 2)}, name="hospitals")


ALONE: dict[str, Any] = {"partition": "by:hospital", "clients": 3}


@pytest.mark.parametrize(
    ("facts", "what"),
    [
        (ALONE, ()),
        ({"partition": "iid", "clients": 1}, ()),
        ({"partition": "iid", "clients": 3}, ("--partition iid",)),
        ({"partition": "dirichlet:0.5", "clients": 3}, ("--partition dirichlet:0.5",)),
        ({"partition": "by:hospital", "clients": 2}, ("--partition by:hospital",)),
        ({**ALONE, "limit": 100}, ("--limit",)),
        ({**ALONE, "validation": 0.2}, ("--validation",)),
        ({**ALONE, "public": "held=20"}, ("--public held",)),
    ],
)
def test_what_draws_from_all_records_is_named(facts: dict[str, Any], what: tuple[str, ...]) -> None:
    """What is not named leaves every other record where it is."""
    more, fewer = (share_out(Experiment(data="own", **facts), hospitals(count)) for count in (121, 120))
    assert more.drawn == fewer.drawn == what
    alike = all(set(a) - {120} == set(b) for (a, _), (b, _) in zip(more.parts, fewer.parts, strict=True))
    assert alike or what
    assert alike == (not what) or what == ("--partition by:hospital",)  # which one record moves only near a tie


def test_a_test_split_that_was_drawn_is_named(tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 200, (60, 8, 8), dtype=np.uint8)
    np.savez(tmp_path / "whole.npz", x_train=images, y_train=np.arange(60) % 3)
    assert share_out(Experiment(data=str(tmp_path / "whole.npz"), clients=1), None).drawn == ("test split",)
    assert share_out(Experiment(data="digits", clients=3, limit=100), None).drawn == ()
    assert share_out(Experiment(data="digits", clients=3), sources.load("digits")).drawn == ()


def test_a_record_that_moves_others_ends_a_guarantee_with_real_noise(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One record of a file decides which client has which others: with three clients, epsilon 1 was 9.3."""
    method = methods.find("fedavg-p")(extractor={"pretrain": "none"}, space={"dims": 4})
    stated = {"mean": (0.5,), "std": (0.25,), "num_classes": 3, "public": "noise=40", "workers": 0, **ALONE}
    task = Experiment(data="own", model="convnet:width=4,depth=1", noise="entropy", **stated)

    def found(out: str, **changes: Any) -> dict[str, Any]:
        caplog.clear()
        job = Job(task.model_copy(update=changes), method, tmp_path / out)
        promised: dict[str, Any] = run(job, data=hospitals(121))["guarantee"]
        return promised

    assert found("alone")["holds"] and not caplog.messages
    drawn = found("iid", partition="iid")
    assert not drawn["holds"] and drawn["epsilon"] is None
    assert "the --partition iid drew from all records which client has which" in drawn["reason"]
    assert "(--partition by:COLUMN)" in caplog.text
    simulated = found("simulated", partition="iid", noise="simulated")
    assert simulated["holds"] and "with real noise this task has no guarantee" in simulated["reason"]
    told = spending.remarks([read_run(tmp_path / "simulated")])
    assert any("With it a task here has no guarantee" in sentence for sentence in told)
    assert not any("With it" in sentence for sentence in spending.remarks([read_run(tmp_path / "alone")]))


def test_labels_move_no_record_where_their_number_alone_counts() -> None:
    drawn = ["test split", "--limit", "--validation", "--public held", "--partition iid"]
    assert guarantee.moving(drawn, "label") == ["test split", "--validation"]
    assert guarantee.moving(["--partition dirichlet:1", "--partition quantity:1"], "label") == [
        "--partition dirichlet:1"
    ]
    assert guarantee.moving(drawn, "record") == drawn


def test_copies_of_the_clients_records_among_held_ones_are_counted(tmp_path: Path) -> None:
    place = write(tmp_path / "data.npz")
    with np.load(place) as once:
        twice = {name: np.concatenate([array] * (2 if "train" in name else 1)) for name, array in once.items()}
    np.savez(tmp_path / "twice.npz", **twice)
    stated = {"mean": (0.5,), "std": (0.25,), "num_classes": 4, "public": "held=60"}
    found = result(tmp_path / "twice.npz", tmp_path / "1", **stated)["guarantee"]
    task = share_out(Experiment(data=str(tmp_path / "twice.npz"), clients=2, **stated), None)
    assert task.public is not None
    held = {row.tobytes() for row in task.train.images[torch.from_numpy(task.public)].numpy()}
    own = np.concatenate([part for part, _ in task.parts])
    copies = sum(row.tobytes() in held for row in task.train.images[torch.from_numpy(own)].numpy())
    assert found["holds"] and found["exposed"] == copies > 20
    assert result(place, tmp_path / "2", **stated)["guarantee"]["exposed"] == 0


def test_test_images_that_are_the_clients_are_found_behind_features(tmp_path: Path) -> None:
    place = write(tmp_path / "data.npz")
    with np.load(place) as arrays:
        train = {"x_train": arrays["x_train"], "y_train": arrays["y_train"]}
    np.savez(tmp_path / "same.npz", **train, x_test=train["x_train"], y_test=train["y_train"])
    other = write(tmp_path / "other.npz", seed=1)
    stated = {"num_classes": 4, "model": "linear", "public": f"{other}:unlabeled"}
    backbone = f"patches:centroids=8,public={other}:unlabeled"
    assert result(place, tmp_path / "1", **stated, features=backbone)["guarantee"]["exposed"] == 0
    found = result(tmp_path / "same.npz", tmp_path / "2", **stated, features=backbone)["guarantee"]
    assert not found["holds"] and "all 120 records of the clients are among the public or the test" in found["reason"]


def test_of_real_sites_nobody_counts_the_records_that_are_public() -> None:
    held = guarantee.Guarantee(True, "record", "a", 1.0, 1e-5, "b", "c", "d", False)
    assert guarantee.beside(held, [], in_public=lambda: (0, 0)).exposed is None
    assert guarantee.beside(held, [], in_public=lambda: (0, 9)).exposed == 0


def test_the_row_of_several_seeds_keeps_the_records_that_nothing_protects() -> None:
    some, none = (
        guarantee.Guarantee(True, "record", "a", e, 1e-5, "b", "c", "d", False, n) for e, n in ((0.5, 300), (0.51, 0))
    )
    assert guarantees.words(guarantees.weakest([some, none])) == "eps 0.51, delta 1e-5 per record, 300 exposed"
