"""DualRAG: reasoning-augmented querying and progressive knowledge aggregation (paper, section 3).

Names follow the paper: x is the question, R the thoughts r^t, K the knowledge outline, e an entity,
Q(e) its queries, D_e the documents reranked for it, k_e the fragment of knowledge drawn from them.
"""

import collections
from collections.abc import Mapping, Sequence

from cirag_jax.datasets.chains import query_text
from cirag_jax.llm.types import Message
from cirag_jax.methods.baselines import ircot
from cirag_jax.methods.common import reading_prompts
from cirag_jax.methods.common.evidence import passage_line, places_of
from cirag_jax.methods.dualrag import prompts
from cirag_jax.methods.dualrag.settings import DualragConfig
from cirag_jax.methods.registry import Method
from cirag_jax.runtime.requests import (
    Generate,
    Generated,
    Program,
    Rank,
    Ranked,
    Retrieve,
    Retrieved,
)
from cirag_jax.triples.normalization import normalise
from cirag_jax.types import Attempt, Granularity, Passage, Prediction, Question, Step

Demands = Mapping[str, tuple[str, ...]]  # e -> Q(e)
Documents = Mapping[str, tuple[Passage, ...]]  # e -> D_e


class State:
    """The state of one question.

    Attributes:
      question: x.
      thoughts: R.
      outline: K: entity -> fragments, in the order in which they were learnt.
      documents: kept documents, best first, by id.
      dropped: documents that were retrieved and not kept.
      read: (entity, document id) that were summarised.
      asked: (entity, query) that were searched.
      parse_errors: malformed output of each kind.
    """

    def __init__(self, question: str):
        self.question: str = question
        self.thoughts: list[str] = []
        self.outline: dict[str, list[str]] = {}
        self.documents: dict[str, Passage] = {}
        self.dropped: dict[str, None] = {}
        self.read: set[tuple[str, str]] = set()
        self.asked: set[tuple[str, str]] = set()
        self.parse_errors: collections.Counter[str] = collections.Counter()

    def knowledge(self, config: DualragConfig) -> str:
        """K as a model reads it."""
        if config.use_outline:
            return prompts.render_outline(self.outline)
        return prompts.render_documents(tuple(self.documents.values()))

    def names(self) -> tuple[str, ...]:
        """Entities of the outline, in order."""
        return tuple(entity for entity in self.outline if entity != prompts.ELSE)

    def texts_with_names(self) -> str:
        """Everything that may name an entity: x, R, and what is known."""
        knowledge = [
            line for entity, fragments in self.outline.items() for line in (entity, *fragments)
        ] or [passage_line(passage) for passage in self.documents.values()]
        return "\n".join([self.question, *self.thoughts, *knowledge])

    def link(self, name: str) -> str:
        """The entity that a name means: a known one where only the spelling differs."""
        known = {normalise(entity, "unicode"): entity for entity in self.outline}
        return known.get(normalise(name, "unicode"), name)


def dualrag(question: Question, config: DualragConfig) -> Program[Prediction]:
    """Reasons until knowledge is missing, searches for it entity by entity, notes it; answers."""
    state, steps = State(question.question), []
    for number in range(config.max_steps):
        thought, retrieves, said = yield from reason(state, number, config)
        demands: Demands = {}
        if retrieves:
            demands = yield from identify(state, thought, config)
        if not demands:
            steps.append(Step(state.question, thought=thought, response=said))
            break
        documents = yield from retrieve(state, demands, config)
        learnt = yield from aggregate(state, demands, documents, config)
        steps.append(_step(thought, said, demands, documents, learnt))
    attempt = yield from answer(state, config)
    return Prediction(
        attempt.answer,
        attempt.granularity,
        passages=tuple(dict.fromkeys([*state.documents, *state.dropped])),
        steps=tuple(steps),
        attempts=(attempt,),
        parse_errors={kind: n for kind, n in sorted(state.parse_errors.items()) if n},
    )


METHOD = Method(dualrag, DualragConfig)


# -------------------------------------------------------------- reasoning-augmented querying (RaQ)


def reason(state: State, number: int, config: DualragConfig) -> Program[tuple[str, bool, str]]:
    """r^t and f^t of round ``number``, and the text that said so (Eq. 3)."""
    known, x, thoughts = state.knowledge(config), state.question, state.thoughts
    if config.use_reasoner:
        messages = prompts.reasoning_messages(known, x, thoughts, few_shot=config.few_shot)
        schema = prompts.THOUGHT_SCHEMA if config.constrained else None
        found, said = prompts.Thought("", None, "empty"), ""
        for _ in range(1 + config.max_retries):
            response: Generated = yield Generate(messages, "reasoner", json_schema=schema)
            said, truncated = response.text, response.finish_reason == "length"
            found = prompts.parse_thought(said, truncated=truncated)
            if found.problem is None:
                break
            state.parse_errors[f"reasoner_{found.problem}"] += 1
            messages = prompts.ask_again(messages, said)
        # Nobody says whether to search: as long as nothing is known, that is the better guess.
        thought, wanted = found.text, found.need_retrieve
        retrieves = number == 0 if wanted is None else wanted
    else:
        messages = prompts.sentence_messages(known, x, thoughts)
        response = yield Generate(messages, "reasoner")
        said, thought = response.text, ircot.parse_thought(response.text)
        state.parse_errors["reasoner_empty"] += not thought
        retrieves = bool(thought) and ircot.FINAL.lower() not in thought.lower()
    if thought:
        thoughts.append(thought)
    return thought, retrieves or number < config.min_retrievals, said


