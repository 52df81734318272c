"""Metric families, compared with hand-computed values."""

import dataclasses
import math

import pytest

from cirag_jax.errors import UserError
from cirag_jax.evaluation import metrics
from cirag_jax.evaluation.evidence import endpoints
from cirag_jax.evaluation.scoring import NAMES, AnsweredQuestion, Scoring
from cirag_jax.types import Attempt, Passage, Prediction, Question, Triple

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


def scores_of(pairs, names=NAMES, corpus=True, **scoring):
    """Returns the value of every score, and the number of questions that it covers."""
    result = metrics.measure(
        [AnsweredQuestion(*pair) for pair in pairs], Scoring(**scoring), names, corpus=corpus
    )
    return {name: (ratio.value, int(ratio.bottom_Q.sum())) for name, ratio in result.items()}


def test_recall_scores_at_three_granularities():
    assert scores_of([(QUESTION, FOUND)], ["recall"], recall_at=(5, 3)) == {
        "recall@5": (1.0, 1), "recall@3": (0.5, 1),
        "sentence_recall@5": (0.5, 1), "sentence_recall@3": (0.5, 1),
        # Birth and death at one place have the same pair of names, at rank 4. The other pair is
        # reversed.
        "triple_recall@5": (1.0, 1), "triple_recall@3": (0.5, 1),
    }  # fmt: skip


def test_ranking_scores_of_passages_equal_hand_computed():
    pairs = [(QUESTION, FOUND), (QUESTION, None), (BARE, FOUND)]
    scores = scores_of(pairs, ["ranking"], recall_at=(3, 5))
    third, fifth, ideal = 1 / math.log2(4), 1 / math.log2(6), 1 + 1 / math.log2(3)
    assert scores == {
        "complete@3": (0.0, 2), "complete@5": (0.5, 2),
        "ndcg@3": (pytest.approx(third / ideal / 2), 2),
        "ndcg@5": (pytest.approx((third + fifth) / ideal / 2), 2),
        "map": (pytest.approx((1 / 3 + 2 / 5) / 2 / 2), 2), "mrr": (pytest.approx(1 / 6), 2),
    }  # fmt: skip
    none = [(QUESTION, Prediction("Orlin", "triple", triples=FOUND.triples))]
    assert [count for _, count in scores_of(none, ["ranking"]).values()] == [0] * 6
    reasons = (metrics.reason(name, [AnsweredQuestion(*none[0])]) for name in ("map", "complete@3"))
    assert set(reasons) == {"ranks no passages"}
    assert metrics.reason("mrr", [AnsweredQuestion(BARE, FOUND)]) == "no gold passages"


def test_recall_scores_with_overlapping_passages():
    """The last sentence of p1 is also the first of p2, so p2 counts as evidence for it."""
    question = dataclasses.replace(
        QUESTION,
        supporting=("p1", "p3"),
        supporting_sentences=(("p1", 4), ("p3", 0)),
        same_sentences=((("p1", 4), ("p2", 0)),),
    )
    result = Prediction("", "passage", passages=("p2", "p3"), sentences=(("p9", 0), ("p2", 0)))
    scores = scores_of([(question, result)], ["recall"], recall_at=(1, 2))
    assert [scores[f"recall@{k}"][0] for k in (1, 2)] == [0.5, 1.0]
    assert [scores[f"sentence_recall@{k}"][0] for k in (1, 2)] == [0.0, 0.5]
    # p1 is also evidence for another sentence, which p2 does not have.
    more = dataclasses.replace(
        question, supporting_sentences=(("p1", 1), *(question.supporting_sentences or ()))
    )
    scores = scores_of([(more, result)], ["recall"], recall_at=(2,))
    assert scores["recall@2"][0] == 0.5 and scores["sentence_recall@2"][0] == pytest.approx(1 / 3)


def test_recall_scores_unranked_granularity_has_no_score():
    passages = Prediction("Bess", "passage", passages=FOUND.passages)
    result = scores_of([(QUESTION, passages), (QUESTION, None)], ["recall"], recall_at=(5,))
    assert result["recall@5"] == (0.5, 2)
    assert result["sentence_recall@5"][1] == result["triple_recall@5"][1] == 0


def test_recall_scores_failed_questions_score_zero():
    pairs = [
        (QUESTION, FOUND),
        (QUESTION, None),
        (BARE, FOUND),
        (QUESTION, Prediction("", "default")),
    ]
    result = scores_of(pairs, ["recall", "answers"], recall_at=(5,))
    for name in ("recall@5", "triple_recall@5"):
        assert result[name] == (pytest.approx(1 / 3), 3)
    assert result["em"] == result["f1"] == result["acc"] == (0.25, 4)
    unscored = scores_of(
        [(BARE, FOUND), (dataclasses.replace(BARE, answers=()), FOUND)], ["recall"]
    )
    assert all(value != value and count == 0 for value, count in unscored.values())
    partly = dataclasses.replace(QUESTION, evidences=None, supporting_sentences=())
    result = scores_of([(QUESTION, FOUND), (partly, FOUND)], ["recall"], recall_at=(1,))
    assert [count for _, count in result.values()] == [2, 1, 1]


