"""The query of the next round: what the integrator wrote, or question and chain (ours)."""

from cirag_jax.datasets.chains import query_text
from cirag_jax.methods.cirag.decisions import Decision
from cirag_jax.methods.cirag.state import State


def following_query(state: State, decision: Decision) -> str | None:
    """a_{t+1}: the query of the next round, or None to end.

    In the paper the integrator writes it. ``next_query`` and ``on_repeat`` of the settings change
    that.
    """
    query = decision.next_query
    if query is not None and state.config.next_query == "chain":
        query = chained_query(state)
    was_asked = any(query == step.query for step in state.steps)
    if not was_asked or state.config.on_repeat == "ask":
        return query
    return None if state.config.on_repeat == "stop" else chained_query(state)


def chained_query(state: State) -> str:
    """The question followed by the facts kept so far, as an aligner reads them."""
    texts = dict.fromkeys(state.evidence.text(fact) for fact in state.kept)
    return query_text(state.question, list(texts), state.config.units)
