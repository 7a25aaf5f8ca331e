"""Scenes of audits: a method's settings, and data sets that differ by records which an attacker looks for."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fedstill import methods
from fedstill.audit.neighbours import Heard, difference
from fedstill.audit.play import Copies, Played, Task, play
from fedstill.audit.search import NORMALISATION
from fedstill.protocol import Method
from fedstill.records import Records
from fedstill.seeds import stream

MODEL = "convnet:width=4,depth=1"
MIXING = "convnet:width=4,depth=1,norm=batch"
"""A model that would mix records in train mode."""
LIKE = Records(torch.zeros(0, 1, 8, 8, dtype=torch.uint8), torch.zeros(0, dtype=torch.int64), 2, NORMALISATION)
"""The task: small images of two classes."""
Masks = Sequence[Sequence[bool]]
"""For each client, which canaries it has."""


@dataclass(frozen=True)
class Choice:
    """Records of a client, and canaries that each client may or may not have.

    Attributes:
        others: records that every client has.
        canaries: ``m`` records whose presence the attacker infers; each by itself, knowing about the others.
    """

    others: Records
    canaries: Records

    def world(self, mask: Sequence[bool], *, labels: bool = False) -> Records:
        """The records of a client with the canaries of ``mask``; or with all, which have class 1 there, else 0."""
        present = torch.tensor(mask)
        if labels:
            return joined(self.others, replace(self.canaries, labels=present.long()))
        return joined(self.others, self.canaries[present])


@dataclass(frozen=True)
class Scene:
    """One method with choices of canaries.

    Attributes:
        method: the method with the auditor's settings.
        task: the run's other settings.
        choices: what to choose from.
        public: the public records.
        labels: whether the claim protects labels.
        mixing: whether the method also takes a model with batch normalisation; neighbours are compared with it then.
    """

    method: Method
    task: Task
    choices: list[Choice]
    public: Records
    labels: bool = False
    mixing: bool = False

    def difference(self, choice: int) -> str:
        """What depends on the first canary of ``choice`` beside releases, or exceeds its sensitivity (`neighbours`)."""
        some, heard = self.choices[choice], (Heard(), Heard())
        task = replace(self.task, model=MIXING) if self.mixing else self.task
        for mine, present in zip(heard, (True, False), strict=True):
            world = some.world([present, *[False] * (len(some.canaries) - 1)], labels=self.labels)
            play(self.method, Copies([world], [0], self.public), task, heard=mine)
        return difference(*heard, None if self.labels else len(some.others))

    def played(self, masks: Masks, *, choice: int = 0, first: int = 0, quiet: bool = False) -> Played:
        """A run with a client for each mask of canaries; ``first`` is the number of the first one."""
        distinct = list(dict.fromkeys(map(tuple, masks)))
        worlds = [self.choices[choice].world(mask, labels=self.labels) for mask in distinct]
        data = Copies(worlds, [distinct.index(tuple(mask)) for mask in masks], self.public, first)
        return play(self.method, data, self.task, quiet=quiet)


def random_images(count: int, *name: str) -> Records:
    """Records with random pixels, of both classes in turn."""
    images = torch.randint(256, (count, *LIKE.shape), generator=stream(0, "audit", *name)).to(torch.uint8)
    return replace(LIKE, images=images, labels=torch.arange(count) % LIKE.num_classes)


def joined(*parts: Records) -> Records:
    """The records of all parts."""
    images, labels = torch.cat([part.images for part in parts]), torch.cat([part.labels for part in parts])
    return replace(parts[0], images=images, labels=labels)


def public_images(count: int = 40) -> Records:
    """The public records of a scene."""
    return random_images(count, "public")


def first_request(method: Method, task: Task, public: Records) -> Mapping[str, Any]:
    """The arguments of a run's first request."""
    return play(method, Copies([random_images(4, "others")], [0], public), task, quiet=True).requests[0]


def of(name: str, epsilon: float, **settings: Any) -> Method:
    """A method with an epsilon and other settings."""
    kind: Any = methods.find(name)
    made: Method = kind(epsilon=epsilon, **settings)
    return made
