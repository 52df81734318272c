"""Metrics of a run's answers and of what it retrieved, in families that ``config.metrics`` names.

Every score is a mean over the questions to which it applies (`overlap.mean_of`).
"""

import functools
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from cirag_jax.datasets.chains import passage_text
from cirag_jax.errors import UserError
from cirag_jax.evaluation.answers import METRICS
from cirag_jax.evaluation.evidence import GRANULARITIES
from cirag_jax.evaluation.overlap import Ratio, mean_of
from cirag_jax.evaluation.recall import recall_at
from cirag_jax.evaluation.scoring import NAMES, Answered, Scoring
from cirag_jax.types import GRANULARITIES as STAGES
from cirag_jax.types import Prediction

ANSWER_TITLES = {"em": "EM", "f1": "F1", "acc": "Acc"}
# Granularity -> name of its recall before @K.
RECALLS = {"passage": "recall", "sentence": "sentence_recall", "triple": "triple_recall"}
STAGE_SCORES = ("em", "f1")
ROUGE_TITLES = {"rouge1": "ROUGE-1", "rouge2": "ROUGE-2", "rougeL": "ROUGE-L"}


class Family(NamedTuple):
    """Scores that are computed together.

    Attributes:
      measure: returns the scores by name; each is of the questions in their order.
      titles: name of a score before ``@`` -> its title in tables.
      needs_corpus: whether the scores are about what was retrieved.
    """

    measure: Callable[[Sequence[Answered], Scoring], Mapping[str, Ratio]]
    titles: Mapping[str, str]
    needs_corpus: bool = False


# ---------------------------------------------------------------------------- scores of answers


def answer_scores(answered: Sequence[Answered], scoring: Scoring) -> dict[str, Ratio]:
    """Returns ``em``, ``f1`` and ``acc`` over the questions that have a gold answer.

    The answer of a failed question is empty.
    """
    return _best_scores(answered, scoring, lambda prediction: (prediction.answer,))


def raw_or_short_scores(answered: Sequence[Answered], scoring: Scoring) -> dict[str, Ratio]:
    """Returns ``em_max``, ``f1_max`` and ``acc_max`` (DualRAG).

    DualRAG's released evaluation extracts a short answer from a long response once more, scores
    both and keeps, for every metric by itself, the larger score. That can only help, so these
    scores are not comparable with `answer_scores`.
    """
    scores = _best_scores(
        answered, scoring, lambda prediction: (raw(prediction), prediction.answer)
    )
    return {f"{name}_max": ratio for name, ratio in scores.items()}


def _best_scores(
    answered: Sequence[Answered],
    scoring: Scoring,
    texts_of: Callable[[Prediction], tuple[str, ...]],
) -> dict[str, Ratio]:
    """Scores the best of a question's texts by each metric."""
    texts = [texts_of(prediction) if prediction else ("",) for _, prediction in answered]
    return {
        name: mean_of(
            [
                max(metric(text, question.answers, scoring.profile) for text in candidates)
                if question.answers
                else None
                for (question, _), candidates in zip(answered, texts, strict=True)
            ]
        )
        for name, metric in METRICS.items()
    }


def raw(prediction: Prediction) -> str:
    """Returns the response from which the answer was read.

    It is that of the last attempt with this answer, or else of the last attempt; empty where no
    model was asked.
    """
    gave = [attempt for attempt in prediction.attempts if attempt.answer == prediction.answer]
    last = (gave or list(prediction.attempts))[-1:]
    return last[0].response if last else ""


def stage_scores(answered: Sequence[Answered], scoring: Scoring) -> dict[str, Ratio]:
    """Returns ``triple_em``, ``triple_f1``, ``sentence_em`` and so on (CIRAG, Figure 4).

    A question counts at the granularity from which it was answered; ``default`` are those that
    every stage refused. A failed question counts nowhere. The stages answer different questions,
    so a difference between them does not compare granularities. For that, run each by itself
    (``cirag.granularities``) and compare the runs.
    """
    return {
        f"{stage}_{name}": mean_of(
            [
                METRICS[name](prediction.answer, question.answers, scoring.profile)
                if prediction and prediction.granularity == stage and question.answers
                else None
                for question, prediction in answered
            ]
        )
        for stage in STAGES
        for name in STAGE_SCORES
    }


