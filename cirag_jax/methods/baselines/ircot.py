"""IRCoT: retrieval interleaved with a chain of thought (Trivedi et al., ACL 2023).

IRDoc (KiRAG, Figure 1) is its switch ``thoughts=documents``.
"""

import collections
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Literal

from cirag_jax.datasets.sentences import split_sentences
from cirag_jax.llm.types import Message
from cirag_jax.methods.common.evidence import passage_line
from cirag_jax.methods.common.reading import ReaderFormat, read
from cirag_jax.methods.registry import Method
from cirag_jax.runtime.requests import Generate, Generated, Needs, Program, Retrieve, Retrieved
from cirag_jax.types import Count, Passage, PositiveInt, Prediction, Question, Step
from cirag_jax.validation import check_fields


@dataclasses.dataclass(frozen=True)
class IrcotConfig:
    """IRCoT's settings.

    Attributes:
      num_passages: passages retrieved for the question and for every thought.
      max_passages: passages collected at most; the earliest stay.
      max_thoughts: thoughts at most.
      thoughts: model; or documents (IRDoc): in a thought's place the best passage that was in none.
      num_read: passages read, the best; 0: all that were collected.
      reader_format: documents (FlashRAG's prompt), or as for CIRAG's reader: thought, chain, brief.
    """

    num_passages: PositiveInt = 5
    max_passages: PositiveInt = 15
    max_thoughts: PositiveInt = 5
    thoughts: Literal["model", "documents"] = "model"
    num_read: Count = 0
    reader_format: ReaderFormat = "documents"

    def __post_init__(self):
        check_fields(self)

    @property
    def needs(self) -> Needs:
        """No model reasons where documents take its place."""
        return Needs(roles=("reasoner", "reader") if self.thoughts == "model" else ("reader",))


def ircot(question: Question, config: IrcotConfig) -> Program[Prediction]:
    """Retrieves with the question, then with each thought; a reader reads what was collected."""
    query, thoughts, steps = question.question, [], []
    collected: dict[str, Passage] = {}
    best: dict[str, float] = {}  # the highest score of each passage
    errors = collections.Counter[str]()
    while True:
        retrieved: Retrieved = yield Retrieve(query, config.num_passages)
        for passage, score in zip(retrieved.passages, retrieved.scores, strict=True):
            best[passage.id] = max(score, best.get(passage.id, score))
        collected = {p.id: p for p in (*collected.values(), *retrieved.passages)}
        collected = dict(list(collected.items())[: config.max_passages])
        ids = tuple(p.id for p in retrieved.passages)
        if len(thoughts) == config.max_thoughts:
            steps.append(Step(query, ids))
            break
        text = ""
        if config.thoughts == "model":
            messages = thought_messages(question.question, collected.values(), thoughts)
            response: Generated = yield Generate(messages, "reasoner")
            text, thought = response.text, parse_thought(response.text)
            errors["thought_empty"] += not thought
        else:
            new = (passage_line(p) for p in retrieved.passages if passage_line(p) not in thoughts)
            thought = next(new, "")
        repeats = thought in thoughts or thought == question.question
        errors["repeated_query"] += repeats
        ends = repeats or not thought or FINAL.lower() in thought.lower()
        following = None if ends else thought
        steps.append(Step(query, ids, thought=thought, next_query=following, response=text))
        if ends:
            break
        thoughts.append(thought)
        query = thought
    ranked = sorted(collected.values(), key=lambda passage: -best[passage.id])
    passages = ranked[: config.num_read or None]
    attempt = yield from read(question.question, "passage", passages, config.reader_format, errors)
    return Prediction(
        attempt.answer,
        "passage",
        tuple(passage.id for passage in ranked),
        steps=tuple(steps),
        attempts=(attempt,),
        parse_errors={kind: count for kind, count in sorted(errors.items()) if count},
    )


METHOD = Method(ircot, IrcotConfig)


# -------------------------------------------------------------------------------------- prompts

FINAL = "So the answer is"
_INSTRUCTION = (
    "Reason about the question in short sentences that state one fact of the documents each. Write "
    f'only the next sentence. As soon as the facts suffice, write "{FINAL}: " and the answer.\n\n'
)


def thought_messages(
    question: str, passages: Iterable[Passage], thoughts: Sequence[str]
) -> tuple[Message, ...]:
    """Asks for the sentence that follows ``thoughts``."""
    documents = "\n\n".join(f"{passage.title}\n{passage.text}" for passage in passages)
    reasoning = f"Question: {question}\nReasoning: {' '.join(thoughts)}".rstrip()
    return (Message("system", _INSTRUCTION, documents), Message("user", reasoning))


def parse_thought(text: str) -> str:
    """The first sentence of a response; empty where there is none."""
    return next((s.strip() for s in split_sentences(text.strip()) if s.strip()), "")
