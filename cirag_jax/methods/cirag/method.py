"""CIRAG: iterative construction-integration, then adaptive cascaded generation (paper, section 3).

Names follow the paper: x is the question, a_t the query of round t, D_t its passages, T^_t the
candidate triples, T~_t the core triples; the pools C, S, D hold core triples, sentences, passages.
What the paper does not have is off by default and stands in the modules beside this one.
"""

from collections.abc import Sequence

from cirag_jax.methods.cirag import links
from cirag_jax.methods.cirag.candidates import construct
from cirag_jax.methods.cirag.cascade import cascade, outcome
from cirag_jax.methods.cirag.decisions import Decision
from cirag_jax.methods.cirag.integrators import integrate
from cirag_jax.methods.cirag.queries import following_query
from cirag_jax.methods.cirag.settings import CiragConfig
from cirag_jax.methods.cirag.state import State
from cirag_jax.methods.common.evidence import (
    Candidates,
    rank_facts,
    rank_passages,
    rank_sentences,
)
from cirag_jax.methods.registry import Method
from cirag_jax.runtime.requests import Program, Retrieve, Retrieved
from cirag_jax.types import Attempt, Passage, Prediction, Question, Step, Triple


def cirag(question: Question, config: CiragConfig) -> Program[Prediction]:
    """Answers x: integrates facts round by round, then reads them at rising granularity."""
    state = State(question.question, config)
    yield from collect(state)
    if not config.max_steps:
        yield from _retrieve_once(state)
    first = state.evidence.seen[: len(state.steps[0].passages)]  # D_1
    attempts = yield from cascade(state.question, state.evidence, first, config, state.parse_errors)
    return _prediction(state, attempts)


METHOD = Method(cirag, CiragConfig)


def construct_and_integrate(question: Question, config: CiragConfig) -> Program[Prediction]:
    """Runs the first module alone, which distillation imitates: steps, and no answer."""
    state = State(question.question, config)
    yield from collect(state)
    return _prediction(state, ())


def collect(state: State) -> Program[None]:
    """Iterative construction-integration (section 3.3): at most L rounds, until a_{t+1} is none."""
    query: str | None = state.question  # a_1 = x
    for _ in range(state.config.max_steps):
        passages, linked = yield from retrieve(state, query)  # D_t
        candidates = yield from construct(state, query, passages, linked)  # T^_t
        decision = yield from integrate(state, candidates)  # r_t, T~_t and a_{t+1} (Eq. 1)
        state.evidence.keep(decision.kept)  # C, S and D (Eq. 3 and 4)
        state.steps.append(_step(query, passages, candidates, decision))
        query = following_query(state, decision)
        if query is None:
            break


def retrieve(state: State, query: str) -> Program[tuple[tuple[Passage, ...], tuple[Passage, ...]]]:
    """D_t: the K passages nearest to a_t, and the linked ones after them.

    Returns:
      All passages, and those of them that links lead to; see `links.follow`.
    """
    retrieved: Retrieved = yield Retrieve(query, state.config.num_passages)
    linked = yield from links.follow(state)
    passages = tuple({p.id: p for p in (*retrieved.passages, *linked)}.values())
    state.evidence.see(passages)
    return passages, linked


def _retrieve_once(state: State) -> Program[None]:
    """Without rounds, the passages nearest to x are all that is read."""
    retrieved: Retrieved = yield Retrieve(state.question, state.config.num_passages)
    state.evidence.see(retrieved.passages)
    state.steps.append(Step(state.question, tuple(p.id for p in retrieved.passages)))


def _step(
    query: str, passages: Sequence[Passage], candidates: Candidates, decision: Decision
) -> Step:
    return Step(
        query,
        tuple(passage.id for passage in passages),
        candidates.facts,
        candidates.scores,
        decision.thought,
        decision.kept,
        decision.next_query,
        decision.response,
    )


def _prediction(state: State, attempts: Sequence[Attempt]) -> Prediction:
    answer, granularity = outcome(attempts, state.config)
    facts = rank_facts(state.steps, state.config.normalization)
    return Prediction(
        answer=answer,
        granularity=granularity,
        passages=rank_passages(facts, state.steps),
        sentences=rank_sentences(facts),
        triples=tuple(fact for fact in facts if isinstance(fact, Triple)),
        steps=tuple(state.steps),
        attempts=tuple(attempts),
        parse_errors={kind: n for kind, n in sorted(state.parse_errors.items()) if n},
    )
