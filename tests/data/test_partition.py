"""Partition rules: always a partition, the published statistics, and refusals that say what to do."""

import re
import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedstill.data import class_counts, local_test_split, split
from fedstill.data.partition import values_of

RULES = [
    "iid",
    "quantity:0.5",
    "dirichlet:0.5",
    "dirichlet-capped:0.5",
    "balanced-dirichlet:0.16",
    "classes:2",
    "shards:2",
    "by:site",
]
LABELS = np.repeat(np.arange(10), 5000)  # as CIFAR-10's, sorted


def rng(seed=0):
    return np.random.default_rng(seed)


def deal(rule, labels, num_clients, seed=0):
    return split(rule, labels, num_clients, rng=rng(seed), columns=columns_of(labels))


def columns_of(labels):
    return {"site": np.arange(len(labels)) % 23}


def counts_of(rule, num_clients, seed):
    return class_counts(deal(rule, LABELS, num_clients, seed), LABELS, 10)


# Every rule ----------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=30)
@given(
    rule=st.sampled_from(RULES),
    num_clients=st.integers(1, 12),
    sizes=st.lists(st.integers(0, 90), min_size=1, max_size=7),
    seed=st.integers(0, 2**32),
)
def test_every_record_goes_to_exactly_one_client_and_no_client_is_empty(rule, num_clients, sizes, seed):
    labels = rng(seed).permutation(np.repeat(np.arange(len(sizes)), sizes))
    try:
        parts = deal(rule, labels, num_clients, seed)
    except ValueError as refusal:
        assert "\n" not in str(refusal) and "; use " in str(refusal) or "; change " in str(refusal)
        return
    assert len(parts) == num_clients
    assert all(len(part) for part in parts)
    assert all(part.dtype == np.int64 and (np.diff(part) > 0).all() for part in parts)
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(len(labels)))


@pytest.mark.parametrize("rule", RULES)
def test_a_seed_fixes_the_split_and_nothing_global_changes_it(rule):
    first = deal(rule, LABELS, 20, seed=1)
    np.random.seed(7)  # noqa: NPY002 - the state that must not matter
    again, other = deal(rule, LABELS, 20, seed=1), deal(rule, LABELS, 20, seed=2)
    assert all(map(np.array_equal, first, again))
    assert rule == "by:site" or not all(map(np.array_equal, first, other))


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "by:site"])
def test_which_records_of_a_class_a_client_gets_is_random(rule):
    parts = deal(rule, LABELS, 20)
    counts = class_counts(parts, LABELS, 10)
    client, label = np.argwhere((counts >= 100) & (counts <= 1300))[0]
    rows = parts[client][LABELS[parts[client]] == label]
    # Cut in file order they would lie within 1300 of each other; 100 random ones of 5000 span 4900 on average.
    assert np.ptp(rows) > 4000


@pytest.mark.parametrize(
    "rule",
    [
        "", "pathological:2", "Dirichlet:1", "dirichlet", "dirichlet:", "dirichlet:-1", "dirichlet:0", "dirichlet:nan",
        "dirichlet:inf", "dirichlet:x", "dirichlet:1_0", "dirichlet-capped:-1", "balanced-dirichlet:0", "quantity",
        "quantity:0", "quantity: 1", "classes", "classes:0", "classes:2.0", "classes:-1", "shards:0", "shards:",
        "iid:3", "by:", "by",
    ],
)  # fmt: skip
def test_what_is_no_rule_is_refused_with_all_that_are(rule):
    with pytest.raises(
        ValueError, match=rf"^{re.escape(repr(rule))} is not a partition rule; use one of iid, quantity:A"
    ):
        deal(rule, LABELS, 10)


@pytest.mark.parametrize("clients", [23, 5, 1])
def test_the_values_of_a_column_at_each_client_are_listed(clients):
    parts, columns = deal("by:site", LABELS, clients), columns_of(LABELS)
    (found,) = values_of("by:site", columns, parts).values()
    wanted = [sorted(set(columns["site"][part].tolist())) for part in parts]
    assert found == [[*map(str, v[:20]), *([f"and {len(v) - 20} more"] if len(v) > 20 else [])] for v in wanted]
    assert values_of("iid", columns, parts) == {}


