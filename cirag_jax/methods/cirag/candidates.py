"""Construction: from the passages of a round to its candidates."""

import dataclasses
from collections.abc import Sequence

from cirag_jax.methods.cirag import links
from cirag_jax.methods.cirag.settings import CiragConfig
from cirag_jax.methods.cirag.state import State
from cirag_jax.methods.common.evidence import Candidates, fact_key, places_of
from cirag_jax.runtime.requests import Extract, Extracted, Program, Rank, Ranked
from cirag_jax.triples.normalization import merge_sources, triple_key
from cirag_jax.types import Passage, Triple


def construct(
    state: State, query: str, passages: Sequence[Passage], linked: Sequence[Passage]
) -> Program[Candidates]:
    """D_t -> T^_t: the N triples, or sentences (ours), that are nearest to a_t.

    Args:
      state: the rounds so far.
      query: a_t.
      passages: D_t.
      linked: the passages whose facts get ``link_bonus`` (ours).
    """
    if state.config.units == "sentence":
        candidates = yield from sentence_candidates(query, passages, state.config)
    else:
        candidates = yield from triple_candidates(state, query, passages)
    if state.config.link_bonus:
        candidates = links.prefer(candidates, linked, state.config)
    return drop_kept(state, candidates) if state.config.only_new else candidates


def triple_candidates(state: State, query: str, passages: Sequence[Passage]) -> Program[Candidates]:
    """The triples of the passages, merged by surface, best first."""
    config = state.config
    extracted: Extracted = yield Extract(tuple(passages))
    state.parse_errors["passage_without_triples"] += sum(t == () for t in extracted.triples)
    state.parse_errors["passage_not_extracted"] += sum(t is None for t in extracted.triples)
    stated = (
        triple
        for triples in extracted.triples
        for triple in triples or ()
        if any(triple_key(triple, config.normalization))
    )
    # In the order of the passages, so that the first statement of each is the best ranked one.
    triples = tuple(fact.triple for fact in merge_sources(stated, config.normalization))
    if not config.use_reranker or not triples:
        return Candidates(triples, (0.0,) * len(triples))
    ranked: Ranked[Triple] = yield Rank(query, triples, _num_ranked(config), "triples")
    return Candidates(ranked.texts, ranked.scores)


def sentence_candidates(
    query: str, passages: Sequence[Passage], config: CiragConfig
) -> Program[Candidates]:
    """The sentences of the passages, best first: candidates that need no extraction."""
    places = places_of(passages)
    if config.integrator == "model":  # Prompts show their texts, in later rounds too.
        places = {text: dataclasses.replace(place, text=text) for text, place in places.items()}
    if not config.use_reranker or not places:
        return Candidates(tuple(places.values()), (0.0,) * len(places))
    ranked: Ranked[str] = yield Rank(query, tuple(places), _num_ranked(config), "triples")
    return Candidates(tuple(places[text] for text in ranked.texts), ranked.scores)


def _num_ranked(config: CiragConfig) -> int:
    """The number of candidates that the ranker returns: all (0) if links reorder them."""
    return 0 if config.link_bonus else config.num_candidates


def drop_kept(state: State, candidates: Candidates) -> Candidates:
    """The candidates that no earlier round kept."""
    normalization = state.config.normalization
    kept = {fact_key(fact, normalization) for fact in state.kept}
    pairs = zip(candidates.facts, candidates.scores, strict=True)
    new = [(fact, score) for fact, score in pairs if fact_key(fact, normalization) not in kept]
    return Candidates(tuple(fact for fact, _ in new), tuple(score for _, score in new))
