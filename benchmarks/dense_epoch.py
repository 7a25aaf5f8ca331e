"""Time of one epoch of DENSE's server, as a ratio to a plain loop over the clients' models on the same work.

Five models with batch norms, 30 steps of a generator on 128 images, then one pass of the student over a full pool of
2,560 images. The plain loop writes the algorithm down: for every step each model's pass with hooks on its batch norms
and one ``backward()`` through all of it, for every batch of the student's each model's pass again. Contenders
alternate, each in a process of its own: the plain loop, the same with the allocator told to keep its memory
(`fedstill.base.processes`), and `fedstill.methods.Dense` with it.

Seconds are of the processor. The generator's loss and gradient, and what the student learns by, are compared with the
plain loop's from the same start.

Usage: python benchmarks/dense_epoch.py --threads 1 --repeats 5
"""

import argparse
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch
from alternating import compared, seconds_of, show
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedstill import models
from fedstill.base.processes import keep_memory
from fedstill.base.records import Normalisation, Records
from fedstill.base.seeds import isolated, stream
from fedstill.distill.ensemble import distillation_loss
from fedstill.distill.generation import Generation, divergence_loss
from fedstill.distill.pool import Pool
from fedstill.distill.teachers import Teachers
from fedstill.methods.dense import Dense
from fedstill.methods.parts.datafree import student_loss
from fedstill.models.generator import UpsampledConv

CLASSES = 10


class Server:
    """What an epoch starts from: the clients' models, the student, the generator and the pool."""

    def __init__(
        self, architecture: str, shape: tuple[int, int, int], clients: int, steps: int, *, plain: bool
    ) -> None:
        self.method = Dense(generation=Generation(steps=steps))
        rng = stream(0, "images")
        images = torch.randint(256, (self.method.pool * self.method.generation.batch_size, *shape), generator=rng)
        channels = shape[0]
        self.images = Records(
            images.to(torch.uint8),
            torch.randint(CLASSES, (len(images),), generator=rng),
            CLASSES,
            Normalisation((0.5,) * channels, (0.25,) * channels),
        )
        self.networks = [self._network(architecture, shape, k) for k in range(clients)]
        self.student = self._network(architecture, shape, clients)
        self.making = self.method.generation.start(self.images[:0], stream(0, "generator"))
        if plain:
            body = self.making._generator.body
            for i, layer in enumerate(body):
                if isinstance(layer, UpsampledConv):
                    convolution = nn.Conv2d(layer.in_channels, layer.out_channels, 3, padding=1, bias=False)
                    convolution.weight = layer.weight
                    body[i] = nn.Sequential(nn.Upsample(scale_factor=2), convolution)
        self.pool = Pool(self.images[:0], len(self.images))
        self.pool.add(self.images, Teachers(self.networks).predict(self.images))

    def _network(self, architecture: str, shape: tuple[int, int, int], draw: int) -> nn.Module:
        with isolated(draw):
            network = models.build(architecture, shape, CLASSES)
        network.train()
        with torch.no_grad():
            for start in range(0, 512, 128):  # for the statistics
                network(self.images.inputs(slice(start, start + 128)))
        return network.eval()

    def epoch(self, number: int) -> None:
        """The library's."""
        teachers = Teachers(self.networks)
        made, said = self.making.epoch(teachers, self.student, stream(0, "images", number))
        self.pool.add(made, said)
        loss, rng = student_loss(teachers, self.method), stream(0, "student", number)
        self.method.student.fit(self.student, self.pool.examples(), rng, loss=loss)

    def plain_epoch(self, number: int) -> None:
        """The algorithm written down."""
        settings, rng, nets = self.method.generation, stream(0, "images", number), self.networks
        generator, adam = self.making._generator, self.making._adam
        z = torch.randn(settings.batch_size, settings.nz, generator=rng)
        labels = torch.randint(CLASSES, (settings.batch_size,), generator=rng).sort().values
        for _ in range(settings.steps):
            loss = self.plain_loss(generator(z), labels)
            adam.zero_grad()
            loss.backward()
            adam.step()
        for net in (*nets, self.student):
            net.zero_grad()
        with torch.no_grad():
            pixels = (generator(z) * 255).round().to(torch.uint8)
        made = Records(pixels, labels, CLASSES, self.images.normalisation)
        self.pool.add(made, torch.zeros(len(made), CLASSES))
        pair = _Asking(self.networks, self.student)
        self.method.student.fit(pair, self.pool.examples(), stream(0, "student", number), loss=pair.loss)

    def plain_loss(self, pixels: Tensor, labels: Tensor) -> Tensor:
        """L_gen, one model after the other."""
        settings, seen = self.method.generation, list[Tensor]([torch.zeros(())])

        def compare(norm: Any, args: tuple[Tensor, ...]) -> None:
            mean, variance = args[0].mean([0, 2, 3]), args[0].var([0, 2, 3], correction=0)
            seen.append((mean - norm.running_mean).norm() + (variance - norm.running_var).norm())

        norms = [m for net in self.networks for m in net.modules() if isinstance(m, nn.BatchNorm2d)]
        hooks = [norm.register_forward_pre_hook(compare) for norm in norms]
        x = self.images.normalisation.apply(pixels)
        mean = torch.stack([net(x) for net in self.networks]).mean(0)
        for hook in hooks:
            hook.remove()
        loss = settings.ce * cross_entropy(mean, labels) + settings.bn * sum(seen) / len(self.networks)
        self.student.eval()
        return loss + settings.div * divergence_loss(mean, self.student(x))


