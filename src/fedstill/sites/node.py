"""``fedstill site serve``: a real site's node, at which only the code installed there runs."""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedstill import __version__, extras, schema
from fedstill.engines.site import NO_REPLY
from fedstill.sites import log, setup
from fedstill.sites.policy import SitePolicy

_PROGRAM = """
import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)  # the node ends, and this process with it
from fedstill.sites import launcher; launcher.main()
"""


def serve(folder: Path, options: Sequence[str] = ()) -> int:
    """Run the node of the site in ``folder`` until it ends, and return its exit code.

    Args:
        folder: the folder that ``fedstill site init`` made.
        options: further options of ``flower-supernode``.

    Raises:
        ValueError: the policy is invalid, the site has no server, the log is damaged, or Flower is not installed; one
            sentence.
    """
    place = folder.resolve() / setup.POLICY
    policy = SitePolicy.read(place)
    _, connection = setup.connection(folder)
    try:  # a late import, as its packages are optional
        from fedstill.engines.flower.node import Limits, run_node
    except ModuleNotFoundError as error:
        raise ValueError(f"the package {error.name} is not installed; {extras.install('flower')}") from error
    os.umask(0o077)
    os.environ["FLWR_HOME"] = str(folder.resolve() / "flower")  # a service may have no home
    settings = policy.model_dump(mode="json")
    log.write(policy, {"fedstill": __version__, "settings": settings}, "started", "the site's node starts")

    def refused(facts: Mapping[str, Any]) -> None:
        known = {name: str(facts[name]) for name in ("run", "bundle") if facts[name] is not None}
        log.write(policy, known, "refused", f"no program gets the message: {schema.clean(facts['detail'], 300)}")

    limits = Limits(policy.messages_at_a_time, policy.max_request, NO_REPLY, refused)
    program = [sys.executable, "-P", "-c", _PROGRAM, str(place), str(policy.state)]
    return run_node([*connection, *options], program, limits)
