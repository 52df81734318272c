"""HotpotQA's scores of supporting facts, alone and jointly with the answer.

The definitions are those of hotpot_evaluate_v1.py (Yang et al., 2018, section 5.2). The supporting
facts of a prediction are its retrieved sentences. They are compared by passage id and index, not by
title.
"""

from collections.abc import Sequence

from cirag_jax.evaluation import answers
from cirag_jax.evaluation.evidence import GRANULARITIES
from cirag_jax.evaluation.overlap import Ratio, mean_of
from cirag_jax.evaluation.recall import set_scores
from cirag_jax.evaluation.scoring import AnsweredQuestion, Scoring

TITLES = {
    "sp_em": "sup EM",
    "sp_f1": "sup F1",
    "sp_precision": "sup P",
    "sp_recall": "sup R",
    "joint_em": "joint EM",
    "joint_f1": "joint F1",
}
_PROFILE = "hotpot"  # the answer scorer of the joint scores


def supporting_fact_scores(
    answered: Sequence[AnsweredQuestion], scoring: Scoring
) -> dict[str, Ratio]:
    """Returns the scores of `TITLES` over the questions with gold sentences.

    The joint scores also need a gold answer. Joint precision is the precision of the supporting
    facts times that of the answer's tokens, and joint recall likewise; joint F1 is the F1 of these
    two, and joint EM the product of both exact matches. A failed question scores 0. A run that
    retrieves no sentences has no scores.
    """
    del scoring  # HotpotQA's script has its own answer scorer.
    ranked_of = GRANULARITIES["sentence"][0]
    ranks_any = any(ranked_of(prediction) for _, prediction in answered if prediction)
    rows = [_scores(pair) if ranks_any else {} for pair in answered]
    return {name: mean_of([row.get(name) for row in rows]) for name in TITLES}


def _scores(answered: AnsweredQuestion) -> dict[str, float]:
    question, prediction = answered
    ranked_of, gold_of, substitutes_of = GRANULARITIES["sentence"]
    retrieved = dict.fromkeys(ranked_of(prediction) if prediction else ())
    gold = dict.fromkeys(gold_of(question))
    if not gold:
        return {}
    facts = set_scores(retrieved, gold, substitutes_of(question))
    scores = {
        "sp_em": facts.exact,
        "sp_f1": facts.f1,
        "sp_precision": facts.precision,
        "sp_recall": facts.recall,
    }
    if question.answers:
        judged = (
            prediction.answer if prediction else "",
            answers.golds_of(question, _PROFILE),
            _PROFILE,
        )
        tokens = answers.token_scores(*judged)
        precision, recall = facts.precision * tokens.precision, facts.recall * tokens.recall
        both = precision + recall
        scores["joint_em"] = facts.exact * answers.exact_match(*judged)
        scores["joint_f1"] = 2 * precision * recall / both if both else 0.0
    return scores
