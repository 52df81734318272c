"""DualRAG (paper, section 3): reasons until knowledge is missing, then collects it by entity.

A round consists of two processes.

*Reasoning-augmented querying* (RaQ, section 3.1.1):

1. `reason`: the reasoner writes a thought and decides whether knowledge is missing. If nothing is
   missing, the rounds end.
2. `identify`: the entity identifier writes names of entities, and queries about each entity.
3. `retrieve`: the documents of an entity's queries are reranked against the entity's name.

*Progressive knowledge aggregation* (pKA, section 3.1.2):

4. `aggregate`: the summarizer condenses the new documents of each entity into a fragment of
   knowledge, which joins the entity's part of the knowledge outline.

After the last round, `answer` answers from the outline and the thoughts.

Symbols are the paper's: x is the question, r^t the thought and f^t the retrieval flag of round t, R
all thoughts, K the outline, e an entity, Q(e) its queries, D_e its documents, and k_e its fragment.
"""

import collections
from collections.abc import Mapping, Sequence

from cirag_jax.datasets.chains import query_text
from cirag_jax.methods.common.evidence import best_scores, passage_line, sentences_by_text
from cirag_jax.methods.common.reading import ask_reader, read, render_reader
from cirag_jax.methods.common.written_answers import FINAL, first_sentence
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
from cirag_jax.triples.normalization import normalize
from cirag_jax.types import Attempt, Granularity, Passage, Prediction, Question, Step

Queries = Mapping[str, tuple[str, ...]]  # e -> Q(e)
Documents = Mapping[str, tuple[Passage, ...]]  # e -> D_e
Fragments = Mapping[str, str]  # e -> k_e


class State:
    """The state of one question.

    Attributes:
      question: the question x.
      thoughts: the thoughts R.
      outline: the outline K: the fragments of each entity, oldest first.
      documents: id -> document kept for any entity, best first.
      retrieved: ids of all retrieved documents.
      summarized: pairs (entity, document id) that the summarizer has read.
      searched: pairs (entity, query) that were searched.
      parse_errors: number of malformed outputs of each kind.
    """

    def __init__(self, question: str):
        self.question: str = question
        self.thoughts: list[str] = []
        self.outline: dict[str, list[str]] = {}
        self.documents: dict[str, Passage] = {}
        self.retrieved: dict[str, None] = {}
        self.summarized: set[tuple[str, str]] = set()
        self.searched: set[tuple[str, str]] = set()
        self.parse_errors: collections.Counter[str] = collections.Counter()

    def knowledge(self, config: DualragConfig) -> str:
        """Returns the outline K as text for prompts; without ``use_outline``, the documents."""
        if config.use_outline:
            return prompts.render_outline(self.outline)
        return prompts.render_documents(tuple(self.documents.values()))

    def names(self) -> tuple[str, ...]:
        """Returns the entities of the outline."""
        return tuple(entity for entity in self.outline if entity != prompts.ELSE)

    def texts_with_names(self) -> str:
        """Returns all text that may name an entity: x, R, and the outline or the documents."""
        knowledge = [
            line for entity, fragments in self.outline.items() for line in (entity, *fragments)
        ] or [passage_line(passage) for passage in self.documents.values()]
        return "\n".join([self.question, *self.thoughts, *knowledge])

    def link(self, name: str) -> str:
        """Returns ``name`` in the outline's spelling, if the outline has this entity."""
        known = {normalize(entity, "unicode"): entity for entity in self.outline}
        return known.get(normalize(name, "unicode"), name)


def dualrag(question: Question, config: DualragConfig) -> Program[Prediction]:
    """Answers a question by rounds of querying and aggregation (Eq. 1 and 2), then one reading."""
    state, steps = State(question.question), []
    for round_number in range(config.max_steps):
        thought, needs_retrieval, response = yield from reason(state, round_number, config)
        queries: Queries = {}
        if needs_retrieval:
            queries = yield from identify(state, thought, config)
        if not queries:
            steps.append(Step(state.question, thought=thought, response=response))
            break
        documents = yield from retrieve(state, queries, config)
        fragments, new = yield from aggregate(state, queries, documents, config)
        steps.append(_step(thought, response, queries, documents, fragments, new))
    attempt = yield from answer(state, config)
    return Prediction(
        attempt.answer,
        attempt.granularity,
        passages=tuple(dict.fromkeys([*state.documents, *state.retrieved])),
        steps=tuple(steps),
        attempts=(attempt,),
        parse_errors={kind: n for kind, n in sorted(state.parse_errors.items()) if n},
    )


