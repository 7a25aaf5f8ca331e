"""Rules that deal the records of one data set to clients.

Every rule gives each record to exactly one client and leaves no client empty. All randomness comes from the generator
argument, so an equal seed gives an equal split.

``flwr-datasets`` 0.6.1 has five of these rules, but cuts records in file order (MNIST's writers are sorted), drops
records or classes, and takes 0.5 to 4 s for 60,000 labels (here 0.01 to 0.1 s). Tests compare ours with its Dirichlet
and pathological rules.
"""

import heapq
import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]
Counts = NDArray[np.int64]  # (C, K): number of records of each class for each client

FORMS = "iid, quantity:A, dirichlet:A, dirichlet-capped:A, balanced-dirichlet:A, classes:C, shards:S, by:COLUMN"
"""All rules: A is a number above 0, C and S are integers from 1, COLUMN is a column of the data set."""
MOST_VALUES = 20
"""Largest number of values of a column that are listed for a client."""
MAX_DRAWS = 1000
"""Number of draws after which a Dirichlet rule fails because a client has too few records."""


def split(
    rule: str,
    labels: np.ndarray,
    num_clients: int,
    *,
    rng: np.random.Generator,
    columns: Mapping[str, np.ndarray] | None = None,
) -> list[Indices]:
    """Deal the records with these ``labels`` to clients.

    K clients, N records, C classes (those that occur in ``labels``), n_c records of class c:

    * ``iid``: a random permutation cut into K parts whose sizes differ by at most 1.
    * ``quantity:A``: a random permutation cut into parts whose shares of the N records ~ Dir(A 1_K), so that clients
      differ in size only; redrawn until each client has a record (NIID-Bench's "iid-diff-quantity").
    * ``dirichlet:A``: the shares of each class ~ Dir(A 1_K), independent; redrawn until each client has a record
      (Hsu et al. 2019, arXiv:1909.06335, with shares per class).
    * ``dirichlet-capped:A``: the same, but a client that already has N/K records gets none of the later classes,
      whose shares are renormalised; redrawn until each client has 10 records (NIID-Bench, arXiv:2102.02079, its
      "noniid-labeldir"; also DENSE's and FedDM's).
    * ``balanced-dirichlet:A``: the Dirichlet shares, rescaled in turn for clients and classes, up to 1000 times, until
      each client gets N/K records (FedAUX, arXiv:2102.02514, its ``split_dirichlet``); redrawn like ``dirichlet``.
    * ``classes:C``: client i owns class i mod C and others drawn at random, C (the argument) in all; each class is cut
      into equal parts among its owners (NIID-Bench's "noniid-#label").
    * ``shards:S``: the records sorted by class and cut into S K blocks whose sizes differ by at most 1; each client
      gets S blocks at random (McMahan et al. 2017, arXiv:1602.05629; with S = 1, FedKADP's).
    * ``by:COLUMN``: a client for each value of a column. With fewer clients than values, each value, the largest first,
      goes to the client with the fewest records.

    Differs from the sources:

    1. The records of a class are always shuffled before they are cut; FedAUX takes them in file order.
    2. ``balanced-dirichlet`` equalises records; FedAUX equalises shares: the same where classes are equally large.
    3. NIID-Bench redraws without limit, here at most ``MAX_DRAWS`` times.
    4. ``classes`` with K < C first deals the classes without an owner; NIID-Bench loses their records.
    5. ``quantity`` redraws until each client has 1 record; NIID-Bench wants 10, which 100 clients hardly ever have.

    Args:
        rule: one of ``FORMS``.
        labels: the class of each record, integers, ``(N,)``.
        num_clients: K, in ``[1, N]``.
        rng: source of randomness for every rule but ``by:COLUMN``.
        columns: columns for ``by:COLUMN``, each ``(N,)``.

    Returns:
        For each client the indices of its records, ascending.

    Raises:
        ValueError: the rule is not one of ``FORMS``, or is impossible with these labels and this many clients.
    """
    if not 1 <= num_clients <= len(labels):
        raise ValueError(
            f"--clients is {num_clients}, but {len(labels)} records can be dealt to 1..{len(labels)} clients only; "
            "change --clients or --limit"
        )
    name, _, argument = rule.partition(":")
    if name == "by" and argument:
        parts = _by_column(argument, columns or {}, num_clients)
    elif name == "iid" and rule == "iid":
        parts = np.array_split(rng.permutation(len(labels)), num_clients)
    elif name == "shards":
        parts = _shards(_positive_int(rule, argument), labels, num_clients, rng)
    elif name == "classes":
        parts = _classes(_positive_int(rule, argument), labels, num_clients, rng)
    elif name == "quantity":
        parts = _dirichlet(rule, np.zeros_like(labels), num_clients, rng)  # all records as one class
    elif name in _DIRICHLET:
        parts = _dirichlet(rule, labels, num_clients, rng)
    else:
        raise _invalid(rule)
    assert all(len(part) for part in parts) and sum(map(len, parts)) == len(labels), rule
    return [np.sort(part).astype(np.int64) for part in parts]


