"""KiRAG (paper, section 3): retrieves along a reasoning chain of knowledge triples.

A step (section 3.2) retrieves passages for the question and the chain, and then

1. `decompose`: splits the passages into knowledge triples,
2. `align`: selects, with the aligner, the triples that best extend the chain,
3. `construct`: lets the constructor complete the chain, and appends its first new triple.

Passages are ranked by their best triple (section 3.3), and the reader reads the best passages.

Symbols are the paper's: q_i is the query of step i, T^i the triples of its passages, T_q^i the
candidates that the aligner selects, and T_q all candidates with their scores. The units of a chain
can also be sentences or passages.
"""

import collections
from collections.abc import Sequence

from cirag_jax.datasets.chains import UNIT_KINDS, sentence_texts
from cirag_jax.llm.types import Message
from cirag_jax.methods.cirag.cascade import cascade, prediction
from cirag_jax.methods.common.evidence import Candidates, passage_line, request_triples
from cirag_jax.methods.common.reading import ask_reader, read, render_reader
from cirag_jax.methods.kirag import prompts
from cirag_jax.methods.kirag.settings import KiragConfig
from cirag_jax.methods.kirag.state import ChainLink, State
from cirag_jax.methods.registry import Method
from cirag_jax.runtime.requests import (
    Demonstrate,
    Demonstrated,
    Generate,
    Generated,
    Program,
    Rank,
    Ranked,
    Retrieve,
    Retrieved,
)
from cirag_jax.triples.normalization import triple_key
from cirag_jax.types import Attempt, Passage, Prediction, Question, Sentence, Step, Triple, Unit


def kirag(question: Question, config: KiragConfig) -> Program[Prediction]:
    """Answers a question: builds a chain, ranks passages by their units, then reads the best."""
    state = State(question.question, config)
    if config.needs.demonstrations:
        state.demonstrations = yield from demonstrate(state.question, config)
    for _ in range(config.max_steps):
        query = state.retriever_query  # q_i
        retrieved: Retrieved = yield Retrieve(query, config.num_passages)
        yield from decompose(state, retrieved.passages)  # T^i
        candidates = yield from align(state, retrieved.passages)  # T_q^i
        link = yield from construct(state, candidates)
        state.append(link)
        state.steps.append(_step(state, query, retrieved, candidates, link))
        if link.is_last:
            break
    ranked = state.ranked_passages()  # D_q
    attempts = yield from read_passages(state, ranked)
    return prediction(state.steps, attempts, config, state.parse_errors, ranked)


def _render(config: KiragConfig) -> None:
    prompts.constructor_messages("", (), (), config.units)
    if config.reader_format == "documents":
        prompts.reading_messages("", ())
    else:
        render_reader(config.reader_format, *UNIT_KINDS)


METHOD = Method(kirag, KiragConfig, _render)


# --------------------------------------------------------------------------------------- one step


def demonstrate(question: str, config: KiragConfig) -> Program[tuple[tuple[Message, ...], ...]]:
    """Returns the most similar training questions with annotated chains, as conversations."""
    # Some questions lack a chain, so this requests more than needed.
    similar: Demonstrated = yield Demonstrate(question, 4 * config.num_demonstrations)
    turns = [turns for q in similar.questions if (turns := prompts.demonstration(q)) is not None]
    return tuple(reversed(turns[: config.num_demonstrations]))  # Ends with the most similar one.


def decompose(state: State, passages: Sequence[Passage]) -> Program[None]:
    """Splits new passages into the units T^i (knowledge decomposition)."""
    new = tuple(passage for passage in passages if passage.id not in state.units)
    state.evidence.add_retrieved(new)
    if state.config.units == "sentence":
        for passage in new:
            indices = sentence_texts(passage).values()
            state.units[passage.id] = tuple(Sentence(passage.id, index) for index in indices)
    elif state.config.units == "passage":
        state.units |= {passage.id: (passage.id,) for passage in new}
    elif new:
        extracted = yield from request_triples(new, state.parse_errors)
        for passage, triples in zip(new, extracted, strict=True):
            state.units[passage.id] = tuple(t for t in triples or () if any(triple_key(t)))


def align(state: State, passages: Sequence[Passage]) -> Program[Candidates]:
    """Selects the candidates T_q^i: the N units nearest to q_i (knowledge identification).

    Returns:
      The units to show to the constructor: T_q^i, or the best units of T_q (``config.pool_size``).
    """
    config = state.config
    units: dict[str, Unit] = {}
    sources: dict[str, dict[str, None]] = collections.defaultdict(dict)
    for passage in state.evidence.retrieved if config.accumulate else passages:
        for unit in state.units[passage.id]:
            text = state.evidence.text(unit)
            units.setdefault(text, unit)
            sources[text][passage.id] = None
    candidates = Candidates(tuple(units.values()), (0.0,) * len(units))
    if config.use_aligner and units:
        unit_of = {u if isinstance(u, Triple) else text: u for text, u in units.items()}
        ranked: Ranked = yield Rank(
            state.aligner_query, tuple(unit_of), config.num_candidates, "aligner"
        )
        candidates = Candidates(tuple(unit_of[text] for text in ranked.texts), ranked.scores)
    state.merge(candidates, sources)
    return state.best_of_pool() if config.pool_size else candidates


