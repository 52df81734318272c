"""The query of the next round: the integrator's (paper), or question and kept facts (ours)."""

from cirag_jax.datasets.chains import query_text
from cirag_jax.methods.cirag.decisions import Decision
from cirag_jax.methods.cirag.state import State


def following_query(state: State, decision: Decision) -> str | None:
    """Returns a_{t+1}, or None to end the rounds.

    The integrator writes the query unless ``config.next_query`` or ``config.on_repeat`` replace it.
    """
    query = decision.next_query
    if query is not None and state.config.next_query == "chain":
        query = chain_query(state)
    is_repeated = any(query == step.query for step in state.steps)
    if not is_repeated or state.config.on_repeat == "ask":
        return query
    return None if state.config.on_repeat == "stop" else chain_query(state)


def chain_query(state: State) -> str:
    """Returns the question followed by the kept facts, in the form that aligners are trained on."""
    texts = dict.fromkeys(state.evidence.text(fact) for fact in state.kept)
    return query_text(state.question, list(texts), state.config.units)
