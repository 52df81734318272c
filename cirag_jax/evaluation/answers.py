"""Exact match, F1 and accuracy of short answers, as each benchmark's scorer counts them.

All scorers normalise alike (SQuAD's rule, Rajpurkar et al. 2016): lower case, without ASCII
punctuation, without the words a, an, the, single spaces. They differ in what a `Profile` says.
"""

import collections
import dataclasses
import re
import string
import unicodedata
from collections.abc import Callable, Mapping, Sequence

from cirag_jax.errors import UserError

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
# Answers that share no token with any other answer, by HotpotQA's scorer.
_CLOSED = frozenset({"yes", "no", "noanswer"})


@dataclasses.dataclass(frozen=True, slots=True)
class Profile:
    """What a scorer does its own way.

    Attributes:
      source: whose scorer it is.
      decompose: text is brought to Unicode's form NFD before all else, so that a composed and a
        decomposed accent are one.
      closed_words: F1 is 0 when either side is yes, no or noanswer and the two differ.
      first_gold: F1 looks at the first gold answer alone; exact match and accuracy at all.
      empty_equal: where a side has no tokens, F1 is 1 if both have none; otherwise always 0.
    """

    source: str
    decompose: bool = False
    closed_words: bool = False
    first_gold: bool = False
    empty_equal: bool = False


PROFILES: Mapping[str, Profile] = {
    "musique": Profile("MuSiQue's metrics/answer.py, which CIRAG declares", empty_equal=True),
    "hotpot": Profile("HotpotQA's hotpot_evaluate_v1.py", closed_words=True),
    "hipporag": Profile("HippoRAG's evaluation/qa_eval.py"),
    "kirag": Profile("KiRAG's evaluation/qa_eval.py", closed_words=True, first_gold=True),
    "flashrag": Profile("FlashRAG's evaluator/metrics.py", closed_words=True),
    "dualrag": Profile("DualRAG's released scorer", decompose=True),
}
DEFAULT = "musique"


def check_profile(name: str) -> None:
    """Raises `UserError` where ``config.profile`` names no profile."""
    if name not in PROFILES:
        known = ", ".join(PROFILES)
        raise UserError(f"config.profile={name!r} is no profile; there are {known}.")


def normalise_answer(text: str, profile: str = DEFAULT) -> str:
    """The text as answers are compared (spec, section 0).

    Raises:
      ValueError: no such profile.
    """
    if _profile(profile).decompose:
        text = unicodedata.normalize("NFD", text)
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def exact_match(prediction: str, golds: Sequence[str], profile: str = DEFAULT) -> float:
    """1 if the normalised prediction equals a normalised gold answer, else 0.

    Raises:
      ValueError: no gold answer, or no such profile.
    """
    return _best(lambda p, gold: float(p == gold), prediction, golds, profile)


def f1(prediction: str, golds: Sequence[str], profile: str = DEFAULT) -> float:
    """Token F1, the largest over the golds: with multisets of tokens P and G,
    ``2 |P and G| / (|P| + |G|)``, the harmonic mean of precision and recall (SQuAD).

    Raises:
      ValueError: no gold answer, or no such profile.
    """
    rules = _profile(profile)
    golds = golds[:1] if rules.first_gold else golds

    def score(predicted: str, gold: str) -> float:
        if rules.closed_words and predicted != gold and not _CLOSED.isdisjoint((predicted, gold)):
            return 0.0
        tokens, wanted = predicted.split(), gold.split()
        if not tokens or not wanted:
            return float(rules.empty_equal and tokens == wanted)
        shared = (collections.Counter(tokens) & collections.Counter(wanted)).total()
        return 2 * shared / (len(tokens) + len(wanted))

    return _best(score, prediction, golds, profile)


def accuracy(prediction: str, golds: Sequence[str], profile: str = DEFAULT) -> float:
    """1 if a normalised gold answer is a substring of the normalised prediction, else 0 (CIRAG's
    and DualRAG's Acc, FlashRAG's ``acc``).

    A gold answer of which normalisation leaves nothing ("The") is in every text; here it is only
    in an empty one.

    Raises:
      ValueError: no gold answer, or no such profile.
    """
    return _best(lambda p, gold: float(gold in p if gold else not p), prediction, golds, profile)


def _best(
    score: Callable[[str, str], float], prediction: str, golds: Sequence[str], profile: str
) -> float:
    if isinstance(golds, str) or not golds:
        raise ValueError("an answer is scored against a list of at least one gold answer")
    predicted = normalise_answer(prediction, profile)
    return max(score(predicted, normalise_answer(gold, profile)) for gold in golds)


def _profile(name: str) -> Profile:
    if name not in PROFILES:
        raise ValueError(f"unknown answer profile {name!r}; there are {', '.join(PROFILES)}")
    return PROFILES[name]


METRICS: Mapping[str, Callable[[str, Sequence[str], str], float]] = {
    "em": exact_match,
    "f1": f1,
    "acc": accuracy,
}