def identify(state: State, thought: str, config: DualragConfig) -> Program[Demands]:
    """E^t and Q^t(e) (Eq. 5): those not asked before; the question where all were, once."""
    wanted: Demands = {prompts.ELSE: (thought or state.question,)}
    if config.use_entities:
        wanted = (yield from _ask_for_entities(state, config)) or wanted
    fresh = _fresh(state, wanted)
    if not fresh:
        state.parse_errors["repeated_query"] += 1
        fresh = _fresh(state, {prompts.ELSE: (state.question,)})
    state.asked.update((entity, query) for entity in fresh for query in fresh[entity])
    return fresh


def _fresh(state: State, demands: Demands) -> Demands:
    fresh = {e: tuple(q for q in demands[e] if (e, q) not in state.asked) for e in demands}
    return {entity: queries for entity, queries in fresh.items() if queries}


def _ask_for_entities(state: State, config: DualragConfig) -> Program[Demands]:
    """What the entity identifier wants, known entities under their known names."""
    names = state.names()
    allowed: tuple[str, ...] = ()
    if config.entities == "named":
        searched = [normalise(entity, "unicode") for entity, _ in state.asked]
        names = allowed = tuple(
            name
            for name in prompts.names_in(state.texts_with_names())
            if not any(normalise(name, "unicode") in entity for entity in searched)
        )
        if not allowed:
            return {}
    messages = prompts.entity_messages(
        state.knowledge(config),
        state.question,
        state.thoughts,
        names,
        few_shot=config.few_shot,
    )
    schema = prompts.entities_schema(config.max_entities, config.max_keywords, allowed)
    demands: tuple[prompts.Demand, ...] = ()
    for _ in range(1 + config.max_retries):
        response: Generated = yield Generate(
            messages, "entity_identifier", json_schema=schema if config.constrained else None
        )
        demands, problems = prompts.parse_entities(
            response.text,
            config.max_entities,
            config.max_keywords,
            truncated=response.finish_reason == "length",
        )
        state.parse_errors.update(f"entities_{problem}" for problem in problems)
        if demands:
            break
        messages = prompts.ask_again(messages, response.text)
    linked: dict[str, tuple[str, ...]] = {}
    known = normalise(state.texts_with_names(), "unicode")
    for name, queries in demands:
        entity = prompts.ELSE if name.lower() == prompts.ELSE else state.link(name)
        if entity != prompts.ELSE and normalise(entity, "unicode") not in known:
            state.parse_errors["entity_never_named"] += 1
        own = (entity,) if config.entities == "named" else ()
        linked[entity] = tuple(dict.fromkeys((*linked.get(entity, ()), *own, *queries)))
    return linked


def retrieve(state: State, demands: Demands, config: DualragConfig) -> Program[Documents]:
    """D_e: what the queries of each entity find, reranked against its name (Eq. 6 to 8)."""
    asked = [(entity, query) for entity, queries in demands.items() for query in queries]
    found: Sequence[Retrieved] = yield [Retrieve(q, config.num_retrieved) for _, q in asked]
    best: dict[str, dict[Passage, float]] = {entity: {} for entity in demands}
    for (entity, _), hits in zip(asked, found, strict=True):
        for passage, score in zip(hits.passages, hits.scores, strict=True):
            best[entity][passage] = max(score, best[entity].get(passage, score))
    pools = {e: tuple(sorted(best[e], key=lambda p, e=e: -best[e][p])) for e in demands if best[e]}
    kept = {entity: pool[: config.num_documents] for entity, pool in pools.items()}
    if config.use_reranker and pools:
        about = {e: demands[e][0] if e == prompts.ELSE else e for e in pools}
        ranked: Sequence[Ranked[Passage]] = yield [
            Rank(about[e], pool, config.num_documents, "passages") for e, pool in pools.items()
        ]
        for entity, best_first in zip(pools, ranked, strict=True):
            scored = zip(best_first.texts, best_first.scores, strict=True)
            kept[entity] = tuple(passage for passage, score in scored if score > config.min_score)
    state.parse_errors["entity_without_documents"] += sum(not kept.get(e) for e in demands)
    # Best first: every entity's best, then every entity's second.
    for place in range(config.num_documents):
        for passages in kept.values():
            for passage in passages[place : place + 1]:
                state.documents.setdefault(passage.id, passage)
    state.dropped.update((p.id, None) for pool in pools.values() for p in pool)
    return kept


