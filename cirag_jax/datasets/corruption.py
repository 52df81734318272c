"""Corrupted facts of single questions: spurious facts, or missing facts around critical entities.

C2RAG (section 4.3) corrupts the graph of each question. The paper has a language model write the
changes; the rules here follow the three noise patterns of its Figure 1. The file
``corrupted.jsonl`` next to a triple store has the changed passages of each question. All other
facts are those of the store.
"""

import dataclasses
import hashlib
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from cirag_jax.datasets.annotations import hops_of, words
from cirag_jax.datasets.jsonl import ends_of
from cirag_jax.datasets.records import read_lines
from cirag_jax.io import read_json
from cirag_jax.triples.normalization import normalize, triple_key
from cirag_jax.types import Passage, Question, Triple

FILE, SETTINGS = "corrupted.jsonl", "corruption.json"
# Noise pattern -> its description for a language model.
PATTERNS = {
    "over_generalized": "the relation is more general or stronger than in the text",
    "mis_bound": "the relation is bound to the wrong entity",
    "semantic_flip": "the relation says the opposite of the text",
}
_GENERAL = ("is related to", "is associated with", "is connected to", "has to do with")
_OPPOSITES = (
    ("born", "died"), ("birth", "death"), ("father", "mother"), ("son", "daughter"),
    ("brother", "sister"), ("husband", "wife"), ("parent", "child"), ("before", "after"),
    ("first", "last"), ("north", "south"), ("east", "west"), ("won", "lost"), ("start", "end"),
    ("opened", "closed"), ("larger", "smaller"), ("older", "younger"),
)  # fmt: skip
_OPPOSITE = {a: b for pair in _OPPOSITES for a, b in (pair, pair[::-1])}

# Question id -> passage id -> triples.
ByQuestion = Mapping[str, Mapping[str, tuple[Triple, ...]]]


class CriticalFact(NamedTuple):
    """A fact of a question's passages around its critical entities.

    Attributes:
      triples: all triples that state the fact.
      is_bridge: whether both ends are critical.
    """

    triples: tuple[Triple, ...]
    is_bridge: bool

    @property
    def triple(self) -> Triple:
        """The first triple that states the fact."""
        return self.triples[0]


@dataclasses.dataclass(frozen=True)
class Edits:
    """The changes to the facts of one question.

    Attributes:
      removed: indices of critical facts.
      added: pairs of the index of a critical fact and a spurious variant (head, relation, tail).
    """

    removed: tuple[int, ...] = ()
    added: tuple[tuple[int, tuple[str, str, str]], ...] = ()

    @property
    def count(self) -> int:
        """The number of changes."""
        return len(self.removed) + len(self.added)


# --------------------------------------------------------------------------------------- the facts


def critical_facts(
    question: Question, corpus: Mapping[str, Passage], triples: Iterable[Triple]
) -> list[CriticalFact]:
    """Returns the distinct facts with a critical entity at an end, in order.

    An entity is critical if the question contains its name, or if it is an entity or value of an
    annotated hop.
    """
    text = f" {normalize(question.question, 'unicode')} "
    hops = hops_of(question, corpus)
    golds = [a for h in hops for a in (*h.answers, *((h.about,) if h.is_entity else ()))]
    golds += [end for hop in hops if hop.triple for end in (hop.triple[0], hop.triple[2])]
    gold_words = {words(name) for name in golds}

    def is_critical(name: str) -> bool:
        normal = normalize(name, "unicode")
        return bool(normal) and (words(name) in gold_words or f" {normal} " in text)

    facts: dict[tuple[str, str, str], list[Triple]] = {}
    for triple in triples:
        facts.setdefault(triple_key(triple, "unicode"), []).append(triple)
    ends = {key: sum(map(is_critical, (t[0].head, t[0].tail))) for key, t in facts.items()}
    return [CriticalFact(tuple(t), ends[key] == 2) for key, t in facts.items() if ends[key]]


def num_edits(num_facts: int, ratio: float) -> int:
    """Returns the number of facts to change: a share of the facts, at least 1 unless it is 0."""
    return max(1, int(ratio * num_facts + 0.5)) if ratio and num_facts else 0


def drawn(question_id: str, facts: Sequence[CriticalFact], seed: int, first: bool) -> list[int]:
    """Returns the indices of all facts in the order in which they are changed.

    So a larger share contains every smaller one. With ``first``, bridges come first.
    """
    order = _rng(seed, question_id).permutation(len(facts)).tolist()
    return sorted(order, key=lambda i: not facts[i].is_bridge) if first else order


def pattern_of(question_id: str, index: int, patterns: Sequence[str], seed: int) -> str:
    """Returns the noise pattern of fact ``index``."""
    return patterns[int(_rng(seed, f"{question_id} {index}").integers(len(patterns)))]