@pytest.mark.parametrize(
    ("rule", "num_clients", "message"),
    [
        ("classes:11", 10, "use an integer from 1 to 10"),
        ("classes:2", 3, "use an integer from 4 to 10"),
        ("shards:100", 1000, "shards:50 at most"),
        ("by:hospital", 10, "no column 'hospital' .* use by:site; other rules: iid"),
        ("by:site", 24, "23 different values .* at most 23 clients"),
        ("dirichlet:0.001", 100, "use a larger A, fewer clients or balanced-dirichlet:A"),
        ("quantity:0.001", 100, "use a larger A, fewer clients or iid"),
        ("dirichlet-capped:1", 5001, "10 records or more, but there are 50000; use at most 5000 clients"),
        ("iid", 0, "1..50000 clients"),
        ("iid", 50001, "1..50000 clients"),
    ],
)
def test_a_rule_that_cannot_be_met_is_refused_with_its_limit(rule, num_clients, message):
    with pytest.raises(ValueError, match=message):
        deal(rule, LABELS, num_clients)


def test_a_class_with_fewer_records_than_owners_is_refused():
    labels = np.array([0] * 50 + [1] * 3)
    with pytest.raises(ValueError, match="class 1 10 owners, but it has 3 records"):
        deal("classes:2", labels, 10)


# Each rule -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_clients", [7, 10])
def test_iid_parts_are_equally_large_and_alike(num_clients):
    counts = counts_of("iid", num_clients, 0)
    assert np.ptp(counts.sum(1)) <= 1
    # Hypergeometric: standard deviation below sqrt(5000 / K) = 27 at most; five of them.
    assert np.abs(counts - 5000 / num_clients).max() < 135


def test_shards_are_contiguous_blocks_of_the_sorted_records():
    labels = rng().permutation(LABELS)
    counts = class_counts(deal("shards:1", labels, 100), labels, 10)
    assert (counts.sum(1) == 500).all() and ((counts > 0).sum(1) == 1).all()  # FedKADP's CIFAR-10 split
    counts = class_counts(deal("shards:2", labels, 100), labels, 10)
    assert set((counts > 0).sum(1)) == {1, 2}  # McMahan et al.'s
    assert np.ptp([len(part) for part in deal("shards:3", LABELS, 7)]) <= 3


def test_classes_are_dealt_as_in_niid_bench():
    counts = counts_of("classes:1", 10, 0)
    np.testing.assert_array_equal(counts, 5000 * np.eye(10, dtype=int))
    for seed in range(5):
        counts = counts_of("classes:3", 25, seed)
        assert ((counts > 0).sum(1) == 3).all()
        assert (counts[np.arange(25), np.arange(25) % 10] > 0).all()
        for of_class in counts.T:
            assert np.ptp(of_class[of_class > 0]) <= 1


def test_classes_nobody_would_own_are_dealt_first_when_clients_are_few():
    for seed in range(5):
        counts = counts_of("classes:2", 5, seed)
        assert ((counts > 0).sum(1) == 2).all() and (counts.sum(0) == 5000).all()


def test_a_column_gives_each_value_to_one_client():
    columns = {"site": np.array(["b", "a", "b", "c", "a", "b"])}
    labels = np.zeros(6, int)
    three = split("by:site", labels, 3, rng=rng(), columns=columns)
    assert [part.tolist() for part in three] == [[1, 4], [0, 2, 5], [3]]  # in the order of the values
    two = split("by:site", labels, 2, rng=rng(), columns=columns)
    assert [part.tolist() for part in two] == [[0, 2, 5], [1, 3, 4]]  # b with 3 records; a with 2 and c with 1


def test_grouped_columns_are_whole_and_balanced():
    site = rng().zipf(1.5, 20000) % 500
    parts = split("by:site", np.zeros(20000, int), 8, rng=rng(), columns={"site": site})
    owners = np.zeros(500, int)
    for part in parts:
        owners[np.unique(site[part])] += 1
    assert owners.max() == 1
    # Graham 1969: the fullest has at most 4/3 of the optimum, which is at least the largest group and at least N/K.
    assert max(map(len, parts)) <= 4 / 3 * max(2500, np.bincount(site).max())


# Published statistics ------------------------------------------------------------------------------------------------


def mean_shares(rule, draws=30):
    """Means over clients and draws: the three largest class shares, classes present; and the extreme client sizes."""
    counts = np.concatenate([counts_of(rule, 20, seed) for seed in range(draws)])
    shares = np.sort(counts / counts.sum(1, keepdims=True))[:, ::-1]
    return shares[:, :3].mean(0), (counts > 0).sum(1).mean(), (counts.sum(1).min(), counts.sum(1).max())


PUBLISHED = {0.01: (0.89, 0.10, 0.01), 0.04: (0.75, 0.19, 0.05), 0.16: (0.55, 0.24, 0.12), 10.24: (0.15, 0.13, 0.12)}


