"""Query-decomposition RAG: one retrieval per sub-query, merged and reranked (GRADE, A.4)."""

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from cirag_jax.errors import UserError
from cirag_jax.io import one_line
from cirag_jax.llm.types import Message
from cirag_jax.methods.common.own_prompts import Prompt
from cirag_jax.methods.common.predictions import passage_prediction
from cirag_jax.methods.common.prompt_parts import example_turns, object_schema
from cirag_jax.methods.common.reading import ReaderFormat, read, render_reader
from cirag_jax.methods.common.reading_prompts import EXAMPLE_QUERY
from cirag_jax.methods.common.tolerant_json import find_json
from cirag_jax.methods.registry import Method
from cirag_jax.runtime.requests import (
    Generate,
    Generated,
    Needs,
    Program,
    Rank,
    Ranked,
    Retrieve,
    Retrieved,
)
from cirag_jax.types import Passage, PositiveInt, Prediction, Question, Step
from cirag_jax.validation import check_fields


@dataclasses.dataclass(frozen=True)
class DecompositionConfig:
    """The settings of query-decomposition RAG, with the values of GRADE's appendix A.4.

    Attributes:
      max_queries: maximum number of sub-queries; further ones are ignored.
      with_question: also retrieve passages for the question itself (ours).
      num_passages: passages retrieved per sub-query.
      num_read: number of reranked passages that the reader reads.
      constrained: force the decomposer's responses to follow their schema.
      reader_format: documents (FlashRAG), or a format of CIRAG's reader: thought, chain, brief.
    """

    max_queries: PositiveInt = 5
    with_question: bool = False
    num_passages: PositiveInt = 10
    num_read: PositiveInt = 10
    constrained: bool = True
    reader_format: ReaderFormat = "documents"

    def __post_init__(self):
        check_fields(self)
        most = self.num_passages * (self.max_queries + self.with_question)
        if self.num_read > most:
            raise UserError(
                f"num_read={self.num_read} must not exceed {most}, the passages of max_queries="
                f"{self.max_queries} sub-queries with num_passages={self.num_passages} each."
            )

    @property
    def needs(self) -> Needs:
        """Needs a decomposer, a reader, and a ranker of passages."""
        return Needs(
            roles=("decomposer", "reader"),
            abilities={"decomposer": ("json_schema",)} if self.constrained else {},
            rankers=("passages",),
        )


def decomposition(question: Question, config: DecompositionConfig) -> Program[Prediction]:
    """Answers a question: splits it, retrieves for each part, reranks all passages, reads."""
    text, errors = question.question, collections.Counter[str]()
    response: Generated = yield Generate(
        decomposition_messages(text, config.max_queries),
        "decomposer",
        json_schema=queries_schema(config.max_queries) if config.constrained else None,
    )
    parsed = parse_queries(
        response.text, config.max_queries, truncated=response.finish_reason == "length"
    )
    errors.update(f"decomposition_{problem}" for problem in parsed.problems)
    # Without a sub-query, the question is its own only part.
    asked = parsed.queries if parsed.queries and not config.with_question else ()
    queries = asked or tuple(dict.fromkeys([text, *parsed.queries]))
    responses: Sequence[Retrieved] = yield [Retrieve(q, config.num_passages) for q in queries]
    merged = {p.id: p for retrieved in responses for p in retrieved.passages}
    ranked: Ranked[Passage] = Ranked((), ())
    if merged:
        ranked = yield Rank(text, tuple(merged.values()), 0, "passages")
    attempt = yield from read(
        text, "passage", ranked.texts[: config.num_read], config.reader_format, errors
    )
    first, *more = queries
    ids = tuple(passage.id for passage in ranked.texts)
    step = Step(
        first,
        ids,
        candidates=ids,
        scores=ranked.scores,
        kept=ids[: config.num_read],
        response=response.text,
        more_queries=tuple(more),
    )
    return passage_prediction(ids, [step], [attempt], errors)


def _render(config: DecompositionConfig) -> None:
    decomposition_messages("", config.max_queries)
    render_reader(config.reader_format, "passage")


METHOD = Method(decomposition, DecompositionConfig, _render)


# ---------------------------------------------------------------------------- prompts and parsers

_MAX_CHARS = 300  # Longer sub-queries are dropped.
PROMPT = Prompt("decomposer", labels={"question": "Question:"}, keys=("queries",))
_INSTRUCTION = (
    "Split a question into the searches that answer it, one fact each, in the order in which they "
    "are needed, at most {limit}. Each search must make sense on its own: name its subject instead "
    "of using a pronoun, and describe an entity that is not known yet. If the question is simple, "
    "write a single search. Answer with one JSON object and nothing else: "
    '{{"queries": ["...", "..."]}}'
)
_EXAMPLES = (
    (
        EXAMPLE_QUERY,
        f'{{"queries": ["Where was Mira Solheim born?", "{EXAMPLE_QUERY}"]}}',
    ),
    (
        "Who is older, the director of Kveld or the director of Nattlys?",
        '{"queries": ["Who directed Kveld?", "Who directed Nattlys?", '
        '"When was the director of Kveld born?", "When was the director of Nattlys born?"]}',
    ),
)


def decomposition_messages(question: str, max_queries: int) -> tuple[Message, ...]:
    """Returns the conversation that requests sub-queries."""
    examples = ((f"Question: {asked}", queries) for asked, queries in _EXAMPLES)
    instruction = _INSTRUCTION.format(limit=max_queries)
    turn = Message("user", f"Question: {one_line(question)}")
    return PROMPT.conversation(instruction, example_turns(*examples), turn)


def queries_schema(max_queries: int) -> Mapping[str, Any]:
    """Returns the schema of a list of sub-queries."""
    text = {"type": "string", "pattern": rf"^[^\s].{{1,{_MAX_CHARS - 1}}}$"}
    queries = {"type": "array", "items": text, "minItems": 1, "maxItems": max_queries}
    return PROMPT.schema(object_schema({"queries": queries}))


class Queries(NamedTuple):
    """Distinct sub-queries, and the kinds of malformed output."""

    queries: tuple[str, ...]
    problems: tuple[str, ...]


def parse_queries(text: str, max_queries: int, *, truncated: bool = False) -> Queries:
    """Parses a response to `decomposition_messages`; never fails.

    An item may be a string, or an object with one string. Other, empty and very long items are
    dropped (``not_a_query``), as are items after ``max_queries`` (``too_many_queries``).
    """
    text = PROMPT.read(text)
    value, problem = find_json(text, "queries", truncated)
    rows = None if value is None else value["queries"]
    if rows is None:  # The list may lack the object around it.
        bare_list, list_problem = find_json(text, truncated=truncated)
        if isinstance(bare_list, list):
            rows, problem = bare_list, list_problem
    problems = [] if problem in (None, "loose_json") else [str(problem)]
    if isinstance(rows, str):
        rows = [rows]
    if not isinstance(rows, list):
        return Queries((), tuple(problems or ["wrong_shape"]))
    queries = dict[str, None]()
    for row in rows:
        parts = [*row.values()] if isinstance(row, dict) else [row]
        query = one_line(parts[0]) if len(parts) == 1 and isinstance(parts[0], str) else ""
        if not 0 < len(query) <= _MAX_CHARS:
            problems.append("not_a_query")
        elif len(queries) == max_queries and query not in queries:
            problems.append("too_many_queries")
        else:
            queries[query] = None
    if not rows:
        problems.append("no_queries")
    return Queries(tuple(queries), tuple(problems))
