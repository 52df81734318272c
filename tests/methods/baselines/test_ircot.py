"""IRCoT, and its variant IRDoc."""

import pytest

from cirag_jax.errors import UserError
from cirag_jax.methods.baselines.ircot import IrcotConfig, ircot
from cirag_jax.runtime.requests import Generate, Retrieve
from cirag_jax.types import Passage, Question
from tests.methods.fakes import FakeHandlers, prompt

QUESTION = "In which province was Ada Moen born?"
BORN = "Ada Moen was born in Lund."
FINAL_THOUGHT = "So the answer is: Skane."
PASSAGES = [Passage(f"p{i}", f"Title {i}", f"Text {i}.") for i in range(9)]


def run(thoughts, passages=None, **settings):
    fakes = FakeHandlers(
        passages or {QUESTION: PASSAGES[:2], BORN: PASSAGES[1:3], None: PASSAGES},
        {},
        {"reasoner": list(thoughts), "reader": ["Skane"]},
    )
    return fakes, fakes.drive(ircot(Question("q", QUESTION, ()), IrcotConfig(**settings)))


def test_ircot_thoughts_retrieve_until_the_answer():
    fakes, result = run([f"{BORN} Then more.", FINAL_THOUGHT])
    assert fakes.kinds() == ["Retrieve", "reasoner", "Retrieve", "reasoner", "reader"]
    assert [r.query for r in fakes.received(Retrieve)] == [QUESTION, BORN]
    assert (result.answer, result.granularity) == ("Skane", "passage")
    assert result.passages == ("p0", "p1", "p2")  # No passage is repeated.
    assert [(s.thought, s.next_query) for s in result.steps] == [
        (BORN, BORN),
        (FINAL_THOUGHT, None),
    ]
    first, second = (prompt(r) for r in fakes.received(Generate, "reasoner"))
    assert "Text 1." in first and "Text 2." not in first and BORN not in first
    assert "Text 0." in second and "Text 2." in second and second.endswith(BORN)
    last = prompt(fakes.received(Generate, "reader")[0])
    assert all(f"Text {i}." in last for i in range(3)) and BORN not in last


def test_ircot_max_thoughts_ends_reasoning():
    fakes, result = run(["One.", "Two."], max_thoughts=2)
    assert [asked.query for asked in fakes.received(Retrieve)] == [QUESTION, "One.", "Two."]
    assert len(fakes.received(Generate, "reasoner")) == 2 and result.parse_errors == {}
    assert [step.next_query for step in result.steps] == ["One.", "Two.", None]


def test_ircot_empty_thought_ends_reasoning():
    fakes, result = run([" \n"])
    assert (
        len(result.steps) == 1 and result.steps[0].next_query is None and result.answer == "Skane"
    )
    assert result.parse_errors == {"thought_empty": 1}


def test_ircot_passages_are_ranked_by_best_score():
    late = PASSAGES[5]
    passages = {QUESTION: PASSAGES[:3], BORN: [late, PASSAGES[2], PASSAGES[0]], None: PASSAGES}
    fakes, answered = run([BORN, FINAL_THOUGHT], passages, num_read=2)
    # p0: 1, then 1/3; p5: 1, later; p1: 1/2; p2: 1/3, then 1/2.
    assert answered.passages == ("p0", "p5", "p1", "p2")
    read = prompt(fakes.received(Generate, "reader")[0])
    assert "Text 5." in read and "Text 1." not in read


def test_ircot_repeated_thought_ends_reasoning():
    fakes, result = run([BORN, BORN])
    assert [step.next_query for step in result.steps] == [BORN, None]
    assert result.parse_errors == {"repeated_query": 1}


def test_irdoc_searches_with_best_unused_passage():
    lines = [f"{p.title}\n{p.text}" for p in PASSAGES]
    passages = {QUESTION: PASSAGES[:2], lines[0]: PASSAGES[:3], None: PASSAGES[:1]}
    fakes = FakeHandlers(passages, {}, {"reader": ["Skane"]})
    settings = IrcotConfig(thoughts="documents")
    answered = fakes.drive(ircot(Question("q", QUESTION, ()), settings))
    assert [r.query for r in fakes.received(Retrieve)] == [QUESTION, lines[0], lines[1]]
    assert settings.needs.roles == ("reader",) and answered.steps[2].next_query is None


def test_ircot_max_passages_limits_collection():
    passages = {QUESTION: PASSAGES[:2], BORN: PASSAGES[4:8]}
    fakes, answered = run([BORN, FINAL_THOUGHT], passages, max_passages=3)
    assert answered.passages == ("p0", "p4", "p1")  # The earliest passages stay; scores rank them.
    assert "Text 5." not in prompt(fakes.received(Generate, "reader")[0])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_passages": 0}, "num_passages=0 must be at least 1"),
        ({"max_passages": 0}, "max_passages=0 must be at least 1"),
        ({"max_thoughts": 0}, "max_thoughts=0 must be at least 1"),
        ({"num_read": -1}, "num_read=-1 must not be negative"),
        ({"thoughts": "none"}, "thoughts='none' is not one of model, documents"),
        ({"reader_format": "xml"}, "reader_format='xml'"),
    ],
)
def test_ircot_config_invalid_settings_are_refused(settings, message):
    with pytest.raises(UserError, match=message):
        IrcotConfig(**settings)
