"""A real site's records and public records, in the form of a run's task."""

from functools import cached_property
from pathlib import Path

import torch

from fedstill import schema
from fedstill.base import files
from fedstill.base.lookup import nfc
from fedstill.base.records import Records
from fedstill.data import features, public, sources
from fedstill.data.places import Reading
from fedstill.data.published import numbers_are_names, places_of_numbers
from fedstill.engines.run_spec import RunSpec
from fedstill.models import backbones
from fedstill.sites.site.policy import SitePolicy


class SiteData:
    """The site's records in the form of the run's task (a `fedstill.engines.client.ClientData`), read when used."""

    def __init__(self, policy: SitePolicy, spec: RunSpec, folder: Path) -> None:
        self._policy = policy
        self._spec = spec
        self._seen = folder / "records"

    def check_backbone(self) -> None:
        """Compare the site's backbone with the run's, whatever the records are.

        Raises:
            Refused: the site can't load it, or it has another SHA-256.
        """
        name, expected = self._spec.features, self._spec.backbone
        if name is None or name.startswith(features.OF_SHAPE):
            return
        try:
            digest = backbones.load(name, (), download=False).digest
        except ValueError as error:
            raise schema.Refused(f"the site can't load the backbone '{name}' (features)") from error
        if digest != expected:
            raise schema.Refused(
                f"the site's backbone '{name}' has the SHA-256 {digest[:16]}..., the run's {str(expected)[:16]}..."
            )

    def check_public(self) -> None:
        """Compare the public records with those that the server describes.

        Raises:
            Refused: the site can't load them, or they are others.
        """
        stated, name = self._spec.public_sample, schema.clean(str(self._spec.public))
        if stated is None:
            return
        if self._spec.public is None or public.is_noise(self._spec.public):
            raise schema.Refused("the run describes public data of no data set (public_sample)")
        try:
            found = self.public()
        except ValueError as error:
            raise schema.Refused(f"the site can't load its public data '{name}' (public)") from error
        if found is not None and (words := public.difference(found, dict(stated))):
            raise schema.Refused(
                f"the site's public data '{name}' are not the server's; both need the same records in the same order "
                "(public)"
            ) from ValueError(words)

    def check_schema(self) -> None:
        """Compare the site's schema with the run's, whatever the records are: other ranges would be other numbers.

        Raises:
            Refused: one of them has none, or they are different, or the run's target is a number.
        """
        if self._spec.target is not None:
            raise schema.Refused("the run predicts a number, which no site takes (target)")
        own, expected = self._reading.schema, self._spec.table_schema
        if own is None and expected is None:
            return
        if own is None or expected is None:
            which, other = ("run", "site") if own is None else ("site", "run")
            raise schema.Refused(f"the {which} reads its table by a schema and the {other} does not (schema_file)")
        if own.digest != expected:
            raise schema.Refused(
                f"the site's schema has the SHA-256 {own.digest[:16]}..., the run's {expected[:16]}...; take the "
                "server's file (schema_file)"
            )

    def check(self) -> None:
        """Read the records.

        Raises:
            Refused: they do not fit the run's task, or they are too few.
        """
        if len(self.own[0]) < self._policy.min_records:
            raise schema.Refused(
                f"the site has {len(self.own[0])} records; its minimum is {self._policy.min_records} (min_records)"
            )

    @cached_property
    def _part(self) -> sources.SiteRecords:
        policy, spec = self._policy, self._spec
        place, cache_dir = str(policy.data), policy.state / "data"
        if spec.features is None:
            return sources.load_part(place, self._reading, cache_dir=cache_dir)
        return features.load_part(
            place,
            spec.features,
            str(spec.backbone),
            reading=self._reading,
            device=policy.device,
            cache_dir=cache_dir,
        )

    @cached_property
    def _reading(self) -> Reading:
        """How the records are read, by a schema that is read once."""
        return self._policy.reading

    @cached_property
    def own(self) -> tuple[Records, Records]:
        """Training and test records.

        Raises:
            Refused: the records do not fit the run's task.
        """
        part = self._part
        places = {nfc(name): i for i, name in enumerate(self._spec.class_names)}
        stated = part.class_names or places_of_numbers(self._policy.class_names)
        occur = torch.unique(torch.cat([part.train[1], part.test[1]]))
        names = stated or self._numbers(occur)
        needed = stated or [names[label] for label in occur.tolist()]
        if unknown := [name for name in needed if nfc(name) not in places]:
            raise schema.Refused(f"the site's class '{schema.clean(unknown[0])}' is not a class of the run")
        table, order = torch.tensor([places.get(nfc(name), -1) for name in names]), self._order(part.columns)
        return self._in_task(*part.train, table, order), self._in_task(*part.test, table, order)

    def _numbers(self, labels: torch.Tensor) -> list[str]:
        """The names of classes whose labels are integers: their numbers, if the run's classes are called so.

        Raises:
            Refused: the run's classes have other names, whose order is only the server's.
        """
        names = self._policy.class_names or self._spec.class_names
        if not numbers_are_names(names) and not all(name.isascii() and name.isdigit() for name in names):
            raise schema.Refused(
                f"the site's labels are integers, but the run's classes are called '{schema.clean(names[0])}', ...; "
                "name the site's classes in its policy, in their order (class_names)"
            )
        return list(map(str, range(1 + int(labels.max())))) if len(labels) else []

    def _order(self, own: tuple[str, ...]) -> list[int] | None:
        """Places of the run's columns among the site's; None if they are the same, or records have no columns.

        Raises:
            Refused: one of both has no names, or the names differ.
        """
        columns, own = self._spec.columns, tuple(map(nfc, own))
        if own == columns:
            return None
        if not own or not columns:
            with_names, without = ("run", "site") if columns else ("site", "run")
            raise schema.Refused(
                f"the {with_names}'s columns have names and the {without}'s have none, so their order can't be "
                "compared; both need tables with names, or both none (columns)"
            )
        if lacking := [name for name in columns if name not in own]:
            raise schema.Refused(f"the site's table lacks the run's column '{schema.clean(lacking[0])}' (columns)")
        if more := [name for name in own if name not in columns]:
            raise schema.Refused(f"the site's table has a column '{schema.clean(more[0])}', the run has not (columns)")
        return [own.index(name) for name in columns]

    def _in_task(
        self, images: torch.Tensor, labels: torch.Tensor, table: torch.Tensor, order: list[int] | None
    ) -> Records:
        spec = self._spec
        if order is not None:
            images = images[:, order]
        if tuple(images.shape[1:]) != spec.shape:
            site_shape, run_shape = (" x ".join(map(str, shape)) for shape in (images.shape[1:], spec.shape))
            kind = "vectors" if images.ndim == 2 else "images"
            raise schema.Refused(f"the site's {kind} are {site_shape}, the run's are {run_shape}")
        if len(labels) and int(labels.max()) >= len(table):
            raise schema.Refused(f"the site has the class {int(labels.max())}; the run has {len(table)} classes")
        return Records(images, table[labels], spec.num_classes, spec.normalisation)

    def records(self, client: int) -> tuple[Records, Records]:
        """The site's own records, whatever the number.

        Raises:
            ValueError: they are others than at the run's first question, so that releases of different records would
                count as those of the same.
        """
        fingerprint = self._part.fingerprint + "".join(f" {name!r}" for name in self._policy.class_names)
        if not self._seen.exists():
            files.write_bytes(self._seen, fingerprint.encode())
        elif self._seen.read_text("utf-8") != fingerprint:
            raise ValueError(
                "the records have changed since the run's first question; bring the former back, or let the server "
                "start another run"
            )
        return self.own

    def public(self) -> Records | None:
        """The public records, from the place that the policy names."""
        return self._public

    @cached_property
    def _public(self) -> Records | None:
        spec = self._spec.public
        if spec is None:
            return None
        name, colon, rest = spec.partition(":")
        if name in self._policy.public:
            spec = f"{self._policy.public[name]}{colon}{rest}"
        size = self._policy.size
        if self._spec.features is not None:
            found = (self._spec.features, str(self._spec.backbone))
            like = Records(
                torch.empty(0, *self._spec.shape), torch.empty(0, dtype=torch.int64), 1, self._spec.normalisation
            )
            return features.load_public(spec, found, like, size=size, device=self._policy.device)
        return public.load(spec, self._spec.shape, self._spec.normalisation, size=size)
