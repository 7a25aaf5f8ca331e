"""No record is in two places: a client, the public records, validation."""

from collections import Counter

import pytest
import torch

from fedstill import Experiment
from fedstill.base.records import Records
from fedstill.experiment.task import client_data, share_out


def counts(*parts: Records) -> Counter[bytes]:
    return Counter(image.numpy().tobytes() for part in parts for image in part.images)


@pytest.mark.parametrize("facts", [{}, {"validation": 0.2}, {"limit": 500, "validation": 0.1, "public": "held=40"}])
def test_every_record_is_dealt_once(facts: dict[str, object]) -> None:
    experiment = Experiment(data="digits", clients=3, **facts)
    task = share_out(experiment, None)
    dealt = [task.train[torch.from_numpy(own)] for own, _ in task.parts]
    public = client_data(experiment, task).public()
    dealt += [public] * (public is not None) + [task.test] * ("validation" in facts)
    whole = counts(task.train)
    assert sum(map(len, dealt)) == (experiment.limit or len(task.train))
    assert counts(*dealt) <= whole and (experiment.limit or counts(*dealt) == whole)
