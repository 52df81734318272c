"""Metrics of a run's answers and retrieval, grouped into families (``config.metrics``).

Every score is a mean over the questions to which it applies (`overlap.mean_of`).
"""

import functools
import itertools
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from cirag_jax.datasets.chains import passage_text
from cirag_jax.errors import UserError
from cirag_jax.evaluation import hops, supporting_facts
from cirag_jax.evaluation.answers import METRICS, golds_of
from cirag_jax.evaluation.evidence import GRANULARITIES, passage_substitutes
from cirag_jax.evaluation.overlap import Ratio, mean_of
from cirag_jax.evaluation.ranking import TITLES as RANKING_TITLES
from cirag_jax.evaluation.ranking import ranking_scores
from cirag_jax.evaluation.recall import recall_at
from cirag_jax.evaluation.scoring import NAMES, AnsweredQuestion, Scoring
from cirag_jax.types import GRANULARITIES as STAGES
from cirag_jax.types import Attempt, Prediction

ANSWER_TITLES = {"em": "EM", "f1": "F1", "acc": "Acc"}
# Granularity -> name of its recall before @K.
RECALLS = {"passage": "recall", "sentence": "sentence_recall", "triple": "triple_recall"}
STAGE_SCORES = ("em", "f1")
ROUGE_TITLES = {"rouge1": "ROUGE-1", "rouge2": "ROUGE-2", "rougeL": "ROUGE-L"}


class Family(NamedTuple):
    """Scores that are computed together.

    Attributes:
      measure: returns the scores by name, each with one term per question.
      titles: name of a score, without ``@K`` -> its title in tables.
      needs_corpus: whether the scores only apply to methods that retrieve.
    """

    measure: Callable[[Sequence[AnsweredQuestion], Scoring], Mapping[str, Ratio]]
    titles: Mapping[str, str]
    needs_corpus: bool = False


# ---------------------------------------------------------------------------- scores of answers


def answer_scores(answered: Sequence[AnsweredQuestion], scoring: Scoring) -> dict[str, Ratio]:
    """Returns ``em``, ``f1`` and ``acc`` over the questions with gold answers.

    A failed question has an empty answer.
    """
    return _best_scores(answered, scoring, lambda prediction: (prediction.answer,))


def raw_or_short_scores(answered: Sequence[AnsweredQuestion], scoring: Scoring) -> dict[str, Ratio]:
    """Returns ``em_max``, ``f1_max`` and ``acc_max`` (DualRAG).

    DualRAG's released evaluation scores a long response and the short answer extracted from it, and
    keeps the larger score of each metric. So these scores are upper bounds of `answer_scores`.
    """
    scores = _best_scores(
        answered, scoring, lambda prediction: (raw(prediction), prediction.answer)
    )
    return {f"{name}_max": ratio for name, ratio in scores.items()}


def _best_scores(
    answered: Sequence[AnsweredQuestion],
    scoring: Scoring,
    texts_of: Callable[[Prediction], tuple[str, ...]],
) -> dict[str, Ratio]:
    """Returns, for each metric, the largest score over the texts of each question."""
    texts = [texts_of(prediction) if prediction else ("",) for _, prediction in answered]
    return {
        name: mean_of(
            [
                max(metric(text, golds, scoring.profile) for text in candidates)
                if (golds := golds_of(question, scoring.profile))
                else None
                for (question, _), candidates in zip(answered, texts, strict=True)
            ]
        )
        for name, metric in METRICS.items()
    }


def raw(prediction: Prediction) -> str:
    """Returns the response from which the answer was parsed; empty if no model was called.

    This is the response of the last attempt with this answer, or else of the last attempt.
    """
    attempt = _answering(prediction)
    return attempt.response if attempt else ""


def evidence_of(prediction: Prediction) -> tuple[str, ...]:
    """Returns the texts from which the answer was read; empty for an answer from memory."""
    attempt = _answering(prediction)
    return attempt.evidence if attempt else ()


def _answering(prediction: Prediction) -> Attempt | None:
    matching = [attempt for attempt in prediction.attempts if attempt.answer == prediction.answer]
    return next(reversed(matching or list(prediction.attempts)), None)


def stage_scores(answered: Sequence[AnsweredQuestion], scoring: Scoring) -> dict[str, Ratio]:
    """Returns ``triple_em``, ``triple_f1``, ``sentence_em`` and so on (CIRAG, Figure 4).

    A question counts for the granularity from which it was answered, or for ``default`` if every
    stage refused. Failed questions are ignored. The stages answer different questions, so their
    scores are not comparable. To compare granularities, run each one separately
    (``cirag.granularities``).
    """
    return {
        f"{stage}_{name}": mean_of(
            [
                METRICS[name](
                    prediction.answer, golds_of(question, scoring.profile), scoring.profile
                )
                if prediction
                and prediction.error is None
                and prediction.granularity == stage
                and question.answers
                else None
                for question, prediction in answered
            ]
        )
        for stage in STAGES
        for name in STAGE_SCORES
    }


