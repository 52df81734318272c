"""C2RAG (paper, section 3): checks whether a graph suffices for a fact before it uses the graph.

1. `build_graph` retrieves the passages U(q) of the question and builds the graph of their triples.
2. `make_plan` lets the planner rewrite the question as constraints, which are triples with unknowns
   (section 3.2).
3. `ground_plan` looks constraints up in the graph. A constraint is resolved if few candidates
   compete. Its unknowns are then bound, which grounds further constraints (sections 3.2 and 3.3).
4. `collect_evidence` collects the source passages of resolved constraints and searches texts for
   the other constraints (section 3.3).
5. `answer` lets the reader answer from evidence blocks, one per constraint (section 3.4).

Symbols are the paper's: q is the question, tau_i a constraint of the plan P, C_i the candidate
triples of a constraint, z their scores, N_eff the number of competing candidates, and E_b(v) the
names to which an unknown v is bound. Settings can select the behavior of the released code.
"""

import collections
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

from cirag_jax.datasets.sentences import sentences_of
from cirag_jax.methods.c2rag import constraints, prompts
from cirag_jax.methods.c2rag.constraints import Candidate, CandidatePool, Grounding
from cirag_jax.methods.c2rag.prompts import Constraint, linearise, textual
from cirag_jax.methods.c2rag.search import best_excerpts, search_graph, search_text
from cirag_jax.methods.c2rag.settings import C2ragConfig
from cirag_jax.methods.c2rag.state import Excerpt, State
from cirag_jax.methods.common.evidence import request_triples
from cirag_jax.methods.common.reading import ask_reader, parse_line, read, render_reader
from cirag_jax.methods.registry import Method
from cirag_jax.runtime.requests import Fetch, Generate, Generated, Program, Retrieve, Retrieved
from cirag_jax.triples.entity_index import EntityIndex
from cirag_jax.triples.normalization import name_key
from cirag_jax.types import Attempt, Passage, Prediction, Question, Step, Triple

_Scored = TypeVar("_Scored", Excerpt, Candidate)


def c2rag(question: Question, config: C2ragConfig) -> Program[Prediction]:
    """Answers a question: plans constraints, grounds them, then reads their evidence."""
    state = State(question.question, config)
    first_step = yield from build_graph(state)
    response = yield from make_plan(state)
    grounding = yield from ground_plan(state)
    blocks = yield from collect_evidence(state, grounding)
    attempt = yield from answer(state, blocks)
    steps = [dataclasses.replace(first_step, response=response)]
    return _prediction(state, steps, grounding, blocks, attempt)


def _render(config: C2ragConfig) -> None:
    prompts.plan_messages(
        "",
        num_variants=config.num_variants,
        max_constraints=config.max_constraints,
        num_examples=config.num_examples,
    )
    prompts.fill_messages(textual(""), "{variable}", ())
    if config.reader_format == "blocks":
        prompts.answer_messages("", ())
    else:
        render_reader(config.reader_format, "passage")


METHOD = Method(c2rag, C2ragConfig, _render)


# ---------------------------------------------------------------------------- graph and planning


def build_graph(state: State) -> Program[Step]:
    """Retrieves the passages U(q); builds the graph of their triples if kg_scope=per_question."""
    retrieved: Retrieved = yield Retrieve(state.question, state.config.num_passages)
    state.add_retrieved(retrieved.passages)
    notes: dict[str, Any] = {}
    if state.config.kg_scope == "per_question":
        extracted = yield from request_triples(retrieved.passages, state.parse_errors)
        triples = (triple for triples in extracted for triple in triples or ())
        state.graph = EntityIndex(triples, state.config.normalization)
        notes["graph"] = {"passages": len(retrieved.passages), **state.graph.statistics()}
    return Step(state.question, retrieved.ids, notes=notes)


def make_plan(state: State) -> Program[str]:
    """Requests a plan, stores the plan (or a fallback) in the state, and returns the response."""
    config = state.config
    limits = {"num_variants": config.num_variants, "max_constraints": config.max_constraints}
    messages = prompts.plan_messages(state.question, num_examples=config.num_examples, **limits)
    schema = prompts.plan_schema(state.question, **limits) if config.plan_schema else None
    conversation, text, plan = messages, "", prompts.Plan((), "", ())
    for _ in range(config.plan_retries + 1):
        response: Generated = yield Generate(conversation, "planner", json_schema=schema)
        text, truncated = response.text, response.finish_reason == "length"
        plan = prompts.parse_plan(text, state.question, **limits, truncated=truncated)
        state.parse_errors.update(plan.parse_errors)
        if not plan.problem:
            break
        state.parse_errors["plan_invalid"] += 1
        conversation = prompts.ask_again(messages, text, plan.problem)
    if not plan.problem:
        state.plan = plan.constraints if config.typed_variables else untyped(plan.constraints)
    elif config.plan_failure == "question":
        state.plan = (textual(state.question),)
    return text


