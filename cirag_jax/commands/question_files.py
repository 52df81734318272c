"""The files of a generated benchmark: a dataset folder, and the outcome of every path."""

import collections
import dataclasses
import itertools
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
class GeneratedQuestion:
    """A path and its outcome: a question, or the reason why there is none."""

    path: Path
    outcome: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Knowledge:
    """Everything extracted from the documents to generate questions."""

    documents: Sequence[Document]
    database: Database
    claims: Sequence[Claim]
    graph: equivalence.Graph
    clusters: clusters.Clusters
    groups: Sequence[Group]

    def facts(self, path: Path) -> list[Fact]:
        """Returns the facts of a path."""
        return [self.graph.facts[edge.fact] for edge in path]

    def positions(self, path: Path) -> list[tuple[str, int]]:
        """Returns the document and sentence number of each fact of a path."""
        facts_claims = [self.claims[fact.claim] for fact in self.facts(path)]
        return [(claim.document, claim.sentence) for claim in facts_claims]


class Reviewed(msgspec.Struct, forbid_unknown_fields=True):
    """A line of `REVIEW`: a group and a person's judgement, null until it is judged."""

    names: tuple[str, ...]
    kind: Kind
    claims: tuple[str, ...]
    judgement: bool | None


def read_review(workdir: pathlib.Path) -> list[Reviewed]:
    """Reads the sample of an earlier run with its judgements; empty if there is none."""
    file = workdir / REVIEW
    if not file.is_file() or not file.stat().st_size:  # empty if there were no groups
        return []
    return [row for _, row in read_lines(file, Reviewed)]


def total_counts(counters: Iterable[Mapping[str, int]]) -> collections.Counter[str]:
    """Adds up counters."""
    return sum(map(collections.Counter, counters), collections.Counter())


def write(
    config: Config,
    knowledge: Knowledge,
    generated: Sequence[GeneratedQuestion],
    workdir: pathlib.Path,
) -> dict[str, Any]:
    """Writes all files of the dataset folder; returns counts for the command's result."""
    old_reviews = read_review(workdir)
    database = knowledge.database
    kept, rows = _questions(generated, knowledge)
    kept = _with_contexts(kept, database, config.context)
    by_chunk = _triples(knowledge)
    jsonl.write_dataset(Dataset(workdir.name, tuple(kept), database.passages, by_chunk), workdir)
    write_lines(workdir / PATHS, rows)
    write_lines(workdir / SOURCES, _sources(knowledge))
    group_rows = _group_rows(knowledge)
    write_lines(workdir / GROUPS, group_rows)
    random.Random(config.seed).shuffle(group_rows)
    sample = [
        msgspec.convert({**row, "judgement": None}, Reviewed) for row in group_rows[: config.review]
    ]
    others = _carry_over(old_reviews, sample)
    write_lines(workdir / REVIEW, map(msgspec.structs.asdict, (*sample, *others)))
    dropped = _dropped(rows, config.paths.hops)
    return {
        "paths": dict(collections.Counter(str(len(item.path)) for item in generated)),
        "questions": len(kept),
        "hops": dict(collections.Counter(str(question.hops) for question in kept)),
        "dropped_questions": dict(total_counts(dropped.values())),
        "dropped_by_hops": {hops: dict(counts) for hops, counts in dropped.items() if counts},
        "needs_link": _needs_link(rows),
        "chunks": len(database.chunks),
        **_review_counts(sample),
    }


def _questions(
    generated: Sequence[GeneratedQuestion], knowledge: Knowledge
) -> tuple[list[Question], list[dict[str, Any]]]:
    """Returns the questions to keep, with ids such as 2hop-0001, and the rows of `PATHS`."""
    kept: list[Question] = []
    rows: list[dict[str, Any]] = []
    counts: collections.Counter[int] = collections.Counter()
    texts: set[str] = set()
    for item in generated:
        outcome, hops = dict(item.outcome), len(item.path)
        if "reason" not in outcome and outcome["question"] in texts:
            outcome["reason"] = "asked_twice"
        name = None
        if "reason" not in outcome:
            texts.add(outcome["question"])
            counts[hops] += 1
            name = f"{hops}hop-{counts[hops]:04d}"
            kept.append(_question(name, item, knowledge))
        rows.append({"question_id": name, **_path_row(item.path, knowledge), **outcome})
    return kept, rows