def rouge_scores(answered: Sequence[AnsweredQuestion], scoring: Scoring) -> dict[str, Ratio]:
    """Returns the F-measures ``rouge1``, ``rouge2`` and ``rougeL`` of long answers (Lin, 2004).

    Each score is the largest over the gold answers, computed by Google's ``rouge-score`` without
    stemming. This package only reads digits and the letters a to z, so answers in other scripts
    score 0. DualRAG reports ROUGE-2 and ROUGE-L (Table 6) without naming its implementation. A
    failed question has an empty answer.
    """
    del scoring  # rouge-score has its own normalization.
    from rouge_score.rouge_scorer import RougeScorer  # Importing NLTK takes a second.

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


def bertscores(answered: Sequence[AnsweredQuestion], scoring: Scoring) -> dict[str, Ratio]:
    """Returns ``bertscore``, the F1 of BERTScore (Zhang et al., 2020).

    There are no idf weights and no rescaling. Precision is the mean, over the answer's tokens, of
    the largest cosine with a token of the gold answer; recall is the same from the gold answer's
    tokens. The score is the largest over the gold answers. A failed question scores 0.
    """
    texts = [prediction.answer if prediction else "" for _, prediction in answered]
    golds = [question.answers for question, _ in answered]
    if scoring.token_vectors is None:
        raise ValueError("BERTScore needs token vectors")
    vectors = scoring.token_vectors([*texts, *itertools.chain.from_iterable(golds)])
    return {
        "bertscore": mean_of(
            [
                max(_bertscore(vectors[text], vectors[gold]) for gold in of_question)
                if of_question
                else None
                for text, of_question in zip(texts, golds, strict=True)
            ]
        )
    }


def _bertscore(answer_TD: np.ndarray, gold_UD: np.ndarray) -> float:
    if not len(answer_TD) or not len(gold_UD):
        return 0.0
    cosine_TU = answer_TD @ gold_UD.T
    precision, recall = cosine_TU.max(1).mean(), cosine_TU.max(0).mean()
    return float(2 * precision * recall / (precision + recall)) if precision + recall > 0 else 0.0


# --------------------------------------------------------------------------- scores of retrieval


def recall_scores(answered: Sequence[AnsweredQuestion], scoring: Scoring) -> dict[str, Ratio]:
    """Returns ``recall@K`` of passages, ``sentence_recall@K`` and ``triple_recall@K``.

    Recall@K is |top-K and gold| / |gold|, averaged over questions with gold items of the
    granularity (CIRAG, Table 5). A question that retrieved nothing, or failed before its evidence
    was read, scores 0; KiRAG's code skips such questions. A run that ranks no items of a
    granularity has no score for this granularity; for example, NativeRAG ranks no triples.
    """
    scores: dict[str, Ratio] = {}
    for granularity, (ranked_of, gold_of, substitutes_of) in GRANULARITIES.items():
        ranked = [list(ranked_of(prediction)) if prediction else [] for _, prediction in answered]
        ranks_any = any(ranked)
        golds = [gold_of(question) if ranks_any else None for question, _ in answered]
        substitutes = [substitutes_of(question) for question, _ in answered]
        for k in scoring.recall_at:
            scores[f"{RECALLS[granularity]}@{k}"] = mean_of(
                [
                    recall_at(row, gold, k, other) if gold else None
                    for row, gold, other in zip(ranked, golds, substitutes, strict=True)
                ]
            )
    return scores


def passage_ranking_scores(
    answered: Sequence[AnsweredQuestion], scoring: Scoring
) -> dict[str, Ratio]:
    """Returns `ranking_scores` of passages: ``complete@K``, ``ndcg@K``, ``map`` and ``mrr``.

    They apply to the same questions as ``recall@K``.
    """
    ranks_any = any(prediction.passages for _, prediction in answered if prediction)
    rows = [
        ranking_scores(
            prediction.passages if prediction else (),
            question.supporting,
            scoring.recall_at,
            passage_substitutes(question),
        )
        if question.supporting and ranks_any
        else {}
        for question, prediction in answered
    ]
    names = ranking_scores((), ("",), scoring.recall_at)
    return {name: mean_of([row.get(name) for row in rows]) for name in names}


def hit_scores(answered: Sequence[AnsweredQuestion], scoring: Scoring) -> dict[str, Ratio]:
    """Returns ``hit@K``, the share of questions with an answer in the first K passages (DPR, 2020).

    Only counts questions without annotated gold passages (NaturalQuestions, WebQuestions,
    Bamboogle); for other questions, recall is more informative. FlashRAG calls this score
    ``retrieval_recall``.

    A passage has an answer if its title or text contains the answer's tokens in sequence, compared
    in Unicode's form NFD and ignoring case. An answer without tokens never matches.
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
    """Returns the rank, from 0, of the first passage with an answer; inf beyond ``depth``."""
    answer_tokens = [tokens for tokens in map(_tokens, answers) if tokens.strip()]
    for rank, passage_id in enumerate(prediction.passages[:depth] if prediction else ()):
        passage_tokens = tokens_of(passage_id)
        if any(tokens in passage_tokens for tokens in answer_tokens):
            return rank
    return float("inf")


def _tokens(text: str) -> str:
    """Returns a text's tokens, separated and surrounded by single spaces."""
    spaced = unicodedata.normalize("NFD", text).casefold().translate(_SPACED)
    return f" {' '.join(spaced.split())} "


