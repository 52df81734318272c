"""Links from facts to the passages whose titles occur in them (ours; off by default)."""

from collections.abc import Sequence

from cirag_jax.methods.cirag.settings import CiragConfig
from cirag_jax.methods.cirag.state import State
from cirag_jax.methods.common.evidence import Candidates, location_of
from cirag_jax.runtime.requests import Follow, Program, Retrieved
from cirag_jax.types import Passage


def follow_links(state: State) -> Program[tuple[Passage, ...]]:
    """Returns the passages whose titles occur in the question or in the kept facts.

    Passages that have a fact in the chain are left out. If ``config.link_bonus`` is 0, the result
    is empty.
    """
    if not state.config.link_bonus:
        return ()
    texts = [state.evidence.text(fact) for fact in state.kept]
    named: Retrieved = yield Follow((state.question, *texts), 2 * state.config.num_passages)
    visited = {location_of(fact)[0] for fact in state.chain}
    return tuple(passage for passage in named.passages if passage.id not in visited)


def add_bonus(candidates: Candidates, linked: Sequence[Passage], config: CiragConfig) -> Candidates:
    """Adds the bonus to candidates from linked passages and returns the N best candidates."""
    ids = {passage.id for passage in linked}
    scores = [
        score + config.link_bonus * (location_of(fact)[0] in ids)
        for fact, score in zip(candidates.facts, candidates.scores, strict=True)
    ]
    best = sorted(range(len(scores)), key=lambda i: -scores[i])[: config.num_candidates]
    return Candidates(tuple(candidates.facts[i] for i in best), tuple(scores[i] for i in best))
