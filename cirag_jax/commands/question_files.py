"""The files of a generated benchmark: a dataset folder, and what became of every path."""

import collections
import dataclasses
import pathlib
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from cirag_jax.datasets import jsonl
from cirag_jax.datasets.records import read_lines
from cirag_jax.grade import clusters, equivalence
from cirag_jax.grade.database import Database
from cirag_jax.grade.records import Claim, Document, Fact, Group, Kind, Path
from cirag_jax.io import say, write_lines
from cirag_jax.retrieval.bm25 import BM25
from cirag_jax.types import Config, Dataset, Question, Triple

PATHS = "paths.jsonl"
SOURCES = "sources.jsonl"
GROUPS = "groups.jsonl"
REVIEW = "review.jsonl"


@dataclasses.dataclass(frozen=True)
class Asked:
    """A path and what became of it."""

    path: Path
    outcome: Mapping[str, Any]


class Reviewed(msgspec.Struct, forbid_unknown_fields=True):
    """A line of `REVIEW`: a group and what a person says of it, null until then."""

    names: tuple[str, ...]
    kind: Kind
    claims: tuple[str, ...]
    judgement: bool | None


def read_review(workdir: pathlib.Path) -> list[Reviewed]:
    """What an earlier run sampled and perhaps a person judged; [] where there is nothing."""
    file = workdir / REVIEW
    if not file.is_file() or not file.stat().st_size:  # without a group it is empty
        return []
    return [row for _, row in read_lines(file, Reviewed)]


def added(counts: Iterable[Mapping[str, int]]) -> collections.Counter[str]:
    """All counts together."""
    total: collections.Counter[str] = collections.Counter()
    for some in counts:
        total.update(some)
    return total


def write(
    config: Config,
    found: Sequence[Document],
    database: Database,
    stated: Sequence[Claim],
    graph: equivalence.Graph,
    clustered: clusters.Clusters,
    groups: Sequence[Group],
    asked: Sequence[Asked],
    workdir: pathlib.Path,
) -> dict[str, Any]:
    """Writes every file of the dataset folder, and those beside it; returns what they count."""
    before = read_review(workdir)
    kept, rows = _questions(asked, graph, stated, database)
    kept = _with_contexts(kept, database, config.context)
    by_chunk = _triples(graph, stated, database)
    jsonl.write_dataset(Dataset(workdir.name, tuple(kept), database.passages, by_chunk), workdir)
    write_lines(workdir / PATHS, rows)
    write_lines(workdir / SOURCES, _sources(found, database))
    shown = _group_rows(groups, clustered, graph, stated)
    write_lines(workdir / GROUPS, shown)
    random.Random(config.seed).shuffle(shown)
    sample = [msgspec.convert({**r, "judgement": None}, Reviewed) for r in shown[: config.review]]
    others = _carry(before, sample)
    write_lines(workdir / REVIEW, map(msgspec.structs.asdict, (*sample, *others)))
    dropped = _dropped(rows, config.paths.hops)
    return {
        "paths": dict(collections.Counter(str(len(one.path)) for one in asked)),
        "questions": len(kept),
        "hops": dict(collections.Counter(str(question.hops) for question in kept)),
        "dropped_questions": dict(added(dropped.values())),
        "dropped_by_hops": {hops: dict(why) for hops, why in dropped.items() if why},
        "needs_link": _needs_link(rows),
        "chunks": len(database.chunks),
        **_reviewed(sample),
    }


