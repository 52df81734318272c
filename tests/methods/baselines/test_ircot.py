"""IRCoT, and its variant IRDoc."""

import pytest

from cirag_jax.errors import UserError
from cirag_jax.methods.baselines.ircot import IrcotConfig, ircot
from cirag_jax.runtime.requests import Generate, Rank, Retrieve
from cirag_jax.types import Passage, Question
from configs.methods import ircot as ircot_config
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


def test_ircot_context_replace_shows_the_last_passages():
    fakes, result = run([BORN, FINAL_THOUGHT], context="replace")
    first, second = (prompt(r) for r in fakes.received(Generate, "reasoner"))
    assert "Text 0." in first and "Text 0." not in second and "Text 2." in second
    read = prompt(fakes.received(Generate, "reader")[0])
    assert "Text 0." not in read and "Text 1." in read and "Text 2." in read
    assert result.passages == ("p0", "p1", "p2")  # Recall counts all passages.
    assert fakes.requests[0] == run([FINAL_THOUGHT])[0].requests[0]


def test_ircot_rerank_keeps_the_best_passages():
    fakes = FakeHandlers(
        {None: PASSAGES[:4]}, {}, {"reasoner": [FINAL_THOUGHT], "reader": ["Skane"]},
        {"p2": 2.0, "p3": 1.0, "p0": -1.0},
    )  # fmt: skip
    settings = IrcotConfig(rerank_from=50)
    answered = fakes.drive(ircot(Question("q", QUESTION, ()), settings))
    assert fakes.received(Retrieve) == [Retrieve(QUESTION, 50)]
    assert fakes.received(Rank) == [Rank(QUESTION, tuple(PASSAGES[:4]), 5, "passages")]
    assert answered.passages == ("p2", "p3") and settings.needs.rankers == ("passages",)
    assert IrcotConfig().needs.rankers == ()


@pytest.mark.parametrize(
    ("thoughts", "answer", "errors"),
    [
        ([BORN, FINAL_THOUGHT], "Skane", {}),
        ([BORN, "So the answer is:"], "", {"answer_empty": 1}),
        ([BORN, ""], BORN, {"answer_no_answer_mark": 1, "thought_empty": 1}),
    ],
)
def test_ircot_answer_from_thoughts_needs_no_reader(thoughts, answer, errors):
    fakes = FakeHandlers({None: PASSAGES}, {}, {"reasoner": thoughts})
    settings = IrcotConfig(answer_from="thoughts")
    result = fakes.drive(ircot(Question("q", QUESTION, ()), settings))
    assert settings.needs.roles == ("reasoner",)
    assert (result.answer, result.parse_errors) == (answer, errors)
    assert result.attempts[0].response.startswith(BORN)


def test_ircot_temperature_is_that_of_thoughts():
    fakes, _ = run([BORN, FINAL_THOUGHT], temperature=0.3)
    assert [r.temperature for r in fakes.received(Generate)] == [0.3, 0.3, 0.0]


def test_ircot_presets_of_papers_have_their_values():
    dualrag, cirag = (ircot_config.get_config(name) for name in ("dualrag", "cirag"))
    assert (dualrag.ircot.max_thoughts, cirag.ircot.max_thoughts) == (5, 4)
    assert (dualrag.ircot.rerank_from, cirag.ircot.rerank_from) == (50, 0)
    assert dualrag.rankers.passages.model == "BAAI/bge-reranker-v2-m3"
    assert (dualrag.data.corpus, cirag.data.corpus) == ("ircot_full", "selected_questions")
    for config in (dualrag, cirag):
        assert (config.ircot.context, config.ircot.num_passages) == ("replace", 10)
        assert (config.ircot.answer_from, config.ircot.temperature) == ("thoughts", 0.3)
        assert (config.data.split, config.data.limit) == ("dev", 1000)
        IrcotConfig(**config.ircot)
    assert (
        ircot_config.get_config("paper").ircot.to_dict()
        == ircot_config.get_config().ircot.to_dict()
    )
    with pytest.raises(UserError, match="small, medium, paper, dualrag, cirag"):
        ircot_config.get_config("code")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"thoughts": "documents", "answer_from": "thoughts"}, "needs thoughts=model"),
        ({"context": "none"}, "context='none' is not one of accumulate, replace"),
        ({"temperature": -1.0}, "temperature"),
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
