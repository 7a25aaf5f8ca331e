"""A record's row depends on the record alone, to the bit: whatever the server chooses, no other record changes it."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedstill import models
from fedstill.base.records import Examples, Normalisation, Records
from fedstill.base.seeds import Simulated, isolated, stream
from fedstill.base.weights import state
from fedstill.distill.embedding import embed
from fedstill.distill.public_map import PublicFeatures
from fedstill.methods.deepafl import Built, DeepAFL
from fedstill.privacy import rowwise
from fedstill.privacy.logistic import LogisticHead

MODELS = [
    ("convnet:width=8,depth=2", (1, 8, 8)),
    ("convnet:width=16,depth=2", (1, 8, 8)),
    ("convnet:width=13,depth=1", (3, 8, 8)),
    ("lenet:padding=2", (1, 8, 8)),
    ("lenet5", (3, 16, 16)),
    ("kadp-mnist", (1, 8, 8)),
    ("dense-cnn1", (3, 18, 18)),
    ("scattering:angles=2,groups=3", (1, 12, 12)),
    ("convnet:width=7,depth=2,activation=sigmoid", (1, 11, 11)),
    ("convnet:width=5,depth=1,activation=swish,pooling=none", (3, 9, 9)),
]
ODD = ("convnet:width=3,depth=1,activation=sigmoid,pooling=none", (1, 7, 7))
"""A network whose activations are an odd number for a record."""
COLUMNS = (1, 5, 6, 7, 9, 11, 33)


def made(spec: str, shape: tuple[int, int, int]) -> nn.Module:
    with isolated(0):
        return models.build(spec, shape, 5)


def images(count: int, shape: tuple[int, int, int], seed: int = 0) -> Records:
    rng = stream(seed, "images")
    pixels = torch.randint(0, 256, (count, *shape), generator=rng, dtype=torch.uint8)
    channels = shape[0]
    normalisation = Normalisation((0.5,) * channels, (0.25,) * channels)
    return Records(pixels, torch.randint(0, 5, (count,), generator=rng), 5, normalisation)


def bits_stay(rows: Any, records: Records) -> bool:
    """Whether each row stays, to the bit, without the first record, without the last, and in another order."""
    whole, n = rows(records), len(records)
    order = torch.randperm(n, generator=stream(0, "order"))
    return all(
        torch.equal(rows(records[index]), whole[index])
        for index in (torch.arange(1, n), torch.arange(n - 1), order, order[: n // 2], torch.tensor([n // 3]))
    )


@pytest.mark.parametrize(("spec", "shape"), MODELS, ids=str)
def test_mapped_features_of_a_record_do_not_depend_on_others(spec: str, shape: tuple[int, int, int]) -> None:
    model, rng = made(spec, shape), stream(1)
    width = models.feature_width(model, shape)
    for columns, count in zip(COLUMNS, (9, 64, 65, 70, 97, 130, 77), strict=True):
        projection = torch.randn(width, columns, generator=rng)
        features = PublicFeatures(state(model), torch.randn(width, generator=rng), projection, 1.0)
        assert bits_stay(lambda some, f=features: f.rows(model, some), images(count, shape)), (columns, count)


def test_the_layout_of_images_in_memory_changes_no_row() -> None:
    """Images that lie channel by channel, as `permute` leaves them, were computed otherwise in full batches."""
    shape = (3, 16, 16)
    model, records = made("convnet:width=16,depth=2", shape), images(97, shape)
    last = records.images.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
    other = Records(last, records.labels, 5, records.normalisation)
    assert not last.is_contiguous() and torch.equal(last, records.images)
    width = models.feature_width(model, shape)
    projection = torch.randn(width, 12, generator=stream(1))
    features = PublicFeatures(state(model), torch.zeros(width), projection, 1.0)
    assert bits_stay(lambda some: features.rows(model, some), other)
    assert torch.equal(features.rows(model, other), features.rows(model, records))


def test_a_network_with_batch_norm_is_used_with_its_fixed_statistics() -> None:
    model = made("resnet8", (3, 8, 8)).train()
    features = PublicFeatures(state(model), torch.zeros(512), torch.eye(512)[:, :32].contiguous(), 1.0)
    assert bits_stay(lambda some: features.rows(model, some), images(9, (3, 8, 8)))


@pytest.mark.parametrize(("spec", "shape"), MODELS, ids=str)
def test_embedded_records_do_not_depend_on_others(spec: str, shape: tuple[int, int, int]) -> None:
    nets = [made(spec, shape), made(spec, shape)]
    assert bits_stay(lambda some: embed(nets, some), images(83, shape))


def twins() -> tuple[nn.Module, PublicFeatures, Tensor]:
    """A network each of whose filters has a twin, and a map that takes twins from each other: only rounding is left."""
    model = made("convnet:width=16,depth=2", (1, 8, 8))
    with torch.no_grad():
        for m in model.modules():
            if isinstance(m, nn.Conv2d):
                m.weight[1::2] = m.weight[::2]
                m.bias[1::2] = m.bias[::2]
    width = models.feature_width(model, (1, 8, 8))
    columns = torch.randn(8, width // 16, 6, generator=stream(2))
    projection = torch.stack([columns, -columns], 1).reshape(width, 6)  # channel by channel
    return model, PublicFeatures(state(model), torch.zeros(width), projection, 1e-8), projection


def test_a_server_cannot_make_one_record_move_the_rows_of_others() -> None:
    """Rows that are nothing but rounding, which a tiny radius makes as long as any other row."""
    model, features, _ = twins()
    records = images(401, (1, 8, 8))
    rows = features.rows(model, records)
    assert float(rows.norm(dim=1).max()) < 1e-3 and float(rows.norm(dim=1).median()) > 1e-8
    head = LogisticHead(num_classes=5, penalty=1.0, radius=1e-8, noise_multiplier=0.0)
    noise = Simulated(stream(0))
    with_it = head((rows, records.labels), noise)
    without = head((features.rows(model, records[torch.arange(1, 401)]), records.labels[1:]), noise)
    assert float((with_it - without).norm()) <= head.sensitivity


@pytest.mark.parametrize("threads", [1, 3])
def test_a_sigmoid_of_the_last_record_is_that_of_any_other(threads: int) -> None:
    """The last values of a batch are computed by other code, which rounds one sigmoid of thirty otherwise."""
    torch.set_num_threads(threads)
    model, (_, shape) = made(*ODD), ODD
    for seed in range(100):
        some = images(9, shape, seed)
        assert torch.equal(embed([model], some)[:8], embed([model], some[torch.arange(8)])), seed


def residual(activation: str = "sigmoid", gain: float = 0.5) -> nn.Module:
    """DeepAFL's network of one block of 31 random features."""
    method = DeepAFL(width=16, expanded=31, activation=activation, gain=gain, rounds=3)
    return method.network(8, Built(0, torch.zeros(1, 5, 31), torch.zeros(1, 16, 5), torch.full((2,), 1e6)))


