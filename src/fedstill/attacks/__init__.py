"""Privacy attacks on finished runs: inference of training records by an observer."""

from pkgutil import resolve_name
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedstill.attacks.attack import Attack

ATTACKS = {
    "membership": "fedstill.attacks.membership:Membership",
    "uploads": "fedstill.attacks.uploads:Uploads",
}
"""Class of each attack by its name on the command line; a new attack is one file, one line here and a section of
docs/attacks.md."""


def find(name: str) -> type["Attack"]:
    """The class of an attack.

    Raises:
        ValueError: there is no attack of that name.
    """
    if name not in ATTACKS:
        raise ValueError(f"there is no attack '{name}'; choose {', '.join(ATTACKS)}")
    attack: type[Attack] = resolve_name(ATTACKS[name])
    return attack
