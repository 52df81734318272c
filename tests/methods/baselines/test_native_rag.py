import pytest

from cirag_jax.errors import UserError
from cirag_jax.methods.baselines.native_rag import NativeRagConfig, native_rag
from cirag_jax.runtime.requests import Generate, Generated, Retrieve
from cirag_jax.types import Passage, Question, Triple
from tests.methods.fakes import FakeHandlers, prompt

PASSAGES = [Passage(f"p{i}", f"Title {i}", f"Text {i}.") for i in range(6)]


def run(text, **settings):
    fakes = FakeHandlers({None: PASSAGES}, {}, {"reader": [text]})
    return fakes, fakes.drive(native_rag(Question("q", "Who?", ()), NativeRagConfig(**settings)))


def test_native_rag_retrieves_and_reads_once():
    fakes, result = run("Answer: Ada Moen\nfor sure", num_passages=4, num_read=2)
    assert fakes.kinds() == ["Retrieve", "reader"]
    assert fakes.received(Retrieve) == [Retrieve("Who?", 4)]
    asked = fakes.received(Generate)[0]
    assert asked.max_tokens == 0 and "Title 1" in prompt(asked) and "Title 2" not in prompt(asked)
    assert (result.answer, result.granularity) == ("Ada Moen", "passage")
    assert result.passages == ("p0", "p1", "p2", "p3")
    assert result.attempts[0].evidence == ("Title 0\nText 0.", "Title 1\nText 1.")
    assert result.steps[0].query == "Who?" and result.parse_errors == {}


def test_native_rag_default_reads_all_ten_passages():
    settings = NativeRagConfig()
    assert settings.num_read == settings.num_passages == 10


def test_native_rag_empty_answer_is_counted():
    _, result = run(" \n ")
    assert result.answer == "" and result.parse_errors == {"answer_empty": 1}
    assert not result.attempts[0].sufficient


@pytest.mark.parametrize(
    ("text", "parse_errors"),
    [("Ada Moen, who", {"answer_truncated": 1}), ("Ada Moen\nborn in", {})],
)
def test_native_rag_truncated_answer_is_counted(text, parse_errors):
    assert run(Generated(text, "length"))[1].parse_errors == parse_errors


@pytest.mark.parametrize(
    "settings", [{"num_read": 0}, {"num_passages": 2}, {"num_read": 0, "units": "triple"}]
)
def test_native_rag_config_num_read_out_of_range_is_refused(settings):
    with pytest.raises(UserError, match="num_read"):
        NativeRagConfig(**settings)


ADA = Passage("a", "Ada", "Ada was born in Lund. She paints.")
LUND = Passage("l", "Lund", "Lund is in Skane.")
BORN, PAINTS = Triple("Ada", "born in", "Lund", "a", 0), Triple("Ada", "paints", "x", "a", 1)
LIES = Triple("Lund", "in", "Skane", "l", 0)


def run_units(scores, **settings):
    fakes = FakeHandlers({None: (ADA, LUND)}, {"a": (BORN, PAINTS), "l": (LIES,)},
                 {"reader": ["Answer: Skane"]}, scores)  # fmt: skip
    settings = NativeRagConfig(num_read=2, reader_format="brief", **settings)
    return fakes, settings, fakes.drive(native_rag(Question("q", "Who?", ()), settings))


def test_native_rag_sentences_are_ranked_by_question():
    scores = {"Lund: Lund is in Skane.": 3.0, "Ada: She paints.": 2.0}
    fakes, settings, result = run_units(scores, units="sentence")
    assert fakes.kinds() == ["Retrieve", "Rank", "reader"]
    assert settings.needs.rankers == ("units",) and not settings.needs.triples
    assert settings.needs.units == "sentence"  # An aligner of other units is refused.
    assert result.attempts[0].evidence == ("Lund: Lund is in Skane.", "Ada: She paints.")
    assert result.sentences == (("l", 0), ("a", 1), ("a", 0))
    assert (result.passages, result.granularity) == (("l", "a"), "sentence")


def test_native_rag_triples_are_ranked_by_question():
    scores = {("lund", "in", "skane"): 3.0, ("ada", "paints", "x"): 2.0}
    fakes, settings, result = run_units(scores, units="triple")
    assert fakes.kinds() == ["Retrieve", "Extract", "Rank", "reader"] and settings.needs.triples
    assert result.triples == (LIES, PAINTS, BORN)
    assert result.attempts[0].evidence == ("('lund', 'in', 'skane')", "('ada', 'paints', 'x')")
    assert (result.sentences, result.passages) == ((("l", 0), ("a", 1), ("a", 0)), ("l", "a"))


def test_native_rag_passages_are_reranked():
    fakes, settings, result = run_units({"l": 2.0, "a": -1.0}, num_passages=2, rerank_from=50)
    assert fakes.received(Retrieve) == [Retrieve("Who?", 50)]
    assert settings.needs.rankers == ("passages",) and result.passages == ("l",)
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
def test_native_rag_config_invalid_units_are_refused(settings, words):
    with pytest.raises(UserError, match=words):
        NativeRagConfig(**settings)
