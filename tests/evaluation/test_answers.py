import math
import string
import unicodedata

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cirag_jax.evaluation import answers
from cirag_jax.evaluation.metrics import answer_scores
from cirag_jax.evaluation.scoring import AnsweredQuestion, Scoring
from cirag_jax.types import Prediction, Question

PROFILES = sorted(answers.PROFILES)
every_profile = pytest.mark.parametrize("profile", PROFILES)
# Words that scorers treat specially, and random text.
ANSWERS = st.text(max_size=12) | st.lists(
    st.sampled_from(["yes", "no", "noanswer", "the", "A", "an", "Cork", "county", "é", "!", "12."]),
    max_size=5,
).map(" ".join)
GOLDS = st.lists(ANSWERS, min_size=1, max_size=4)


@every_profile
def test_normalize_answer_examples(profile):
    def normal(text):
        return answers.normalize_answer(text, profile)

    assert normal("  The  U.S. Army,\tan  army ") == "us army army"
    # Punctuation is removed before articles, without a space: "a-b" has no article.
    assert normal("an-a a-b theatre") == "ana ab theatre"
    assert normal("A.") == normal("the") == normal("...") == ""
    assert normal("“curly” – dash") == "“curly” – dash"  # only ASCII punctuation is deleted
    assert normal("İstanbul") == unicodedata.normalize(
        "NFD" if profile == "dualrag" else "NFC", "i̇stanbul"
    )


def test_unicode_decomposition_only_in_dualrag():
    composed, decomposed = "Café", "Cafe\u0301"
    scores = {name: answers.exact_match(composed, [decomposed], name) for name in PROFILES}
    assert scores == {name: float(name == "dualrag") for name in PROFILES}
    assert answers.exact_match("Cafe", ["Café"], "dualrag") == 0  # the accent still counts


@every_profile
def test_f1_matches_hand_computed_values(profile):
    def f1(prediction, *golds):
        return answers.f1(prediction, golds, profile)

    # Multisets: one "new" of two is shared. P = {new, new, york}, G = {new, york, city}.
    assert f1("new new york", "New York City") == pytest.approx(2 * (2 / 3) * (2 / 3) / (4 / 3))
    # Precision 1/4, recall 1.
    assert f1("he was from Cork", "Cork") == pytest.approx(2 * (1 / 4) * 1 / (5 / 4))
    assert f1("the Cork", "Cork.") == 1.0
    assert f1("Dublin", "Cork") == 0.0
    assert f1("", "Cork") == f1("Cork", "the") == 0.0


@every_profile
@pytest.mark.parametrize("name", answers.METRICS)
def test_scores_empty_prediction_has_0(profile, name):
    for gold in ("Cork", "The", "The The", "!!!", "a", ""):
        for prediction in ("", " ", "\n"):
            assert answers.METRICS[name](prediction, [gold], profile) == 0


@every_profile
@pytest.mark.parametrize("name", answers.METRICS)
def test_scores_gold_of_articles_or_punctuation_is_compared_as_written(profile, name):
    score = answers.METRICS[name]
    for gold in ("The The", "A", "!!!", "?"):
        assert score(gold, [gold], profile) == 1
        assert score("Cork", [gold], profile) == score("an", ["The"], profile) == 0
    assert score("the the.", ["The The"], profile) == 1
    for prediction in ("the", "!!!"):
        assert score(prediction, ["Cork"], profile) == score(prediction, [""], profile) == 0
    assert score("Cork", ["Cork", "The"], profile) == 1


def test_f1_closed_words_have_no_partial_credit():
    closed = {"hotpot", "kirag", "flashrag", "two_wiki"}
    for prediction, gold in (
        ("yes it is", "yes"),
        ("no", "no one"),
        ("noanswer given", "noanswer"),
    ):
        for name in PROFILES:
            score = answers.f1(prediction, [gold], name)
            assert (score == 0) == (name in closed), (prediction, gold, name)
    assert all(answers.f1("Yes.", ["yes"], name) == 1.0 for name in PROFILES)


def test_f1_kirag_uses_only_first_gold():
    golds = ["Orlin County", "Orlin"]
    for name in PROFILES:
        expected = 2 / 3 if name == "kirag" else 1.0
        assert answers.f1("Orlin", golds, name) == pytest.approx(expected)
        assert (
            answers.exact_match("Orlin", golds, name) == 1.0
        )  # exact match uses all gold answers, also for kirag
    # A gold answer yes or no does not affect the others.
    assert answers.f1("Orlin", ["no", "Orlin"], "flashrag") == 1.0


