"""Diagnostics of hops, compared with hand-computed values."""

import dataclasses

import pytest

from cirag_jax.datasets.annotations import hops_of
from cirag_jax.evaluation import hops, metrics
from cirag_jax.evaluation.scoring import AnsweredQuestion, Scoring
from cirag_jax.methods.c2rag.prompts import Constraint
from cirag_jax.types import Passage, Prediction, Question, Step, SubQuestion, Triple

QUESTION = Question(
    "q1",
    "When was the director of The Lantern Road born?",
    ("3 May 1898",),
    supporting=("p1", "p2"),
    evidences=(
        ("The Lantern Road", "director", "Ilse Varga"),
        ("Ilse Varga", "date of birth", "3 May 1898"),
    ),
)
DIRECTED = Constraint("The Lantern Road", "directed by", "?person", ("director",))
BORN = Constraint("?person", "born on", "?date", ("date of birth",))


def planned(plan, names=(), passages=((),) * 9):
    """Returns a prediction with a step per constraint, after the step that retrieves."""
    first = Step("q", ("p1", "p9"), notes={"graph": {"entities": 3, "triples": 2}})
    steps = [
        Step("c", passages[i], notes={"constraint": [*c[:3], *c[3]], "names": dict(names)})
        for i, c in enumerate(plan)
    ]
    return Prediction("", "passage", ("p9", "p2", "p1"), steps=(first, *steps))


def scores_of(*pairs, passages=dict):
    answered = [AnsweredQuestion(*pair) for pair in pairs]
    result = metrics.measure(answered, Scoring(recall_at=(1, 2), passages=passages), ["hops"])
    reasons = {
        name: metrics.reason(name, answered) for name, r in result.items() if not r.bottom_Q.any()
    }
    return {name: ratio.value for name, ratio in result.items()}, reasons


def test_hop_scores_recall_of_each_gold_passage():
    scores, reasons = scores_of((QUESTION, planned([DIRECTED])), (QUESTION, None))
    # p2 is the second gold passage, at rank 2; the failed question retrieves nothing.
    assert [scores[f"hop{hop}_recall@2"] for hop in (1, 2)] == [0.0, 0.5]
    assert scores["hop2_recall@1"] == 0.0
    assert reasons["hop3_recall@1"] == "no question has this hop"
    _, reasons = scores_of((dataclasses.replace(QUESTION, supporting=None), planned([DIRECTED])))
    assert reasons["hop1_recall@1"] == reasons["hop1_unsupported"] == "no gold passages"
    assert metrics.title("hop2_recall@1") == "hop 2 R@1"


def test_hop_scores_unsupported_evidence_is_pooled_over_questions():
    plan, evidence = [DIRECTED, BORN], (("p1", "p7", "p8"), ("p2",))
    one = planned(plan, passages=evidence)
    two = planned(plan, passages=(("p1",), ("p9", "p2")))
    scores, reasons = scores_of((QUESTION, one), (QUESTION, two), (QUESTION, None))
    assert scores["hop1_unsupported"] == 2 / 4 and scores["hop2_unsupported"] == 1 / 3
    assert reasons["hop3_unsupported"] == "no question has this hop"
    overlapping = dataclasses.replace(QUESTION, same_sentences=((("p1", 1), ("p7", 0)),))
    assert scores_of((overlapping, one))[0]["hop1_unsupported"] == 1 / 3


def test_hop_scores_unsupported_counts_what_a_method_keeps():
    facts = tuple(Triple("a", "b", "c", passage_id) for passage_id in ("p1", "p3", "p4"))
    chosen = Step("q", ("p1", "p2", "p3"), facts, (1.0,) * 3, kept=facts[:2])
    none = dataclasses.replace(chosen, kept=())
    result = Prediction("", "triple", steps=(chosen, none, Step("q", ("p2", "p5"))))
    scores, reasons = scores_of((QUESTION, result))
    assert scores["hop1_unsupported"] == 0.5 and scores["hop3_unsupported"] == 0.5
    assert reasons["hop2_unsupported"] == "no question has this hop"
    assert reasons["resolved"] == reasons["plan_error"] == "plans no constraints"


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ({"?person": ["Ilse VARGA", "Per Lund"], "?date": ["May 3, 1898"]}, (1.0, 1.0, 0.0)),
        ({"?person": ["Per Lund", "Ilse Varga"], "?date": ["3 May 1898"]}, (1.0, 0.5, 0.5)),
        ({"?person": ["Ilse Varga"]}, (0.5, 1.0, 0.0)),
        ({"?person": ["Per Lund"], "?unused": ["Ilse Varga"]}, (0.5, 0.0, 0.5)),
    ],
)
def test_hop_scores_bindings(names, expected):
    scores, _ = scores_of((QUESTION, planned([DIRECTED, BORN], names)))
    shown = [scores[name] for name in ("resolved", "binding_precision", "confident_wrong")]
    assert shown == pytest.approx(expected)


