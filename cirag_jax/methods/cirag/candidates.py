"""Construction (section 3.3): ranks the facts of a round's passages as candidates."""

import dataclasses
from collections.abc import Sequence

from cirag_jax.methods.cirag import links
from cirag_jax.methods.cirag.settings import CiragConfig
from cirag_jax.methods.cirag.state import State
from cirag_jax.methods.common.evidence import (
    Candidates,
    fact_key,
    request_triples,
    sentences_by_text,
)
from cirag_jax.runtime.requests import Program, Rank, Ranked
from cirag_jax.triples.normalization import merge_sources, triple_key
from cirag_jax.types import Passage, Triple


def construct(
    state: State, query: str, passages: Sequence[Passage], linked: Sequence[Passage]
) -> Program[Candidates]:
    """Returns the candidates T^_t: the N triples nearest to the query (or sentences, ours).

    Args:
      state: the state before this round.
      query: the query a_t.
      passages: the passages D_t, whose facts are ranked.
      linked: passages whose facts get the bonus ``config.link_bonus`` (ours).
    """
    if state.config.units == "sentence":
        candidates = yield from sentence_candidates(query, passages, state.config)
    else:
        candidates = yield from triple_candidates(state, query, passages)
    if state.config.link_bonus:
        candidates = links.add_bonus(candidates, linked, state.config)
    return drop_kept(state, candidates) if state.config.only_new else candidates


def triple_candidates(state: State, query: str, passages: Sequence[Passage]) -> Program[Candidates]:
    """Ranks the triples of the passages; equal triples become one candidate."""
    config = state.config
    extracted = yield from request_triples(passages, state.parse_errors)
    not_blank = (
        triple
        for triples in extracted
        for triple in triples or ()
        if any(triple_key(triple, config.normalization))
    )
    # Passages are in ranked order, so the first source of a triple is its best-ranked source.
    triples = tuple(fact.triple for fact in merge_sources(not_blank, config.normalization))
    if not config.use_reranker or not triples:
        return Candidates(triples, (0.0,) * len(triples))
    ranked: Ranked[Triple] = yield Rank(query, triples, _num_ranked(config), "triples")
    return Candidates(ranked.texts, ranked.scores)


def sentence_candidates(
    query: str, passages: Sequence[Passage], config: CiragConfig
) -> Program[Candidates]:
    """Ranks the sentences of the passages, without extracting triples."""
    sentences = sentences_by_text(passages)
    if config.integrator == "model":  # The prompts of later rounds show the texts again.
        sentences = {text: dataclasses.replace(s, text=text) for text, s in sentences.items()}
    if not config.use_reranker or not sentences:
        return Candidates(tuple(sentences.values()), (0.0,) * len(sentences))
    ranked: Ranked[str] = yield Rank(query, tuple(sentences), _num_ranked(config), "triples")
    return Candidates(tuple(sentences[text] for text in ranked.texts), ranked.scores)


def _num_ranked(config: CiragConfig) -> int:
    """Returns the number of candidates to request; 0 (all) if link bonuses reorder them later."""
    return 0 if config.link_bonus else config.num_candidates


def drop_kept(state: State, candidates: Candidates) -> Candidates:
    """Drops candidates that an earlier round kept."""
    normalization = state.config.normalization
    kept = {fact_key(fact, normalization) for fact in state.kept}
    pairs = zip(candidates.facts, candidates.scores, strict=True)
    new = [(fact, score) for fact, score in pairs if fact_key(fact, normalization) not in kept]
    return Candidates(tuple(fact for fact, _ in new), tuple(score for _, score in new))