def test_accuracy_is_substring_of_prediction():
    assert answers.accuracy("It lies in Orlin County, says the map", ["Orlin County"]) == 1
    assert (
        answers.accuracy("Orlin", ["Orlin County"]) == 0
    )  # a substring of the gold answer is not enough
    assert answers.accuracy("in the U.S.", ["x", "US"]) == 1
    assert answers.accuracy("a category", ["cat"]) == 1  # substrings of characters, not tokens
    assert answers.accuracy("anything", ["The The"]) == answers.accuracy("", ["The The"]) == 0
    assert answers.accuracy("It is The The, I think", ["The The"]) == 1


@every_profile
@given(prediction=ANSWERS, golds=GOLDS)
def test_scores_invariants(profile, prediction, golds):
    em = answers.exact_match(prediction, golds, profile)
    f1 = answers.f1(prediction, golds, profile)
    acc = answers.accuracy(prediction, golds, profile)
    assert em in (0, 1) and acc in (0, 1) and 0 <= f1 <= 1
    assert em <= acc
    # The order of gold answers only matters for KiRAG's F1.
    assert answers.exact_match(prediction, golds[::-1], profile) == em
    if profile != "kirag":
        assert answers.f1(prediction, golds[::-1], profile) == f1
        assert answers.f1(prediction, [*golds, "more"], profile) >= f1
        assert f1 == 1 or not em
    if all(answers.normalize_answer(text, profile) for text in (prediction, *golds)):
        if profile != "kirag":  # F1 is symmetric.
            assert f1 == max(answers.f1(gold, [prediction], profile) for gold in golds)
        # Text that normalization removes does not change scores.
        noisy = f"The {prediction} !"
        assert answers.exact_match(noisy, golds, profile) == em
        assert answers.f1(noisy, golds, profile) == f1


@every_profile
@given(text=ANSWERS)
def test_normalize_answer_is_idempotent(profile, text):
    once = answers.normalize_answer(text, profile)
    assert set(once).isdisjoint(string.punctuation)
    assert once == " ".join(once.split())
    assert set(once.split()).isdisjoint({"a", "an", "the"})
    assert answers.f1(once, [text], profile) in (0.0, 1.0)


def test_answer_scores_of_a_run():
    said = ["Orlin County", "no", "", "in Cork", "x"]
    golds = [("Orlin", "Orlin County"), ("yes",), ("Cork",), ("Cork", "the city of Cork"), ()]
    answered = [
        AnsweredQuestion(Question(str(i), "", gold), Prediction(text, "passage") if text else None)
        for i, (text, gold) in enumerate(zip(said, golds, strict=True))
    ]
    scores = answer_scores(answered, Scoring())
    assert scores["em"].top_Q.tolist() == [1, 0, 0, 0, 0]
    assert scores["acc"].top_Q.tolist() == [1, 0, 0, 1, 0]
    np.testing.assert_allclose(scores["f1"].top_Q, [1, 0, 0, 2 / 3, 0])
    for score in scores.values():
        assert score.bottom_Q.tolist() == [1, 1, 1, 1, 0]  # the last question has no gold answer
    assert (scores["em"].value, scores["acc"].value) == (0.25, 0.5)
    assert scores["f1"].value == pytest.approx((1 + 2 / 3) / 4)
    assert answer_scores(answered, Scoring("kirag"))["f1"].value == pytest.approx(
        (2 / 3 + 2 / 3) / 4
    )
    assert math.isnan(answer_scores([], Scoring())["em"].value)


def test_scores_reject_unknown_profile_and_missing_gold():
    with pytest.raises(ValueError, match="unknown answer profile 'squad'; choose one of musique"):
        answers.exact_match("x", ["x"], "squad")
    with pytest.raises(ValueError, match="at least one gold"):
        answers.f1("x", [])
    with pytest.raises(ValueError, match="at least one gold"):
        answers.accuracy("x", "x")  # a string would be read as a list of letters


def test_golds_of_kirag_ignores_aliases_but_not_open_domain_answers():
    """KiRAG's data has one answer of a MuSiQue question, and several of an NQ question."""
    several = Question("q", "Who?", ("Tarn", "Tarn town"), hops=2)
    stated = Question("q", "Who?", ("Tarn", "Osk", "Tarn town"), hops=2, aliases=("Tarn town",))
    open_domain = Question("q", "Who?", ("Tarn", "Osk"))
    assert answers.golds_of(several, "kirag") == ("Tarn",)
    assert answers.golds_of(stated, "kirag") == ("Tarn", "Osk")
    assert answers.golds_of(open_domain, "kirag") == ("Tarn", "Osk")
    for question in (several, stated, open_domain):
        assert answers.golds_of(question, "musique") == question.answers
    run = [AnsweredQuestion(several, Prediction("Tarn town", "passage"))]
    for profile, em in (("musique", 1.0), ("kirag", 0.0)):
        assert answer_scores(run, Scoring(profile))["em"].value == em
