"""Triples of claims, from a language model, a dataset or the built-in graph."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict

from cirag_jax.datasets import demo, jsonl
from cirag_jax.errors import UserError
from cirag_jax.grade import prompts
from cirag_jax.grade.records import Claim, Fact
from cirag_jax.runtime.requests import Generate, Generated, Program
from cirag_jax.triples.normalization import name_key
from cirag_jax.types import Count, PositiveInt, Triple
from cirag_jax.validation import check_fields


@dataclasses.dataclass(frozen=True)
class TripleSettings:
    """Settings of triple extraction.

    Attributes:
      kind: source of triples: model, or dataset (openie.jsonl of the folder, or the triples of the
        built-in dataset).
      claims: number of claims per request.
      max_tokens: maximum number of new tokens of a response.
    """

    kind: Literal["model", "dataset"] = "model"
    claims: PositiveInt = 10
    max_tokens: PositiveInt = 768

    def __post_init__(self):
        check_fields(self, prefix="config.triples.")

    @property
    def roles(self) -> tuple[str, ...]:
        """Returns the roles of language models in this step."""
        return ("extractor",) if self.kind == "model" else ()


class TripleResult(TypedDict):
    """Result of `extract`; the last item of a triple is the index of its claim."""

    triples: list[tuple[str, str, str, Count]]
    problems: list[str]


def extract(claims: Sequence[str], settings: TripleSettings) -> Program[Mapping[str, Any]]:
    """Requests the triples of a few claims from a language model (A.9.3).

    Returns:
      ``triples`` (head, relation, tail and index of the claim), and ``problems``. These are the
      problems of `grade.prompts.parse_triples`, and ``not_said`` for a triple with a name that its
      claim does not contain. Small models copy such triples from the example or other claims.
    """
    messages = prompts.triple_messages(claims)
    response: Generated = yield Generate(messages, "extractor", settings.max_tokens)
    parsed = prompts.parse_triples(response.text, response.finish_reason, len(claims))
    words = [set(name_key(claim, "unicode").split()) for claim in claims]
    triples = [
        [*parts, index]
        for parts, index in parsed.triples
        if set(name_key(f"{parts[0]} {parts[2]}", "unicode").split()) <= words[index]
    ]
    unsupported = ["not_said"] * (len(parsed.triples) - len(triples))
    return {"triples": triples, "problems": [*parsed.problems, *unsupported]}


def facts(triples: Iterable[tuple[Triple, int]]) -> tuple[Fact, ...]:
    """Converts (triple, claim) pairs to facts; drops facts that relate a node to itself."""
    every = (Fact(*t[:3], claim, node(t.head), node(t.tail)) for t, claim in triples)
    return tuple(fact for fact in every if fact.head_id != fact.tail_id)


def node(name: str) -> str:
    """Returns the node of a name: the name in lower case, as in the paper."""
    return " ".join(name.casefold().split())


def of_dataset(path: str | None, claims: Sequence[Claim]) -> tuple[tuple[Fact, ...], int]:
    """Returns a dataset's triples whose sentences are claims, and the number of other triples."""
    index_of = {(claim.document, claim.sentence): index for index, claim in enumerate(claims)}
    if path is None:
        typed = list(demo.typed_triples())
        of_claims = [
            Fact(*t.triple[:3], index_of[place], t.head, t.target or t.triple.tail, t.type)
            for t in typed
            if (place := (t.triple.passage_id or "", t.triple.sentence or 0)) in index_of
        ]
        return tuple(of_claims), len(typed) - len(of_claims)
    folder = Path(path).expanduser()
    folder = folder.parent if folder.is_file() else folder
    if not (folder / jsonl.OPENIE).is_file():
        raise UserError(
            f"{folder} has no {jsonl.OPENIE}; use --config.triples.kind=model to extract triples "
            "with a language model."
        )
    by_passage = jsonl.read_dataset(folder, questions=False).triples
    every = [(t, (t.passage_id or "", t.sentence or 0)) for ts in by_passage.values() for t in ts]
    stated = [(triple, index_of[place]) for triple, place in every if place in index_of]
    return facts(stated), len(every) - len(stated)
