"""C2RAG's two searches for a constraint: in the graph (section 3.2), and in text (section 3.3)."""

import collections
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from cirag_jax.datasets.sentences import sentences_of
from cirag_jax.methods.c2rag.constraints import Bindings, Candidate, Pool, instances
from cirag_jax.methods.c2rag.prompts import Constraint, linearise
from cirag_jax.methods.c2rag.settings import C2ragConfig
from cirag_jax.methods.common.evidence import passage_line, sentence_line
from cirag_jax.runtime.requests import (
    Anchor,
    Anchored,
    Program,
    Rank,
    Ranked,
    Retrieve,
    Retrieved,
)
from cirag_jax.triples.entity_index import EntityIndex
from cirag_jax.triples.normalization import merge_sources
from cirag_jax.types import Passage, Triple


class Text(NamedTuple):
    """A piece of evidence: a passage, or one sentence of it, and its score."""

    passage: Passage
    sentence: int | None
    score: float

    @property
    def line(self) -> str:
        """As the reader sees it."""
        if self.sentence is None:
            return passage_line(self.passage)
        return sentence_line(self.passage, self.sentence)


@dataclasses.dataclass
class Run:
    """One question under way.

    Attributes:
      question: q.
      config: the switches.
      passages: everything retrieved, by id, in order.
      graph: of U(q); None: the corpus's, which is asked for.
      plan: the constraints.
      pools: what was found in the graph, by place in the plan.
      texts: what was recovered from text, by place in the plan.
      known: bindings read from text.
      parse_errors: malformed output by kind.
    """

    question: str
    config: C2ragConfig
    passages: dict[str, Passage] = dataclasses.field(default_factory=dict)
    graph: EntityIndex | None = None
    plan: tuple[Constraint, ...] = ()
    pools: dict[int, Pool] = dataclasses.field(default_factory=dict)
    texts: dict[int, tuple[Text, ...]] = dataclasses.field(default_factory=dict)
    known: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    parse_errors: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)

    def see(self, passages: Iterable[Passage]) -> None:
        """Notes passages."""
        self.passages.update((p.id, p) for p in passages if p.id not in self.passages)


# ------------------------------------------------------------------------------------ in the graph


def look_up(run: Run, places: Sequence[int], bindings: Bindings) -> Program[dict[int, Pool]]:
    """The refined pools C_i^top of constraints with a named end, all looked up together."""
    config = run.config
    asked = [(i, c) for i in places for c in instances(run.plan[i], bindings)]
    anchors = yield from _anchor(run, asked)
    aligned = yield from _align(run, asked, [triples for _, triples in anchors])
    ranked = yield from _rerank(run, asked, aligned)
    pools = {}
    for place in places:
        own = [row for row, (i, _) in enumerate(asked) if i == place]
        best: dict[Any, Candidate] = {}
        for fact, score in (candidate for row in own for candidate in ranked[row]):
            known = best.get(fact.triple)
            if known is None or score > known.score:
                best[fact.triple] = Candidate(fact, score)
        pools[place] = Pool(
            run.plan[place],
            tuple(asked[row][1] for row in own),
            tuple(dict.fromkeys(name for row in own for name in anchors[row][0])),
            tuple(sorted(best.values(), key=lambda c: -c.score))[: config.num_structural],
            tuple(v for v in run.plan[place].variables if v not in bindings),
        )
    return pools


def _is_coarse(run: Run, place: int) -> bool:
    return not run.config.use_constraints or place < run.config.plain_hops


def _anchor(
    run: Run, asked: Sequence[tuple[int, Constraint]]
) -> Program[list[tuple[tuple[str, ...], tuple[Triple, ...]]]]:
    """Of each constraint, the entities that its named ends match, and the triples around them."""
    config, graph = run.config, run.graph
    fine = [c for i, c in asked if not _is_coarse(run, i)]
    surfaces = tuple(dict.fromkeys(surface for c in fine for surface in c.entities))
    if graph is None:
        requests = [Anchor(s, config.num_anchors, config.anchor_match) for s in surfaces]
        responses: list[Anchored] = yield requests
        found = {s: (r.entities, r.triples) for s, r in zip(surfaces, responses, strict=True)}
    else:
        names = {s: graph.anchors(s, config.num_anchors, config.anchor_match) for s in surfaces}
        found = {s: (near, graph.neighbours(near)) for s, near in names.items()}
    anchored = []
    for place, constraint in asked:
        if graph is not None and _is_coarse(run, place):
            anchored.append(((), tuple(graph.triples)))
            continue
        near = [found[surface] for surface in constraint.entities]
        anchored.append(
            (
                tuple(dict.fromkeys(name for entities, _ in near for name in entities)),
                tuple(dict.fromkeys(triple for _, triples in near for triple in triples)),
            )
        )
    return anchored


