"""Recall of gold passages by step and by hop."""

import dataclasses

import pytest

from cirag_jax.evaluation.evidence import recall_per_step
from cirag_jax.types import Prediction, Question, Step, SubQuestion

QUESTION = Question("q1", "In which county did she grow up?", ("Orlin",), supporting=("p1", "p2"))
BARE = Question("q2", "And who is he?", ("nobody",))


def test_recall_per_step_and_per_hop():
    long = Prediction(
        "", "default", ("p2", "p9", "p1"), steps=(Step("a", ("p9",)), Step("b", ("p1", "p2")))
    )
    short = Prediction("", "default", ("p1", "p3"), steps=(Step("a", ("p1", "p3")),))
    # Only sub-questions order MuSiQue's gold passages.
    reordered = dataclasses.replace(
        QUESTION,
        supporting=("p1", "p2", "p3"),
        decomposition=(SubQuestion("?", "x", "p3"), SubQuestion("?", "y", "p1")),
    )
    questions = [QUESTION, reordered, QUESTION, BARE]
    assert recall_per_step([long, short, None, long], questions, (1, 3)) == {
        # The first question finds none (p9 is not gold), then all; the second finds two of three.
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


def test_passage_substitutes_count_as_retrieved():
    question = dataclasses.replace(
        QUESTION,
        supporting_sentences=(("p1", 3), ("p2", 0)),
        same_sentences=((("p1", 3), ("p9", 0)),),
    )
    result = Prediction("", "default", ("p9", "p2"), steps=(Step("a", ("p9",)), Step("b", ("p2",))))
    assert recall_per_step([result], [question], (1,)) == {
        "found": [0.5, 1.0],
        "hops": [
            {"recall@1": 1.0, "num_questions": 1},
            {"recall@1": 0.0, "num_questions": 1},
        ],
        "num_questions": 1,
    }
