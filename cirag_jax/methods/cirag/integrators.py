"""Integration (section 3.3): keeps candidates of a round and chooses the next query.

The paper's integrator is a language model. An aligner or a fixed rule can replace it (ours).
"""

import dataclasses
from collections.abc import Sequence

from cirag_jax.datasets.chains import query_text
from cirag_jax.llm.types import Message
from cirag_jax.methods.cirag import prompts
from cirag_jax.methods.cirag.decisions import Decision
from cirag_jax.methods.cirag.decoding import write_decision
from cirag_jax.methods.cirag.state import State
from cirag_jax.methods.common.evidence import Candidates, Fact, fact_key
from cirag_jax.runtime.requests import Generate, Generated, Program

TOP_K = 3


def integrate(state: State, candidates: Candidates) -> Program[Decision]:
    """Returns the decision of a round: thought r_t, core facts T~_t, next query a_{t+1} (Eq. 1)."""
    if state.config.integrator == "aligner":
        return extend_chain(state, candidates)
    if state.config.integrator == "top_k":
        return keep_top(state.question, candidates.facts)
    return (yield from ask_model(state, candidates.facts))


def ask_model(state: State, candidates: Sequence[Fact]) -> Program[Decision]:
    """Returns the decision of the language model with the role ``integrator``."""
    config = state.config
    messages = prompts.integration_messages(
        state.question,
        state.steps,
        candidates,
        normalization=config.normalization,
        prompt_format=config.prompt_format,
        few_shot=config.few_shot,
        units=config.units,
    )
    text, truncated = yield from write_decision(messages, config)
    decision = prompts.parse_decision(
        text,
        candidates,
        normalization=config.normalization,
        prompt_format=config.prompt_format,
        cutoff=config.match_cutoff,
        truncated=truncated,
    )
    if not decision.has_question and text.strip() and config.retry:
        decision = yield from _ask_for_question(state, messages, text, decision)
    state.parse_errors.update(decision.parse_errors)
    # Without a question section, the rounds end although the model did not choose to stop.
    state.parse_errors["no_decision"] += not decision.has_question
    return dataclasses.replace(decision, response=text)


def _ask_for_question(
    state: State, messages: Sequence[Message], text: str, decision: Decision
) -> Program[Decision]:
    """Requests the question section that ``text`` lacks, and adds the section to the decision."""
    prompt_format = state.config.prompt_format
    response: Generated = yield Generate(
        prompts.ask_for_question(messages, text, prompt_format), "integrator", max_tokens=64
    )
    truncated = response.finish_reason == "length"
    reply = prompts.parse_reply(response.text, prompt_format=prompt_format, truncated=truncated)
    state.parse_errors["asked_again"] += 1
    return dataclasses.replace(
        decision,
        next_query=reply.next_query,
        has_question=reply.has_question,
        parse_errors=decision.parse_errors + reply.parse_errors,
    )


def keep_top(question: str, candidates: Sequence[Fact]) -> Decision:
    """Returns the baseline's decision: keep the three best candidates and repeat the question."""
    return Decision("", tuple(candidates[:TOP_K]), question)


def extend_chain(state: State, candidates: Candidates) -> Decision:
    """Returns an aligner's decision: extend the chain by the best candidate outside the chain.

    The decision keeps the extending candidate and the ``config.keep`` best candidates that no
    earlier round kept. The next query is the question with the extended chain. The rounds end if no
    candidate outside the chain scores at least ``config.stop_below``.
    """
    config = state.config
    in_chain = {fact_key(fact, config.normalization) for fact in state.chain}
    kept = {fact_key(fact, config.normalization) for fact in state.kept}
    pairs = [
        (fact, fact_key(fact, config.normalization))
        for fact, score in zip(candidates.facts, candidates.scores, strict=True)
        if score >= config.stop_below
    ]
    best = next((fact for fact, key in pairs if key not in in_chain), None)
    if best is None:
        return Decision("", ())
    new = [fact for fact, key in pairs if key not in kept][: config.keep]
    texts = [state.evidence.text(fact) for fact in (*state.chain, best)]
    query = query_text(state.question, texts, config.units)
    return Decision("", tuple(dict.fromkeys((best, *new))), query)


def following_query(state: State, decision: Decision) -> str | None:
    """Returns the next query a_{t+1}, or None to end the rounds.

    The integrator writes the query (paper), unless ``config.next_query`` or ``config.on_repeat``
    replaces it (ours).
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