@pytest.mark.slow
@pytest.mark.parametrize("alpha", PUBLISHED)
def test_balanced_dirichlet_has_the_shares_of_fedauxfdps_table_1(alpha):
    shares, _, (smallest, largest) = mean_shares(f"balanced-dirichlet:{alpha}")
    # The table is one draw; means of 20 clients differ between draws with a standard deviation below 0.02.
    np.testing.assert_allclose(shares, PUBLISHED[alpha], atol=0.04)
    assert smallest >= 2490 and largest <= 2510  # 2500 up to the rounding of 10 cuts
    for other in set(PUBLISHED) - {alpha}:
        assert np.abs(shares - PUBLISHED[other]).max() > 0.08


def test_balanced_dirichlet_equalises_clients_of_unequal_classes():
    labels = np.repeat(np.arange(4), [8000, 4000, 2000, 2000])
    sizes = [len(part) for part in deal("balanced-dirichlet:0.5", labels, 16)]
    assert min(sizes) >= 996 and max(sizes) <= 1004


def present(rule, draws=100):
    """Mean classes present at a client, with any and with at least 10 records; extreme client sizes. K = 10."""
    counts = np.concatenate([counts_of(rule, 10, seed) for seed in range(draws)])
    sizes = counts.sum(1)
    return (counts > 0).sum(1).mean(), (counts >= 10).sum(1).mean(), sizes.min(), sizes.max()


@pytest.mark.slow
def test_capped_dirichlet_has_the_class_counts_measured_on_niid_bench():
    some, ten, smallest, largest = present("dirichlet-capped:0.1")
    # Measured 5.5 / 4.0 classes, sizes 30..9565. 1000 clients: standard error 0.05; the tolerance is for their one run.
    assert some == pytest.approx(5.5, abs=0.3) and ten == pytest.approx(4.0, abs=0.3)
    assert smallest >= 10 and largest < 10000  # below N/K = 5000 before its last class of 5000
    some, ten, *_ = present("dirichlet-capped:0.5")
    assert some == pytest.approx(8.7, abs=0.3) and ten == pytest.approx(7.9, abs=0.3)
    # The plain rule has no cap: more classes present, larger clients.
    some, ten, _, largest = present("dirichlet:0.1")
    assert ten > 4.3 and largest > 10000


@pytest.mark.slow
@pytest.mark.parametrize("alpha", [0.1, 1.0])
def test_dirichlet_shares_have_the_variance_of_dir_alpha(alpha):
    shares = np.stack([counts_of(f"dirichlet:{alpha}", 10, seed) for seed in range(200)]) / 5000
    # Var p_k = (1/K)(1 - 1/K) / (K alpha + 1); 20,000 shares give it to about 3 % at alpha = 0.1.
    expected = 0.09 / (10 * alpha + 1)
    assert shares.var() == pytest.approx(expected, rel=0.1)
    assert shares.var() != pytest.approx(0.09 / (10 * alpha * 1.5 + 1), rel=0.1)
    assert shares.var() != pytest.approx(0.09 / (10 * alpha / 1.5 + 1), rel=0.1)


def test_quantity_skew_has_the_sizes_of_dir_alpha_and_leaves_the_classes_alike():
    counts = np.stack([counts_of("quantity:0.5", 10, seed) for seed in range(300)])  # (draws, clients, classes)
    sizes = counts.sum(2)
    shares = sizes / len(LABELS)
    assert shares.var() == pytest.approx(0.09 / (10 * 0.5 + 1), rel=0.1)
    for wrong in (0.5 / 1.5, 0.5 * 1.5):
        assert shares.var() != pytest.approx(0.09 / (10 * wrong + 1), rel=0.1)
    # within a client, counts by class are draws without replacement: their chi-square is about its degrees of freedom
    expected, left = sizes[..., None] / 10, 1 - shares[..., None]
    assert ((counts - expected) ** 2 / expected / left).sum(2).mean() == pytest.approx(9, rel=0.05)


def test_quantity_skew_deals_as_niid_bench_does():
    # its "iid-diff-quantity", with our shares: cut a permutation at floor(cumsum(shares) N)
    shares = rng(3).dirichlet(np.full(10, 0.5))
    sizes = [len(part) for part in np.split(np.arange(len(LABELS)), (np.cumsum(shares) * len(LABELS)).astype(int)[:-1])]
    assert [len(part) for part in deal("quantity:0.5", LABELS, 10, 3)] == sizes and min(sizes) >= 1


@pytest.mark.parametrize("rule", ["dirichlet-capped:1e-9", "balanced-dirichlet:1e-9"])
def test_shares_of_exactly_zero_are_drawn_again(rule):
    # Each class goes to one of two clients: in half of the draws both to one, the other cannot be filled.
    labels = np.repeat([0, 1], 20)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a division by zero
        for seed in range(10):
            assert [len(part) for part in deal(rule, labels, 2, seed)] == [20, 20]


# Against flwr-datasets -----------------------------------------------------------------------------------------------