def untyped(plan: Sequence[Constraint]) -> tuple[Constraint, ...]:
    """Returns the plan with unknowns named ?v1, ?v2, ... (the ablation w/o Typed-Var)."""
    variables = dict.fromkeys(v for constraint in plan for v in constraint.variables)
    name = {variable: f"?v{number}" for number, variable in enumerate(variables, 1)}
    return tuple(
        c._replace(head=name.get(c.head, c.head), tail=name.get(c.tail, c.tail)) for c in plan
    )


# --------------------------------------------------------------------- grounding and propagation


def ground_plan(state: State) -> Program[Grounding]:
    """Grounds constraints with a name (P_1), then constraints with bound unknowns (P_2, Eq. 15)."""
    plan, config = state.plan, state.config
    indices = [
        i for i, c in enumerate(plan) if c.entities and (c.variables or config.ground_constants)
    ]
    max_passes = 2 if config.propagation == "single_pass" else len(plan) + 1
    grounding = constraints.ground(plan, state.pools, state.text_bindings, config)
    for _ in range(max_passes):
        if not indices:
            break
        state.pools.update((yield from search_graph(state, indices, grounding.bindings)))
        grounding = constraints.ground(plan, state.pools, state.text_bindings, config)
        if config.bind_from_text:
            grounding = yield from bind_from_text(state, indices, grounding)
        indices = [
            i
            for i, constraint in enumerate(plan)
            if i not in state.pools and set(constraint.variables) & set(grounding.bindings)
        ]
    return grounding


def bind_from_text(
    state: State, indices: Sequence[int], grounding: Grounding
) -> Program[Grounding]:
    """Lets the planner read names from texts, for unbound unknowns that constraints share."""
    num_uses = collections.Counter(v for constraint in state.plan for v in constraint.variables)
    source: dict[str, int] = {}  # Maps an unknown to the constraint whose texts are read for it.
    for i in indices:
        for variable in state.plan[i].variables:
            if variable not in grounding.bindings and num_uses[variable] > 1:
                source.setdefault(variable, i)
    if not source:
        return grounding
    yield from search_text(state, tuple(dict.fromkeys(source.values())), grounding.bindings)
    responses: list[Generated] = yield [
        Generate(
            prompts.fill_messages(
                constraints.instances(state.plan[i], grounding.bindings)[0],
                variable,
                [text.line for text in state.texts[i]],
            ),
            "planner",
            max_tokens=32,
        )
        for variable, i in source.items()
    ]
    for variable, response in zip(source, responses, strict=True):
        if (value := prompts.parse_fill(response.text)) is not None:
            state.text_bindings[variable] = (value,)
    return constraints.ground(state.plan, state.pools, state.text_bindings, state.config)


# --------------------------------------------------------------------------- evidence and answer


class Block(NamedTuple):
    """The evidence block B_i of a constraint (Eq. 16).

    Attributes:
      index: index of the constraint.
      resolved: whether the graph grounds the constraint.
      kept: candidates that ground the constraint.
      texts: the evidence.
      from_graph: whether the texts are sources of candidates, with the candidates' scores.
    """

    index: int
    resolved: bool
    kept: tuple[Candidate, ...]
    texts: tuple[Excerpt, ...]
    from_graph: bool


def collect_evidence(state: State, grounding: Grounding) -> Program[list[Block]]:
    """Collects sources of resolved constraints, and texts for other constraints (section 3.3)."""
    config = state.config
    kept = {
        i: constraints.consistent(state.pools[i], grounding.bindings, config)
        if config.consistent_only
        else state.pools[i].candidates
        for i in sorted(grounding.resolved)
        if i not in state.texts
    }
    if config.kg_scope == "corpus" and config.fetch_sources:
        sources = (p for candidates in kept.values() for c in candidates for p, _ in c.fact.sources)
        missing = tuple(dict.fromkeys(p for p in sources if p and p not in state.passages))
        if missing:
            fetched: Retrieved = yield Fetch(missing)
            state.add_retrieved(fetched.passages)
    texts = {i: best_excerpts(_sources(state, candidates)) for i, candidates in kept.items()}
    without_texts = [i for i in range(len(state.plan)) if i not in texts and i not in state.texts]
    if config.recover_if_empty:
        without_texts += [i for i, excerpts in texts.items() if not excerpts]
    if without_texts:
        yield from search_text(state, without_texts, grounding.bindings)
    return [
        Block(
            i,
            i in kept,
            kept.get(i, ()),
            texts.get(i) or state.texts.get(i, ()),
            bool(texts.get(i)),
        )
        for i in range(len(state.plan))
    ]


