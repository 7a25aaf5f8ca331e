"""What a check has found of methods of the user's own (`fedstill check`), kept by the digest of their code.

A pass is no proof: it says that on so many pairs of neighbouring data sets nothing but releases differed. It holds for
one version of the code, one choice of settings and one model; a change of any of them is another method.
"""

import hashlib
import json

import fedstill
from fedstill.base import files, lookup
from fedstill.data import cache
from fedstill.engines.run_spec import RunSpec
from fedstill.models.build import is_own, own_builder
from fedstill.protocol import Method


def keep_pass(method: Method, model: str, pairs: int) -> bool:
    """Keep that ``pairs`` of neighbours did not differ; False for code that is in no file, of which nothing is kept."""
    if (key := _key(method, model)) is None:
        return False
    place = cache.default_folder() / "checks" / f"{key}.json"
    place.parent.mkdir(parents=True, exist_ok=True)
    files.write_json(place, {"method": type(method).__qualname__, "model": model, "pairs": pairs})
    return True


def named(spec: RunSpec) -> list[str]:
    """The method and the models of a run that are the user's own, as their words stand in a guarantee."""
    kind = type(spec.method)
    own = [kind.__qualname__] if lookup.is_own(kind) else []
    return own + [name.rpartition("/")[2] for name in _models(spec) if is_own(name)]


def pairs_of(spec: RunSpec) -> int | None:
    """Number of pairs that a check of the run's method has compared with each of its models; None without one."""
    return min(pairs_passed(spec.method, name) or 0 for name in _models(spec)) or None


def _models(spec: RunSpec) -> list[str]:
    return list(dict.fromkeys(spec.models or (spec.model,)))


def pairs_passed(method: Method, model: str) -> int | None:
    """Number of pairs that a check of this code, with these settings and this model, has compared; None without one."""
    if (key := _key(method, model)) is None:
        return None
    try:
        found = json.loads((cache.default_folder() / "checks" / f"{key}.json").read_bytes())["pairs"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if isinstance(found, int) and found > 0 else None


def _key(method: Method, model: str) -> str | None:
    """SHA-256 of the code, also that of a model of one's own, and the settings; None for code that is in no file."""
    code, builder = lookup.source_digests(type(method)), own_builder(model)
    network = {} if builder is None else lookup.source_digests(builder)
    if not code and lookup.is_own(type(method)) or not network and builder is not None or not (code or network):
        return None
    settings = method.model_dump(mode="json")
    content = [type(method).__qualname__, code, settings, model, network, fedstill.__version__]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
