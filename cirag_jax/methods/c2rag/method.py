"""C2RAG: constraint-checked retrieval over an imperfect graph of triples (paper, section 3).

Names follow the paper: q is the question, U(q) its passages, tau_i a constraint of the plan P,
C_i the candidate triples of one, z their scores, N_eff how many of them compete, E_b(v) the names
that an unknown v is bound to. Where the code released after the paper differs, a switch says so.
"""

import collections
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from cirag_jax.datasets.sentences import sentences_of
from cirag_jax.methods.c2rag import constraints, prompts
from cirag_jax.methods.c2rag.constraints import Candidate, CandidatePool, Grounding
from cirag_jax.methods.c2rag.prompts import Constraint, linearise, textual
from cirag_jax.methods.c2rag.search import best, look_up, recover
from cirag_jax.methods.c2rag.settings import C2ragConfig
from cirag_jax.methods.c2rag.state import Excerpt, State
from cirag_jax.methods.common import reading_prompts
from cirag_jax.methods.common.reading import parse_response
from cirag_jax.methods.registry import Method
from cirag_jax.runtime.requests import (
    Extract,
    Extracted,
    Fetch,
    Generate,
    Generated,
    Program,
    Retrieve,
    Retrieved,
)
from cirag_jax.triples.entity_index import EntityIndex
from cirag_jax.triples.normalization import name_key
from cirag_jax.types import Attempt, Passage, Prediction, Question, Step, Triple


def c2rag(question: Question, config: C2ragConfig) -> Program[Prediction]:
    """Answers q: plans constraints, grounds them in the graph or in text, reads the evidence."""
    state = State(question.question, config)
    first = yield from build_graph(state)
    response = yield from make_plan(state)
    grounding = yield from ground_plan(state)
    blocks = yield from collect_evidence(state, grounding)
    attempt = yield from answer(state, blocks)
    return _prediction(
        state, [dataclasses.replace(first, response=response)], grounding, blocks, attempt
    )


METHOD = Method(c2rag, C2ragConfig)


# ---------------------------------------------------------------------------- graph and planning


def build_graph(state: State) -> Program[Step]:
    """U(q) and, unless the graph is the corpus's, the graph of its triples."""
    found: Retrieved = yield Retrieve(state.question, state.config.num_passages)
    state.see(found.passages)
    notes: dict[str, Any] = {}
    if state.config.kg_scope == "per_question":
        extracted: Extracted = yield Extract(found.passages)
        state.parse_errors["passage_without_triples"] += sum(t == () for t in extracted.triples)
        state.parse_errors["passage_not_extracted"] += sum(t is None for t in extracted.triples)
        triples = (triple for triples in extracted.triples for triple in triples or ())
        state.graph = EntityIndex(triples, state.config.normalization)
        notes["graph"] = {"passages": len(found.passages), **state.graph.statistics()}
    return Step(state.question, tuple(p.id for p in found.passages), notes=notes)


def make_plan(state: State) -> Program[str]:
    """P: the planner's constraints; where they cannot be used, q as a textual one."""
    config, limits = state.config, _limits(state.config)
    messages = prompts.plan_messages(state.question, num_examples=config.num_examples, **limits)
    schema = prompts.plan_schema(state.question, **limits) if config.plan_schema else None
    asked, text, plan = messages, "", prompts.Plan((), "", ())
    for _ in range(config.plan_retries + 1):
        said: Generated = yield Generate(asked, "planner", json_schema=schema)
        text, truncated = said.text, said.finish_reason == "length"
        plan = prompts.parse_plan(text, state.question, **limits, truncated=truncated)
        state.parse_errors.update(plan.parse_errors)
        if not plan.problem:
            break
        state.parse_errors["plan_invalid"] += 1
        asked = prompts.ask_again(messages, text, plan.problem)
    if not plan.problem:
        state.plan = plan.constraints if config.typed_variables else untyped(plan.constraints)
    elif config.plan_failure == "question":
        state.plan = (textual(state.question),)
    return text


def _limits(config: C2ragConfig) -> dict[str, int]:
    return {"num_variants": config.num_variants, "max_constraints": config.max_constraints}