def rouge_scores(answered: Sequence[Answered], scoring: Scoring) -> dict[str, Ratio]:
    """Returns the F-measures ``rouge1``, ``rouge2`` and ``rougeL`` of long answers (Lin, 2004).

    Each is the largest over the gold answers, as Google's ``rouge-score`` counts it, without
    stemming. DualRAG reports ROUGE-2 and ROUGE-L (its Table 6) and does not name its
    implementation. This one reads only the letters a to z and digits, so an answer in another
    script earns 0. The answer of a failed question is empty.
    """
    del scoring  # It normalises in its own way.
    from rouge_score.rouge_scorer import RougeScorer  # It imports NLTK, which takes a second.

    scorer = RougeScorer(list(ROUGE_TITLES))
    scores = [
        scorer.score_multi(question.answers, prediction.answer if prediction else "")
        if question.answers
        else None
        for question, prediction in answered
    ]
    return {
        name: mean_of([None if score is None else score[name].fmeasure for score in scores])
        for name in ROUGE_TITLES
    }


# --------------------------------------------------------------------------- scores of retrieval


def recall_scores(answered: Sequence[Answered], scoring: Scoring) -> dict[str, Ratio]:
    """Returns ``recall@K`` of passages, ``sentence_recall@K`` and ``triple_recall@K``.

    Recall@K = |top-K and gold| / |gold|, the mean over the questions that annotate the granularity
    (CIRAG, Table 5). A question that failed or retrieved nothing earns 0 (KiRAG's code skips it).
    Where a run ranks nothing of a granularity for any question, as NativeRAG ranks no triples, it
    has no score.
    """
    scores: dict[str, Ratio] = {}
    for granularity, (ranked_of, gold_of, elsewhere_of) in GRANULARITIES.items():
        ranked = [list(ranked_of(prediction)) if prediction else [] for _, prediction in answered]
        ranks_any = any(ranked)
        golds = [gold_of(question) if ranks_any else None for question, _ in answered]
        elsewhere = [elsewhere_of(question) for question, _ in answered]
        for k in scoring.recall_at:
            scores[f"{RECALLS[granularity]}@{k}"] = mean_of(
                [
                    recall_at(row, gold, k, other) if gold else None
                    for row, gold, other in zip(ranked, golds, elsewhere, strict=True)
                ]
            )
    return scores


def hit_scores(answered: Sequence[Answered], scoring: Scoring) -> dict[str, Ratio]:
    """Returns ``hit@K``: whether one of the first K passages has an answer (DPR, 2020).

    Counts the questions with answers whose benchmark names no gold passages (NaturalQuestions,
    WebQuestions, Bamboogle); where it does, recall says more. FlashRAG calls its own form
    ``retrieval_recall``.

    A passage has an answer if the answer's tokens follow each other in its title or text. Tokens
    are compared in Unicode's form NFD without regard to case. No passage has an answer without
    tokens.
    """
    counted = [bool(q.answers) and q.supporting is None for q, _ in answered]
    passages = scoring.passages() if any(counted) else {}

    @functools.cache
    def tokens_of(passage_id: str) -> str:
        return _tokens(passage_text(passages[passage_id])) if passage_id in passages else ""

    depth = max(scoring.recall_at)
    ranks = [
        _first_hit(prediction, question.answers, tokens_of, depth) if counts else None
        for counts, (question, prediction) in zip(counted, answered, strict=True)
    ]
    return {
        f"hit@{k}": mean_of([None if rank is None else float(rank < k) for rank in ranks])
        for k in scoring.recall_at
    }