def _questions(
    asked: Sequence[Asked],
    graph: equivalence.Graph,
    stated: Sequence[Claim],
    database: Database,
) -> tuple[list[Question], list[dict[str, Any]]]:
    """The questions that are kept, numbered by hops, and a row of `PATHS` for every path."""
    kept: list[Question] = []
    rows: list[dict[str, Any]] = []
    counts: collections.Counter[int] = collections.Counter()
    texts: set[str] = set()
    for one in asked:
        outcome, hops = dict(one.outcome), len(one.path)
        if "reason" not in outcome and outcome["question"] in texts:
            outcome["reason"] = "asked_twice"
        name = None
        if "reason" not in outcome:
            texts.add(outcome["question"])
            counts[hops] += 1
            name = f"{hops}hop-{counts[hops]:04d}"
            kept.append(_question(name, one, graph, stated, database))
        row = _path_row(one.path, graph, stated, database)
        rows.append({"question_id": name, **row, **outcome})
    return kept, rows


def _dropped(
    rows: Iterable[Mapping[str, Any]], hops: Sequence[int]
) -> dict[str, collections.Counter[str]]:
    """By hops, for which reason how many paths gave no question."""
    found = {str(number): collections.Counter[str]() for number in hops}
    for row in rows:
        if row["question_id"] is None:
            found[str(row["hops"])][row["reason"]] += 1
    return found


def _path_row(
    path: Path, graph: equivalence.Graph, stated: Sequence[Claim], database: Database
) -> dict[str, Any]:
    facts = [graph.facts[edge.fact] for edge in path]
    homes = [(stated[fact.claim].document, stated[fact.claim].sentence) for fact in facts]
    evidence = dict(zip(dict.fromkeys(homes), database.evidence(homes), strict=True))
    return {
        "hops": len(path),
        "nodes": [graph.name(node) for node in (path[0].head, *(edge.tail for edge in path))],
        "links": list(graph.links(path)),
        "facts": [
            {
                "triple": list(fact.parts),
                "claim": stated[fact.claim].text,
                "document": home[0],
                "sentence": home[1],
                "chunk": evidence[home][0],
            }
            for fact, home in zip(facts, homes, strict=True)
        ],
    }


def _question(
    name: str,
    one: Asked,
    graph: equivalence.Graph,
    stated: Sequence[Claim],
    database: Database,
) -> Question:
    facts = [graph.facts[edge.fact] for edge in one.path]
    homes = [(stated[fact.claim].document, stated[fact.claim].sentence) for fact in facts]
    evidence = database.evidence(homes)
    places = [tuple(database.places(*home)) for home in dict.fromkeys(homes)]
    return Question(
        id=name,
        question=one.outcome["question"],
        answers=tuple(one.outcome["answers"]),
        type="bridge",
        hops=len(one.path),
        split="test",
        supporting=tuple(dict.fromkeys(chunk for chunk, _ in evidence)),
        supporting_sentences=evidence,
        same_sentences=tuple(same for same in places if len(same) > 1) or None,
        evidences=tuple(fact.parts for fact in facts),
    )


def _with_contexts(kept: Sequence[Question], database: Database, others: int) -> list[Question]:
    """Every question with its evidence, and the other chunks nearest to it by BM25, as context."""
    passages = list(database.passages.values())
    index = BM25([f"{passage.title} {passage.text}" for passage in passages])
    rows_QK = index.search(
        [q.question for q in kept], others + max((q.hops or 0 for q in kept), default=0)
    )
    out = []
    for question, rows in zip(kept, rows_QK, strict=True):
        gold = question.supporting or ()
        near = [passages[row].id for row in rows if row >= 0 and passages[row].id not in gold]
        context = sorted((*gold, *near[:others]))  # an order that tells nothing
        out.append(dataclasses.replace(question, context=tuple(context)))
    return out


def _triples(
    graph: equivalence.Graph, stated: Sequence[Claim], database: Database
) -> dict[str, tuple[Triple, ...]]:
    """All facts, in every chunk that has their sentence; a chunk without one has none."""
    found: dict[str, list[Triple]] = {name: [] for name in database.passages}
    for fact in graph.facts:
        claim = stated[fact.claim]
        for name, sentence in database.places(claim.document, claim.sentence):
            found[name].append(Triple(*fact.parts, name, sentence))
    return {name: tuple(some) for name, some in found.items()}