def construct(state: State, candidates: Candidates) -> Program[ChainLink]:
    """Lets the constructor complete the chain; returns the completion's first new unit."""
    config = state.config
    if not config.use_constructor:
        return best_new(state, candidates)
    completion, response = yield from _complete(state, candidates)
    no_candidate = completion.candidate is None and not _is_answer(completion)
    if config.prefilled_opening and no_candidate and candidates.facts and config.units == "triple":
        state.parse_errors["asked_again"] += 1
        completion, response = yield from _complete(state, candidates, opening=True)
    if config.as_written:
        text = completion.written
        nearest = state.nearest(text)
        unit = None if nearest is None else nearest.unit
        has_answer = prompts.answer_in(text) is not None
    elif completion.candidate is not None:
        unit = candidates.facts[completion.candidate]
        text, has_answer = state.evidence.text(unit), False
    elif config.append_best and not _is_answer(completion):
        return best_new(state, candidates)._replace(response=response)
    else:
        text, unit, has_answer = "", None, False
    # Without a new unit, another step would repeat this step.
    is_last = not text or (config.stop == "chain" and has_answer)
    is_last |= config.stop == "text" and completion.answer is not None
    return ChainLink(text, unit, is_last, completion.answer, response)


def _is_answer(completion: prompts.Completion) -> bool:
    """Returns whether the constructor's next step is the answer, without a unit before it."""
    return completion.answer is not None and not completion.has_unit


def _complete(
    state: State, candidates: Candidates, opening: bool = False
) -> Program[tuple[prompts.Completion, str]]:
    """Returns the constructor's completion of the chain, parsed and as text."""
    config, texts = state.config, state.texts(candidates)
    messages = prompts.constructor_messages(
        state.question,
        texts,
        state.chain,
        config.units,
        demonstrations=state.demonstrations,
        opening=opening,
        continues=config.continues,
    )
    response: Generated = yield Generate(
        messages,
        "constructor",
        stop=prompts.CONSTRUCTOR.stops(prompts.STOP),
        continue_final=config.continues,
    )
    completion = prompts.parse_completion(
        response.text,
        texts,
        state.chain,
        config.units,
        cutoff=config.match_cutoff,
        opening=opening,
        truncated=response.finish_reason == "length",
    )
    state.parse_errors.update(completion.parse_errors)
    return completion, response.text


def best_new(state: State, candidates: Candidates) -> ChainLink:
    """Returns the first candidate outside the chain, or a link that ends the chain."""
    for text, unit in zip(state.texts(candidates), candidates.facts, strict=True):
        if text not in state.chain:
            return ChainLink(text, unit, False)
    return ChainLink("", None, True)


# ---------------------------------------------------------------------------------------- reading


def read_passages(state: State, ranked: Sequence[str]) -> Program[list[Attempt]]:
    """Answers from the best passages, or from the chain by CIRAG's cascade."""
    config, question, errors = state.config, state.question, state.parse_errors
    if config.reader == "nothing":
        return []
    by_id = {passage.id: passage for passage in state.evidence.retrieved}
    passages = [by_id[passage_id] for passage_id in ranked[: config.num_read]]
    if config.reader == "cascade":
        return (yield from cascade(question, state.evidence, passages, config, errors))
    max_tokens, reader_format = config.answer_tokens, config.reader_format
    if reader_format != "documents":
        attempt = yield from read(
            question, "passage", passages, reader_format, errors, max_tokens=max_tokens
        )
        return [attempt]
    attempt = yield from ask_reader(  # KiRAG's prompt, not FlashRAG's.
        prompts.reading_messages(question, passages),
        "passage",
        tuple(map(passage_line, passages)),
        errors,
        parse=prompts.parse_reading,
        max_tokens=max_tokens,
        prompt=prompts.READER,
    )
    return [attempt]


def _step(
    state: State, query: str, retrieved: Retrieved, candidates: Candidates, link: ChainLink
) -> Step:
    written = link.text if link.text and link.unit is None else ""
    return Step(
        query,
        retrieved.ids,
        candidates.facts,
        candidates.scores,
        thought="" if link.answer is None else f"{prompts.FINAL} {link.answer}.",
        kept=() if link.unit is None else (link.unit,),
        next_query=None if link.is_last else state.retriever_query,
        response=link.response,
        notes={"written": written} if written else {},
    )
