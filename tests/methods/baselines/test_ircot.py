"""IRCoT by hand."""

import pytest

from cirag_jax.errors import UserError
from cirag_jax.methods.baselines.ircot import IrcotConfig, ircot
from cirag_jax.runtime.requests import Generate, Retrieve
from cirag_jax.types import Passage, Question
from tests.methods.by_hand import Hand, prompt

QUESTION = "In which province was Ada Moen born?"
BORN = "Ada Moen was born in Lund."
ENDS = "So the answer is: Skane."
PASSAGES = [Passage(f"p{i}", f"Title {i}", f"Text {i}.") for i in range(9)]


def run(thoughts, found=None, **settings):
    hand = Hand(
        found or {QUESTION: PASSAGES[:2], BORN: PASSAGES[1:3], None: PASSAGES},
        {},
        {"reasoner": list(thoughts), "reader": ["Skane"]},
    )
    return hand, hand.drive(ircot(Question("q", QUESTION, ()), IrcotConfig(**settings)))


def test_every_thought_retrieves_until_one_has_the_answer():
    hand, found = run([f"{BORN} Then more.", ENDS])
    assert hand.kinds() == ["Retrieve", "reasoner", "Retrieve", "reasoner", "reader"]
    assert [r.query for r in hand.asked(Retrieve)] == [QUESTION, BORN]
    assert (found.answer, found.granularity) == ("Skane", "passage")
    assert found.passages == ("p0", "p1", "p2")  # collected, each once
    assert [(s.thought, s.next_query) for s in found.steps] == [(BORN, BORN), (ENDS, None)]
    first, second = (prompt(r) for r in hand.asked(Generate, "reasoner"))
    assert "Text 1." in first and "Text 2." not in first and BORN not in first
    assert "Text 0." in second and "Text 2." in second and second.endswith(BORN)
    read = prompt(hand.asked(Generate, "reader")[0])
    assert all(f"Text {i}." in read for i in range(3)) and BORN not in read


def test_it_stops_after_the_last_thought():
    hand, found = run(["One.", "Two."], max_thoughts=2)
    assert [asked.query for asked in hand.asked(Retrieve)] == [QUESTION, "One.", "Two."]
    assert len(hand.asked(Generate, "reasoner")) == 2 and found.parse_errors == {}
    assert [step.next_query for step in found.steps] == ["One.", "Two.", None]


def test_no_thought_ends_the_reasoning():
    hand, found = run([" \n"])
    assert len(found.steps) == 1 and found.steps[0].next_query is None and found.answer == "Skane"
    assert found.parse_errors == {"thought_empty": 1}


def test_the_ranked_list_is_best_first():
    """A passage counts with its best score of all retrievals, and recall looks from the best."""
    late = PASSAGES[5]
    found = {QUESTION: PASSAGES[:3], BORN: [late, PASSAGES[2], PASSAGES[0]], None: PASSAGES}
    hand, answered = run([BORN, ENDS], found, num_read=2)
    # p0: 1, then 1/3; p5: 1, later; p1: 1/2; p2: 1/3, then 1/2.
    assert answered.passages == ("p0", "p5", "p1", "p2")
    read = prompt(hand.asked(Generate, "reader")[0])
    assert "Text 5." in read and "Text 1." not in read


def test_a_thought_that_comes_again_ends_the_reasoning():
    hand, found = run([BORN, BORN])
    assert [step.next_query for step in found.steps] == [BORN, None]
    assert found.parse_errors == {"repeated_query": 1}


def test_irdoc_searches_with_the_best_passage_that_it_has_not_used():
    lines = [f"{p.title}\n{p.text}" for p in PASSAGES]
    found = {QUESTION: PASSAGES[:2], lines[0]: PASSAGES[:3], None: PASSAGES[:1]}
    hand = Hand(found, {}, {"reader": ["Skane"]})
    settings = IrcotConfig(thoughts="documents")
    answered = hand.drive(ircot(Question("q", QUESTION, ()), settings))
    assert [r.query for r in hand.asked(Retrieve)] == [QUESTION, lines[0], lines[1]]
    assert settings.needs.roles == ("reader",) and answered.steps[2].next_query is None


def test_passages_are_collected_up_to_the_cap():
    found = {QUESTION: PASSAGES[:2], BORN: PASSAGES[4:8]}
    hand, answered = run([BORN, ENDS], found, max_passages=3)
    assert answered.passages == ("p0", "p4", "p1")  # the cap is by time, the order by score
    assert "Text 5." not in prompt(hand.asked(Generate, "reader")[0])


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"num_passages": 0}, "num_passages=0 must be at least 1"),
        ({"max_passages": 0}, "max_passages=0 must be at least 1"),
        ({"max_thoughts": 0}, "max_thoughts=0 must be at least 1"),
        ({"num_read": -1}, "num_read=-1 must not be negative"),
        ({"thoughts": "none"}, "thoughts='none' is not one of model, documents"),
        ({"reader_format": "xml"}, "reader_format='xml'"),
    ],
)
def test_settings_out_of_range_are_refused(settings, said):
    with pytest.raises(UserError, match=said):
        IrcotConfig(**settings)