def _dropped(
    rows: Iterable[Mapping[str, Any]], hops: Sequence[int]
) -> dict[str, collections.Counter[str]]:
    """Counts the paths without a question by hops and reason."""
    counts = {str(number): collections.Counter[str]() for number in hops}
    for row in rows:
        if row["question_id"] is None:
            counts[str(row["hops"])][row["reason"]] += 1
    return counts


def _path_row(path: Path, knowledge: Knowledge) -> dict[str, Any]:
    graph, positions = knowledge.graph, knowledge.positions(path)
    unique = dict.fromkeys(positions)
    evidence = dict(zip(unique, knowledge.database.evidence(positions), strict=True))
    return {
        "hops": len(path),
        "nodes": [graph.name(node) for node in (path[0].head, *(edge.tail for edge in path))],
        "links": list(graph.links(path)),
        "facts": [
            {
                "triple": list(fact.parts),
                "claim": knowledge.claims[fact.claim].text,
                "document": position[0],
                "sentence": position[1],
                "chunk": evidence[position][0],
            }
            for fact, position in zip(knowledge.facts(path), positions, strict=True)
        ],
    }


def _question(name: str, item: GeneratedQuestion, knowledge: Knowledge) -> Question:
    database, positions = knowledge.database, knowledge.positions(item.path)
    evidence = database.evidence(positions)
    places = [tuple(database.places(*position)) for position in dict.fromkeys(positions)]
    return Question(
        id=name,
        question=item.outcome["question"],
        answers=tuple(item.outcome["answers"]),
        type="bridge",
        hops=len(item.path),
        split="test",
        supporting=tuple(dict.fromkeys(chunk for chunk, _ in evidence)),
        supporting_sentences=evidence,
        same_sentences=tuple(same for same in places if len(same) > 1) or None,
        evidences=tuple(fact.parts for fact in knowledge.facts(item.path)),
    )


def _with_contexts(kept: Sequence[Question], database: Database, others: int) -> list[Question]:
    """Adds contexts to questions: the evidence, and other chunks that BM25 ranks highest.

    If fewer chunks share a word with a question, the first chunks fill its context.
    """
    passages = list(database.passages.values())
    index = BM25([f"{passage.title} {passage.text}" for passage in passages])
    rows_QK, _ = index.search(
        [q.question for q in kept], others + max((q.hops or 0 for q in kept), default=0)
    )
    questions = []
    for question, rows in zip(kept, rows_QK, strict=True):
        gold = question.supporting or ()
        ranked = dict.fromkeys((*(row for row in rows.tolist() if row >= 0), *range(len(passages))))
        near = (passages[row].id for row in ranked if passages[row].id not in gold)
        # Sorted, because this order hides the evidence.
        context = sorted((*gold, *itertools.islice(near, others)))
        questions.append(dataclasses.replace(question, context=tuple(context)))
    return questions


def _triples(knowledge: Knowledge) -> dict[str, tuple[Triple, ...]]:
    """Returns the facts of every chunk, as triples."""
    by_chunk: dict[str, list[Triple]] = {name: [] for name in knowledge.database.passages}
    for fact in knowledge.graph.facts:
        claim = knowledge.claims[fact.claim]
        for name, sentence in knowledge.database.places(claim.document, claim.sentence):
            by_chunk[name].append(Triple(*fact.parts, name, sentence))
    return {name: tuple(chunk_triples) for name, chunk_triples in by_chunk.items()}


