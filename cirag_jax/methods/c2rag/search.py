"""C2RAG's two searches for a constraint: in the graph (section 3.2) and in text (section 3.3).

All constraints of a search are looked up together: each step is one list of requests. A `Lookup` is
one instance of a constraint, identified by the constraint's index in the plan.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from cirag_jax.datasets.sentences import sentences_of
from cirag_jax.methods.c2rag.constraints import Bindings, Candidate, CandidatePool, instances
from cirag_jax.methods.c2rag.prompts import Constraint, linearise
from cirag_jax.methods.c2rag.settings import C2ragConfig
from cirag_jax.methods.c2rag.state import Excerpt, State
from cirag_jax.methods.common.evidence import best_scores, sentence_line
from cirag_jax.runtime.requests import Anchor, Anchored, Program, Rank, Ranked, Retrieve, Retrieved
from cirag_jax.triples.normalization import merge_sources
from cirag_jax.types import Triple


class Lookup(NamedTuple):
    """An instance of a constraint, and the index of the constraint in the plan."""

    index: int
    constraint: Constraint


def _lookups(state: State, indices: Sequence[int], bindings: Bindings) -> list[Lookup]:
    return [Lookup(i, c) for i in indices for c in instances(state.plan[i], bindings)]


# ----------------------------------------------------------------------------------- in the graph


def search_graph(
    state: State, indices: Sequence[int], bindings: Bindings
) -> Program[dict[int, CandidatePool]]:
    """Looks up constraints with a named end in the graph; returns their pools C_i^top."""
    config = state.config
    lookups = _lookups(state, indices, bindings)
    anchored = yield from _match_anchors(state, lookups)  # C_i
    aligned = yield from _align_relations(state, lookups, [triples for _, triples in anchored])
    ranked = yield from _rerank(state, lookups, aligned)
    pools = {}
    for i in indices:
        rows = [row for row, lookup in enumerate(lookups) if lookup.index == i]
        best: dict[Triple, Candidate] = {}
        for candidate in (candidate for row in rows for candidate in ranked[row]):
            known = best.get(candidate.fact.triple)
            if known is None or candidate.score > known.score:
                best[candidate.fact.triple] = candidate
        pools[i] = CandidatePool(
            state.plan[i],
            tuple(lookups[row].constraint for row in rows),
            tuple(dict.fromkeys(name for row in rows for name in anchored[row][0])),
            tuple(sorted(best.values(), key=lambda c: -c.score))[: config.num_structural],
            tuple(v for v in state.plan[i].variables if v not in bindings),
        )
    return pools


def _is_coarse(state: State, lookup: Lookup) -> bool:
    """Returns whether all triples of the graph are candidates (w/o Constraint, NoC2RAG)."""
    return not state.config.use_constraints or lookup.index < state.config.plain_hops


def _match_anchors(
    state: State, lookups: Sequence[Lookup]
) -> Program[list[tuple[tuple[str, ...], tuple[Triple, ...]]]]:
    """Returns the anchors of each lookup's named ends, and the anchors' triples (Eq. 3 and 4)."""
    config, graph = state.config, state.graph
    named = [lookup.constraint for lookup in lookups if not _is_coarse(state, lookup)]
    surfaces = tuple(dict.fromkeys(surface for c in named for surface in c.entities))
    if graph is None:
        responses: list[Anchored] = yield [
            Anchor(s, config.num_anchors, config.anchor_match) for s in surfaces
        ]
        nearby = {s: (r.entities, r.triples) for s, r in zip(surfaces, responses, strict=True)}
    else:
        anchors = {s: graph.anchors(s, config.num_anchors, config.anchor_match) for s in surfaces}
        nearby = {s: (names, graph.neighbors(names)) for s, names in anchors.items()}
    anchored = []
    for lookup in lookups:
        if graph is not None and _is_coarse(state, lookup):
            anchored.append(((), tuple(graph.triples)))
            continue
        matches = [nearby[surface] for surface in lookup.constraint.entities]
        names = tuple(dict.fromkeys(name for entities, _ in matches for name in entities))
        triples = tuple(dict.fromkeys(triple for _, triples in matches for triple in triples))
        anchored.append((names, triples))
    return anchored


def _align_relations(
    state: State, lookups: Sequence[Lookup], pools: Sequence[Sequence[Triple]]
) -> Program[list[list[Candidate]]]:
    """Returns C_i^init: the R candidates of each lookup with the best relations (Eq. 5)."""
    config = state.config
    facts = [merge_sources(pool, config.normalization) for pool in pools]
    requests, rows = [], []
    for row, lookup in enumerate(lookups):
        if not facts[row]:
            continue
        if _is_coarse(state, lookup):
            triples = tuple(fact.triple for fact in facts[row])
            query = linearise(lookup.constraint)
            ranks = [Rank(query, triples, config.num_structural, "relations")]
        elif config.use_relations:
            relations = tuple(dict.fromkeys(fact.triple.relation for fact in facts[row]))
            ranks = [Rank(r, relations, 0, "relations") for r in lookup.constraint.relations]
        else:
            continue
        requests += ranks
        rows += [row] * len(ranks)
    responses: list[Ranked[Any]] = yield requests
    pairs: list[list[tuple[Any, float]]] = [[] for _ in lookups]
    for row, ranked in zip(rows, responses, strict=True):
        pairs[row] += zip(ranked.texts, ranked.scores, strict=True)
    aligned = []
    for row, lookup in enumerate(lookups):
        score = best_scores(pairs[row])
        if _is_coarse(state, lookup):
            chosen = [Candidate(f, score[f.triple]) for f in facts[row] if f.triple in score]
        elif not config.use_relations:
            aligned.append([Candidate(fact, 0.0) for fact in facts[row]])
            continue
        else:
            chosen = [Candidate(fact, score[fact.triple.relation]) for fact in facts[row]]
        chosen.sort(key=lambda candidate: -candidate.score)
        aligned.append(chosen[: config.num_relations])
    return aligned


def _rerank(
    state: State, lookups: Sequence[Lookup], aligned: Sequence[Sequence[Candidate]]
) -> Program[list[list[Candidate]]]:
    """Returns the K_s best candidates of each lookup, with their scores z (Eq. 6)."""
    config = state.config
    best = [list(candidates[: config.num_structural]) for candidates in aligned]
    if not config.rerank_structural:
        return best
    requests, rows = [], []
    for row, lookup in enumerate(lookups):
        if aligned[row] and not _is_coarse(state, lookup):
            by_text = {_ranked_triple(c.fact.triple, config): c for c in aligned[row]}
            query = f"{state.question}\n{_pattern(lookup.constraint, config)}"
            requests.append(Rank(query, tuple(by_text), config.num_structural, "triples"))
            rows.append((row, by_text))
    responses: list[Ranked[Triple]] = yield requests
    for (row, by_text), ranked in zip(rows, responses, strict=True):
        pairs = zip(ranked.texts, ranked.scores, strict=True)
        best[row] = [Candidate(by_text[text].fact, score) for text, score in pairs]
    return best


def _ranked_triple(triple: Triple, config: C2ragConfig) -> Triple:
    """Returns a candidate as text for the reranker."""
    return triple if config.use_relations else triple._replace(relation="")


def _pattern(constraint: Constraint, config: C2ragConfig) -> str:
    """Returns Lin(tau) as text for the rerankers."""
    relation = constraint.relation
    if config.lin_relation == "variants" and constraint.variants:
        relation = f"{relation} ({' | '.join(constraint.variants)})"
    if not config.use_placeholders:
        blank = {variable: "" for variable in constraint.variables}
        head, tail = (blank.get(end, end) for end in (constraint.head, constraint.tail))
        constraint = constraint._replace(head=head, tail=tail)
    return linearise(constraint, relation if config.use_relations else "")


# ---------------------------------------------------------------------------------------- in text


def search_text(state: State, indices: Sequence[int], bindings: Bindings) -> Program[None]:
    """Finds texts for constraints that the graph does not ground (textual recovery)."""
    config = state.config
    lookups = _lookups(state, indices, bindings)
    responses: list[Retrieved] = yield [
        Retrieve(linearise(lookup.constraint), config.num_dense)
        for lookup in lookups  # Eq. 11
    ]
    excerpts = [_excerpts(response, config) for response in responses]
    for response in responses:
        state.add_retrieved(response.passages)
    if config.rerank_texts:
        rows = [row for row, found in enumerate(excerpts) if found]
        rankings: list[Ranked[Any]] = yield [
            Rank(
                _text_query(state, lookups[row].constraint),
                tuple(excerpts[row]),
                config.num_texts,
                "passages",
            )
            for row in rows  # Eq. 12
        ]
        for row, ranked in zip(rows, rankings, strict=True):
            pairs = zip(ranked.texts, ranked.scores, strict=True)
            excerpts[row] = {t: excerpts[row][t]._replace(score=score) for t, score in pairs}
    for i in indices:
        rows = [row for row, lookup in enumerate(lookups) if lookup.index == i]
        texts = [text for row in rows for text in excerpts[row].values()]
        state.texts[i] = best_excerpts(texts)[: config.num_texts]


def _excerpts(retrieved: Retrieved, config: C2ragConfig) -> dict[Any, Excerpt]:
    """Maps the text of each passage or sentence for the reranker to its excerpt, best first."""
    pairs = zip(retrieved.passages, retrieved.scores, strict=True)
    if config.recovery_unit == "passage":
        return {passage: Excerpt(passage, None, score) for passage, score in pairs}
    return {
        sentence_line(passage, index): Excerpt(passage, index, score)
        for passage, score in pairs
        for index, sentence in enumerate(sentences_of(passage))
        if sentence.strip()
    }


def _text_query(state: State, constraint: Constraint) -> str:
    pattern = _pattern(constraint, state.config)
    if not state.config.recovery_question or pattern == state.question:
        return pattern
    return f"{state.question}\n{pattern}"


def best_excerpts(excerpts: Iterable[Excerpt]) -> tuple[Excerpt, ...]:
    """Sorts excerpts by score, best first, and drops repeated passages or sentences."""
    best: dict[Any, Excerpt] = {}
    for excerpt in sorted(excerpts, key=lambda excerpt: -excerpt.score):
        best.setdefault((excerpt.passage.id, excerpt.sentence), excerpt)
    return tuple(best.values())
