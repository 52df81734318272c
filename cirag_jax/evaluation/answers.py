"""Exact match, F1 and accuracy of short answers, as computed by published scorers.

All scorers normalize texts like SQuAD (Rajpurkar et al. 2016): lower case, no ASCII punctuation, no
articles (a, an, the), single spaces. A `Profile` describes how one scorer differs from the others.

Two cases differ from these scorers, some of which give a missing answer full marks. An empty
prediction scores 0. If normalization would make a gold answer empty, the answer keeps its articles
("The The") or, if it has no words, its punctuation ("!!!").
"""

import collections
import dataclasses
import re
import string
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from cirag_jax.errors import UserError
from cirag_jax.types import Question

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
# Answers to which HotpotQA's scorer gives no partial credit.
_CLOSED = frozenset({"yes", "no", "noanswer"})


@dataclasses.dataclass(frozen=True, slots=True)
class Profile:
    """The details in which scorers differ.

    Attributes:
      source: origin of the scorer.
      decompose: convert texts to Unicode's form NFD first, so that composed and decomposed accents
        are equal.
      closed_words: F1 is 0 if one of the answers is yes, no or noanswer and the other differs.
      first_gold: F1 uses only the first gold answer; exact match and accuracy use all.
      aliases: whether aliases of the gold answer count (`golds_of`).
    """

    source: str
    decompose: bool = False
    closed_words: bool = False
    first_gold: bool = False
    aliases: bool = True


PROFILES: Mapping[str, Profile] = {
    "musique": Profile("MuSiQue's metrics/answer.py, which CIRAG declares"),
    "hotpot": Profile("HotpotQA's hotpot_evaluate_v1.py", closed_words=True),
    "hipporag": Profile("HippoRAG's evaluation/qa_eval.py"),
    "two_wiki": Profile("2WikiMultihopQA's 2wikimultihop_evaluate_v1.1.py", closed_words=True),
    "kirag": Profile(
        "KiRAG's evaluation/qa_eval.py", closed_words=True, first_gold=True, aliases=False
    ),
    "flashrag": Profile("FlashRAG's evaluator/metrics.py", closed_words=True),
    "dualrag": Profile("DualRAG's released scorer", decompose=True),
}
DEFAULT = "musique"


def check_profile(name: str) -> None:
    """Raises `UserError` if ``config.profile`` is unknown."""
    if name not in PROFILES:
        profiles = ", ".join(PROFILES)
        raise UserError(f"config.profile={name!r} is an unknown profile; choose one of {profiles}.")


def golds_of(question: Question, profile: str = DEFAULT) -> tuple[str, ...]:
    """Returns the gold answers that a scorer accepts.

    KiRAG's data has the answers of open-domain questions, but no aliases of multi-hop questions. If
    a question of several hops does not say which answers are aliases, all but the first are.
    """
    if _profile(profile).aliases:
        return question.answers
    aliases = question.aliases
    if aliases is None:
        aliases = question.answers[1:] if (question.hops or 1) > 1 else ()
    golds = tuple(answer for answer in question.answers if answer not in aliases)
    return golds or question.answers[:1]


def normalize_answer(text: str, profile: str = DEFAULT) -> str:
    """Normalizes an answer for comparison."""
    if _profile(profile).decompose:
        text = unicodedata.normalize("NFD", text)
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def exact_match(prediction: str, golds: Sequence[str], profile: str = DEFAULT) -> float:
    """Returns 1 if the normalized prediction equals a normalized gold answer, else 0."""
    return _best(lambda p, gold: float(p == gold), 0.0, prediction, golds, profile)


def f1(prediction: str, golds: Sequence[str], profile: str = DEFAULT) -> float:
    """Returns the largest token F1 over the gold answers (SQuAD).

    Token F1 of multisets P and G is ``2 |P and G| / (|P| + |G|)``.
    """
    return token_scores(prediction, golds, profile).f1


class TokenScores(NamedTuple):
    """Overlap of the tokens of an answer and a gold answer."""

    f1: float
    precision: float
    recall: float


def token_scores(prediction: str, golds: Sequence[str], profile: str = DEFAULT) -> TokenScores:
    """Returns the `f1` of an answer, with precision and recall for the same gold answer."""
    rules = _profile(profile)
    golds = golds[:1] if rules.first_gold else golds

    def score(predicted: str, gold: str) -> TokenScores:
        if rules.closed_words and predicted != gold and not _CLOSED.isdisjoint((predicted, gold)):
            return _NOTHING_SHARED
        tokens, gold_tokens = predicted.split(), gold.split()
        shared = (collections.Counter(tokens) & collections.Counter(gold_tokens)).total()
        return TokenScores(
            f1=2 * shared / (len(tokens) + len(gold_tokens)),
            precision=shared / len(tokens),
            recall=shared / len(gold_tokens),
        )

    return _best(score, _NOTHING_SHARED, prediction, golds, profile)


def accuracy(prediction: str, golds: Sequence[str], profile: str = DEFAULT) -> float:
    """Returns 1 if a normalized gold answer is a substring of the normalized prediction, else 0.

    This is CIRAG's and DualRAG's Acc and FlashRAG's ``acc``.
    """
    return _best(lambda p, gold: float(gold in p), 0.0, prediction, golds, profile)


_NOTHING_SHARED = TokenScores(0.0, 0.0, 0.0)
_Score = TypeVar("_Score", float, TokenScores)


def _best(
    score: Callable[[str, str], _Score],
    zero: _Score,
    prediction: str,
    golds: Sequence[str],
    profile: str,
) -> _Score:
    """Returns the best score of a normalized prediction and a normalized gold answer.

    ``zero`` is the score if one of them is empty.
    """
    if isinstance(golds, str) or not golds:
        raise ValueError("an answer is scored against a list of at least one gold answer")
    pairs = [_normalize_pair(prediction, gold, profile) for gold in golds]
    return max(score(*pair) if all(pair) else zero for pair in pairs)


def _normalize_pair(prediction: str, gold: str, profile: str) -> tuple[str, str]:
    """Normalizes both texts, but omits steps that would make the gold answer empty."""
    normalized = normalize_answer(gold, profile)
    if normalized:
        return normalize_answer(prediction, profile), normalized
    for normalize in (_without_punctuation, _lower_case):
        if normalized := normalize(gold):
            break
    return normalize(prediction), normalized


def _without_punctuation(text: str) -> str:
    return _lower_case(text.translate(_NO_PUNCTUATION))


def _lower_case(text: str) -> str:
    return " ".join(text.lower().split())


def _profile(name: str) -> Profile:
    if name not in PROFILES:
        raise ValueError(f"unknown answer profile {name!r}; choose one of {', '.join(PROFILES)}")
    return PROFILES[name]


METRICS: Mapping[str, Callable[[str, Sequence[str], str], float]] = {
    "em": exact_match,
    "f1": f1,
    "acc": accuracy,
}