def _align(
    run: Run, asked: Sequence[tuple[int, Constraint]], pools: Sequence[Sequence[Triple]]
) -> Program[list[list[Candidate]]]:
    """C_i^init: the R candidates whose relation is nearest to a wording of the constraint's."""
    config = run.config
    facts = [merge_sources(pool, config.normalization) for pool in pools]
    requests, owners = [], []
    for row, (place, constraint) in enumerate(asked):
        if not facts[row]:
            continue
        if _is_coarse(run, place):
            triples = tuple(fact.triple for fact in facts[row])
            wanted = [Rank(linearise(constraint), triples, config.num_structural, "relations")]
        elif config.use_relations:
            relations = tuple(dict.fromkeys(fact.triple.relation for fact in facts[row]))
            wanted = [Rank(r, relations, 0, "relations") for r in constraint.relations]
        else:
            continue
        requests += wanted
        owners += [row] * len(wanted)
    ranked: list[Ranked[Any]] = yield requests
    score: list[dict[Any, float]] = [{} for _ in asked]
    for row, found in zip(owners, ranked, strict=True):
        for text, value in zip(found.texts, found.scores, strict=True):
            score[row][text] = max(value, score[row].get(text, value))
    aligned = []
    for row, (place, _) in enumerate(asked):
        if _is_coarse(run, place):
            chosen = [
                Candidate(f, score[row][f.triple]) for f in facts[row] if f.triple in score[row]
            ]
        elif not config.use_relations:
            aligned.append([Candidate(fact, 0.0) for fact in facts[row]])
            continue
        else:
            chosen = [Candidate(fact, score[row][fact.triple.relation]) for fact in facts[row]]
        chosen.sort(key=lambda candidate: -candidate.score)
        aligned.append(chosen[: config.num_relations])
    return aligned


def _rerank(
    run: Run, asked: Sequence[tuple[int, Constraint]], aligned: Sequence[Sequence[Candidate]]
) -> Program[list[list[Candidate]]]:
    """The scores z of Eq. 6, and the K_s best candidates of each constraint."""
    config = run.config
    ranked = [list(candidates[: config.num_structural]) for candidates in aligned]
    if not config.rerank_structural:
        return ranked
    requests, owners = [], []
    for row, (place, constraint) in enumerate(asked):
        if aligned[row] and not _is_coarse(run, place):
            shown = {_shown(c.fact.triple, config): c for c in aligned[row]}
            query = f"{run.question}\n{_pattern(constraint, config)}"
            requests.append(Rank(query, tuple(shown), config.num_structural, "triples"))
            owners.append((row, shown))
    found: list[Ranked[Triple]] = yield requests
    for (row, shown), response in zip(owners, found, strict=True):
        pairs = zip(response.texts, response.scores, strict=True)
        ranked[row] = [Candidate(shown[text].fact, score) for text, score in pairs]
    return ranked


def _shown(triple: Triple, config: C2ragConfig) -> Triple:
    """A candidate as the reranker sees it."""
    return triple if config.use_relations else triple._replace(relation="")


def _pattern(constraint: Constraint, config: C2ragConfig) -> str:
    """Lin(tau) as the rerankers see it."""
    relation = constraint.relation
    if config.lin_relation == "variants" and constraint.variants:
        relation = f"{relation} ({' | '.join(constraint.variants)})"
    if not config.use_placeholders:
        gone = {variable: "" for variable in constraint.variables}
        head, tail = (gone.get(end, end) for end in (constraint.head, constraint.tail))
        constraint = constraint._replace(head=head, tail=tail)
    return linearise(constraint, relation if config.use_relations else "")


# ---------------------------------------------------------------------------------------- in text


def recover(run: Run, places: Sequence[int], bindings: Bindings) -> Program[None]:
    """The texts of constraints that the graph does not ground, all looked up together."""
    config = run.config
    asked = [(i, c) for i in places for c in instances(run.plan[i], bindings)]
    found: list[Retrieved] = yield [Retrieve(linearise(c), config.num_dense) for _, c in asked]
    units = [_units(response, config) for response in found]
    for response in found:
        run.see(response.passages)
    if config.rerank_texts:
        rows = [row for row, own in enumerate(units) if own]
        ranked: list[Ranked[Any]] = yield [
            Rank(_text_query(run, asked[row][1]), tuple(units[row]), config.num_texts, "passages")
            for row in rows
        ]
        for row, response in zip(rows, ranked, strict=True):
            pairs = zip(response.texts, response.scores, strict=True)
            units[row] = {unit: units[row][unit]._replace(score=score) for unit, score in pairs}
    for place in places:
        texts = [
            t for (i, _), own in zip(asked, units, strict=True) if i == place for t in own.values()
        ]
        run.texts[place] = best(texts)[: config.num_texts]


def _units(found: Retrieved, config: C2ragConfig) -> dict[Any, Text]:
    """What the reranker compares -> the text it stands for, best first."""
    pairs = zip(found.passages, found.scores, strict=True)
    if config.recovery_unit == "passage":
        return {passage: Text(passage, None, score) for passage, score in pairs}
    return {
        sentence_line(passage, place): Text(passage, place, score)
        for passage, score in pairs
        for place, sentence in enumerate(sentences_of(passage))
        if sentence.strip()
    }


def _text_query(run: Run, constraint: Constraint) -> str:
    pattern = _pattern(constraint, run.config)
    if not run.config.recovery_question or pattern == run.question:
        return pattern
    return f"{run.question}\n{pattern}"


def best(texts: Iterable[Text]) -> tuple[Text, ...]:
    """By falling score, each passage or sentence once."""
    places: dict[Any, Text] = {}
    for text in sorted(texts, key=lambda text: -text.score):
        places.setdefault((text.passage.id, text.sentence), text)
    return tuple(places.values())
