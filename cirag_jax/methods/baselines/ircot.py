"""IRCoT: retrieval interleaved with a chain of thought (Trivedi et al., ACL 2023).

The setting ``thoughts=documents`` gives IRDoc (KiRAG, Figure 1).
"""

import collections
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Literal

from cirag_jax.datasets.sentences import split_sentences
from cirag_jax.llm.types import Message
from cirag_jax.methods.common.evidence import best_scores, passage_line
from cirag_jax.methods.common.own_prompts import Prompt
from cirag_jax.methods.common.reading import ReaderFormat, read, render_reader
from cirag_jax.methods.registry import Method
from cirag_jax.runtime.requests import Generate, Generated, Needs, Program, Retrieve, Retrieved
from cirag_jax.types import Count, Passage, PositiveInt, Prediction, Question, Step
from cirag_jax.validation import check_fields


@dataclasses.dataclass(frozen=True)
class IrcotConfig:
    """IRCoT's settings.

    Attributes:
      num_passages: passages retrieved for the question and for each thought.
      max_passages: maximum number of collected passages; later passages are dropped.
      max_thoughts: maximum number of thoughts.
      thoughts: model, or documents (IRDoc: the best unused passage replaces the thought).
      num_read: number of passages that the reader reads, best first; 0 means all of them.
      reader_format: documents (FlashRAG), or a format of CIRAG's reader: thought, chain, brief.
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
        """Needs the reader, and the reasoner unless documents replace the thoughts."""
        return Needs(roles=("reasoner", "reader") if self.thoughts == "model" else ("reader",))


def ircot(question: Question, config: IrcotConfig) -> Program[Prediction]:
    """Answers a question: retrieves for the question and each thought, then reads the passages."""
    query, thoughts, steps = question.question, [], []
    collected: dict[str, Passage] = {}
    best: dict[str, float] = {}  # The highest score of each passage.
    errors = collections.Counter[str]()
    while True:
        retrieved: Retrieved = yield Retrieve(query, config.num_passages)
        ids = tuple(p.id for p in retrieved.passages)
        best = best_scores([*best.items(), *zip(ids, retrieved.scores, strict=True)])
        collected = {p.id: p for p in (*collected.values(), *retrieved.passages)}
        collected = dict(list(collected.items())[: config.max_passages])
        if len(thoughts) == config.max_thoughts:
            steps.append(Step(query, ids))
            break
        text = ""
        if config.thoughts == "model":
            messages = thought_messages(question.question, collected.values(), thoughts)
            response: Generated = yield Generate(messages, "reasoner")
            text = PROMPT.read(response.text)
            thought = parse_thought(text)
            errors["thought_empty"] += not thought
            is_cut = response.finish_reason == "length" and thought == text.strip()
            errors["thought_truncated"] += is_cut
        else:
            new = (passage_line(p) for p in retrieved.passages if passage_line(p) not in thoughts)
            thought = next(new, "")
        is_repeated = thought in thoughts or thought == question.question
        errors["repeated_query"] += is_repeated
        is_last = is_repeated or not thought or FINAL.lower() in thought.lower()
        next_query = None if is_last else thought
        steps.append(Step(query, ids, thought=thought, next_query=next_query, response=text))
        if is_last:
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


# -------------------------------------------------------------------------------------- prompts

FINAL = "So the answer is"
PROMPT = Prompt(
    "reasoner",
    labels={"question": "Question:", "reasoning": "Reasoning:"},
    written={"answer": FINAL},
)
_INSTRUCTION = (
    "Reason about the question in short sentences that state one fact of the documents each. Write "
    f'only the next sentence. As soon as the facts suffice, write "{FINAL}: " and the answer.\n\n'
)


def thought_messages(
    question: str, passages: Iterable[Passage], thoughts: Sequence[str]
) -> tuple[Message, ...]:
    """Returns the conversation that requests the next sentence after ``thoughts``."""
    documents = "\n\n".join(f"{passage.title}\n{passage.text}" for passage in passages)
    reasoning = f"Question: {question}\nReasoning: {' '.join(thoughts)}".rstrip()
    system = Message("system", _INSTRUCTION, documents)
    return PROMPT.conversation(system, (), Message("user", reasoning))


def _render(config: IrcotConfig) -> None:
    thought_messages("", (), ())
    render_reader(config.reader_format, "passage")


METHOD = Method(ircot, IrcotConfig, _render)


def parse_thought(text: str) -> str:
    """Returns the first sentence of a response; empty if there is none."""
    return next((s.strip() for s in split_sentences(text.strip()) if s.strip()), "")
