"""The command that adds an optional part fits the way in which fedstill was installed."""

import json
from importlib.metadata import PackageNotFoundError
from typing import Any

import pytest

from fedstill.base import errors


@pytest.mark.parametrize(
    ("noted", "command"),
    [
        (None, "pip install 'fedstill[flower]'"),
        ({"url": "file:///home/me/my%20code", "dir_info": {}}, "pip install '/home/me/my code[flower]'"),
        ({"url": "file:///work", "dir_info": {"editable": True}}, "pip install -e '/work[flower]'"),
        (
            {"url": "https://host/fedstill.git", "vcs_info": {"vcs": "git", "commit_id": "1" * 40}},
            "pip install 'fedstill[flower] @ git+https://host/fedstill.git'",
        ),
        (
            {"url": "file:///tmp/fedstill-0.1.0-py3-none-any.whl", "archive_info": {}},
            "pip install 'fedstill[flower] @ file:///tmp/fedstill-0.1.0-py3-none-any.whl'",
        ),
    ],
)
def test_each_way_of_installing_has_its_command(
    noted: dict[str, Any] | None, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Installed:
        def read_text(self, name: str) -> str | None:
            assert name == "direct_url.json"
            return None if noted is None else json.dumps(noted)

    monkeypatch.setattr(errors, "distribution", lambda _: Installed())
    assert errors.install("flower") == command


def test_a_checkout_on_the_path_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(errors, "distribution", missing)
    assert errors.install("flower") == "pip install '.[flower]' in a checkout of fedstill"