def values_of(rule: str, columns: Mapping[str, np.ndarray], parts: Sequence[Indices]) -> dict[str, list[list[str]]]:
    """For ``by:COLUMN``, the column's values at each client, the first `MOST_VALUES` as text; empty for other rules."""
    name, _, column = rule.partition(":")
    if name != "by":
        return {}
    found = [list(map(str, np.unique(columns[column][part]))) for part in parts]
    return {column: [v[:MOST_VALUES] + [f"and {len(v) - MOST_VALUES} more"] * (len(v) > MOST_VALUES) for v in found]}


def local_test_split(
    indices: Indices, *, fraction: float = 0.2, rng: np.random.Generator, labels: np.ndarray | None = None
) -> tuple[Indices, Indices]:
    """Split a client's records into train and test indices at random, both ascending.

    Args:
        indices: the client's records, ``(n,)``, at least 1.
        fraction: share of test records, in [0, 1), of each class to within one record if ``labels`` are given. At least
            one record stays in train.
        rng: source of randomness.
        labels: the class of every record of the data set, indexed by ``indices``.

    Raises:
        ValueError: ``fraction`` is out of range.
    """
    if not 0 <= fraction < 1:
        raise ValueError(f"the test fraction is {fraction}, but it lies in [0, 1); 0.2 holds out one record in five")
    shuffled = rng.permutation(indices)
    if labels is not None:
        shuffled = shuffled[np.argsort(labels[shuffled], kind="stable")]
    num_test = min(round(fraction * len(indices)), len(indices) - 1)
    # Systematic sampling: equal steps from a random start pass through each class in proportion.
    steps = (np.arange(num_test) + rng.random()) * len(indices) / max(num_test, 1)
    is_test = np.zeros(len(indices), bool)
    is_test[steps.astype(np.int64)] = True
    return np.sort(shuffled[~is_test]), np.sort(shuffled[is_test])


def group_split(
    indices: Indices, *, fraction: float, rng: np.random.Generator, labels: np.ndarray, groups: np.ndarray
) -> tuple[Indices, Indices]:
    """Split records into train and test indices so that all records of a group are on one side, both ascending.

    Groups are drawn at random among those whose most frequent class is the same, until the test records are the
    ``fraction`` of all to within half a group. The last group of each such class stays in train.

    Args:
        indices: the records to split, ``(n,)``, at least 1.
        fraction: share of test records, in [0, 1).
        rng: source of randomness.
        labels: the class of every record of the data set, indexed by ``indices``.
        groups: the group of every record, likewise.

    Raises:
        ValueError: ``fraction`` is out of range, or no group can be taken.
    """
    if not 0 <= fraction < 1:
        raise ValueError(f"the test fraction is {fraction}, but it lies in [0, 1); 0.2 holds out one record in five")
    values, codes, sizes = np.unique(groups[indices], return_inverse=True, return_counts=True)
    counts = np.zeros((len(values), int(labels[indices].max()) + 1), np.int64)
    np.add.at(counts, (codes, labels[indices]), 1)
    mostly, taken, target, number = counts.argmax(1), np.zeros(len(values), bool), 0.0, 0
    for label in np.unique(mostly):
        members = rng.permutation(np.flatnonzero(mostly == label))
        target += fraction * sizes[members].sum()
        for group in members[:-1]:
            if number + sizes[group] / 2 <= target:
                taken[group] = True
                number += int(sizes[group])
    if fraction and not number:
        raise ValueError(
            f"the {len(indices)} records have {len(values)} groups of up to {sizes.max()} records, of which none can "
            f"be set aside whole for a share of {fraction:g}; give more records, or say --group none"
        )
    return np.sort(indices[~taken[codes]]), np.sort(indices[taken[codes]])