def delete(question_id: str, facts: Sequence[CriticalFact], ratio: float, seed: int) -> Edits:
    """Removes a share of the facts, bridges first."""
    order = drawn(question_id, facts, seed, first=True)
    return Edits(removed=tuple(order[: num_edits(len(facts), ratio)]))


def add_noise(
    question_id: str,
    facts: Sequence[CriticalFact],
    triples: Sequence[Triple],
    ratio: float,
    patterns: Sequence[str],
    seed: int,
) -> Edits:
    """Adds a spurious variant of a share of the facts; ``triples`` are all of the question's."""
    known = {triple_key(triple, "unicode") for triple in triples}
    entities = ends_of(triples)
    added = []
    for index in drawn(question_id, facts, seed, first=False)[: num_edits(len(facts), ratio)]:
        pattern = pattern_of(question_id, index, patterns, seed)
        rng = _rng(seed, f"{question_id} {index} variant")
        variant = _variant(facts[index].triple, pattern, entities, known, rng)
        if variant is not None:
            added.append((index, variant))
    return Edits(added=tuple(added))


def _rng(seed: int, text: str) -> np.random.Generator:
    return np.random.default_rng((seed, zlib.crc32(text.encode())))


def _variant(
    triple: Triple,
    pattern: str,
    entities: Sequence[str],
    known: set[tuple[str, str, str]],
    rng: np.random.Generator,
) -> tuple[str, str, str] | None:
    """Returns a variant that is no known fact; None if all are known."""
    head, relation, tail = triple[:3]
    if pattern == "over_generalized":
        variants = [(head, general, tail) for general in _GENERAL]
    elif pattern == "mis_bound":
        # A number or date is replaced with another one.
        kind = any(map(str.isdigit, tail))
        others = [e for e in entities if e not in (head, tail) and any(map(str.isdigit, e)) == kind]
        variants = [(head, relation, entity) for entity in others]
    else:
        variants = [(head, flipped(relation), tail)]
    new = [v for v in variants if triple_key(Triple(*v), "unicode") not in known]
    return new[rng.integers(len(new))] if new else None


def flipped(relation: str) -> str:
    """Returns the opposite of a relation: without or with "not", or with an opposite word."""
    parts = relation.split()
    if "not" in parts:
        return " ".join(part for part in parts if part != "not")
    opposite = [_OPPOSITE.get(part.lower(), part) for part in parts]
    return " ".join(opposite) if opposite != parts else f"not {relation}"


# ---------------------------------------------------------------------------------------- the file


def edited(
    triples: Mapping[str, Sequence[Triple]], facts: Sequence[CriticalFact], edits: Edits
) -> dict[str, tuple[Triple, ...]]:
    """Returns the changed passages with their new triples; a variant follows its fact."""
    removed = {triple for index in edits.removed for triple in facts[index].triples}
    after = {
        facts[index].triple: Triple(*variant, *facts[index].triple[3:])
        for index, variant in edits.added
    }
    changed = {}
    for passage_id, old in triples.items():
        new = []
        for triple in old:
            new += [triple] if triple not in removed else []
            new += [after.pop(triple)] if triple in after else []
        if new != list(old):
            changed[passage_id] = tuple(new)
    return changed


class _Line(msgspec.Struct):
    """A line of the file."""

    question_id: str
    passage_id: str
    triples: list[tuple[str, str, str, int | None]]


def lines_of(question_id: str, changed: Mapping[str, Sequence[Triple]]) -> Iterator[dict[str, Any]]:
    """Yields the lines of a question's changed passages."""
    for passage_id, triples in changed.items():
        rows = tuple((*triple[:3], triple.sentence) for triple in triples)
        yield {"question_id": question_id, "passage_id": passage_id, "triples": rows}


@dataclasses.dataclass(frozen=True)
class CorruptedFacts:
    """The changed facts next to a triple store, and a hash of their file.

    ``settings`` has the ``kind`` and ``ratio`` of the changes, unless an earlier version made them.
    """

    by_question: ByQuestion
    digest: str
    settings: Mapping[str, Any]


def read_corrupted(source: str) -> CorruptedFacts | None:
    """Returns the changed facts of a store (its workdir or file); None if it is not corrupted."""
    path = Path(source).expanduser()
    file = (path if path.is_dir() else path.parent) / FILE
    if not file.is_file():
        return None
    content = file.read_bytes()
    by_question: dict[str, dict[str, tuple[Triple, ...]]] = {}
    for _, line in read_lines(file, _Line) if content.strip() else ():
        triples = tuple(Triple(*row[:3], line.passage_id, row[3]) for row in line.triples)
        by_question.setdefault(line.question_id, {})[line.passage_id] = triples
    described = file.with_name(SETTINGS)
    settings = read_json(described) if described.is_file() else {}
    return CorruptedFacts(by_question, hashlib.sha256(content).hexdigest()[:16], settings)