class _Asking(nn.Module):
    """A student whose teachers are asked about every batch."""

    def __init__(self, networks: Sequence[nn.Module], student: nn.Module) -> None:
        super().__init__()
        self._networks = list(networks)
        self.student = student

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            said = torch.stack([net(x) for net in self._networks]).mean(0)
        return torch.stack([self.student(x), said], 1)

    def loss(self, both: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return distillation_loss(both[:, 0], both[:, 1], Dense().temperature)


def contender(plain: bool, kept: bool, threads: int, given: tuple[Any, ...], pipe: Connection) -> None:
    """A process that makes one epoch for every message and answers with its seconds."""
    torch.set_num_threads(threads)
    if kept:
        keep_memory()
    server, number = Server(*given, plain=plain), 0
    while pipe.recv():
        number += 1
        start = time.process_time()
        (server.plain_epoch if plain else server.epoch)(number)
        pipe.send(time.process_time() - start)


def differences(given: tuple[Any, ...]) -> tuple[float, float, float]:
    """Relative differences (of the largest entry): of L_gen, of its gradient, of what the student learns by.

    The first two in float64: a new generator's images are nearly even, and in float32 it is for the last bits to say
    which of four pixels max pooling takes.
    """
    server, other = Server(*given, plain=False), Server(*given, plain=True)
    said = server.pool.examples().labels
    with torch.no_grad():
        plainly = torch.stack([net(server.images.inputs()) for net in server.networks]).mean(0)
    z, labels = torch.randn(128, 256, generator=stream(0, "z")).double(), torch.arange(128) % CLASSES
    found = []
    for one in (server, other):
        generator = one.making._generator.double()
        for network in (*one.networks, one.student):
            network.double()
        pixels = generator(z)
        if one is server:
            x = one.images.normalisation.apply(pixels)
            loss = one.method.generation.loss(Teachers(one.networks), one.student, x, labels)
        else:
            loss = one.plain_loss(pixels, labels)
        found.append((loss.detach(), torch.autograd.grad(loss, list(generator.parameters()))))
    (loss, gradient), (theirs, plain) = found
    apart = max(float((g - h).abs().max()) for g, h in zip(gradient, plain, strict=True))
    largest = max(float(h.abs().max()) for h in plain)
    said_apart = float((said - plainly).abs().max() / plainly.abs().max())
    return float((loss - theirs).abs() / theirs), apart / largest, said_apart


def main() -> None:
    """Print one line per architecture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--models", nargs="+", default=["dense-mnist", "dense-cnn2"])
    parser.add_argument("--clients", type=int, default=5)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--json", help="write the table here too")
    args = parser.parse_args()
    contenders = {"plain": (True, False), "plain, memory kept": (True, True), "fedstill": (False, True)}
    table: list[dict[str, Any]] = []
    for architecture in args.models:
        shape = (1, 28, 28) if architecture == "dense-mnist" else (3, 32, 32)
        given = (architecture, shape, args.clients, args.steps)
        turns = {name: (*how, args.threads, given) for name, how in contenders.items()}
        seconds = seconds_of(contender, turns, args.repeats)
        loss, gradient, said = differences(given)
        row = {
            "model": architecture,
            "clients": args.clients,
            "threads": args.threads,
            **compared(seconds),
            "relative difference of loss": loss,
            "relative difference of gradient": gradient,
            "relative difference of what the student learns by": said,
        }
        show(row, table, args.json)


if __name__ == "__main__":
    main()
