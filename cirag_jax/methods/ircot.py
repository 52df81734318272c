"""IRCoT: retrieval interleaved with a chain of thought (Trivedi et al., ACL 2023)."""

import dataclasses

from cirag_jax.prompts import ircot as prompts
from cirag_jax.prompts.rag import parse_short_answer, reading_messages
from cirag_jax.runtime.requests import Generate, Generated, Needs, Program, Retrieve, Retrieved
from cirag_jax.types import Attempt, Passage, Prediction, Question, Step


@dataclasses.dataclass(frozen=True)
class IrcotConfig:
    """IRCoT's settings.

    Attributes:
      num_passages: passages retrieved for the question and for every thought.
      max_passages: passages collected at most; the earliest stay.
      max_thoughts: thoughts at most.
    """

    needs = Needs(roles=("reasoner", "reader"))

    num_passages: int = 5
    max_passages: int = 15
    max_thoughts: int = 5


def ircot(asked: Question, config: IrcotConfig) -> Program[Prediction]:
    """Retrieves with the question, then with each thought; a reader reads what was collected."""
    query, thoughts, steps = asked.question, [], []
    collected: dict[str, Passage] = {}
    while len(thoughts) < config.max_thoughts:
        found: Retrieved = yield Retrieve(query, config.num_passages)
        collected = {p.id: p for p in (*collected.values(), *found.passages)}
        collected = dict(list(collected.items())[: config.max_passages])
        messages = prompts.thought_messages(asked.question, collected.values(), thoughts)
        said: Generated = yield Generate(messages, "reasoner")
        thought = prompts.parse_thought(said.text)
        ends = not thought or prompts.FINAL.lower() in thought.lower()
        ids, following = tuple(p.id for p in found.passages), None if ends else thought
        steps.append(Step(query, ids, thought=thought, next_query=following, response=said.text))
        if ends:
            break
        thoughts.append(thought)
        query = thought
    read = tuple(collected.values())
    response: Generated = yield Generate(reading_messages(asked.question, read), "reader")
    answer = parse_short_answer(response.text)
    texts = tuple(f"{p.title}\n{p.text}" for p in read)
    attempt = Attempt("passage", texts, response.text, answer, bool(answer))
    return Prediction(answer, "passage", tuple(collected), steps=tuple(steps), attempts=(attempt,))