def _render(config: DualragConfig) -> None:
    prompts.reasoning_messages("", "", (), few_shot=config.few_shot)
    prompts.sentence_messages("", "", ())
    prompts.entity_messages("", "", (), (), few_shot=config.few_shot)
    prompts.summary_messages("", (), "", (), ())
    if config.reader_format == "outline":
        prompts.answer_messages("", "", ())
    else:
        render_reader(config.reader_format, "sentence", "passage")


METHOD = Method(dualrag, DualragConfig, _render)


# ------------------------------------------------------------- reasoning-augmented querying (RaQ)


def reason(
    state: State, round_number: int, config: DualragConfig
) -> Program[tuple[str, bool, str]]:
    """Returns the thought r^t, the retrieval flag f^t (Eq. 3), and the reasoner's response."""
    if config.use_reasoner:
        thought, flag, response = yield from _ask_reasoner(state, config)
        # Without a flag, only the first round retrieves, because nothing is known yet.
        needs_retrieval = round_number == 0 if flag is None else flag
    else:
        thought, response = yield from _ask_for_sentence(state, config)
        needs_retrieval = bool(thought) and FINAL.lower() not in thought.lower()
    if thought:
        state.thoughts.append(thought)
    return thought, needs_retrieval or round_number < config.min_retrievals, response


def _ask_reasoner(state: State, config: DualragConfig) -> Program[tuple[str, bool | None, str]]:
    """Returns the thought, the flag (None if unreadable) and the response of the reasoner M_R."""
    messages = prompts.reasoning_messages(
        state.knowledge(config), state.question, state.thoughts, few_shot=config.few_shot
    )
    schema = prompts.thought_schema(config.max_thought) if config.constrained else None
    thought, text = prompts.Thought("", None, "empty"), ""
    for _ in range(1 + config.max_retries):
        response: Generated = yield Generate(messages, "reasoner", json_schema=schema)
        text, truncated = response.text, response.finish_reason == "length"
        limit = config.max_thought
        thought = prompts.parse_thought(text, truncated=truncated, max_chars=limit)
        state.parse_errors["reasoner_thought_cut"] += thought.is_cut
        if thought.problem is None:
            break
        state.parse_errors[f"reasoner_{thought.problem}"] += 1
        messages = prompts.ask_again(messages, text)
    return thought.text, thought.need_retrieve, text


def _ask_for_sentence(state: State, config: DualragConfig) -> Program[tuple[str, str]]:
    """Returns one sentence as the thought, and the full response (the ablation w/o R)."""
    known = state.knowledge(config)
    messages = prompts.sentence_messages(known, state.question, state.thoughts)
    response: Generated = yield Generate(messages, "reasoner")
    thought = first_sentence(prompts.SENTENCE.read(response.text))
    state.parse_errors["reasoner_empty"] += not thought
    is_cut = response.finish_reason == "length" and thought == response.text.strip()
    state.parse_errors["reasoner_truncated"] += is_cut
    return thought, response.text


def identify(state: State, thought: str, config: DualragConfig) -> Program[Queries]:
    """Returns the entities E^t and their queries Q^t(e) (Eq. 5) without repeated queries.

    If every query is repeated, the question is used as the query, but only once.
    """
    queries: Queries = {prompts.ELSE: (thought or state.question,)}
    if config.use_entities:
        queries = (yield from _ask_for_entities(state, config)) or queries
    new = _without_searched(state, queries)
    if not new:
        state.parse_errors["repeated_query"] += 1
        new = _without_searched(state, {prompts.ELSE: (state.question,)})
    state.searched.update((entity, query) for entity in new for query in new[entity])
    return new


def _without_searched(state: State, queries: Queries) -> Queries:
    new = {e: tuple(q for q in queries[e] if (e, q) not in state.searched) for e in queries}
    return {entity: left for entity, left in new.items() if left}