def _sources(knowledge: Knowledge) -> Iterable[dict[str, Any]]:
    chunks: dict[str, list[str]] = collections.defaultdict(list)
    for chunk in knowledge.database.chunks:
        chunks[chunk.document].append(chunk.passage.id)
    return (
        {"id": d.id, "title": d.title, "source": d.source, "date": d.date, "chunks": chunks[d.id]}
        for d in knowledge.documents
    )


def _group_rows(knowledge: Knowledge) -> list[dict[str, Any]]:
    """Returns the names in each group, and the claims in its cluster that mention them."""
    facts = knowledge.graph.facts
    by_claim = equivalence.facts_of_claims(facts)
    of_clusters = [
        [facts[i] for claim in cluster for i in by_claim.get(claim, ())]
        for cluster in knowledge.clusters
    ]
    return [
        _group_row(group, of_clusters[group.cluster], knowledge.claims)
        for group in knowledge.groups
    ]


def _group_row(group: Group, facts: Sequence[Fact], claims: Sequence[Claim]) -> dict[str, Any]:
    nodes = set(group.nodes)
    named = [fact for fact in facts if nodes & {fact.head_id, fact.tail_id}]
    ends = [end for f in named for end in ((f.head, f.head_id), (f.tail, f.tail_id))]
    names = dict.fromkeys(name for name, node in ends if node in nodes)
    texts = dict.fromkeys(claims[fact.claim].text for fact in named)
    return {"names": list(names), "kind": group.kind, "claims": list(texts)}


def _carry_over(old: Sequence[Reviewed], sample: Sequence[Reviewed]) -> list[Reviewed]:
    """Copies judgements from ``old`` to equal groups of ``sample``; returns the other judged rows.

    Groups with equal claims are matched first, because clusters may have groups with equal names.
    """
    judged = [row for row in old if row.judgement is not None]
    for with_claims in (True, False):
        by_key: dict[Any, list[Reviewed]] = collections.defaultdict(list)
        for row in judged:
            by_key[_key(row, with_claims)].append(row)
        for row in sample:
            if row.judgement is None and (equal := by_key[_key(row, with_claims)]):
                row.judgement = equal.pop(0).judgement
        judged = [row for rows in by_key.values() for row in rows]
    if judged:
        say(f"{REVIEW}: {len(judged)} judged groups, no longer in the sample, are kept at the end")
    return judged


def _key(row: Reviewed, with_claims: bool) -> Any:
    return frozenset(row.names), row.kind, row.claims if with_claims else None


def _review_counts(sample: Sequence[Reviewed]) -> dict[str, Any]:
    """Returns ``review``: by kind, the number of judged groups and the share that is right."""
    by_kind: dict[str, list[bool]] = collections.defaultdict(list)
    for row in sample:
        if row.judgement is not None:
            by_kind[row.kind].append(row.judgement)
    review = {
        kind: {"judged": len(judgements), "right": sum(judgements) / len(judgements)}
        for kind, judgements in sorted(by_kind.items())
    }
    for kind, counts in review.items():
        say(
            f"{REVIEW}: {100 * counts['right']:.1f} % of {counts['judged']} {kind} groups are right"
        )
    return {"review": review} if review else {}


def _needs_link(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Returns the percentage of questions with added links, by hops (GRADE's Table 2).

    ``exact``: questions with an exact link. ``context``: questions with only contextual links.
    ``either``: the sum of both.
    """
    percentages: dict[str, dict[str, float]] = {}
    for hops in sorted({str(row["hops"]) for row in rows if row["question_id"]}):
        links = [set(r["links"]) for r in rows if r["question_id"] and str(r["hops"]) == hops]
        share = {
            "exact": sum("exact" in kinds for kinds in links),
            "context": sum("context" in kinds and "exact" not in kinds for kinds in links),
        }
        share["either"] = sum(share.values())
        percentages[hops] = {kind: round(100 * n / len(links), 1) for kind, n in share.items()}
    return percentages
