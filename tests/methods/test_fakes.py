"""The fake handlers that tests of methods use."""

from cirag_jax.llm.types import Message
from cirag_jax.runtime.requests import Demonstrate, Extract, Generate, Rank, Retrieve, Score
from cirag_jax.types import Feedback, Passage, Question, Triple
from tests.methods.fakes import FakeHandlers

A, B = Passage("a", "A", "One."), Passage("b", "B", "Two.")
FACT = Triple("A", "is", "one", "a", 0)
MESSAGES = (Message("user", "?"),)


def program():
    first = yield Retrieve("q", 2)
    second, third = yield [
        Retrieve("r", 1, Feedback(0.5, (("a", 0.5),))),
        Generate(MESSAGES, "planner"),
    ]
    facts = yield Extract(first.passages)
    ranked = yield (Rank("q", (A, B), 1, "passages"), Rank("q", ("x", FACT, "y"), 0, "units"))
    scored = yield Score(MESSAGES, ("yes", "no"), "judge")
    shown = yield Demonstrate("q", 1)
    return first, second, third, facts, ranked, scored, shown


def test_fake_handlers_answer_every_kind_of_request():
    known = Question("t", "Train?", ("x",))
    fakes = FakeHandlers(
        {"q": (A, B), None: (B, A)}, {"a": (FACT,)},
        {"planner": ["plan"], "judge": [(-0.1, -2.0)]},
        {"b": 1.0, "y": 0.5, ("a", "is", "one"): 0.75}, [known],
    )  # fmt: skip
    first, second, third, facts, ranked, scored, shown = fakes.drive(program())
    assert (first.passages, second.passages, third.text) == ((A, B), (B,), "plan")
    assert facts.triples == ((FACT,), None)
    assert [r.texts for r in ranked] == [(B,), (FACT, "y", "x")]
    assert scored.logprobs == (-0.1, -2.0) and shown.questions == (known,)
    assert fakes.kinds() == [
        "Retrieve", "Retrieve", "planner", "Extract", "Rank", "Rank", "judge", "Demonstrate",
    ]  # fmt: skip