def _ask_for_entities(state: State, config: DualragConfig) -> Program[Queries]:
    """Returns the entities and queries that the entity identifier M_EI writes."""
    names = state.names()
    allowed: tuple[str, ...] = ()
    if config.entities == "named":
        searched = [normalize(entity, "unicode") for entity, _ in state.searched]
        names = allowed = tuple(
            name
            for name in prompts.names_in(state.texts_with_names())
            if not any(normalize(name, "unicode") in entity for entity in searched)
        )
        if not allowed:
            return {}
    messages = prompts.entity_messages(
        state.knowledge(config), state.question, state.thoughts, names, few_shot=config.few_shot
    )
    schema = prompts.entities_schema(config.max_entities, config.max_keywords, allowed)
    identified: tuple[prompts.Entity, ...] = ()
    for _ in range(1 + config.max_retries):
        response: Generated = yield Generate(
            messages, "entity_identifier", json_schema=schema if config.constrained else None
        )
        identified, problems = prompts.parse_entities(
            response.text,
            config.max_entities,
            config.max_keywords,
            truncated=response.finish_reason == "length",
        )
        state.parse_errors.update(f"entities_{problem}" for problem in problems)
        if identified:
            break
        messages = prompts.ask_again(messages, response.text)
    return _link(state, identified, config)


def _link(
    state: State, identified: Sequence[prompts.Entity], config: DualragConfig
) -> dict[str, tuple[str, ...]]:
    """Gives identified entities the spelling of equal entities in the outline (section 3.1.1)."""
    linked: dict[str, tuple[str, ...]] = {}
    known_text = normalize(state.texts_with_names(), "unicode")
    for name, queries in identified:
        entity = prompts.ELSE if name.lower() == prompts.ELSE else state.link(name)
        if entity != prompts.ELSE and normalize(entity, "unicode") not in known_text:
            state.parse_errors["entity_never_named"] += 1
        name_query = (entity,) if config.entities == "named" else ()
        linked[entity] = tuple(dict.fromkeys((*linked.get(entity, ()), *name_query, *queries)))
    return linked


def retrieve(state: State, queries: Queries, config: DualragConfig) -> Program[Documents]:
    """Returns the documents D_e of each entity, reranked against the entity's name (Eq. 6 to 8)."""
    pairs = [(entity, query) for entity in queries for query in queries[entity]]
    responses: Sequence[Retrieved] = yield [Retrieve(q, config.num_retrieved) for _, q in pairs]
    scored: dict[str, list[tuple[Passage, float]]] = {entity: [] for entity in queries}
    for (entity, _), response in zip(pairs, responses, strict=True):
        scored[entity] += zip(response.passages, response.scores, strict=True)
    best = {entity: best_scores(scored[entity]) for entity in queries if scored[entity]}
    pools = {e: tuple(sorted(best[e], key=best[e].__getitem__, reverse=True)) for e in best}
    if config.use_reranker and pools:
        kept = yield from _rerank(queries, pools, config)
    else:
        kept = {entity: pool[: config.num_documents] for entity, pool in pools.items()}
    state.parse_errors["entity_without_documents"] += sum(not kept.get(e) for e in queries)
    # Best first: the best document of every entity, then the second of every entity.
    for rank in range(config.num_documents):
        for passages in kept.values():
            for passage in passages[rank : rank + 1]:
                state.documents.setdefault(passage.id, passage)
    state.retrieved.update((p.id, None) for pool in pools.values() for p in pool)
    return kept


def _rerank(queries: Queries, pools: Documents, config: DualragConfig) -> Program[Documents]:
    """Returns the documents of each entity that score best against the entity's name (Eq. 8)."""
    rank_queries = {e: queries[e][0] if e == prompts.ELSE else e for e in pools}
    rankings: Sequence[Ranked[Passage]] = yield [
        Rank(rank_queries[e], pool, config.num_documents, "passages") for e, pool in pools.items()
    ]
    kept = {}
    for entity, ranked in zip(pools, rankings, strict=True):
        scored = zip(ranked.texts, ranked.scores, strict=True)
        kept[entity] = tuple(passage for passage, score in scored if score > config.min_score)
    return kept


# -------------------------------------------------------- progressive knowledge aggregation (pKA)