class _Spaced(dict[int, str]):
    """A table for `str.translate` that puts spaces between tokens.

    A token is a run of letters, numbers and marks (such as an accent of NFD), or any other single
    character that is neither a space nor a control character.
    """

    def __missing__(self, code: int) -> str:
        char = chr(code)
        kind = unicodedata.category(char)[0]
        self[code] = char if kind in "LNM" else " " if kind in "ZC" else f" {char} "
        return self[code]


_SPACED = _Spaced()


# ------------------------------------------------------------------------------------- all scores

# Families by their names in ``config.metrics``.
FAMILIES: dict[str, Family] = {
    "answers": Family(answer_scores, ANSWER_TITLES),
    "bertscore": Family(bertscores, {"bertscore": "BERTScore"}),
    "by_granularity": Family(
        stage_scores,
        {f"{g}_{name}": f"{g} {ANSWER_TITLES[name]}" for g in STAGES for name in STAGE_SCORES},
    ),
    "hits": Family(hit_scores, {"hit": "hit"}, needs_corpus=True),
    "hops": Family(hops.hop_scores, hops.TITLES, needs_corpus=True),
    "ranking": Family(passage_ranking_scores, RANKING_TITLES, needs_corpus=True),
    "raw_or_short": Family(
        raw_or_short_scores, {f"{name}_max": f"{name.upper()} max" for name in METRICS}
    ),
    "recall": Family(
        recall_scores,
        {"recall": "R", "sentence_recall": "sentence R", "triple_recall": "triple R"},
        needs_corpus=True,
    ),
    "rouge": Family(rouge_scores, ROUGE_TITLES),
    "supporting_facts": Family(
        supporting_facts.supporting_fact_scores, supporting_facts.TITLES, needs_corpus=True
    ),
}


def check(names: Sequence[str], bertscore: str | None = None) -> None:
    """Raises `UserError` if ``config.metrics`` is empty or has an unknown family.

    ``bertscore`` is the model of BERTScore.
    """
    if not names or any(name not in FAMILIES for name in names):
        raise UserError(
            f"config.metrics={tuple(names)!r} must be one or more of {', '.join(FAMILIES)}."
        )
    if "bertscore" in names and not bertscore:
        raise UserError(
            "config.metrics names bertscore, which needs an encoder: run configs/comparison.py "
            "with --config.bertscore=FOLDER."
        )


def measure(
    answered: Sequence[AnsweredQuestion],
    scoring: Scoring,
    names: Sequence[str] = NAMES,
    *,
    corpus: bool = True,
) -> dict[str, Ratio]:
    """Returns all scores of the families ``names``; a score without questions is NaN.

    Args:
      answered: a run's questions and predictions.
      scoring: settings of the metrics.
      names: names of families.
      corpus: whether the method retrieves; if not, its retrieval is not scored.
    """
    scores: dict[str, Ratio] = {}
    for name in names:
        if corpus or not FAMILIES[name].needs_corpus:
            scores |= FAMILIES[name].measure(answered, scoring)
    return scores


def reason(name: str, answered: Sequence[AnsweredQuestion], *, corpus: bool = True) -> str:
    """Returns why a score applies to no question; arguments as in `measure`."""
    kind = name.partition("@")[0]
    (family,) = (name for name, family in FAMILIES.items() if kind in family.titles)
    if not corpus and FAMILIES[family].needs_corpus:
        return "retrieves nothing"
    if family in ("recall", "ranking", "supporting_facts"):
        default = "sentence" if family == "supporting_facts" else "passage"
        granularities = {score: granularity for granularity, score in RECALLS.items()}
        granularity = granularities.get(kind, default)
        ranked_of, gold_of, _ = GRANULARITIES[granularity]
        if not any(ranked_of(prediction) for _, prediction in answered if prediction):
            return f"ranks no {granularity}s"
        if not any(gold_of(question) for question, _ in answered):
            return f"no gold {granularity}s"
    if family == "hops":
        return hops.reason(kind, answered)
    if not any(question.answers for question, _ in answered):
        return "no gold answer"
    applies = {
        "hits": "gold passages are known",
        "by_granularity": "no question was answered at this granularity",
    }
    return applies.get(family, "applies to no question")


def title(name: str) -> str:
    """Returns a score's title in tables, such as ``R@5`` for ``recall@5``."""
    kind, at, k = name.partition("@")
    titles = {key: text for family in FAMILIES.values() for key, text in family.titles.items()}
    return f"{titles[kind]}{at}{k}"