def class_counts(parts: Sequence[Indices], labels: np.ndarray, num_classes: int) -> Counts:
    """Number of records of each class at each client, ``(K, num_classes)``."""
    return np.stack([np.bincount(labels[part], minlength=num_classes) for part in parts])


def _invalid(rule: str) -> ValueError:
    return ValueError(
        f"{rule!r} is not a partition rule; use one of {FORMS} (A a number above 0, C and S integers from 1, COLUMN a "
        "column of the data set)"
    )


def _positive_int(rule: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise _invalid(rule)
    return int(text)


def _positive_float(rule: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise _invalid(rule) from None
    if not 0 < value < math.inf or set(text) & set(" _\t\n"):  # float takes these too
        raise _invalid(rule)
    return value


def _by_class(labels: np.ndarray, rng: np.random.Generator) -> list[Indices]:
    """The records of each class, shuffled."""
    shuffled = rng.permutation(len(labels))
    ordered = shuffled[np.argsort(labels[shuffled], kind="stable")]
    return np.split(ordered, np.cumsum(np.unique(labels, return_counts=True)[1])[:-1])


def _deal(counts: Counts, labels: np.ndarray, rng: np.random.Generator) -> list[Indices]:
    """Give client k ``counts[c, k]`` random records of class c."""
    cut = [np.split(rows, np.cumsum(row)[:-1]) for rows, row in zip(_by_class(labels, rng), counts, strict=True)]
    return [np.concatenate(pieces) for pieces in zip(*cut, strict=True)]


def _shards(num_shards: int, labels: np.ndarray, num_clients: int, rng: np.random.Generator) -> list[Indices]:
    if num_shards * num_clients > len(labels):
        raise ValueError(
            f"shards:{num_shards} for {num_clients} clients needs {num_shards * num_clients} records, there are "
            f"{len(labels)}; use shards:{len(labels) // num_clients} at most, or fewer clients"
        )
    blocks = np.array_split(np.concatenate(_by_class(labels, rng)), num_shards * num_clients)
    owners = rng.permutation(len(blocks)).reshape(num_clients, num_shards)
    return [np.concatenate([blocks[block] for block in owned]) for owned in owners]


def _classes(per_client: int, labels: np.ndarray, num_clients: int, rng: np.random.Generator) -> list[Indices]:
    classes, sizes = np.unique(labels, return_counts=True)
    num_classes = len(classes)
    if not num_classes / num_clients <= per_client <= num_classes:
        raise ValueError(
            f"classes:{per_client} cannot deal {num_classes} classes to {num_clients} clients so that each class has "
            f"an owner; use an integer from {-(-num_classes // num_clients)} to {num_classes}"
        )
    owns = np.zeros((num_classes, num_clients), bool)
    owns[np.arange(num_clients) % num_classes, np.arange(num_clients)] = True
    unowned = rng.permutation(np.flatnonzero(~owns.any(1)))
    owns[unowned, np.arange(len(unowned)) % num_clients] = True
    for client in range(num_clients):
        others = np.flatnonzero(~owns[:, client])
        owns[rng.choice(others, per_client - (num_classes - len(others)), replace=False), client] = True
    short = np.flatnonzero(owns.sum(1) > sizes)
    if len(short):
        raise ValueError(
            f"classes:{per_client} for {num_clients} clients gives class {classes[short[0]]} {owns[short[0]].sum()} "
            f"owners, but it has {sizes[short[0]]} records; use fewer clients or fewer classes each"
        )
    # as in np.array_split, the first (n_c mod owners) owners of a class get one record more
    rank = owns.cumsum(1) - 1
    owners = owns.sum(1, keepdims=True)
    return _deal(owns * (sizes[:, None] // owners + (rank < sizes[:, None] % owners)), labels, rng)


def _by_column(name: str, columns: Mapping[str, np.ndarray], num_clients: int) -> list[Indices]:
    if name not in columns:
        raise ValueError(
            f"the data set has no column {name!r} to partition by, of integers or texts without gaps; "
            + (f"use by:{' or by:'.join(columns)}" if columns else "it has no columns but images and classes")
            + f"; other rules: {FORMS}"
        )
    values, codes, sizes = np.unique(columns[name], return_inverse=True, return_counts=True)
    if num_clients > len(values):
        raise ValueError(
            f"by:{name} has {len(values)} different values for {num_clients} clients; use at most {len(values)} clients"
        )
    client_of = np.arange(len(values))
    if num_clients < len(values):
        clients = [(0, client) for client in range(num_clients)]  # (records so far, client): a heap
        for value in np.argsort(-sizes, kind="stable"):
            records, client_of[value] = clients[0]
            heapq.heapreplace(clients, (records + int(sizes[value]), int(client_of[value])))
    owner = client_of[codes]
    return np.split(np.argsort(owner, kind="stable"), np.cumsum(np.bincount(owner))[:-1])


def _dirichlet(rule: str, labels: np.ndarray, num_clients: int, rng: np.random.Generator) -> list[Indices]:
    """Draw counts until each client has the rule's fewest records, then deal."""
    name, _, argument = rule.partition(":")
    (draw, least), alpha = _DIRICHLET[name], _positive_float(rule, argument)
    if least * num_clients > len(labels):
        raise ValueError(
            f"{rule!r} gives each of {num_clients} clients {least} records or more, but there are {len(labels)}; "
            f"use at most {len(labels) // least} clients"
        )
    sizes = np.unique(labels, return_counts=True)[1]
    for _ in range(MAX_DRAWS):
        counts = draw(alpha, sizes, num_clients, rng)
        if counts.sum(0).min() >= least:
            return _deal(counts, labels, rng)
    other = "iid" if name == "quantity" else "balanced-dirichlet:A"
    raise ValueError(
        f"{rule!r} left one of {num_clients} clients with fewer than {least} of {len(labels)} records in each of "
        f"{MAX_DRAWS} draws; use a larger A, fewer clients or {other}"
    )


def _cut(shares: NDArray[np.float64], size: int) -> Counts:
    """Number of the ``size`` records for each share: cut at floor(cumsum(shares) * size)."""
    cuts = np.minimum(np.cumsum(shares)[:-1] * size, size).astype(np.int64)
    return np.diff(cuts, prepend=0, append=size)


def _plain(alpha: float, sizes: Counts, num_clients: int, rng: np.random.Generator) -> Counts:
    shares = rng.dirichlet(np.full(num_clients, alpha), len(sizes))
    return np.stack([_cut(*of_class) for of_class in zip(shares, sizes, strict=True)])


def _capped(alpha: float, sizes: Counts, num_clients: int, rng: np.random.Generator) -> Counts:
    shares = rng.dirichlet(np.full(num_clients, alpha), len(sizes))
    counts = np.zeros(shares.shape, np.int64)
    for c, size in enumerate(sizes):
        left = shares[c] * (counts.sum(0) < sizes.sum() / num_clients)
        if left.sum() == 0:  # with a tiny alpha the one client with a share may be full: draw again
            return np.zeros_like(counts)
        counts[c] = _cut(left / left.sum(), size)
    return counts


def _balanced(alpha: float, sizes: Counts, num_clients: int, rng: np.random.Generator) -> Counts:
    records = rng.dirichlet(np.full(num_clients, alpha), len(sizes)) * sizes[:, None]
    per_client = sizes.sum() / num_clients
    for _ in range(1000):
        of_client = records.sum(0)
        if of_client.min() == 0:  # with a tiny alpha a client may have no share of any class: draw again
            return np.zeros(records.shape, np.int64)
        if np.abs(of_client - per_client).max() < 1e-6:
            break
        records *= per_client / of_client
        records *= (sizes / records.sum(1))[:, None]
    return np.stack([_cut(row / size, size) for row, size in zip(records, sizes, strict=True)])


_DIRICHLET = {
    "dirichlet": (_plain, 1), "quantity": (_plain, 1), "dirichlet-capped": (_capped, 10),
    "balanced-dirichlet": (_balanced, 1),
}  # fmt: skip
"""Rule -> its function (alpha, class sizes, K, rng) -> counts (C, K), and the fewest records of a client."""