def _first_hit(
    prediction: Prediction | None,
    answers: Sequence[str],
    tokens_of: Callable[[str], str],
    depth: int,
) -> float:
    """Returns the rank, from 0, of the first of ``depth`` passages that has an answer."""
    wanted = [tokens for tokens in map(_tokens, answers) if tokens.strip()]
    for rank, passage_id in enumerate(prediction.passages[:depth] if prediction else ()):
        passage_tokens = tokens_of(passage_id)
        if any(tokens in passage_tokens for tokens in wanted):
            return rank
    return float("inf")


def _tokens(text: str) -> str:
    """Returns a text's tokens, each between two single spaces."""
    spaced = unicodedata.normalize("NFD", text).casefold().translate(_SPACED)
    return f" {' '.join(spaced.split())} "


class _Spaced(dict[int, str]):
    """Every character with the spaces that part it from other tokens.

    A token is a run of letters, numbers and marks (an accent of NFD is one), or another character
    that is neither space nor control.
    """

    def __missing__(self, code: int) -> str:
        char = chr(code)
        kind = unicodedata.category(char)[0]
        self[code] = char if kind in "LNM" else " " if kind in "ZC" else f" {char} "
        return self[code]


_SPACED = _Spaced()


# ------------------------------------------------------------------------------------- all scores

# Every family by its name in ``config.metrics``.
FAMILIES: dict[str, Family] = {
    "answers": Family(answer_scores, ANSWER_TITLES),
    "by_granularity": Family(
        stage_scores,
        {f"{g}_{name}": f"{g} {ANSWER_TITLES[name]}" for g in STAGES for name in STAGE_SCORES},
    ),
    "hits": Family(hit_scores, {"hit": "hit"}, needs_corpus=True),
    "raw_or_short": Family(
        raw_or_short_scores, {f"{name}_max": f"{name.upper()} max" for name in METRICS}
    ),
    "recall": Family(
        recall_scores,
        {"recall": "R", "sentence_recall": "sentence R", "triple_recall": "triple R"},
        needs_corpus=True,
    ),
    "rouge": Family(rouge_scores, ROUGE_TITLES),
}


def check(names: Sequence[str]) -> None:
    """Raises `UserError` where ``config.metrics`` names an unknown family."""
    if not names or any(name not in FAMILIES for name in names):
        raise UserError(f"config.metrics={tuple(names)!r} must be some of {', '.join(FAMILIES)}.")


def measure(
    answered: Sequence[Answered],
    scoring: Scoring,
    names: Sequence[str] = NAMES,
    *,
    corpus: bool = True,
) -> dict[str, Ratio]:
    """Computes all scores of some families.

    Args:
      answered: a run's questions and predictions.
      scoring: how they are scored.
      names: the families.
      corpus: whether the method retrieves; otherwise its retrieval is not scored.

    Returns:
      The scores by name; a score of no question has the value NaN.
    """
    scores: dict[str, Ratio] = {}
    for name in names:
        if corpus or not FAMILIES[name].needs_corpus:
            scores |= FAMILIES[name].measure(answered, scoring)
    return scores


def reason(name: str, answered: Sequence[Answered], *, corpus: bool = True) -> str:
    """Returns why a score is of no question; arguments as in `measure`."""
    kind = name.partition("@")[0]
    (family,) = (name for name, family in FAMILIES.items() if kind in family.titles)
    if not corpus and FAMILIES[family].needs_corpus:
        return "retrieves nothing"
    if family == "recall":
        (granularity,) = (granularity for granularity, score in RECALLS.items() if score == kind)
        ranked_of = GRANULARITIES[granularity][0]
        ranks_any = any(ranked_of(prediction) for _, prediction in answered if prediction)
        return f"no gold {granularity}s" if ranks_any else f"ranks no {granularity}s"
    if not any(question.answers for question, _ in answered):
        return "no gold answer"
    applies = {
        "hits": "gold passages are known",
        "by_granularity": "no question was answered there",
    }
    return applies.get(family, "applies to no question")


def title(name: str) -> str:
    """Returns a score's title in tables: ``recall@5`` is ``R@5``."""
    kind, at, k = name.partition("@")
    titles = {key: text for family in FAMILIES.values() for key, text in family.titles.items()}
    return f"{titles[kind]}{at}{k}"
