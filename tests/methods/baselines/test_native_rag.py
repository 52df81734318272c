"""NativeRAG by hand, and the table of methods."""

import pytest

from cirag_jax.errors import UserError
from cirag_jax.methods.baselines.native_rag import NativeRagConfig, native_rag
from cirag_jax.runtime.requests import Generate, Generated, Retrieve
from cirag_jax.types import Passage, Question, Triple
from tests.methods.by_hand import Hand, prompt

PASSAGES = [Passage(f"p{i}", f"Title {i}", f"Text {i}.") for i in range(6)]


def run(text, **settings):
    hands = Hand({None: PASSAGES}, {}, {"reader": [text]})
    return hands, hands.drive(native_rag(Question("q", "Who?", ()), NativeRagConfig(**settings)))


def test_one_retrieval_one_reading():
    hands, found = run("Answer: Ada Moen\nfor sure", num_passages=4, num_read=2)
    assert hands.kinds() == ["Retrieve", "reader"]
    assert hands.asked(Retrieve) == [Retrieve("Who?", 4)]
    asked = hands.asked(Generate)[0]
    assert asked.max_tokens == 0 and "Title 1" in prompt(asked) and "Title 2" not in prompt(asked)
    assert (found.answer, found.granularity) == ("Ada Moen", "passage")
    assert found.passages == ("p0", "p1", "p2", "p3")
    assert found.attempts[0].evidence == ("Title 0\nText 0.", "Title 1\nText 1.")
    assert found.steps[0].query == "Who?" and found.parse_errors == {}


def test_it_reads_the_ten_passages_that_it_retrieves():
    settings = NativeRagConfig()
    assert settings.num_read == settings.num_passages == 10


def test_an_empty_answer_is_counted():
    _, found = run(" \n ")
    assert found.answer == "" and found.parse_errors == {"answer_empty": 1}
    assert not found.attempts[0].sufficient


@pytest.mark.parametrize(
    ("text", "parse_errors"),
    [("Ada Moen, who", {"answer_truncated": 1}), ("Ada Moen\nborn in", {})],
)
def test_an_answer_that_was_cut_off_is_counted(text, parse_errors):
    assert run(Generated(text, "length"))[1].parse_errors == parse_errors


@pytest.mark.parametrize(
    "settings", [{"num_read": 0}, {"num_passages": 2}, {"num_read": 0, "units": "triple"}]
)
def test_settings_out_of_range_are_refused(settings):
    with pytest.raises(UserError, match="num_read"):
        NativeRagConfig(**settings)


ADA = Passage("a", "Ada", "Ada was born in Lund. She paints.")
LUND = Passage("l", "Lund", "Lund is in Skane.")
BORN, PAINTS = Triple("Ada", "born in", "Lund", "a", 0), Triple("Ada", "paints", "x", "a", 1)
LIES = Triple("Lund", "in", "Skane", "l", 0)


def run_units(scores, **settings):
    hands = Hand({None: (ADA, LUND)}, {"a": (BORN, PAINTS), "l": (LIES,)},
                 {"reader": ["Answer: Skane"]}, scores)  # fmt: skip
    settings = NativeRagConfig(num_read=2, reader_format="brief", **settings)
    return hands, settings, hands.drive(native_rag(Question("q", "Who?", ()), settings))


def test_sentences_are_ranked_by_the_question():
    scores = {"Lund: Lund is in Skane.": 3.0, "Ada: She paints.": 2.0}
    hands, settings, found = run_units(scores, units="sentence")
    assert hands.kinds() == ["Retrieve", "Rank", "reader"]
    assert settings.needs.rankers == ("units",) and not settings.needs.triples
    assert settings.needs.units == "sentence"  # an aligner of others is refused
    assert found.attempts[0].evidence == ("Lund: Lund is in Skane.", "Ada: She paints.")
    assert found.sentences == (("l", 0), ("a", 1), ("a", 0))
    assert (found.passages, found.granularity) == (("l", "a"), "sentence")


def test_triples_are_ranked_by_the_question():
    scores = {("lund", "in", "skane"): 3.0, ("ada", "paints", "x"): 2.0}
    hands, settings, found = run_units(scores, units="triple")
    assert hands.kinds() == ["Retrieve", "Extract", "Rank", "reader"] and settings.needs.triples
    assert found.triples == (LIES, PAINTS, BORN)
    assert found.attempts[0].evidence == ("('lund', 'in', 'skane')", "('ada', 'paints', 'x')")
    assert (found.sentences, found.passages) == ((("l", 0), ("a", 1), ("a", 0)), ("l", "a"))


def test_passages_may_be_reranked():
    hands, settings, found = run_units({"l": 2.0, "a": -1.0}, num_passages=2, rerank_from=50)
    assert hands.asked(Retrieve) == [Retrieve("Who?", 50)]
    assert settings.needs.rankers == ("passages",) and found.passages == ("l",)
    assert settings.needs.units is None


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"units": "page"}, "units='page'"),
        ({"units": "sentence"}, "needs reader_format"),
        ({"rerank_from": 5}, "rerank_from"),
        ({"rerank_from": -1}, "rerank_from=-1 must not be negative"),
        ({"num_passages": 0, "units": "sentence", "reader_format": "brief"}, "num_passages=0 must"),
        ({"reader_format": "xml"}, "documents, thought"),
    ],
)
def test_units_and_formats_out_of_range_are_refused(settings, words):
    with pytest.raises(UserError, match=words):
        NativeRagConfig(**settings)