def test_hop_scores_bindings_without_annotations_have_reasons():
    bare = Question("q2", "Who?", ("Ilse",))
    result = planned([DIRECTED], {"?person": ["Ilse"]})
    scores, reasons = scores_of((bare, result), (QUESTION, planned([DIRECTED, BORN])))
    # Only the first question has a name, and only the second has annotations.
    assert scores["resolved"] == 1 / 3 and scores["confident_wrong"] == 0.0
    assert reasons["binding_precision"] == "binds no unknown"
    scores, reasons = scores_of((bare, result))
    assert scores["resolved"] == 1.0
    assert reasons["binding_precision"] == reasons["confident_wrong"] == "no annotated hops"
    assert reasons["plan_error"] == "no annotated relations"
    assert scores_of((bare, planned([DIRECTED._replace(tail="X")])))[1]["resolved"] == (
        "plans no unknowns"
    )


def test_hop_scores_binding_of_hotpotqa_is_the_title_of_the_next_passage():
    question = Question("q", "Where was its director born?", ("Marn",), supporting=("a", "b"))
    passages = {
        "a": Passage("a", "The Road", "A film by Ilse Varga."),
        "b": Passage("b", "Ilse Varga", "Born in Marn."),
    }
    pair = (question, planned([DIRECTED], {"?person": ["Ilse Varga"]}))
    scores, reasons = scores_of(pair, passages=lambda: passages)
    assert scores["binding_precision"] == 1.0 and reasons["plan_error"] == "no annotated relations"


ASKED = Question(
    "q3",
    "Are A Hill and B Lake in the same country?",
    ("no",),
    evidences=(("A Hill", "country", "Norland"), ("B Lake", "country", "Sudland")),
    supporting=("p1", "p2"),
)
STEPS = dataclasses.replace(
    QUESTION,
    evidences=None,
    decomposition=(
        SubQuestion("The Lantern Road >> director", "Ilse Varga", "p1"),
        SubQuestion("When was #1 born?", "3 May 1898", "p2"),
    ),
)


@pytest.mark.parametrize(
    ("question", "plan", "expected"),
    [
        (QUESTION, [DIRECTED, BORN], set()),
        (STEPS, [DIRECTED, BORN], set()),
        (QUESTION, [DIRECTED._replace(relation="music by", variants=()), BORN], {0}),
        (QUESTION, [DIRECTED._replace(head="Marn Keep"), BORN], {0}),
        (QUESTION, [DIRECTED, BORN._replace(head="?other")], {1}),  # The unknown is missing.
        (QUESTION, [DIRECTED, DIRECTED, BORN], {1}),  # One hop has only one constraint.
        (ASKED, [Constraint(n, "country", f"?{i}") for i, n in enumerate(("A Hill", "B Lake"))],
         set()),
        (ASKED, [Constraint(n, "country", "?x") for n in ("A Hill", "B Lake")], {1}),
        (dataclasses.replace(ASKED, evidences=tuple(
            (head, relation, "Norland") for head, relation, _ in ASKED.evidences or ())),
         [Constraint(n, "country", "?x") for n in ("A Hill", "B Lake")], set()),
    ],
)  # fmt: skip
def test_wrong_constraints(question, plan, expected):
    assert hops.wrong_constraints(plan, hops_of(question, {})) == expected


def test_hop_scores_plan_errors_are_shares_of_constraints_and_plans():
    wrong = DIRECTED._replace(relation="music by", variants=())
    pairs = [planned([DIRECTED, BORN]), planned([wrong, BORN]), planned([]), None]
    scores, _ = scores_of(*((QUESTION, result) for result in pairs))
    assert scores["plan_error"] == 1 / 4 and scores["plan_invalid"] == 2 / 3


def test_histograms_and_graph_statistics():
    results = [planned([DIRECTED]), planned([DIRECTED]), Prediction("", "passage")]
    assert hops.histograms(results, [2, 10, 2]) == {
        "steps": {"0": 1, "2": 2},
        "queries": {"2": 2, "10": 1},
    }
    assert hops.graph_statistics(results) == {"questions": 2, "entities": 6, "triples": 4}
    assert hops.graph_statistics(results[2:]) == {"reason": "builds no graph per question"}


def test_hop_scores_without_questions_are_undefined():
    scores, _ = scores_of()
    assert all(value != value for value in scores.values())