def untyped(plan: Sequence[Constraint]) -> tuple[Constraint, ...]:
    """The plan with unknowns called by number."""
    variables = dict.fromkeys(v for constraint in plan for v in constraint.variables)
    number = {variable: f"?v{place}" for place, variable in enumerate(variables, 1)}
    return tuple(
        c._replace(head=number.get(c.head, c.head), tail=number.get(c.tail, c.tail)) for c in plan
    )


# --------------------------------------------------------------------- grounding, and propagation


def ground_plan(state: State) -> Program[Grounding]:
    """Constraints with one unknown first; then, from what they bind, those with two."""
    plan, config = state.plan, state.config
    todo = [
        i for i, c in enumerate(plan) if c.entities and (c.variables or config.ground_constants)
    ]
    passes = 2 if config.propagation == "single_pass" else len(plan) + 1
    grounding = constraints.ground(plan, state.pools, state.text_bindings, config)
    for _ in range(passes):
        if not todo:
            break
        state.pools.update((yield from look_up(state, todo, grounding.bindings)))
        grounding = constraints.ground(plan, state.pools, state.text_bindings, config)
        if config.bind_from_text:
            grounding = yield from fill(state, todo, grounding)
        todo = [
            i
            for i, constraint in enumerate(plan)
            if i not in state.pools and set(constraint.variables) & set(grounding.bindings)
        ]
    return grounding


def fill(state: State, places: Sequence[int], grounding: Grounding) -> Program[Grounding]:
    """Binds unknowns that others wait for, and that the graph does not bind, from text."""
    others = collections.Counter(v for constraint in state.plan for v in constraint.variables)
    wanted: dict[str, int] = {}
    for place in places:
        for variable in state.plan[place].variables:
            if variable not in grounding.bindings and others[variable] > 1:
                wanted.setdefault(variable, place)
    if not wanted:
        return grounding
    yield from recover(state, tuple(dict.fromkeys(wanted.values())), grounding.bindings)
    responses: list[Generated] = yield [
        Generate(
            prompts.fill_messages(
                constraints.instances(state.plan[place], grounding.bindings)[0],
                variable,
                [text.line for text in state.texts[place]],
            ),
            "planner",
            max_tokens=32,
        )
        for variable, place in wanted.items()
    ]
    for variable, response in zip(wanted, responses, strict=True):
        if (value := prompts.parse_fill(response.text)) is not None:
            state.text_bindings[variable] = (value,)
    return constraints.ground(state.plan, state.pools, state.text_bindings, state.config)


# ---------------------------------------------------------------------------- evidence and answer


class Block(NamedTuple):
    """B_i: a constraint's state and its evidence (Eq. 16)."""

    place: int
    resolved: bool
    kept: tuple[Candidate, ...]
    texts: tuple[Excerpt, ...]


def collect_evidence(state: State, grounding: Grounding) -> Program[list[Block]]:
    """Of resolved constraints the sources of their candidates, of the others recovered texts."""
    config = state.config
    resolved = [i for i in sorted(grounding.resolved) if i not in state.texts]
    kept = {i: state.pools[i].candidates for i in resolved}
    if config.consistent_only:
        kept = {
            i: constraints.consistent(state.pools[i], grounding.bindings, config) for i in resolved
        }
    if config.kg_scope == "corpus" and config.fetch_sources:
        sources = (p for own in kept.values() for c in own for p, _ in c.fact.sources)
        unseen = tuple(dict.fromkeys(p for p in sources if p and p not in state.passages))
        if unseen:
            fetched: Retrieved = yield Fetch(unseen)
            state.see(fetched.passages)
    texts = {i: best(_source_texts(state, own)) for i, own in kept.items()}
    unread = [i for i in range(len(state.plan)) if i not in texts and i not in state.texts]
    if config.recover_if_empty:
        unread += [i for i, own in texts.items() if not own]
    if unread:
        yield from recover(state, unread, grounding.bindings)
    return [
        Block(i, i in kept, kept.get(i, ()), texts.get(i) or state.texts.get(i, ()))
        for i in range(len(state.plan))
    ]