def _sources(found: Sequence[Document], database: Database) -> Iterable[dict[str, Any]]:
    of: dict[str, list[str]] = collections.defaultdict(list)
    for one in database.chunks:
        of[one.document].append(one.passage.id)
    return (
        {"id": d.id, "title": d.title, "source": d.source, "date": d.date, "chunks": of[d.id]}
        for d in found
    )


def _group_rows(
    groups: Sequence[Group],
    clustered: clusters.Clusters,
    graph: equivalence.Graph,
    stated: Sequence[Claim],
) -> list[dict[str, Any]]:
    by_claim = equivalence.facts_of_claims(graph.facts)
    facts_of = {
        number: [graph.facts[at] for claim in cluster for at in by_claim.get(claim, ())]
        for number, cluster in enumerate(clustered)
    }
    return [_group_row(group, facts_of[group.cluster], stated) for group in groups]


def _group_row(group: Group, facts: Sequence[Fact], stated: Sequence[Claim]) -> dict[str, Any]:
    """A group with its names and the claims that have them, of the facts of its cluster."""
    nodes = set(group.nodes)
    named = [fact for fact in facts if nodes & {fact.head_id, fact.tail_id}]
    ends = [end for f in named for end in ((f.head, f.head_id), (f.tail, f.tail_id))]
    names = dict.fromkeys(name for name, node in ends if node in nodes)
    told = dict.fromkeys(stated[fact.claim].text for fact in named)
    return {"names": list(names), "kind": group.kind, "claims": list(told)}


def _carry(before: Sequence[Reviewed], sample: Sequence[Reviewed]) -> list[Reviewed]:
    """Gives the judgements of ``before`` to equal groups of ``sample``; the judged rows left over.

    Two clusters may have groups of the same names, which their claims then tell apart.
    """
    left = [row for row in before if row.judgement is not None]
    for with_claims in (True, False):
        waiting: dict[Any, list[Reviewed]] = collections.defaultdict(list)
        for row in left:
            waiting[_key(row, with_claims)].append(row)
        for row in sample:
            if row.judgement is None and (same := waiting[_key(row, with_claims)]):
                row.judgement = same.pop(0).judgement
        left = [row for rows in waiting.values() for row in rows]
    if left:
        say(f"{REVIEW}: {len(left)} judged groups are not in the sample any more; they stay below")
    return left


def _key(row: Reviewed, with_claims: bool) -> Any:
    return frozenset(row.names), row.kind, row.claims if with_claims else None


def _reviewed(sample: Sequence[Reviewed]) -> dict[str, Any]:
    """``review``: kind -> how many groups are judged, and the share of right ones (A.6)."""
    found: dict[str, Any] = {}
    for kind in sorted({row.kind for row in sample if row.judgement is not None}):
        own = [row.judgement for row in sample if row.kind == kind and row.judgement is not None]
        found[kind] = {"judged": len(own), "right": sum(own) / len(own)}
        say(f"{REVIEW}: of {len(own)} {kind} groups {100 * sum(own) / len(own):.1f} % are right")
    return {"review": found} if found else {}


def _needs_link(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """By hops the percentage of questions with added joints (Table 2).

    ``exact``: of those with an exact one; ``context``: with contextual ones alone, for the paper's
    two columns add up to its third; ``either``.
    """
    found: dict[str, dict[str, float]] = {}
    for hops in sorted({str(row["hops"]) for row in rows if row["question_id"]}):
        links = [set(r["links"]) for r in rows if r["question_id"] and str(r["hops"]) == hops]
        share = {
            "exact": sum("exact" in some for some in links),
            "context": sum("context" in some and "exact" not in some for some in links),
        }
        share["either"] = sum(share.values())
        found[hops] = {kind: round(100 * n / len(links), 1) for kind, n in share.items()}
    return found
