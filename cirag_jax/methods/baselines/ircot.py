"""IRCoT: retrieval interleaved with a chain of thought (Trivedi et al., ACL 2023).

The setting ``thoughts=documents`` gives IRDoc (KiRAG, Figure 1). The presets ``dualrag`` and
``cirag`` of its config run it as those papers do.
"""

import collections
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Literal

from cirag_jax.errors import UserError
from cirag_jax.llm.types import Message
from cirag_jax.methods.common.evidence import best_scores, passage_line
from cirag_jax.methods.common.own_prompts import Prompt
from cirag_jax.methods.common.predictions import passage_prediction
from cirag_jax.methods.common.reading import ReaderFormat, SearchConfig, read, render_reader, search
from cirag_jax.methods.common.written_answers import FINAL, first_sentence, written_answer
from cirag_jax.methods.registry import Method
from cirag_jax.runtime.requests import Generate, Generated, Needs, Program
from cirag_jax.types import (
    Attempt,
    Count,
    NonNegativeFloat,
    Passage,
    PositiveInt,
    Prediction,
    Question,
    Step,
)


@dataclasses.dataclass(frozen=True)
class IrcotConfig(SearchConfig):
    """IRCoT's settings.

    Attributes:
      num_passages: passages retrieved for the question and for each thought.
      max_passages: maximum number of collected passages; later passages are dropped.
      max_thoughts: maximum number of thoughts.
      thoughts: model, or documents (IRDoc: the best unused passage replaces the thought).
      num_read: number of passages that the reader reads, best first; 0 means all of them.
      context: passages that thoughts and the reader see: accumulate (all, up to max_passages), or
        replace (those of the last retrieval; DualRAG's code).
      rerank_from: passages retrieved for reranking, which keeps the best num_passages; 0 disables
        reranking (DualRAG's code: 50).
      min_score: reranked passages with this score or less are dropped.
      temperature: temperature of thoughts; 0 is greedy (DualRAG's code: 0.3).
      answer_from: reader, or thoughts (DualRAG's code: the answer that the thoughts state).
      reader_format: documents (FlashRAG), or a format of CIRAG's reader: thought, chain, brief.
    """

    num_passages: PositiveInt = 5
    max_passages: PositiveInt = 15
    max_thoughts: PositiveInt = 5
    thoughts: Literal["model", "documents"] = "model"
    num_read: Count = 0
    context: Literal["accumulate", "replace"] = "accumulate"
    rerank_from: Count = 0
    min_score: float = 0.0
    temperature: NonNegativeFloat = 0.0
    answer_from: Literal["reader", "thoughts"] = "reader"
    reader_format: ReaderFormat = "documents"

    def __post_init__(self):
        super().__post_init__()
        if self.thoughts == "documents" and self.answer_from == "thoughts":
            raise UserError("answer_from=thoughts needs thoughts=model.")

    @property
    def needs(self) -> Needs:
        """Needs the roles that write thoughts and the answer, and a ranker if it reranks."""
        return Needs(
            roles=(
                *(("reasoner",) if self.thoughts == "model" else ()),
                *(("reader",) if self.answer_from == "reader" else ()),
            ),
            rankers=("passages",) if self.rerank_from else (),
        )


def ircot(question: Question, config: IrcotConfig) -> Program[Prediction]:
    """Answers a question: retrieves for the question and each thought, then reads the passages."""
    query, thoughts, steps = question.question, [], []
    collected: dict[str, Passage] = {}
    best: dict[str, float] = {}  # The highest score of each passage.
    errors = collections.Counter[str]()
    while True:
        retrieved = yield from search(query, config)
        ids = retrieved.ids
        best = best_scores([*best.items(), *zip(ids, retrieved.scores, strict=True)])
        collected = {p.id: p for p in (*collected.values(), *retrieved.passages)}
        context = retrieved.passages
        if config.context == "accumulate":
            collected = dict(list(collected.items())[: config.max_passages])
            context = tuple(collected.values())
        if len(thoughts) == config.max_thoughts:
            steps.append(Step(query, ids))
            break
        text = ""
        if config.thoughts == "model":
            messages = thought_messages(question.question, context, thoughts)
            response: Generated = yield Generate(
                messages, "reasoner", temperature=config.temperature
            )
            text = PROMPT.read(response.text)
            thought = first_sentence(text)
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
    if config.answer_from == "thoughts":
        text = " ".join(step.thought for step in steps if step.thought)
        answer, problem = written_answer(text)
        errors[f"answer_{problem}"] += problem is not None
        attempt = Attempt("passage", tuple(map(passage_line, context)), text, answer, bool(answer))
    else:
        passages = [passage for passage in ranked if passage in context][: config.num_read or None]
        attempt = yield from read(
            question.question, "passage", passages, config.reader_format, errors
        )
    return passage_prediction((passage.id for passage in ranked), steps, [attempt], errors)


# -------------------------------------------------------------------------------------- prompts

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
    if config.answer_from == "reader":
        render_reader(config.reader_format, "passage")


METHOD = Method(ircot, IrcotConfig, _render)
