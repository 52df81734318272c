"""Direct answering by hand."""

from cirag_jax.methods.baselines.direct import DirectConfig, direct
from cirag_jax.runtime.requests import Generate
from cirag_jax.types import Question
from tests.methods.by_hand import Hand, prompt


def test_the_reader_alone_is_asked():
    hands = Hand({}, {}, {"reader": ["Ada Moen"]})
    found = hands.drive(direct(Question("q", "Who?", ()), DirectConfig()))
    assert hands.kinds() == ["reader"] and "Who?" in prompt(hands.asked(Generate)[0])
    assert (found.answer, found.granularity, found.passages) == ("Ada Moen", "default", ())


def test_nothing_but_the_reader_is_needed():
    needs = DirectConfig().needs
    assert needs.roles == ("reader",) and not (needs.corpus or needs.triples or needs.rankers)