def through(nets: Sequence[nn.Module], x: Tensor) -> Tensor:
    """The rows of a network."""
    with rowwise.WideLinear():
        rows: Tensor = nets[0](x)
    return rows


def test_a_deep_network_of_sigmoids_takes_each_row_by_itself() -> None:
    """A server that amplifies the last bit of one entry turned another record's row around, 1.5 sensitivities away."""
    network = residual()
    for seed in range(100):
        x = torch.randn(9, 8, generator=stream(seed))
        whole, part = (rowwise.features(through, [network], Examples(some, some[:, 0])) for some in (x, x[:8]))
        assert torch.equal(whole[:8], part), seed


# --- the test of kernels


def sizes_of(
    compute: rowwise.Compute, among: tuple[int, ...] = rowwise.SIZES, like: Tensor | None = None
) -> tuple[int, ...]:
    return rowwise.sizes(object(), lambda: compute, torch.zeros(1, 8) if like is None else like, among)


def test_sizes_are_those_for_which_rows_stand_alone() -> None:
    assert sizes_of(lambda x: [x * 2]) == rowwise.SIZES
    assert sizes_of(lambda x: [x * 2, x - 1], (3, 5)) == (3, 5)
    # by its place, by a neighbour, by the batch, by the size of the batch
    assert sizes_of(lambda x: [x + torch.arange(len(x))[:, None]]) == (1,)
    assert sizes_of(lambda x: [x + x.roll(1, 0)]) == (1,)
    assert sizes_of(lambda x: [x - x.mean(0)]) == (1,)
    assert sizes_of(lambda x: [x + (len(x) < 20)]) == (24, 32, 40, 48, 56, 64)
    # nothing to tell: not finite, or an error
    assert sizes_of(lambda x: [x / 0]) == (1,)
    assert sizes_of(lambda x: [x @ torch.zeros(3, 3)]) == (1,)
    assert rowwise.sizes("whole numbers", lambda: lambda x: [x], torch.zeros(1, 8, dtype=torch.int64)) == (1,)


@pytest.mark.parametrize("kernel", [torch.sigmoid, torch.exp, functional.gelu, lambda x: torch.sigmoid_(x.clone())])
def test_a_size_passes_if_no_elementwise_kernel_has_a_rest(kernel: Any) -> None:
    """Whether or not the values of the test show it: 32 values of four bytes fill the registers of any processor."""
    assert sizes_of(lambda x: [kernel(x)]) == rowwise.SIZES  # 8 values for a record
    odd = torch.zeros(1, 7)
    assert sizes_of(lambda x: [kernel(x)], like=odd) == (32, 64)
    assert sizes_of(lambda x: [kernel(x)], like=odd.double()) == (16, 32, 48, 64)
    assert sizes_of(lambda x: [functional.relu(kernel(x) * 0 + x) ** 2], like=odd) == (32, 64)
    assert sizes_of(lambda x: [x.sub(1, alpha=0.3)], like=odd) == (32, 64)
    assert sizes_of(lambda x: [(x.relu() - 1) ** 2 / 3], like=odd) == rowwise.SIZES  # IEEE 754 says how each is rounded


