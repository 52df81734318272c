"""Triples with the claim they come from: a language model's, a dataset's, the built-in graph's."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict

from cirag_jax.datasets import demo, jsonl
from cirag_jax.errors import UserError, check_at_least, check_choice
from cirag_jax.grade import prompts
from cirag_jax.grade.records import Claim, Fact
from cirag_jax.runtime.requests import Generate, Generated, Program
from cirag_jax.triples.normalization import name_key
from cirag_jax.types import Count, Triple


@dataclasses.dataclass(frozen=True)
class TripleSettings:
    """Where triples come from.

    Attributes:
      kind: model, or dataset (the folder's openie.jsonl, or the built-in dataset's own).
      claims: claims that one request lists.
      max_tokens: most new tokens of its answer.
    """

    kind: Literal["model", "dataset"] = "model"
    claims: int = 10
    max_tokens: int = 768

    def __post_init__(self):
        check_choice("config.triples.kind", self.kind, ("model", "dataset"))
        check_at_least(1, self, "claims", "max_tokens", prefix="config.triples.")

    @property
    def roles(self) -> tuple[str, ...]:
        """The role of a language model that is asked."""
        return ("extractor",) if self.kind == "model" else ()


class Outcome(TypedDict):
    """What `extract` gives: the last of a triple is the place of its claim."""

    triples: list[tuple[str, str, str, Count]]
    problems: list[str]


def extract(claims: Sequence[str], settings: TripleSettings) -> Program[Mapping[str, Any]]:
    """Asks for the triples of a few claims (A.9.3).

    Returns:
      ``triples``: head, relation, tail and the place of the claim; ``problems``: see
      `grade.prompts.parse_triples`, and ``not_said`` where the claim lacks a word of a name: small
      models repeat the example, or what another claim says.
    """
    messages = prompts.triple_messages(claims)
    told: Generated = yield Generate(messages, "extractor", settings.max_tokens)
    found = prompts.parse_triples(told.text, told.finish_reason, len(claims))
    words = [set(name_key(claim, "unicode").split()) for claim in claims]
    triples = [
        [*parts, place]
        for parts, place in found.triples
        if set(name_key(f"{parts[0]} {parts[2]}", "unicode").split()) <= words[place]
    ]
    unsaid = ["not_said"] * (len(found.triples) - len(triples))
    return {"triples": triples, "problems": [*found.problems, *unsaid]}


def facts(triples: Iterable[tuple[Triple, int]]) -> tuple[Fact, ...]:
    """Triples, each with its claim; a node is a name in lower case, as in the paper."""
    found = (Fact(*t[:3], claim, node(t.head), node(t.tail)) for t, claim in triples)
    return tuple(fact for fact in found if fact.head_id != fact.tail_id)


def node(name: str) -> str:
    """What names that match exactly have in common."""
    return " ".join(name.casefold().split())


def of_dataset(path: str | None, claims: Sequence[Claim]) -> tuple[tuple[Fact, ...], int]:
    """A dataset's triples whose sentences are claims, and how many others it has."""
    places = {(claim.document, claim.sentence): at for at, claim in enumerate(claims)}
    if path is None:
        typed = list(demo.typed_triples())
        known = [
            Fact(*t.triple[:3], places[at], t.head, t.target or t.triple.tail, t.type)
            for t in typed
            if (at := (t.triple.passage_id or "", t.triple.sentence or 0)) in places
        ]
        return tuple(known), len(typed) - len(known)
    folder = Path(path).expanduser()
    folder = folder.parent if folder.is_file() else folder
    if not (folder / jsonl.OPENIE).is_file():
        raise UserError(
            f"{folder} has no {jsonl.OPENIE}; --config.triples.kind=model asks a language model "
            "for triples."
        )
    read = jsonl.read_dataset(folder, questions=False).triples
    found = [(t, (t.passage_id or "", t.sentence or 0)) for ts in read.values() for t in ts]
    stated = [(triple, places[at]) for triple, at in found if at in places]
    return facts(stated), len(found) - len(stated)
