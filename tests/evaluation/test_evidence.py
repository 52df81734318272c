"""Recall as the steps of a run go on."""

import dataclasses

import pytest

from cirag_jax.evaluation.evidence import recall_per_step
from cirag_jax.types import Prediction, Question, Step, SubQuestion

QUESTION = Question("q1", "In which county did she grow up?", ("Orlin",), supporting=("p1", "p2"))
BARE = Question("q2", "And who is he?", ("nobody",))


def test_recall_grows_with_the_steps_and_falls_with_the_hops():
    long = Prediction(
        "", "default", ("p2", "p9", "p1"), steps=(Step("a", ("p9",)), Step("b", ("p1", "p2")))
    )
    short = Prediction("", "default", ("p1", "p3"), steps=(Step("a", ("p1", "p3")),))
    # MuSiQue lists gold passages in no order; its sub-questions have one.
    reordered = dataclasses.replace(
        QUESTION,
        supporting=("p1", "p2", "p3"),
        decomposition=(SubQuestion("?", "x", "p3"), SubQuestion("?", "y", "p1")),
    )
    asked = [QUESTION, reordered, QUESTION, BARE]
    assert recall_per_step([long, short, None, long], asked, (1, 3)) == {
        # p9 is nobody's; then both of the first question; the second ended with two of three.
        "found": [pytest.approx(2 / 9), pytest.approx(5 / 9)],
        "hops": [
            {"recall@1": 0.0, "recall@3": pytest.approx(2 / 3), "num_questions": 3},
            {
                "recall@1": pytest.approx(2 / 3),
                "recall@3": pytest.approx(2 / 3),
                "num_questions": 3,
            },
            {"recall@1": 0.0, "recall@3": 0.0, "num_questions": 1},
        ],
        "num_questions": 3,
    }
    assert recall_per_step([long], [BARE], (1,)) is None
    assert recall_per_step([None, Prediction("", "default")], [QUESTION] * 2, (1,)) is None


def test_what_a_passage_is_gold_for_may_be_read_in_another():
    question = dataclasses.replace(
        QUESTION,
        supporting_sentences=(("p1", 3), ("p2", 0)),
        same_sentences=((("p1", 3), ("p9", 0)),),
    )
    found = Prediction("", "default", ("p9", "p2"), steps=(Step("a", ("p9",)), Step("b", ("p2",))))
    assert recall_per_step([found], [question], (1,)) == {
        "found": [0.5, 1.0],
        "hops": [
            {"recall@1": 1.0, "num_questions": 1},
            {"recall@1": 0.0, "num_questions": 1},
        ],
        "num_questions": 1,
    }