def _sources(state: State, candidates: Sequence[Candidate]) -> Iterable[Excerpt]:
    """Yields the source excerpts of candidates that ``config.resolved_evidence`` selects."""
    unit = state.config.resolved_evidence
    for fact, score in candidates:
        for passage_id, _ in fact.sources:
            passage = state.passages.get(passage_id or "")
            if passage is None:
                continue
            if unit == "sentence":
                index = _naming_sentence(passage, fact.triple, state.config)
                if index is not None:
                    yield Excerpt(passage, index, score)
            elif unit == "passage" or _names_both(passage.text, fact.triple, state.config):
                yield Excerpt(passage, None, score)


def _names_both(text: str, triple: Triple, config: C2ragConfig) -> bool:
    names = [name_key(name, config.normalization) for name in (triple.head, triple.tail)]
    return all(name in name_key(text, config.normalization) for name in names)


def _naming_sentence(passage: Passage, triple: Triple, config: C2ragConfig) -> int | None:
    """Returns the index of the first sentence that contains both names of a triple."""
    sentences = enumerate(sentences_of(passage))
    return next((i for i, sentence in sentences if _names_both(sentence, triple, config)), None)


def answer(state: State, blocks: Sequence[Block]) -> Program[Attempt]:
    """Returns the reader's answer from the blocks, in the order of the plan (Eq. 16)."""
    config, max_texts = state.config, state.config.max_texts or None
    lines_of = [
        (linearise(state.plan[block.index]), [text.line for text in block.texts[:max_texts]])
        for block in blocks
    ]
    lines = tuple(dict.fromkeys(line for _, lines in lines_of for line in lines))
    errors = state.parse_errors
    if config.reader_format != "blocks":
        return (yield from read(state.question, "passage", lines, config.reader_format, errors))
    messages = prompts.answer_messages(state.question, lines_of)
    return (
        yield from ask_reader(
            messages, "passage", lines, errors, parse=parse_line, prompt=prompts.READER
        )
    )


def _prediction(
    state: State, steps: list[Step], grounding: Grounding, blocks: Sequence[Block], attempt: Attempt
) -> Prediction:
    config = state.config
    texts = [text for block in blocks for text in block.texts]
    kept = _by_score((_ranker(config, b.index, True), c) for b in blocks for c in b.kept)
    if config.recall_order == "score":
        texts = _by_score(
            (_ranker(config, b.index, b.from_graph), text) for b in blocks for text in b.texts
        )
    sources = [(t.passage.id, t.sentence) for t in texts] + [
        s for c in kept for s in c.fact.sources
    ]
    steps = [*steps, *(_step(state, block, grounding) for block in blocks)]
    next_queries = [*(step.query for step in steps[1:]), None]
    return Prediction(
        attempt.answer,
        attempt.granularity,
        tuple(dict.fromkeys(text.passage.id for text in texts)),
        tuple(dict.fromkeys((p, s) for p, s in sources if p is not None and s is not None)),
        tuple(dict.fromkeys(candidate.fact.triple for candidate in kept)),
        tuple(
            dataclasses.replace(step, next_query=query)
            for step, query in zip(steps, next_queries, strict=True)
        ),
        (attempt,),
        {kind: count for kind, count in sorted(state.parse_errors.items()) if count},
    )


def _ranker(config: C2ragConfig, index: int, from_graph: bool) -> str:
    """Returns what computes the scores of a constraint: a reranker, relations, or the retriever."""
    if not from_graph:
        return "reranker" if config.rerank_texts else "retriever"
    is_coarse = not config.use_constraints or index < config.plain_hops
    return "reranker" if config.rerank_structural and not is_coarse else "relations"


def _by_score(pairs: Iterable[tuple[str, _Scored]]) -> list[_Scored]:
    """Sorts pairs (ranker, item) by score, best first.

    Items of several rankers are sorted by their place among the items of their ranker.
    """
    by_ranker: dict[str, list[_Scored]] = collections.defaultdict(list)
    for ranker, item in pairs:
        by_ranker[ranker].append(item)
    places = [
        (place, item)
        for items in by_ranker.values()
        for place, item in enumerate(sorted(items, key=lambda item: -item.score))
    ]
    return [item for _, item in sorted(places, key=lambda pair: pair[0])]


def _step(state: State, block: Block, grounding: Grounding) -> Step:
    """Returns a constraint as a step of the trace."""
    constraint = state.plan[block.index]
    pool = state.pools.get(block.index, CandidatePool(constraint))
    n_eff = grounding.n_eff.get(block.index)
    names = {
        v: list(grounding.bindings[v]) for v in constraint.variables if v in grounding.bindings
    }
    notes = {
        "constraint": [constraint.head, constraint.relation, constraint.tail, *constraint.variants],
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
