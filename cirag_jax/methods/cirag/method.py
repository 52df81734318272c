"""CIRAG (paper, section 3): collects facts in rounds, then answers at rising granularity.

A round of *iterative construction-integration* (section 3.3) has three steps:

1. `retrieve` returns the K passages nearest to the current query.
2. `construct` (candidates.py) selects the N triples of these passages nearest to the query.
3. `integrate` (integrators.py) lets the integrator keep the candidates that help with the question,
   and write the next query or end the rounds.

*Adaptive cascaded generation* (section 3.4, cascade.py) answers from the kept triples. If the
reader refuses, it answers from the sentences that state these triples, and then from the passages.

Symbols are the paper's: x is the question, a_t the query of round t, D_t its passages, T^_t the
candidate triples, and T~_t the core triples. The pools C, S and D contain the core triples,
sentences and passages of all rounds. The other modules have our extensions, which are off by
default.
"""

from collections.abc import Sequence

from cirag_jax.datasets.chains import UNIT_KINDS
from cirag_jax.methods.cirag import links
from cirag_jax.methods.cirag.candidates import construct
from cirag_jax.methods.cirag.cascade import cascade, prediction
from cirag_jax.methods.cirag.decisions import Decision
from cirag_jax.methods.cirag.integrators import following_query, integrate
from cirag_jax.methods.cirag.prompts import integration_messages
from cirag_jax.methods.cirag.settings import CiragConfig
from cirag_jax.methods.cirag.state import State
from cirag_jax.methods.common.evidence import Candidates
from cirag_jax.methods.common.reading import render_reader
from cirag_jax.methods.registry import Method
from cirag_jax.runtime.requests import Program, Retrieve, Retrieved
from cirag_jax.types import Passage, Prediction, Question, Step


def cirag(question: Question, config: CiragConfig) -> Program[Prediction]:
    """Answers a question by construction-integration, then cascaded generation."""
    state = State(question.question, config)
    yield from collect_facts(state)
    if not config.max_steps:
        yield from _retrieve_once(state)
    first = state.evidence.retrieved[: len(state.steps[0].passages)]  # D_1
    attempts = yield from cascade(
        state.question, state.evidence, first, config, state.parse_errors, state.steps
    )
    return prediction(state.steps, attempts, config, state.parse_errors)


def _render(config: CiragConfig) -> None:
    integration_messages(
        "",
        (),
        (),
        normalization=config.normalization,
        prompt_format=config.prompt_format,
        few_shot=config.few_shot,
        units=config.units,
    )
    render_reader(config.reader_format, *UNIT_KINDS)


METHOD = Method(cirag, CiragConfig, _render)


def construct_and_integrate(question: Question, config: CiragConfig) -> Program[Prediction]:
    """Runs only construction-integration, whose steps distillation trains on (section 3.5)."""
    state = State(question.question, config)
    yield from collect_facts(state)
    return prediction(state.steps, (), config, state.parse_errors)


def collect_facts(state: State) -> Program[None]:
    """Runs at most L rounds of construction and integration; stops if there is no next query."""
    query: str | None = state.question  # a_1 = x
    for _ in range(state.config.max_steps):
        passages, linked = yield from retrieve(state, query)  # D_t
        candidates = yield from construct(state, query, passages, linked)  # T^_t
        decision = yield from integrate(state, candidates)  # r_t, T~_t and a_{t+1} (Eq. 1)
        state.evidence.keep(decision.kept)  # C, S and D (Eq. 3 and 4)
        state.steps.append(_step(query, passages, candidates, decision))
        query = following_query(state, decision)  # a_{t+1}
        if query is None:
            break


def retrieve(state: State, query: str) -> Program[tuple[tuple[Passage, ...], tuple[Passage, ...]]]:
    """Returns the passages D_t of a round, and the passages among them found by links (ours)."""
    retrieved: Retrieved = yield Retrieve(query, state.config.num_passages)
    linked = yield from links.follow_links(state)
    passages = tuple({p.id: p for p in (*retrieved.passages, *linked)}.values())
    state.evidence.add_retrieved(passages)
    return passages, linked


def _retrieve_once(state: State) -> Program[None]:
    """Retrieves passages for the question, for a run without rounds."""
    retrieved: Retrieved = yield Retrieve(state.question, state.config.num_passages)
    state.evidence.add_retrieved(retrieved.passages)
    state.steps.append(Step(state.question, retrieved.ids))


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