# --------------------------------------------------------- progressive knowledge aggregation (pKA)


def aggregate(
    state: State, demands: Demands, documents: Documents, config: DualragConfig
) -> Program[Mapping[str, str]]:
    """k_e of every entity, noted in K (Eq. 9 and 10); only documents new to it are read."""
    if not config.use_outline:
        return {}
    if not config.use_entities:
        documents = _by_title(documents)
    new = {
        entity: tuple(p for p in passages if (entity, p.id) not in state.read)
        for entity, passages in documents.items()
    }
    new = {entity: passages for entity, passages in new.items() if passages}
    if not new:
        return {}
    state.read.update((entity, p.id) for entity, passages in new.items() for p in passages)
    if config.summarizer == "model":
        fragments = yield from _summarise(state, demands, new)
    else:
        fragments = yield from _best_sentences(state, new, config)
    learnt = {entity: said for entity, said in fragments.items() if said}
    for entity, said in learnt.items():
        state.outline.setdefault(entity, []).append(said)
    return learnt


def _by_title(documents: Documents) -> Documents:
    """Without entities, each document is about what its title names."""
    found: dict[str, tuple[Passage, ...]] = {}
    for passage in (p for passages in documents.values() for p in passages):
        title = passage.title or prompts.ELSE
        found[title] = (*found.get(title, ()), passage)
    return found


def _summarise(state: State, demands: Demands, new: Documents) -> Program[Mapping[str, str]]:
    """M_KS: what the documents of each entity say, in a model's words."""
    said: Sequence[Generated] = yield [
        Generate(
            prompts.summary_messages(
                state.question,
                state.thoughts,
                entity,
                demands.get(entity, state.thoughts[-1:]),
                passages,
            ),
            "summarizer",
        )
        for entity, passages in new.items()
    ]
    return {e: prompts.parse_summary(response.text) for e, response in zip(new, said, strict=True)}


def _best_sentences(
    state: State, new: Documents, config: DualragConfig
) -> Program[Mapping[str, str]]:
    """In the summarizer's place: the sentences nearest to the question and the outline."""
    noted = [line for told in state.outline.values() for said in told for line in said.split("\n")]
    pools: dict[str, tuple[str, ...]] = {}
    for entity, passages in new.items():
        if pool := tuple(text for text in places_of(passages) if text not in noted):
            pools[entity] = pool
    if not pools:
        return {}
    query = query_text(state.question, noted, "sentence")
    ranked: Sequence[Ranked[str]] = yield [
        Rank(query, pool, config.num_sentences, "passages") for pool in pools.values()
    ]
    return {e: "\n".join(best.texts) for e, best in zip(pools, ranked, strict=True)}


# --------------------------------------------------------------------------------------- the answer


def answer(state: State, config: DualragConfig) -> Program[Attempt]:
    """M_A(K, x, R) (Eq. 4)."""
    messages, granularity, evidence = _reading(state, config)
    response: Generated = yield Generate(messages, "reader")
    found, sufficient, problem = reading_prompts.parse_answer(
        response.text, truncated=response.finish_reason == "length"
    )
    if problem is not None:
        state.parse_errors[f"answer_{problem}"] += 1
    return Attempt(granularity, evidence, response.text, found, sufficient)


def _reading(
    state: State, config: DualragConfig
) -> tuple[tuple[Message, ...], Granularity, tuple[str, ...]]:
    """The reader's conversation, and the evidence in it."""
    lines = tuple(
        dict.fromkeys(
            # A sentence brings its title along.
            line if config.summarizer == "sentences" else f"{entity}: {line}"
            for entity, fragments in state.outline.items()
            for fragment in fragments
            for line in fragment.split("\n")
        )
    )
    granularity: Granularity = "sentence" if lines else "passage"
    evidence = lines or tuple(map(passage_line, state.documents.values()))
    if config.reader_format == "outline":
        messages = prompts.answer_messages(state.knowledge(config), state.question, state.thoughts)
        if config.use_outline:  # An empty one is what it reads.
            return messages, "sentence", lines
    else:
        messages = reading_prompts.answer_messages(
            state.question,
            granularity,
            evidence,
            may_refuse=False,
            reader_format=config.reader_format,
        )
    return messages, granularity, evidence


def _step(
    thought: str, said: str, demands: Demands, documents: Documents, learnt: Mapping[str, str]
) -> Step[str]:
    first, *more = (query for queries in demands.values() for query in queries)
    kept = tuple(dict.fromkeys(p.id for passages in documents.values() for p in passages))
    return Step(
        first,
        kept,
        thought=thought,
        kept=kept,
        response=said,
        more_queries=tuple(more),
        notes={
            "queries": {entity: list(queries) for entity, queries in demands.items()},
            "learnt": dict(learnt),
        },
    )
