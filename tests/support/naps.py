"""Sites that stop to be killed, at moments that count; see hooks/sitecustomize.py."""

import time
from types import ModuleType
from typing import Any

from fedstill.engines.site import SiteClient

LONG = 3600


def in_release(deployed: ModuleType) -> None:
    """After a release was charged and made, before the reply holds it."""
    honest = SiteClient.release

    def release(self: SiteClient, *args: Any, **options: Any) -> Any:
        made = honest(self, *args, **options)
        time.sleep(LONG)
        return made

    SiteClient.release = release  # type: ignore[method-assign]


def before_sending(deployed: ModuleType) -> None:
    """After the reply was kept, before it leaves."""
    honest = deployed.Deployed.answer

    def answer(self: Any, *args: Any) -> bytes:
        reply = honest(self, *args)
        time.sleep(LONG)
        return bytes(reply)

    deployed.Deployed.answer = answer
