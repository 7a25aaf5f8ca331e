"""A site's part in masked sums (docs/sums.md): the runs that it takes part in, and its answers as a helper.

A site needs no faith in its server for the privacy of a total. The run's spec names the keys of all helpers and all
clients; the site compares the helpers with those that its policy names, finds its own key at its own number, and signs
uploads that are bound to the digest of that spec. A server that tells two sites two specs gets uploads that no helper
opens together.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedstill import schema
from fedstill.base import files
from fedstill.engines import helper_calls
from fedstill.engines.masked_sums import MaskedSums
from fedstill.engines.run_spec import RunSpec
from fedstill.runs.environment import now
from fedstill.sites.site.policy import SitePolicy
from fedstill.sites.site.site_journal import SiteJournal
from fedstill.sums.helpers import Helper
from fedstill.sums.keys import Keys, fingerprint
from fedstill.sums.masks import SumRefused

FOLDER = "sums"
"""Name of the folder in a site's state with its keys for masked sums, and with what it has signed as a helper."""


def keys_of(state: Path) -> Keys:
    """The keys of the site with this state; they are made at the first use."""
    return Keys(state / FOLDER)


def check(policy: SitePolicy, spec: RunSpec) -> None:
    """Refuse a run whose sums are masked in a way that the policy does not trust, by public facts alone.

    Raises:
        Refused: a helper is unknown, the site's own key is another, or its noise counts on too many.
    """
    sums = spec.sums
    if sums is None:
        return
    boxes, signers = (tuple(map(bytes.fromhex, some)) for some in (sums.boxes, sums.signers))
    prints_ = [fingerprint(*key) for key in zip(signers, boxes, strict=True)]
    for place, print_ in enumerate(prints_):
        if print_ in prints_[:place]:  # two keys of one fingerprint take 2^40 tries, which their owner can afford
            raise schema.Refused(
                f"two helpers of the run's masked sums have the fingerprint {print_}; they are one owner, who would "
                "count twice, so take another helper (helpers)"
            )
        if print_ not in policy.helpers:
            raise schema.Refused(
                f"helper {place} of the run's masked sums has the fingerprint {print_}, which the site's policy does "
                "not name; ask that site's operator for it, not the server (helpers)"
            )
    if sums.traitors < policy.traitors:
        raise schema.Refused(
            f"the run's masked sums hold against {sums.traitors} helpers who work with the server; the site asks for "
            f"{policy.traitors} (traitors)"
        )
    own = keys_of(policy.state).signer
    if sums.roster(policy.client) != own:
        raise schema.Refused(
            "the run has another key for this site's masked sums than the site has; send the line of site.key.pub to "
            "the server again (fedstill server accept)"
        )
    if policy.sum_budget == "total":
        _check_partners(policy, sums, own)


def _check_partners(policy: SitePolicy, sums: MaskedSums, own: bytes) -> None:
    """Refuse a sum whose noise counts on clients that the site does not know.

    Whoever is no partner may be the server's. A set has ``least`` clients, of whom all that are unknown may be some, so
    that ``least`` less their number are partners or the site itself.
    """
    unknown = sum(_print_of(bytes.fromhex(key)) not in policy.partners for key in sums.members if key != own.hex())
    known = sums.least - unknown
    if sums.adders > known:
        raise schema.Refused(
            f"the run's noise counts on {sums.adders} honest clients, but {unknown} of its {sums.clients} are no "
            f"partners of this site, so that a set of {sums.least} may have {max(known, 0)} that it knows (partners, "
            "or sum_budget alone)"
        )


def _print_of(signer: bytes) -> str:
    """The fingerprint of a client, which signs only: it is that of its key with no key to seal to."""
    return fingerprint(signer, b"")


def prints(policy: SitePolicy) -> dict[str, str]:
    """The site's own fingerprints, as a helper and as a partner, which its operator tells other sites."""
    keys = keys_of(policy.state)
    return {"helper": fingerprint(keys.signer, keys.box), "partner": _print_of(keys.signer)}


def answer(policy: SitePolicy, spec: RunSpec, request: bytes, header: Mapping[str, Any]) -> bytes:
    """The site's reply as a helper; no record of its own is read for it.

    Raises:
        Refused: the site is no helper, or the question is malformed.
        Damaged: what the site has signed can't be read, or is an older copy.
    """
    sums = spec.sums
    if not policy.helper:
        raise schema.Refused("the site's policy does not make it a helper of masked sums (helper)")
    if sums is None or not sums.members:
        raise schema.Refused("the run's sums are not masked, or it names no keys of its clients")
    keys = keys_of(policy.state)
    own = (keys.signer.hex(), keys.box.hex())
    pairs = list(zip(sums.signers, sums.boxes, strict=True))
    if own not in pairs:
        raise schema.Refused(
            "the run names other keys for its helpers than this site has; send the line of site.key.pub to the server "
            "again (fedstill server accept)"
        )
    helper = Helper(policy.state / FOLDER, pairs.index(own), sums.roster)
    try:
        terms, call = helper_calls.decode(request, header, lambda *size: sums.terms(spec.digest, *size))
    except SumRefused as refused:  # the terms themselves are wrong
        raise schema.Refused(str(refused)) from refused
    name, journal = fingerprint(keys.signer, keys.box), SiteJournal(policy.state)
    noted = journal.standing().at.signed.get(name, 0)
    if (number := helper.signatures) < noted:
        raise files.Damaged(
            f"{policy.state / FOLDER} is an older copy: it has {number} of the {noted} sets that were signed with its "
            "key; remove the folder, which makes new keys that the server and the other sites must be told"
        )
    reply = helper_calls.reply(helper, terms, call)
    if (number := helper.signatures) > noted:  # before the signature leaves
        facts = {"what": "signed", "helper": name, "signatures": number}
        journal.append({"time": now(), **facts, "detail": f"sets signed as a helper: {number}"})
    return reply