def test_measure_without_corpus_skips_retrieval():
    assert set(scores_of([(QUESTION, FOUND)], corpus=False)) == {"em", "f1", "acc"}
    assert {"recall@3", "ndcg@3", "hit@3"} < set(scores_of([(QUESTION, FOUND)]))


def test_hit_scores_only_without_gold_passages():
    texts = {
        "p9": Passage("p9", "A road", "Nobody's road."),
        "p8": Passage("p8", "Orlin", "He is NOBODY, they say."),
        "p2": Passage("p2", "Nobody", "x"),
    }
    read = []

    def passages():
        read.append(1)
        return texts

    def hit(answers, k):
        question = dataclasses.replace(BARE, answers=answers)
        return scores_of([(question, FOUND)], ["hits"], recall_at=(k,), passages=passages)[
            f"hit@{k}"
        ]

    assert hit(("he is nobody",), 1) == (0.0, 1) and hit(("he is nobody",), 2) == (1.0, 1)
    assert hit(("nobody",), 1) == (1.0, 1)  # an apostrophe is a token
    assert hit(("orlin",), 2) == (1.0, 1)  # titles are searched, too
    assert hit(("obody",), 5) == hit(("...!",), 5) == (0.0, 1)
    assert hit((), 5)[1] == hit(("", " "), 5)[1] == 0  # no gold answers
    read.clear()
    result = scores_of([(QUESTION, FOUND)], ["hits"], passages=passages)
    assert result["hit@3"][1] == 0 and not read  # gold passages are known, so recall applies
    nowhere = dataclasses.replace(BARE, supporting=())  # known to have no gold passage
    assert scores_of([(nowhere, FOUND)], ["hits"], passages=passages)["hit@3"][1] == 0
    assert scores_of([(BARE, None)], ["hits"], recall_at=(1,))["hit@1"] == (0.0, 1)


@pytest.mark.parametrize(
    ("text", "answer", "hit"),
    [
        ("in São Paulo.", "SA\u0303O PAULO", 1.0),
        ("in Sao Paulo.", "São Paulo", 0.0),
        ("Thomas Müller", "Mu", 0.0),  # combining marks belong to their word
        ("हिन्दी", "ह", 0.0),
        ("snake_case", "snake", 1.0),  # an underscore is a token, as in DPR
        ("one\x00two", "one two", 1.0),
    ],
)
def test_hit_scores_match_whole_words(text, answer, hit):
    question = dataclasses.replace(BARE, answers=(answer,))
    texts = {"p9": Passage("p9", "", text)}
    pairs = [(question, FOUND)]
    assert scores_of(pairs, ["hits"], passages=lambda: texts)["hit@3"] == (hit, 1)


def test_hit_scores_read_each_passage_once(monkeypatch):
    read = []
    tokens = metrics._tokens
    monkeypatch.setattr(metrics, "_tokens", lambda text: read.append(text) or tokens(text))
    texts = {name: Passage(name, "", f"text of {name}") for name in FOUND.passages}
    question = dataclasses.replace(BARE, answers=("no such", "nor this"))
    scores_of([(question, FOUND)] * 3, ["hits"], passages=lambda: texts, recall_at=(1, 2))
    output = [text.rpartition(" ")[2] for text in read if "text of" in text]
    assert sorted(output) == ["p8", "p9"]
    assert len(read) == len(output) + 3 * 2


def test_recall_scores_check_ranked_items_once_per_run(monkeypatch):
    checks = 0

    class Ranked(list):
        def __bool__(self):
            nonlocal checks
            checks += 1
            return False

    kinds = {"passage": (lambda found: (), lambda question: question.supporting, lambda _: {})}
    monkeypatch.setattr(metrics, "GRANULARITIES", kinds)
    monkeypatch.setattr(metrics, "list", Ranked, raising=False)
    scores_of([(QUESTION, FOUND)] * 50, ["recall"], recall_at=(5,))
    assert checks == 50


