"""``fedstill publish``: a run's model as files that need no fedstill, with a model card."""

import json
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.export import Dim

import fedstill
from fedstill import files
from fedstill.experiment.trained import Trained, load_model
from fedstill.report import guarantees
from fedstill.report.record import RunRecord, read_run
from fedstill.report.words import accuracy_words, human_bytes
from fedstill.weights import state

PROGRAM, WEIGHTS, CARD, FACTS = "model.pt2", "model.safetensors", "README.md", "config.json"
TOLERANCE = 1e-5
"""Largest difference of a logit, relative to the largest, between the run's model and the published one."""


def publish(run: Path, out: Path) -> dict[str, Any]:
    """Write the model of the finished run ``run`` to the new folder ``out``.

    ``model.pt2`` is a program of `torch.export`: it takes images ``(n, c, h, w)``, floats in [0, 1], or vectors
    ``(n, d)``, and returns logits ``(n, classes)``. ``model.safetensors`` has the network's weights, ``config.json``
    shape, classes and normalisation, ``README.md`` what the model is and what its guarantee rests on.

    Returns:
        The folder, the files and the number of parameters.

    Raises:
        ValueError: there is no finished run or no model for all, ``out`` has files, or torch cannot export the model;
            one sentence.
    """
    record, model = read_run(run), load_model(run)
    if model.features is not None:
        raise ValueError(f"{run} works on vectors of {model.features[0]!r}, which can't be published with it")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} exists; choose an empty folder")
    out.mkdir(parents=True, exist_ok=True)
    _export(model, out / PROGRAM)
    weights = {name: tensor.contiguous() for name, tensor in state(model.network).items()}
    save_file(weights, out / WEIGHTS)
    facts = _facts(record, model)
    files.write_bytes(out / FACTS, (json.dumps(facts, indent=2, ensure_ascii=False) + "\n").encode())
    files.write_bytes(out / CARD, _card(record, facts).encode())
    return {"folder": str(out), "files": sorted(path.name for path in out.iterdir()), **facts}


def upload(folder: Path, name: str) -> str:
    """Upload a published folder to the Hugging Face hub as the model ``owner/name``; returns its address.

    Raises:
        ValueError: the hub refuses, or cannot be reached.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError

    try:
        api = HfApi(library_name="fedstill", library_version=fedstill.__version__)
        api.create_repo(name, exist_ok=True)
        return str(api.upload_folder(repo_id=name, folder_path=folder, commit_message="Publish a model of fedstill"))
    except (HfHubHTTPError, HFValidationError, LocalTokenNotFoundError, OSError) as error:
        why = str(error).strip().split("\n")[0].rstrip(".")
        raise ValueError(
            f"{folder} is complete, but {name} was not uploaded ({why}); log in with 'hf auth login'"
        ) from error


class _Plain(nn.Module):
    """The normalisation and the network, without the checks of values, which `torch.export` cannot write."""

    def __init__(self, model: Trained) -> None:
        super().__init__()
        self.network, self._normalisation = model.network, model.normalisation
        self.eval()

    def forward(self, images: Float[Tensor, "n ..."]) -> Float[Tensor, "n classes"]:
        logits: Tensor = self.network(self._normalisation.apply(images))
        return logits


def _export(model: Trained, path: Path) -> None:
    """Write the model as a program for batches of any size, and compare it with the model."""
    images = torch.rand(4, *model.shape, generator=torch.Generator().manual_seed(0))
    try:
        program = torch.export.export(_Plain(model), (images,), dynamic_shapes=({0: Dim("n", min=1)},))
        torch.export.save(program, path)
    except Exception as error:  # torch has no common class for what it cannot trace
        why = str(error).strip().split("\n")[0]
        raise ValueError(f"torch.export cannot write {type(model.network).__name__}: {why}") from error
    written = torch.export.load(path).module()
    for count in (1, 4, 40):  # networks that take images in parts have at most 32 in one
        some = torch.rand(count, *model.shape, generator=torch.Generator().manual_seed(count))
        with torch.no_grad():
            expected, found = model(some), written(some)
        if not (found - expected).abs().max() <= TOLERANCE * expected.abs().max():
            raise ValueError(f"the exported {type(model.network).__name__} computes other logits than the run's model")


def _facts(record: RunRecord, model: Trained) -> dict[str, Any]:
    """What a program needs to use the model."""
    return {
        "architecture": record.config["experiment"]["model"],
        "num_parameters": sum(weight.numel() for weight in model.network.parameters()),
        "shape": list(model.shape),
        "class_names": list(model.class_names),
        "mean": list(model.normalisation.mean),
        "std": list(model.normalisation.std),
        "fedstill": fedstill.__version__,
    }


def _card(record: RunRecord, facts: dict[str, Any]) -> str:
    """The model card, with the header that the hub reads."""
    summary, promised = record.summary, record.guarantee
    shape = ", ".join(map(str, facts["shape"]))
    kind, tag, values = (
        ("vectors", "tabular", "floats, not normalised")
        if len(facts["shape"]) == 1
        else ("images", "image", "floats in [0, 1], not normalised")
    )
    privacy = [f"* {guarantees.words(promised)}"]
    privacy += [f"* {sentence}" for sentence in guarantees.explained(promised, sent=summary["bytes_up"] > 0)]
    if guarantees.is_finite(promised):
        privacy += [f"* Neighbours: {promised.adjacency}.", f"* Composed by: {promised.accountant}."]
    if guarantees.is_simulated(promised):
        privacy.append("* **The noise came from the run's seed, so whoever knows the seed can remove it.**")
    return f"""---
library_name: pytorch
pipeline_tag: {tag}-classification
tags: [federated-learning, fedstill]
---

# {_plain(record.label)} on {_plain(summary["data"])}

A classifier of {kind} ({_plain(facts["architecture"])}, {facts["num_parameters"]:,} parameters) that
{summary["clients"]} clients trained with fedstill's method {_plain(summary["method"])}, without pooling their {kind}.

| | |
|---|---|
| accuracy on {_plain(summary["judged_on"])} | {accuracy_words(summary["accuracy"], None)} % |
| split of the records | {_plain(summary["partition"])} |
| upload of a client | {human_bytes(summary["bytes_up_per_client"])} |
| download of a client | {human_bytes(summary["bytes_down_per_client"])} |
| rounds | {summary["rounds"]} |
| seed | {summary["seed"]} |

## Use

```python
import torch

model = torch.export.load("{PROGRAM}").module()
logits = model(torch.rand(1, {shape}))  # {kind} (n, {shape}), {values}
```

Classes, in the order of the logits: {", ".join(map(_plain, facts["class_names"]))}.
`{WEIGHTS}` has the network's weights alone.

## Privacy

{chr(10).join(privacy)}

{_reproduce(record)}fedstill {_plain(str(summary["version"]))}, {_plain(str(summary["finished"]))}.
"""


def _reproduce(record: RunRecord) -> str:
    command = record.config.get("command")
    return f"## Reproduce\n\n```\n{command}\n```\n\n" if command else ""


def _plain(text: str) -> str:
    """Text on one line without Markdown's and HTML's special characters."""
    return "".join(f"\\{c}" if c in "\\`*_[]<>|#" else c for c in " ".join(str(text).split()))