def aggregate(
    state: State, queries: Queries, documents: Documents, config: DualragConfig
) -> Program[tuple[Fragments, Documents]]:
    """Adds a fragment k_e about each entity's new documents to the outline K (Eq. 9 and 10).

    Returns the fragments that are not empty, and the new documents of each entity.
    """
    if not config.use_outline:
        return {}, {}
    if not config.use_entities:
        documents = _by_title(documents)
    new = {
        entity: tuple(p for p in passages if (entity, p.id) not in state.summarized)
        for entity, passages in documents.items()
    }
    new = {entity: passages for entity, passages in new.items() if passages}
    if not new:
        return {}, {}
    state.summarized.update((entity, p.id) for entity, passages in new.items() for p in passages)
    if config.summarizer == "model":
        fragments = yield from _summarize(state, queries, new)
    else:
        fragments = yield from _best_sentences(state, new, config)
    fragments = {entity: fragment for entity, fragment in fragments.items() if fragment}
    for entity, fragment in fragments.items():
        state.outline.setdefault(entity, []).append(fragment)
    return fragments, new


def _by_title(documents: Documents) -> Documents:
    """Groups documents by their titles (the ablation w/o EI)."""
    by_title: dict[str, tuple[Passage, ...]] = {}
    for passage in (p for passages in documents.values() for p in passages):
        title = passage.title or prompts.ELSE
        by_title[title] = (*by_title.get(title, ()), passage)
    return by_title


def _summarize(state: State, queries: Queries, new: Documents) -> Program[Fragments]:
    """Returns a fragment for each entity: k_e = M_KS(x, R^t, e, Q^t(e), D_e) (Eq. 9)."""
    last_thought = state.thoughts[-1:]  # The query for titles, which have no queries (w/o EI).
    responses: Sequence[Generated] = yield [
        Generate(
            prompts.summary_messages(
                state.question, state.thoughts, e, queries.get(e, last_thought), passages
            ),
            "summarizer",
        )
        for e, passages in new.items()
    ]
    is_cut = (response.finish_reason == "length" for response in responses)
    state.parse_errors["summary_truncated"] += sum(is_cut)
    return {e: prompts.parse_summary(r.text) for e, r in zip(new, responses, strict=True)}


def _best_sentences(state: State, new: Documents, config: DualragConfig) -> Program[Fragments]:
    """Returns the sentences nearest to the question and the outline, as fragments (ours)."""
    noted = [
        line
        for fragments in state.outline.values()
        for fragment in fragments
        for line in fragment.split("\n")
    ]
    pools = {
        entity: pool
        for entity, passages in new.items()
        if (pool := tuple(text for text in sentences_by_text(passages) if text not in noted))
    }
    if not pools:
        return {}
    query = query_text(state.question, noted, "sentence")
    rankings: Sequence[Ranked[str]] = yield [
        Rank(query, pool, config.num_sentences, "passages") for pool in pools.values()
    ]
    return {e: "\n".join(ranked.texts) for e, ranked in zip(pools, rankings, strict=True)}


# ------------------------------------------------------------------------------------- the answer


def answer(state: State, config: DualragConfig) -> Program[Attempt]:
    """Returns the reader's answer from outline, question and thoughts: M_A(K, x, R) (Eq. 4)."""
    lines = tuple(
        dict.fromkeys(
            # Sentences already begin with their title.
            line if config.summarizer == "sentences" else f"{entity}: {line}"
            for entity, fragments in state.outline.items()
            for fragment in fragments
            for line in fragment.split("\n")
        )
    )
    reads_outline = config.reader_format == "outline"
    granularity: Granularity = "sentence"
    if not lines and not (reads_outline and config.use_outline):
        granularity, lines = "passage", tuple(map(passage_line, state.documents.values()))
    errors = state.parse_errors
    if not reads_outline:
        return (yield from read(state.question, granularity, lines, config.reader_format, errors))
    messages = prompts.answer_messages(state.knowledge(config), state.question, state.thoughts)
    return (yield from ask_reader(messages, granularity, lines, errors, prompt=prompts.READER))


def _step(
    thought: str,
    response: str,
    queries: Queries,
    documents: Documents,
    fragments: Fragments,
    new: Documents,
) -> Step[str]:
    first, *more = (query for entity in queries for query in queries[entity])
    kept = tuple(dict.fromkeys(p.id for passages in documents.values() for p in passages))
    notes = {
        "queries": {e: list(queries[e]) for e in queries},
        "learnt": dict(fragments),
        "read": {e: [passage.id for passage in new[e]] for e in new},
    }
    return Step(
        first,
        kept,
        thought=thought,
        kept=kept,
        response=response,
        more_queries=tuple(more),
        notes=notes,
    )