def test_threads_share_values_out_without_a_rest() -> None:
    """Three threads begin at thirds of a large batch, two at halves; a small one is one thread's."""
    found = {}
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        found[threads] = [sizes_of(lambda x: [x.sigmoid()], like=torch.zeros(1, d)) for d in (7, 1031, 1024, 3072)]
    assert found == {
        1: [(32, 64), (32, 64), rowwise.SIZES, rowwise.SIZES],
        2: [(32, 64), (64,), rowwise.SIZES, rowwise.SIZES],
        3: [(32, 64), (1,), (8, 16, 24, 48), rowwise.SIZES],
    }


def test_a_key_has_what_a_module_keeps_beside_its_weights() -> None:
    """The answer for one activation served another, of which ``repr`` says nothing."""
    networks = residual(), residual("relu"), residual(gain=2.0)
    assert len({rowwise.form(through, [network]) for network in networks}) == 3
    assert rowwise.form(through, [residual()]) == rowwise.form(through, [networks[0]])


def test_a_layer_of_few_outputs_and_odd_inputs_takes_batches_too() -> None:
    """Such rows begin at other alignments, by which kernels round them; with outputs added, they don't."""
    layer = nn.Linear(3969, 10)

    def tested(wide: bool) -> tuple[int, ...]:
        def compute(x: Tensor) -> list[Tensor]:
            with rowwise.WideLinear() if wide else nullcontext():
                return [layer(x)]

        return rowwise.sizes(("wide", wide), lambda: compute, torch.zeros(1, 3969))

    alike = nn.Linear(3969, 16)  # a layer that has the outputs; not every processor takes batches of every size
    expected = rowwise.sizes("sixteen outputs", lambda: lambda x: [alike(x)], torch.zeros(1, 3969))
    assert tested(True) == expected and len(expected) >= len(rowwise.SIZES) - 1
    x = torch.randn(7, 3969, generator=stream(0, "x"))
    with rowwise.WideLinear():
        wide = layer(x)
        assert torch.equal(nn.Linear(5, 32)(x[:, :5]).isfinite(), torch.ones(7, 32, dtype=torch.bool))
    torch.testing.assert_close(wide, layer(x))
    assert wide.shape == (7, 10) and wide.is_contiguous()


def test_answers_are_kept_by_public_facts_and_without_the_model() -> None:
    calls: list[int] = []

    def make() -> rowwise.Compute:
        calls.append(1)
        return lambda x: [x]

    for shape in ((1, 4), (7, 4), (1, 5)):
        rowwise.sizes("a key of this test", make, torch.zeros(shape))
    assert len(calls) == 2  # the number of records makes no difference


def test_given_weights_cannot_hide_what_kernels_do() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.BatchNorm1d(4))
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    other = rowwise.randomised(model)
    assert all((value != 0).all() for value in other.parameters())
    assert all((value == 0).all() for value in model.parameters())
    assert other[1].p == 0.0 and model[1].p == 0.5
    assert rowwise.form(model[2]) == rowwise.form(other[2])
    assert rowwise.form(model) != rowwise.form(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)))


def test_own_models_are_run_one_record_at_a_time() -> None:
    class Gate(nn.Module):
        """Mixes records once its weights are large: no test of other weights shows it."""

        def __init__(self) -> None:
            super().__init__()
            self.inner, self.last = nn.Linear(64, 8), nn.Linear(8, 5)

        def forward(self, x: Tensor) -> Tensor:
            rows = self.inner(x.flatten(1))
            if float(self.inner.weight.detach().abs().max()) > 100:
                rows = rows - rows.mean(0)
            out: Tensor = self.last(rows)
            return out

    model = Gate()
    assert not rowwise.is_known(model) and rowwise.is_known(made(*MODELS[0]))
    with torch.no_grad():
        model.inner.weight.mul_(1e4)
    assert bits_stay(
        lambda some: rowwise.features(lambda nets, x: models.features(nets[0], x), [model], some), images(20, (1, 8, 8))
    )


def test_batches_cover_all_records_once_in_tested_sizes() -> None:
    for count in (0, 1, 8, 63, 64, 65, 130):
        parts = list(rowwise.batches(count, (8, 24, 64)))
        assert [i for where, _ in parts for i in range(where.start, where.stop)] == list(range(count))
        assert all(size in (8, 24, 64) and size >= where.stop - where.start for where, size in parts)
    assert [size for _, size in rowwise.batches(70, (8, 24, 64))] == [64, 8]
