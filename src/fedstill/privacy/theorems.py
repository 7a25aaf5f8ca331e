"""The sentences on fedstill's mechanisms that a guarantee may rest on.

A client lists its releases with the name of each mechanism, its theorem and, where nothing bounds it, the reason. These
words stand in guarantees and reports, so a server takes them from this table and never from a reply: `own_words` keeps
a sentence of the table, whose numbers are the client's, and replaces every other one.
"""

import re
from functools import cache

from fedstill.privacy.class_gaussians import COUNTS
from fedstill.privacy.ledger import Entry
from fedstill.privacy.mechanisms import Mechanism
from fedstill.privacy.releases import Unbounded

_HEAD = (
    "one record adds a loss of slope at most # to a #-strongly convex objective and so moves its minimiser, the "
    "solver's residual included, by at most #, the sensitivity (Chaudhuri, Monteleoni, Sarwate 2011, lemma 7); "
    "Gaussian mechanism (Balle, Wang 2018, theorem 8)"
)
_SUMS = (
    "one record adds its row r, |r| <= 1, to one class and r r^T, whose Frobenius norm is at most 1, so that the sums, "
    "H times #, move by at most #, the sensitivity; Gaussian mechanism (Balle, Wang 2018, theorem 8)"
)
_LABELS = "one record's label is replaced by another; each label is randomised once, independently of all others, by"
_PRIOR = "and a prior that no label of these records entered, which is #-DP (Ghazi et al. 2021, arXiv:2102.06062,"
_BATCH = (
    "the batch's gradient is clipped, not each record's, so one record may turn it round; the noise is for a B-th of "
    "that"
)
_NORM = (
    "features are divided by the private data's own maximum norm, so one record changes every feature and the released "
    "scale without bound; the number of records enters the noise"
)
_CLASSES = ", and so does the number of local classes; classes that do not occur show as rows of zeros"
_FACTOR = "the penalty lacks its factor n, so one record moves the head about 20 times the claimed bound; "
_PUBLISHED = tuple(start + _NORM + end for start in ("", _FACTOR) for end in ("", _CLASSES))

THEOREMS: dict[str, tuple[str, ...]] = {
    "NoisySum": (
        "one record adds one row of length at most #, the sensitivity; Gaussian mechanism (Balle, Wang 2018, theorem "
        "8)",
    ),
    "ClassSums": (
        "one record adds one row of length at most # to one class, the sensitivity; Gaussian mechanism (Balle, Wang "
        "2018, theorem 8)",
    ),
    "ClippedUpdate": (
        "the clipped update has length at most # whatever the records, so that other records, one or all, move it by "
        "at most #, the sensitivity; Gaussian mechanism (Balle, Wang 2018, theorem 8)",
    ),
    "Histogram": (
        "one record changes one count by 1, the sensitivity; Gaussian mechanism (Balle, Wang 2018, theorem 8)",
    ),
    "LogisticHead": (_HEAD,),
    "BinaryHead": (_HEAD,),
    "SecondMoments": (_SUMS,),
    "PublishedGaussians": (f"none holds: {COUNTS}",),
    "DPSGD": (
        "one record adds to each of # sums, with probability #, a gradient of length at most #, the sensitivity; "
        "Gaussian mechanism on Poisson samples, composed (Abadi et al. 2016; Mironov, Talwar, Zhang 2019)",
    ),
    "RandomizedResponse": (
        f"{_LABELS} #-ary randomised response, which is #-DP (Ghazi et al. 2021, arXiv:2102.06062, algorithm 1 and "
        "lemma 1 with k = K; parallel composition over records)",
    ),
    "RRWithPrior": (
        f"{_LABELS} RRWithPrior {_PRIOR} algorithms 1-2, lemma 1 and corollary 2; parallel composition over records)",
        f"{_LABELS} RRTop-k with k = # {_PRIOR} algorithm 1 and lemma 1; parallel composition over records)",
    ),
    "UnprotectedLabels": ("none",),
    "BatchClippedSGD": ("none",),
    "PublishedLogisticHead": tuple(f"none holds: {reason}" for reason in _PUBLISHED),
    "PublishedBinaryHead": tuple(f"none holds: {reason}" for reason in _PUBLISHED),
}
"""The theorem of each mechanism; # stands for a number."""

REASONS = (
    "the release carries no noise",
    "labels are not randomised",
    "its images were made with the true labels, so that randomising their tags hides nothing",
    _BATCH,
    *_PUBLISHED,
    COUNTS,
)
"""Reasons why no epsilon bounds a release."""

UNKNOWN = "UnknownMechanism"
NO_THEOREM = "no theorem is known here for this mechanism; its cost is the client's own word"
NO_REASON = "the client says that no epsilon bounds it"
"""Words in place of those of a client."""
_NUMBER = r"(?:-?\d{1,12}(?:\.\d{1,20})?(?:e[-+]\d{1,3})?|inf|nan)"


def own_words(entry: Entry) -> Entry:
    """A release as a client lists it, with the words of `THEOREMS` and `REASONS` in place of the client's own.

    The name of a mechanism of one's own stays if this process has imported its class.
    """
    name = entry.mechanism if entry.mechanism in THEOREMS or entry.mechanism in _names(Mechanism) else UNKNOWN
    theorem = entry.theorem if _fits(entry.theorem, THEOREMS.get(entry.mechanism, ())) else NO_THEOREM
    event = entry.event
    if isinstance(event, Unbounded) and not _fits(event.reason, REASONS):
        event = Unbounded(reason=NO_REASON)
    return entry.model_copy(update={"mechanism": name, "theorem": theorem, "event": event})


def _names(kind: type) -> set[str]:
    return {kind.__name__}.union(*map(_names, kind.__subclasses__()))


def _fits(text: str, sentences: tuple[str, ...]) -> bool:
    return any(_pattern(sentence).fullmatch(text) for sentence in sentences)


@cache
def _pattern(sentence: str) -> re.Pattern[str]:
    return re.compile(_NUMBER.join(map(re.escape, sentence.split("#"))), re.ASCII)
