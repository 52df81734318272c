"""Supporting-fact and joint scores, compared with the formulas of HotpotQA's script."""

import collections
import dataclasses
import itertools

import pytest

from cirag_jax.evaluation import metrics
from cirag_jax.evaluation.scoring import AnsweredQuestion, Scoring
from cirag_jax.types import Prediction, Question

GOLD = (("p1", 0), ("p2", 3))
QUESTION = Question("q", "Where?", ("the Orlin County",), supporting_sentences=GOLD)


def official(answer, gold_answer, facts, gold):
    """The formulas of the script for one question, with normalized answers."""
    words, gold_words = answer.split(), gold_answer.split()
    same = sum((collections.Counter(words) & collections.Counter(gold_words)).values())
    closed = {"yes", "no", "noanswer"}
    if answer != gold_answer and (answer in closed or gold_answer in closed):
        same = 0
    precision, recall = (same / len(words), same / len(gold_words)) if same else (0, 0)
    found, wanted = set(facts), set(gold)
    hits = len(found & wanted)
    sp_precision = hits / len(found) if found else 0
    sp_recall = hits / len(wanted)
    total = sp_precision + sp_recall
    joint = precision * sp_precision, recall * sp_recall
    sp_em = float(found == wanted)
    return {
        "sp_em": sp_em,
        "sp_f1": 2 * sp_precision * sp_recall / total if total else 0,
        "sp_precision": sp_precision,
        "sp_recall": sp_recall,
        "joint_em": sp_em * (answer == gold_answer),
        "joint_f1": 2 * joint[0] * joint[1] / sum(joint) if sum(joint) else 0,
    }


def scores(*pairs):
    answered = [AnsweredQuestion(*pair) for pair in pairs]
    ratios = metrics.measure(answered, Scoring(), ["supporting_facts"])
    reasons = {n: metrics.reason(n, answered) for n, r in ratios.items() if not r.bottom_Q.any()}
    return {name: ratio.value for name, ratio in ratios.items()}, reasons


def test_supporting_facts_equal_the_official_formulas():
    answers = ["orlin county", "orlin bay county", "yes", "bergen"]
    facts = [GOLD, (*GOLD, ("p3", 1)), GOLD[1:] * 2 + (("p1", 1),), (("p1", 1),)]
    for answer, gold, found in itertools.product(answers, ["orlin county", "yes"], facts):
        question = dataclasses.replace(QUESTION, answers=(gold,))
        measured, _ = scores((question, Prediction(answer, "sentence", sentences=found)))
        assert measured == pytest.approx(official(answer, gold, found, GOLD)), (answer, found)


def test_supporting_facts_hand_computed():
    """Two of three sentences are gold, and two of three words are right."""
    found = Prediction("Orlin County coast", "sentence", sentences=(*GOLD, ("p3", 1)))
    measured, _ = scores((QUESTION, found))
    assert measured["sp_f1"] == pytest.approx(4 / 5) and measured["sp_em"] == 0
    # Precision 2/3 * 2/3, recall 1.
    assert measured["joint_f1"] == pytest.approx(2 * (4 / 9) / (13 / 9))


def test_supporting_facts_means_and_reasons():
    right = Prediction("Orlin County", "sentence", sentences=GOLD)
    bare = dataclasses.replace(QUESTION, supporting_sentences=None)
    unanswered = dataclasses.replace(QUESTION, answers=())
    measured, _ = scores((QUESTION, right), (QUESTION, None), (bare, right), (unanswered, right))
    assert measured["sp_em"] == pytest.approx(2 / 3) and measured["joint_em"] == 0.5
    _, reasons = scores((bare, right))
    assert set(reasons.values()) == {"no gold sentences"} and len(reasons) == 6
    _, reasons = scores((QUESTION, dataclasses.replace(right, sentences=())))
    assert set(reasons.values()) == {"ranks no sentences"}
    _, reasons = scores((unanswered, right))
    assert reasons == dict.fromkeys(("joint_em", "joint_f1"), "no gold answer")
