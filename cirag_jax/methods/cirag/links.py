"""Links between passages: those that facts name by their titles (ours; off by default)."""

from collections.abc import Sequence

from cirag_jax.methods.cirag.settings import CiragConfig
from cirag_jax.methods.cirag.state import State
from cirag_jax.methods.common.evidence import Candidates, place_of
from cirag_jax.runtime.requests import Follow, Program, Retrieved
from cirag_jax.types import Passage


def follow(state: State) -> Program[tuple[Passage, ...]]:
    """The passages that question and kept facts name, except those of the chain.

    Without ``link_bonus`` there are none.
    """
    if not state.config.link_bonus:
        return ()
    texts = [state.evidence.text(fact) for fact in state.kept]
    named: Retrieved = yield Follow((state.question, *texts), 2 * state.config.num_passages)
    visited = {place_of(fact)[0] for fact in state.chain}
    return tuple(passage for passage in named.passages if passage.id not in visited)


def prefer(candidates: Candidates, linked: Sequence[Passage], config: CiragConfig) -> Candidates:
    """The N best candidates once those of linked passages have the bonus."""
    ids = {passage.id for passage in linked}
    scores = [
        score + config.link_bonus * (place_of(fact)[0] in ids)
        for fact, score in zip(candidates.facts, candidates.scores, strict=True)
    ]
    best = sorted(range(len(scores)), key=lambda i: -scores[i])[: config.num_candidates]
    return Candidates(tuple(candidates.facts[i] for i in best), tuple(scores[i] for i in best))