def flower(partitioner, labels, num_clients):
    from datasets import Dataset

    partitioner.dataset = Dataset.from_dict({"label": labels})
    return np.stack(
        [np.bincount(partitioner.load_partition(k)["label"], minlength=10) for k in range(num_clients)],
    )


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "capped"), [("dirichlet:0.5", False), ("dirichlet-capped:0.5", True)])
def test_dirichlet_counts_equal_flwr_datasets(rule, capped):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its own imports
        partitioner = pytest.importorskip("flwr_datasets.partitioner").DirichletPartitioner
    labels = LABELS[::10]
    for seed in range(3):
        theirs = partitioner(8, "label", 0.5, min_partition_size=10, self_balancing=capped, seed=seed)
        ours = class_counts(deal(rule, labels, 8, seed), labels, 10)
        np.testing.assert_array_equal(ours, flower(theirs, labels, 8))  # both draw the shares of all classes first


@pytest.mark.slow
def test_class_parts_are_those_of_flwr_datasets():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        partitioner = pytest.importorskip("flwr_datasets.partitioner").PathologicalPartitioner
    labels = np.repeat(np.arange(10), 503)  # 50 each and 3 more
    for num_classes in (10, 1):
        theirs = partitioner(10, "label", num_classes, class_assignment_mode="first-deterministic")
        ours = class_counts(deal(f"classes:{num_classes}", labels, 10), labels, 10)
        np.testing.assert_array_equal(ours, flower(theirs, labels, 10))


# Local test splits and counts ----------------------------------------------------------------------------------------


@settings(deadline=None)
@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=6).filter(any),
    fraction=st.floats(0, 1, exclude_max=True),
    seed=st.integers(0, 2**32),
)
def test_a_local_test_split_is_proportional_in_every_class(sizes, fraction, seed):
    labels = np.repeat(np.arange(len(sizes)), sizes)
    indices = rng(seed).permutation(len(labels))
    train, test = local_test_split(indices, fraction=fraction, rng=rng(seed), labels=labels)
    np.testing.assert_array_equal(np.sort(np.concatenate([train, test])), np.arange(len(labels)))
    assert len(train) >= 1 and len(test) == min(round(fraction * len(labels)), len(labels) - 1)
    share = len(test) / len(labels)
    of_class = np.bincount(labels[test], minlength=len(sizes))
    assert (np.abs(of_class - share * np.array(sizes)) < 1 + 1e-9).all()


def test_a_local_test_split_is_random_and_needs_no_labels():
    indices = np.arange(100, 1100)
    train, test = local_test_split(indices, rng=rng(0))
    assert len(train) == 800 and len(test) == 200 and len(np.unique(np.diff(test))) > 5
    again, other = local_test_split(indices, rng=rng(0))[1], local_test_split(indices, rng=rng(1))[1]
    assert np.array_equal(test, again) and not np.array_equal(test, other)
    assert [part.tolist() for part in local_test_split(np.array([4]), fraction=0.9, rng=rng())] == [[4], []]
    with pytest.raises(ValueError, match=r"fraction is 1, but it lies in \[0, 1\)"):
        local_test_split(indices, fraction=1, rng=rng())


def test_a_local_test_split_may_hold_out_any_record_of_small_classes():
    labels = np.arange(10)
    held_out = [local_test_split(labels, rng=rng(seed), labels=labels)[1] for seed in range(200)]
    # Each with probability 0.2: 40 of 200 with a standard deviation of 6.
    assert (np.abs(np.bincount(np.concatenate(held_out), minlength=10) - 40) < 28).all()


def test_class_counts_include_classes_a_client_lacks():
    counts = class_counts([np.array([0, 1]), np.array([2])], np.array([2, 2, 0]), 4)
    assert counts.tolist() == [[0, 0, 2, 0], [1, 0, 0, 0]]


def test_writers_of_mnist_are_natural_clients(real_data: Path):
    import pyarrow.parquet as pq

    file = real_data / "mnist/train-00000-of-00001.parquet"
    if not file.exists() or "writer_id" not in pq.read_schema(file).names:
        pytest.skip(f"no MNIST with writers in {real_data}")
    table = pq.read_table(file, columns=["label", "writer_id"])
    labels, writer = table["label"].to_numpy(), table["writer_id"].to_numpy()
    parts = split("by:writer_id", labels, len(np.unique(writer)), rng=rng(), columns={"writer_id": writer})
    assert all(len(np.unique(writer[part])) == 1 for part in parts)
    parts = split("by:writer_id", labels, 50, rng=rng(), columns={"writer_id": writer})
    # Whoever is fullest was the emptiest before the last writer came.
    assert max(map(len, parts)) - min(map(len, parts)) <= np.unique(writer, return_counts=True)[1].max()
