import dataclasses

import pytest

from cirag_jax.evaluation.evidence import endpoints, evidence_recall, recall_per_step
from cirag_jax.types import Prediction, Question, Step, SubQuestion, Triple

QUESTION = Question(
    "q1",
    "In which county did she grow up?",
    ("Orlin",),
    supporting=("p1", "p2"),
    supporting_sentences=(("p1", 0), ("p2", 3)),
    evidences=(
        ("The Lantern Road", "director", "Ilse Varga"),
        ("Ilse Varga", "place of birth", "Tarnow Bay"),
        ("Ilse Varga", "place of death", "Tarnow Bay"),
    ),
)
BARE = Question("q2", "And who is he?", ("nobody",))
FOUND = Prediction(
    "Orlin",
    "triple",
    passages=("p9", "p8", "p2", "p7", "p1"),
    sentences=(("p2", 3), ("p1", 1)),
    triples=(
        Triple("a lighthouse", "stands in", "Tarnow Bay"),
        Triple("ilse  VARGA", "was the director of", "The 'Lantern' Road"),
        Triple("Tarnow Bay", "is near", "Orlin"),
        Triple("Ilse Varga", "was born in", "Tarnow Bay"),
    ),
)


def test_three_granularities():
    recall = evidence_recall([FOUND], [QUESTION])
    assert recall == {
        "passage": {"recall@3": 0.5, "recall@5": 1.0, "num_questions": 1},
        "sentence": {"recall@3": 0.5, "recall@5": 0.5, "num_questions": 1},
        # Born and died at one place: one pair of names, found at rank 4. The other is reversed.
        "triple": {"recall@3": 0.5, "recall@5": 1.0, "num_questions": 1},
    }


def test_only_annotated_questions_count_and_failed_ones_earn_nothing():
    recall = evidence_recall(
        [FOUND, None, FOUND, Prediction("", "default")], [QUESTION] * 2 + [BARE, QUESTION], (5,)
    )
    assert recall["passage"] == {"recall@5": pytest.approx(1 / 3), "num_questions": 3}
    assert recall["triple"] == {"recall@5": pytest.approx(1 / 3), "num_questions": 3}
    assert evidence_recall([FOUND], [BARE]) == {"passage": None, "sentence": None, "triple": None}
    partly = dataclasses.replace(QUESTION, evidences=None, supporting_sentences=())
    counts = evidence_recall([FOUND, FOUND], [QUESTION, partly])
    assert [counts[name]["num_questions"] for name in ("passage", "sentence", "triple")] == [
        2,
        1,
        1,
    ]
    with pytest.raises(ValueError, match="zip"):
        evidence_recall([FOUND], [])


def test_a_triple_must_join_both_names():
    assert endpoints("Ilse Varga", "Tarnow Bay") == endpoints("TARNOW bay!", "ilse-varga")
    assert endpoints("Ilse Varga", "Tarnow Bay") != endpoints("Ilse Varga", "Tarnow")
    assert endpoints("Bråk", "X") != endpoints("Br k", "X")  # letters of every script are kept
    assert endpoints("東京", "日本") != endpoints("大阪", "日本")
    assert endpoints("+", "x") != endpoints("-", "x")  # nothing left: the sign itself


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
    assert recall_per_step([long], [BARE]) is None
    assert recall_per_step([None, FOUND], [QUESTION] * 2) is None
