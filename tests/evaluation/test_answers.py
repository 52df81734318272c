import math
import string
import unicodedata

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cirag_jax.evaluation import answers
from cirag_jax.evaluation.metrics import answer_scores
from cirag_jax.evaluation.scoring import Answered, Scoring
from cirag_jax.types import Prediction, Question

PROFILES = sorted(answers.PROFILES)
every_profile = pytest.mark.parametrize("profile", PROFILES)
# Words that scorers treat specially, and anything else.
ANSWERS = st.text(max_size=12) | st.lists(
    st.sampled_from(["yes", "no", "noanswer", "the", "A", "an", "Cork", "county", "é", "!", "12."]),
    max_size=5,
).map(" ".join)
GOLDS = st.lists(ANSWERS, min_size=1, max_size=4)


@every_profile
def test_normalisation_by_hand(profile):
    def normal(text):
        return answers.normalise_answer(text, profile)

    assert normal("  The  U.S. Army,\tan  army ") == "us army army"
    # Punctuation goes before articles, and leaves no space: "a-b" has no article in it.
    assert normal("an-a a-b theatre") == "ana ab theatre"
    assert normal("A.") == normal("the") == normal("...") == ""
    assert normal("“curly” – dash") == "“curly” – dash"  # only ASCII punctuation is deleted
    assert normal("İstanbul") == unicodedata.normalize(
        "NFD" if profile == "dualrag" else "NFC", "i̇stanbul"
    )


def test_only_dualrag_sees_through_composition():
    composed, decomposed = "Café", "Cafe\u0301"
    scores = {name: answers.exact_match(composed, [decomposed], name) for name in PROFILES}
    assert scores == {name: float(name == "dualrag") for name in PROFILES}
    assert answers.exact_match("Cafe", ["Café"], "dualrag") == 0  # the accent still counts


@every_profile
def test_f1_by_hand(profile):
    def f1(prediction, *golds):
        return answers.f1(prediction, golds, profile)

    # Multisets: one "new" of two is shared. P = {new, new, york}, G = {new, york, city}.
    assert f1("new new york", "New York City") == pytest.approx(2 * (2 / 3) * (2 / 3) / (4 / 3))
    # Precision 1/4, recall 1.
    assert f1("he was from Cork", "Cork") == pytest.approx(2 * (1 / 4) * 1 / (5 / 4))
    assert f1("the Cork", "Cork.") == 1.0
    assert f1("Dublin", "Cork") == 0.0
    assert f1("", "Cork") == f1("Cork", "the") == 0.0


def test_an_empty_answer_to_an_empty_gold():
    """MuSiQue's scorer says equal; the others divide only where a token is shared."""
    scores = {name: answers.f1("the", ["a"], name) for name in PROFILES}
    assert scores == {name: float(name == "musique") for name in PROFILES}


def test_yes_and_no_share_no_token_with_longer_answers_in_hotpot_s_line():
    closed = {"hotpot", "kirag", "flashrag"}
    for prediction, gold in (
        ("yes it is", "yes"),
        ("no", "no one"),
        ("noanswer given", "noanswer"),
    ):
        for name in PROFILES:
            score = answers.f1(prediction, [gold], name)
            assert (score == 0) == (name in closed), (prediction, gold, name)
    assert all(answers.f1("Yes.", ["yes"], name) == 1.0 for name in PROFILES)


def test_the_first_gold_alone_counts_for_kirag_s_f1():
    golds = ["Orlin County", "Orlin"]
    for name in PROFILES:
        expected = 2 / 3 if name == "kirag" else 1.0
        assert answers.f1("Orlin", golds, name) == pytest.approx(expected)
        assert answers.exact_match("Orlin", golds, name) == 1.0  # of all golds, kirag's too
    # Another gold's yes/no does not spoil the best one.
    assert answers.f1("Orlin", ["no", "Orlin"], "flashrag") == 1.0


def test_accuracy_is_a_substring_of_the_prediction():
    assert answers.accuracy("It lies in Orlin County, says the map", ["Orlin County"]) == 1
    assert answers.accuracy("Orlin", ["Orlin County"]) == 0  # not the other way round
    assert answers.accuracy("in the U.S.", ["x", "US"]) == 1
    assert answers.accuracy("a category", ["cat"]) == 1  # of characters, not of tokens
    assert answers.accuracy("anything", ["The"]) == 0 and answers.accuracy("", ["The"]) == 1


@every_profile
@given(prediction=ANSWERS, golds=GOLDS)
def test_invariants(profile, prediction, golds):
    em = answers.exact_match(prediction, golds, profile)
    f1 = answers.f1(prediction, golds, profile)
    acc = answers.accuracy(prediction, golds, profile)
    assert em in (0, 1) and acc in (0, 1) and 0 <= f1 <= 1
    assert em <= acc
    # The order of golds matters to KiRAG's F1 and to nothing else.
    assert answers.exact_match(prediction, golds[::-1], profile) == em
    if profile != "kirag":
        assert answers.f1(prediction, golds[::-1], profile) == f1
        assert answers.f1(prediction, [*golds, "more"], profile) >= f1
        # F1 is the same from both sides.
        assert f1 == max(answers.f1(gold, [prediction], profile) for gold in golds)
        if em and answers.normalise_answer(prediction, profile):
            assert f1 == 1
    # What normalisation drops changes no score.
    noisy = f"The {prediction} !"
    assert answers.exact_match(noisy, golds, profile) == em
    assert answers.f1(noisy, golds, profile) == f1


@every_profile
@given(text=ANSWERS)
def test_normal_form(profile, text):
    once = answers.normalise_answer(text, profile)
    assert set(once).isdisjoint(string.punctuation)
    assert once == " ".join(once.split())
    assert set(once.split()).isdisjoint({"a", "an", "the"})
    assert answers.f1(once, [text], profile) in (0.0, 1.0)


def test_a_run_is_scored_question_by_question():
    said = ["Orlin County", "no", "", "in Cork", "x"]
    golds = [("Orlin", "Orlin County"), ("yes",), ("Cork",), ("Cork", "the city of Cork"), ()]
    answered = [
        Answered(Question(str(i), "", gold), Prediction(text, "passage") if text else None)
        for i, (text, gold) in enumerate(zip(said, golds, strict=True))
    ]
    scores = answer_scores(answered, Scoring())
    assert scores["em"].top_Q.tolist() == [1, 0, 0, 0, 0]
    assert scores["acc"].top_Q.tolist() == [1, 0, 0, 1, 0]
    np.testing.assert_allclose(scores["f1"].top_Q, [1, 0, 0, 2 / 3, 0])
    for score in scores.values():
        assert score.bottom_Q.tolist() == [1, 1, 1, 1, 0]  # there is no gold answer of the last
    assert (scores["em"].value, scores["acc"].value) == (0.25, 0.5)
    assert scores["f1"].value == pytest.approx((1 + 2 / 3) / 4)
    assert answer_scores(answered, Scoring("kirag"))["f1"].value == pytest.approx(
        (2 / 3 + 2 / 3) / 4
    )
    assert math.isnan(answer_scores([], Scoring())["em"].value)


def test_what_cannot_be_scored():
    with pytest.raises(ValueError, match="unknown answer profile 'squad'; choose one of musique"):
        answers.exact_match("x", ["x"], "squad")
    with pytest.raises(ValueError, match="at least one gold"):
        answers.f1("x", [])
    with pytest.raises(ValueError, match="at least one gold"):
        answers.accuracy("x", "x")  # a string is a list of its letters
