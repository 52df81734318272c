"""C2RAG's two searches for a constraint: in the graph (section 3.2), and in text (section 3.3)."""

from collections.abc import Iterable, Sequence
from typing import Any

from cirag_jax.datasets.sentences import sentences_of
from cirag_jax.methods.c2rag.constraints import Bindings, Candidate, CandidatePool, instances
from cirag_jax.methods.c2rag.prompts import Constraint, linearise
from cirag_jax.methods.c2rag.settings import C2ragConfig
from cirag_jax.methods.c2rag.state import Excerpt, State
from cirag_jax.methods.common.evidence import sentence_line
from cirag_jax.runtime.requests import (
    Anchor,
    Anchored,
    Program,
    Rank,
    Ranked,
    Retrieve,
    Retrieved,
)
from cirag_jax.triples.normalization import merge_sources
from cirag_jax.types import Triple

# ------------------------------------------------------------------------------------ in the graph


def look_up(
    state: State, places: Sequence[int], bindings: Bindings
) -> Program[dict[int, CandidatePool]]:
    """The refined pools C_i^top of constraints with a named end, all looked up together."""
    config = state.config
    asked = [(i, c) for i in places for c in instances(state.plan[i], bindings)]
    anchors = yield from _anchor(state, asked)
    aligned = yield from _align(state, asked, [triples for _, triples in anchors])
    ranked = yield from _rerank(state, asked, aligned)
    pools = {}
    for place in places:
        own = [row for row, (i, _) in enumerate(asked) if i == place]
        best: dict[Any, Candidate] = {}
        for fact, score in (candidate for row in own for candidate in ranked[row]):
            known = best.get(fact.triple)
            if known is None or score > known.score:
                best[fact.triple] = Candidate(fact, score)
        pools[place] = CandidatePool(
            state.plan[place],
            tuple(asked[row][1] for row in own),
            tuple(dict.fromkeys(name for row in own for name in anchors[row][0])),
            tuple(sorted(best.values(), key=lambda c: -c.score))[: config.num_structural],
            tuple(v for v in state.plan[place].variables if v not in bindings),
        )
    return pools


def _is_coarse(state: State, place: int) -> bool:
    return not state.config.use_constraints or place < state.config.plain_hops


def _anchor(
    state: State, asked: Sequence[tuple[int, Constraint]]
) -> Program[list[tuple[tuple[str, ...], tuple[Triple, ...]]]]:
    """Of each constraint, the entities that its named ends match, and the triples around them."""
    config, graph = state.config, state.graph
    fine = [c for i, c in asked if not _is_coarse(state, i)]
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
        if graph is not None and _is_coarse(state, place):
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
    state: State, asked: Sequence[tuple[int, Constraint]], pools: Sequence[Sequence[Triple]]
) -> Program[list[list[Candidate]]]:
    """C_i^init: the R candidates whose relation is nearest to a wording of the constraint's."""
    config = state.config
    facts = [merge_sources(pool, config.normalization) for pool in pools]
    requests, owners = [], []
    for row, (place, constraint) in enumerate(asked):
        if not facts[row]:
            continue
        if _is_coarse(state, place):
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
        if _is_coarse(state, place):
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
    state: State, asked: Sequence[tuple[int, Constraint]], aligned: Sequence[Sequence[Candidate]]
) -> Program[list[list[Candidate]]]:
    """The scores z of Eq. 6, and the K_s best candidates of each constraint."""
    config = state.config
    ranked = [list(candidates[: config.num_structural]) for candidates in aligned]
    if not config.rerank_structural:
        return ranked
    requests, owners = [], []
    for row, (place, constraint) in enumerate(asked):
        if aligned[row] and not _is_coarse(state, place):
            shown = {_shown(c.fact.triple, config): c for c in aligned[row]}
            query = f"{state.question}\n{_pattern(constraint, config)}"
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


def recover(state: State, places: Sequence[int], bindings: Bindings) -> Program[None]:
    """The texts of constraints that the graph does not ground, all looked up together."""
    config = state.config
    asked = [(i, c) for i in places for c in instances(state.plan[i], bindings)]
    found: list[Retrieved] = yield [Retrieve(linearise(c), config.num_dense) for _, c in asked]
    units = [_excerpts(response, config) for response in found]
    for response in found:
        state.see(response.passages)
    if config.rerank_texts:
        rows = [row for row, own in enumerate(units) if own]
        ranked: list[Ranked[Any]] = yield [
            Rank(_text_query(state, asked[row][1]), tuple(units[row]), config.num_texts, "passages")
            for row in rows
        ]
        for row, response in zip(rows, ranked, strict=True):
            pairs = zip(response.texts, response.scores, strict=True)
            units[row] = {unit: units[row][unit]._replace(score=score) for unit, score in pairs}
    for place in places:
        texts = [
            t for (i, _), own in zip(asked, units, strict=True) if i == place for t in own.values()
        ]
        state.texts[place] = best(texts)[: config.num_texts]


def _excerpts(found: Retrieved, config: C2ragConfig) -> dict[Any, Excerpt]:
    """What the reranker compares -> the text it stands for, best first."""
    pairs = zip(found.passages, found.scores, strict=True)
    if config.recovery_unit == "passage":
        return {passage: Excerpt(passage, None, score) for passage, score in pairs}
    return {
        sentence_line(passage, place): Excerpt(passage, place, score)
        for passage, score in pairs
        for place, sentence in enumerate(sentences_of(passage))
        if sentence.strip()
    }


def _text_query(state: State, constraint: Constraint) -> str:
    pattern = _pattern(constraint, state.config)
    if not state.config.recovery_question or pattern == state.question:
        return pattern
    return f"{state.question}\n{pattern}"


def best(texts: Iterable[Excerpt]) -> tuple[Excerpt, ...]:
    """By falling score, each passage or sentence once."""
    places: dict[Any, Excerpt] = {}
    for text in sorted(texts, key=lambda text: -text.score):
        places.setdefault((text.passage.id, text.sentence), text)
    return tuple(places.values())