def _source_texts(state: State, kept: Sequence[Candidate]) -> Iterable[Excerpt]:
    for fact, score in kept:
        for passage_id, _ in fact.sources:
            passage = state.passages.get(passage_id or "")
            if passage is None:
                continue
            kind = state.config.resolved_evidence
            if kind == "passage":
                yield Excerpt(passage, None, score)
            elif kind == "naming_passage":
                if _names_both(passage.text, fact.triple, state.config):
                    yield Excerpt(passage, None, score)
            elif (place := _naming_sentence(passage, fact.triple, state.config)) is not None:
                yield Excerpt(passage, place, score)


def _names_both(text: str, triple: Triple, config: C2ragConfig) -> bool:
    names = [name_key(name, config.normalization) for name in (triple.head, triple.tail)]
    return all(name in name_key(text, config.normalization) for name in names)


def _naming_sentence(passage: Passage, triple: Triple, config: C2ragConfig) -> int | None:
    """The first sentence that has both names of a triple."""
    for place, sentence in enumerate(sentences_of(passage)):
        if _names_both(sentence, triple, config):
            return place
    return None


def answer(state: State, blocks: Sequence[Block]) -> Program[Attempt]:
    """The reader's answer from the blocks, in the order of the plan."""
    config, most = state.config, state.config.max_texts or None
    shown = [
        (linearise(state.plan[block.place]), [text.line for text in block.texts[:most]])
        for block in blocks
    ]
    lines = tuple(dict.fromkeys(line for _, texts in shown for line in texts))
    if config.reader_format == "blocks":
        messages = prompts.answer_messages(state.question, shown)
    else:
        messages = reading_prompts.answer_messages(
            state.question, "passage", lines, may_refuse=False, reader_format=config.reader_format
        )
    response: Generated = yield Generate(messages, "reader")
    found, sufficient, problem = parse_response(response, config.reader_format)
    if problem is not None:
        state.parse_errors[f"answer_{problem}"] += 1
    return Attempt("passage", lines, response.text, found, sufficient)


def _prediction(
    state: State, steps: list[Step], grounding: Grounding, blocks: Sequence[Block], attempt: Attempt
) -> Prediction:
    texts = [text for block in blocks for text in block.texts]
    kept = sorted((c for block in blocks for c in block.kept), key=lambda c: -c.score)
    if state.config.recall_order == "score":
        texts = sorted(texts, key=lambda text: -text.score)
    places = [(t.passage.id, t.sentence) for t in texts] + [s for c in kept for s in c.fact.sources]
    steps = [*steps, *(_step(state, block, grounding) for block in blocks)]
    queries = [*(step.query for step in steps[1:]), None]
    return Prediction(
        attempt.answer,
        attempt.granularity,
        tuple(dict.fromkeys(text.passage.id for text in texts)),
        tuple(dict.fromkeys((p, s) for p, s in places if p is not None and s is not None)),
        tuple(dict.fromkeys(candidate.fact.triple for candidate in kept)),
        tuple(
            dataclasses.replace(step, next_query=query)
            for step, query in zip(steps, queries, strict=True)
        ),
        (attempt,),
        {kind: count for kind, count in sorted(state.parse_errors.items()) if count},
    )


def _step(state: State, block: Block, grounding: Grounding) -> Step:
    """A constraint as a trace shows it."""
    constraint = state.plan[block.place]
    pool = state.pools.get(block.place, CandidatePool(constraint))
    n_eff = grounding.n_eff.get(block.place)
    names = {
        v: list(grounding.bindings[v]) for v in constraint.variables if v in grounding.bindings
    }
    notes = {
        "state": "resolved" if block.resolved else "unresolved",
        "n_eff": None if n_eff is None else round(n_eff, 4),
        "anchors": list(pool.anchors),
        "names": names,
    }
    return Step(
        linearise(constraint),
        tuple(dict.fromkeys(text.passage.id for text in block.texts)),
        tuple(candidate.fact.triple for candidate in pool.candidates),
        tuple(candidate.score for candidate in pool.candidates),
        kept=tuple(candidate.fact.triple for candidate in block.kept),
        notes=notes,
    )