def test_raw_or_short_scores_keep_larger_score():
    """The short answer has the larger exact match; the raw response contains more gold answers."""
    question = dataclasses.replace(BARE, answers=("Orlin", "the county of Orlin in Tarn"))
    attempts = (
        Attempt("triple", ("x",), "I cannot say.", "", False),
        Attempt("passage", ("x",), "the county of Orlin, in Tarn!", "Orlin", True),
    )
    result = Prediction("Orlin", "passage", attempts=attempts)
    assert metrics.raw(result) == "the county of Orlin, in Tarn!"
    both = scores_of([(question, result)], ["answers", "raw_or_short"])
    assert both["em"] == both["em_max"] == (1.0, 1)
    wrong = dataclasses.replace(result, answer="Tarn")
    assert (
        metrics.raw(wrong) == "the county of Orlin, in Tarn!"
    )  # no attempt has this answer, so the last one is used
    scores = scores_of([(question, wrong)], ["answers", "raw_or_short"])
    assert scores["em"][0] == 0 and scores["em_max"][0] == 1 > scores["f1"][0]
    short = dataclasses.replace(
        result, attempts=(Attempt("passage", (), "So: Orlin", "Orlin", True),)
    )
    scores = scores_of([(question, short)], ["raw_or_short"])
    assert scores["em_max"] == (1.0, 1)
    assert scores_of([(question, None)], ["raw_or_short"])["acc_max"] == (0.0, 1)
    assert metrics.raw(Prediction("", "default")) == ""


def test_stage_scores_by_granularity():
    """Two answers are from triples (right, half right), one from sentences, one is the default."""
    question = dataclasses.replace(BARE, answers=("Orlin County",))
    answers = [
        ("triple", "the Orlin County"), ("triple", "Orlin Bay"), ("default", "Tarn"),
        ("sentence", "Orlin County"),
    ]  # fmt: skip
    pairs = [(question, Prediction(answer, stage)) for stage, answer in answers]
    hidden = (dataclasses.replace(BARE, answers=()), Prediction("x", "triple"))
    down = Attempt("triple", (), "", "", False, "the server is down")
    failed = (question, Prediction("", "triple", attempts=(down,)))
    result = scores_of([*pairs, (question, None), hidden, failed], ["by_granularity"])
    assert result["triple_em"] == (0.5, 2) and result["triple_f1"] == (0.75, 2)
    assert result["sentence_em"] == result["sentence_f1"] == (1.0, 1)
    assert result["default_em"] == result["default_f1"] == (0.0, 1)
    value, count = result["passage_f1"]
    assert value != value and count == 0  # no answers: no score
    # The sum is the cascade's score without the failed question.
    whole = scores_of(pairs, ["answers"])
    assert whole["f1"] == (pytest.approx((2 * 0.75 + 1 + 0) / 4), 4)
    assert metrics.title("triple_f1") == "triple F1"


def test_rouge_scores_match_hand_computed_values():
    """Six gold words and five predicted words have four words and two bigrams in common."""
    question = dataclasses.replace(BARE, answers=("no", "The cat sat on the mat."))
    result = scores_of(
        [(question, Prediction("a cat sat on mat", "passage")), (question, None)], ["rouge"]
    )
    # Words: recall 4/6, precision 4/5. Bigrams: 2/5 and 2/4. In order: 4/6 and 4/5.
    assert result["rouge1"] == (pytest.approx(8 / 11 / 2), 2)
    assert result["rouge2"] == (pytest.approx(4 / 9 / 2), 2)
    assert result["rougeL"] == (pytest.approx(8 / 11 / 2), 2)
    turned = scores_of([(question, Prediction("mat cat on sat", "passage"))], ["rouge"])
    assert turned["rouge1"] == (pytest.approx(8 / 10), 1)
    assert turned["rougeL"] == (pytest.approx(4 / 10), 1)  # "cat on" or "cat sat"
    assert scores_of([(dataclasses.replace(BARE, answers=()), None)], ["rouge"])["rougeL"][1] == 0


def test_endpoints_normalize_both_names():
    assert endpoints("Ilse Varga", "Tarnow Bay") == endpoints("TARNOW bay!", "ilse-varga")
    assert endpoints("Ilse Varga", "Tarnow Bay") != endpoints("Ilse Varga", "Tarnow")
    assert endpoints("Bråk", "X") != endpoints("Br k", "X")  # letters of every script are kept
    assert endpoints("東京", "日本") != endpoints("大阪", "日本")
    assert endpoints("+", "x") != endpoints("-", "x")  # no letters remain, so the signs count


def test_metrics_have_titles_and_invalid_settings_are_rejected():
    assert metrics.title("recall@5") == "R@5" and metrics.title("f1") == "F1"
    assert metrics.title("sentence_recall@2") == "sentence R@2"
    metrics.check(NAMES)
    with pytest.raises(
        UserError, match=r"config\.metrics=\('bleu',\) must be one or more of answers,"
    ):
        metrics.check(("bleu",))
    with pytest.raises(UserError, match=r"config\.metrics=\(\) must be one or more of"):
        metrics.check(())
    for bad in ((), (0,), (3, 3), ("a",), (2.5,)):
        with pytest.raises(UserError, match=r"config\.recall_at=.* must be distinct numbers"):
            Scoring(recall_at=bad)
