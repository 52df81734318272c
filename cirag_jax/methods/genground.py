"""GenGround: guess the answer to a sub-question, then ground it (Shi et al., ACL 2024)."""

import collections
import dataclasses
import itertools
from collections.abc import Sequence
from typing import Literal

from cirag_jax.errors import UserError, check_at_least, check_choice
from cirag_jax.methods.evidence import passage_line
from cirag_jax.methods.reading import check_reader_format, read, search
from cirag_jax.prompts import genground as prompts
from cirag_jax.prompts import reading
from cirag_jax.runtime.requests import Generate, Generated, Needs, Program
from cirag_jax.types import Attempt, Passage, Prediction, Question, Step


@dataclasses.dataclass(frozen=True)
class GengroundConfig:
    """GenGround's settings; the defaults are those of DualRAG's code.

    Attributes:
      max_steps: sub-questions; the code always asks for so many.
      num_passages: passages kept for a sub-question.
      rerank_from: passages retrieved for the ranker, which keeps those; 0: no ranker.
      min_score: what a passage must score above: 0 is a cross-encoder's logit.
      batch: passages that are read at a time, until some support an answer.
      max_batches: so many times at most.
      constrained: hold the JSON to its schema while it is decoded.
      grounding: tags (the code's: a reference and a revision, by the generator), or reader (ours,
        for small models: the reader answers the sub-question, or refuses).
      reader_format: pairs (the code's: sub-questions and answers in), documents, or as for CIRAG's
        reader: thought, chain, brief; these read the passages that answers were grounded in, and
        the pairs only where none was.
    """

    max_steps: int = 5
    num_passages: int = 10
    rerank_from: int = 50
    min_score: float = 0.0
    batch: int = 3
    max_batches: int = 4
    constrained: bool = True
    grounding: Literal["tags", "reader"] = "tags"
    reader_format: str = "pairs"

    def __post_init__(self):
        check_at_least(1, self, "max_steps", "num_passages", "batch", "max_batches", prefix="")
        check_at_least(0, self, "rerank_from", prefix="")
        check_choice("grounding", self.grounding, ("tags", "reader"))
        if self.reader_format != "pairs":
            check_reader_format(self.reader_format)
        if self.grounding == "reader" and self.reader_format not in reading.FORMATS:
            raise UserError("grounding=reader needs reader_format=thought, chain or brief.")

    @property
    def needs(self) -> Needs:
        """A ranker only where something is ranked."""
        return Needs(
            roles=("generator", "reader"),
            abilities={"generator": ("json_schema",)} if self.constrained else {},
            rankers=("passages",) if self.rerank_from else (),
        )


def genground(asked: Question, config: GengroundConfig) -> Program[Prediction]:
    """Sub-question by sub-question: guess, search, ground; then answer from what is known."""
    question, pairs, steps = asked.question, [], []
    errors = collections.Counter[str]()
    grounded: dict[str, Passage] = {}
    for _ in range(config.max_steps):
        schema = prompts.DEDUCTION_SCHEMA if config.constrained else None
        messages = prompts.deduction_messages(question, pairs)
        said: Generated = yield Generate(messages, "generator", json_schema=schema)
        deduced = prompts.parse_deduction(said.text, truncated=said.finish_reason == "length")
        if deduced.problem:
            errors[f"deduction_{deduced.problem}"] += 1
        query = deduced.question
        if not query or query in (asks for asks, _ in pairs):
            # Nothing new is asked: the question itself is, once, and then that is all.
            errors["repeated_query"] += bool(query)
            query = question
            if question in (asks for asks, _ in pairs):
                break
        found = yield from search(query, config.num_passages, config.rerank_from, config.min_score)
        answer, support = yield from ground(query, deduced.guess, found.passages, config, errors)
        pairs.append((query, answer))
        grounded |= {passage.id: passage for passage in support}
        ids = tuple(passage.id for passage in found.passages)
        note = {"guess": deduced.guess, "answer": answer}
        kept = tuple(passage.id for passage in support)
        steps.append(Step(query, ids, kept=kept, response=said.text, notes=note))
    ranked = dict.fromkeys([*grounded, *(name for step in steps for name in step.passages)])
    attempt = yield from _answer(question, pairs, tuple(grounded.values()), config, errors)
    return Prediction(
        attempt.answer,
        "passage",
        tuple(ranked),
        steps=tuple(steps),
        attempts=(attempt,),
        parse_errors={kind: count for kind, count in sorted(errors.items()) if count},
    )


def ground(
    query: str,
    guess: str,
    passages: Sequence[Passage],
    config: GengroundConfig,
    errors: collections.Counter[str],
) -> Program[tuple[str, tuple[Passage, ...]]]:
    """The answer to a sub-question and the passages that gave it; the guess where none does."""
    starts = range(0, len(passages), config.batch)
    for start in itertools.islice(starts, config.max_batches):
        batch = tuple(passages[start : start + config.batch])
        if config.grounding == "reader":
            messages = reading.answer_messages(
                query, "passage", [*map(passage_line, batch)], reader_format=config.reader_format
            )
            read_out: Generated = yield Generate(messages, "reader")
            revised, supports, problem = reading.parse_answer(
                read_out.text, truncated=read_out.finish_reason == "length"
            )
            if problem is not None:
                errors[f"grounding_{problem}"] += 1
        else:
            messages = prompts.grounding_messages(query, guess, batch)
            checked: Generated = yield Generate(messages, "generator")
            found = prompts.parse_grounding(checked.text)
            if found.problem:
                errors[f"grounding_{found.problem}"] += 1
            revised, supports = found.revised or guess, bool(found.reference)
        if supports:
            return revised, batch
    errors["answer_not_grounded"] += 1
    return guess, ()


def _answer(
    question: str,
    pairs: Sequence[tuple[str, str]],
    grounded: Sequence[Passage],
    config: GengroundConfig,
    errors: collections.Counter[str],
) -> Program[Attempt]:
    """The answer from the pairs, or from the passages behind them."""
    if config.reader_format != "pairs" and grounded:
        return (yield from read(question, "passage", grounded, config.reader_format, errors))
    lines = tuple(f"{asks} {answer}" for asks, answer in pairs)
    if config.reader_format in reading.FORMATS:
        return (yield from read(question, "sentence", lines, config.reader_format, errors))
    response: Generated = yield Generate(prompts.answer_messages(question, pairs), "reader")
    answer, sufficient, problem = reading.parse_answer(
        response.text, truncated=response.finish_reason == "length"
    )
    if problem:
        errors[f"answer_{problem}"] += 1
    return Attempt("sentence", lines, response.text, answer, sufficient)
