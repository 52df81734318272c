"""Vector-PRF."""

import pytest

from cirag_jax.commands import opening
from cirag_jax.config_files import load_config
from cirag_jax.errors import UserError
from cirag_jax.methods.baselines.vector_prf import VectorPrfConfig, vector_prf
from cirag_jax.runtime.requests import Generate, RequestError, Retrieve
from cirag_jax.types import Feedback, Passage, Question
from tests.methods.fakes import FakeHandlers, prompt

QUESTION = "In which province was Ada Moen born?"
PASSAGES = [Passage(f"p{i}", f"Title {i}", f"Text {i}.") for i in range(9)]


def run(reader="Skane", passages=PASSAGES, **settings):
    fakes = FakeHandlers({None: passages}, {}, {"reader": [reader]})
    return fakes, fakes.drive(vector_prf(Question("q", QUESTION, ()), VectorPrfConfig(**settings)))


def test_vector_prf_average_weights_query_and_passages_equally():
    fakes, result = run(num_passages=4, num_read=2)
    assert fakes.kinds() == ["Retrieve", "Retrieve", "reader"]
    moved = Feedback(0.25, (("p0", 0.25), ("p1", 0.25), ("p2", 0.25)))
    assert fakes.received(Retrieve) == [Retrieve(QUESTION, 3), Retrieve(QUESTION, 4, moved)]
    read = prompt(fakes.received(Generate)[0])
    assert "Text 1." in read and "Text 2." not in read
    assert (result.answer, result.passages) == ("Skane", ("p0", "p1", "p2", "p3"))
    assert [step.query for step in result.steps] == [QUESTION] * 2


def test_vector_prf_rocchio_weights_the_mean_of_the_passages():
    fakes, _ = run(combination="rocchio", num_feedback=2)
    assert fakes.received(Retrieve)[1].feedback == Feedback(0.4, (("p0", 0.3), ("p1", 0.3)))
    fakes, _ = run(combination="rocchio", num_feedback=1, alpha=1, beta=0.5)
    assert fakes.received(Retrieve)[1].feedback == Feedback(1, (("p0", 0.5),))


def test_vector_prf_fewer_passages_than_num_feedback_share_the_weight():
    fakes, _ = run(passages=PASSAGES[:1])
    assert fakes.received(Retrieve)[1].feedback == Feedback(0.5, (("p0", 0.5),))


def test_vector_prf_without_passages_reads_nothing():
    fakes, result = run(passages=())
    assert fakes.kinds() == ["Retrieve", "reader"] and result.passages == ()


def test_vector_prf_failed_reader_keeps_the_passages():
    _, result = run(RequestError("too long"))
    assert result.error == "too long" and len(result.passages) == 9


@pytest.mark.parametrize(
    "flags",
    [
        ["--config.retriever.kind=bm25"],
        ["--config.retriever.kind=linked"],
        ["--config.retriever.units=sentence"],
    ],
)
def test_vector_prf_index_without_passage_vectors_is_refused(flags):
    config = load_config("configs/methods/vector_prf.py", flags)
    with pytest.raises(UserError, match="does not support relevance feedback, which vector_prf"):
        opening.check(config, VectorPrfConfig().needs)


@pytest.mark.parametrize("preset", ["", ":small", ":medium", ":paper"])
def test_vector_prf_presets_support_feedback(preset):
    config = load_config(f"configs/methods/vector_prf.py{preset}")
    opening.check(config, VectorPrfConfig().needs)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"num_feedback": 0}, "num_feedback"),
        ({"num_read": 11}, "num_read=11 must not exceed num_passages=10"),
        ({"combination": "sum"}, "combination='sum' is not one of average, rocchio"),
        ({"combination": "rocchio", "alpha": 0.0, "beta": 0.0}, "needs an alpha or a beta above 0"),
        ({"alpha": -1.0}, "alpha"),
    ],
)
def test_vector_prf_config_invalid_settings_are_refused(settings, words):
    with pytest.raises(UserError, match=words):
        VectorPrfConfig(**settings)
