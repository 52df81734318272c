from cirag_jax.methods.baselines.direct import DirectConfig, direct
from cirag_jax.runtime.requests import Generate
from cirag_jax.types import Question
from tests.methods.fakes import FakeHandlers, prompt


def test_direct_makes_one_reader_request():
    fakes = FakeHandlers({}, {}, {"reader": ["Ada Moen"]})
    result = fakes.drive(direct(Question("q", "Who?", ()), DirectConfig()))
    assert fakes.kinds() == ["reader"] and "Who?" in prompt(fakes.received(Generate)[0])
    assert (result.answer, result.granularity, result.passages) == ("Ada Moen", "default", ())


def test_direct_needs_only_the_reader():
    needs = DirectConfig().needs
    assert needs.roles == ("reader",) and not (needs.corpus or needs.triples or needs.rankers)
