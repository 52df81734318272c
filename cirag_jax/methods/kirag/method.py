"""KiRAG: iterative retrieval along a reasoning chain of knowledge triples (paper, section 3).

Names follow the paper: q_i is the query of step i, T^i the units of its passages, T_q^i those that
the aligner puts first, T_q all of them with their scores; the constructor extends the chain.
"""

import collections
from collections.abc import Sequence

from cirag_jax.datasets.chains import sentence_texts
from cirag_jax.llm.types import Message
from cirag_jax.methods.cirag.cascade import cascade, outcome
from cirag_jax.methods.common import reading_prompts
from cirag_jax.methods.common.evidence import (
    Candidates,
    passage_line,
    rank_facts,
    rank_sentences,
)
from cirag_jax.methods.common.reading import parse_response
from cirag_jax.methods.kirag import prompts
from cirag_jax.methods.kirag.settings import KiragConfig
from cirag_jax.methods.kirag.state import Link, State
from cirag_jax.methods.registry import Method
from cirag_jax.runtime.requests import (
    Demonstrate,
    Demonstrated,
    Extract,
    Extracted,
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
    """Builds the reasoning chain step by step, ranks passages by its candidates, reads them."""
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
        if link.ends:
            break
    ranked = state.ranked_passages()  # D_q
    attempts = yield from read(state, ranked)
    return _prediction(state, ranked, attempts)


METHOD = Method(kirag, KiragConfig)


# ------------------------------------------------------------------------------------------ a step


def demonstrate(question: str, config: KiragConfig) -> Program[tuple[tuple[Message, ...], ...]]:
    """The most similar training questions whose annotations give a chain."""
    # Not every one does: some more are asked for.
    similar: Demonstrated = yield Demonstrate(question, 4 * config.num_demonstrations)
    made = (prompts.demonstration(one) for one in similar.questions)
    turns = [turn for turn in made if turn is not None][: config.num_demonstrations]
    return tuple(reversed(turns))  # the most similar one last, next to what is asked


def decompose(state: State, passages: Sequence[Passage]) -> Program[None]:
    """Knowledge decomposition: the units of passages that no earlier step had."""
    new = tuple(passage for passage in passages if passage.id not in state.units)
    state.evidence.see(new)
    if state.config.units == "sentence":
        for passage in new:
            places = sentence_texts(passage).values()
            state.units[passage.id] = tuple(Sentence(passage.id, place) for place in places)
    elif state.config.units == "passage":
        state.units |= {passage.id: (passage.id,) for passage in new}
    elif new:
        extracted: Extracted = yield Extract(new)
        for passage, triples in zip(new, extracted.triples, strict=True):
            state.parse_errors["passage_not_extracted"] += triples is None
            state.parse_errors["passage_without_triples"] += triples == ()
            state.units[passage.id] = tuple(t for t in triples or () if any(triple_key(t)))


def align(state: State, passages: Sequence[Passage]) -> Program[Candidates]:
    """Candidate identification: T^i -> T_q^i, the N units nearest to question and chain.

    Returns:
      What the constructor is shown.
    """
    config = state.config
    units: dict[str, Unit] = {}
    sources: dict[str, dict[str, None]] = collections.defaultdict(dict)
    for passage in state.evidence.seen if config.accumulate else passages:
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


def construct(state: State, candidates: Candidates) -> Program[Link]:
    """Chain construction: the constructor completes the chain; its first new unit is appended."""
    config = state.config
    if not config.use_constructor:
        return best_new(state, candidates)
    completion, response = yield from _complete(state, candidates)
    is_lost = completion.candidate is None and not _says_answer(completion)
    if config.prefilled_opening and is_lost and candidates.facts and config.units == "triple":
        state.parse_errors["asked_again"] += 1
        completion, response = yield from _complete(state, candidates, opening=True)
    if config.as_written:
        text = completion.written
        nearest = state.nearest(text)
        unit = None if nearest is None else nearest.unit
        is_answer = prompts.answer_in(text) is not None
    elif completion.candidate is not None:
        unit = candidates.facts[completion.candidate]
        text, is_answer = state.evidence.text(unit), False
    elif config.append_best and not _says_answer(completion):
        return best_new(state, candidates)._replace(response=response)
    else:
        text, unit, is_answer = "", None, False
    # Without a new unit the next step would be the same as this one.
    ends = not text or (config.stop == "chain" and is_answer)
    ends |= config.stop == "text" and completion.answer is not None
    return Link(text, unit, ends, completion.answer, response)


def _says_answer(completion: prompts.Completion) -> bool:
    """Whether the next step is the answer; after a unit that nobody offered, it is none."""
    return completion.answer is not None and not completion.has_unit


def _complete(
    state: State, candidates: Candidates, opening: bool = False
) -> Program[tuple[prompts.Completion, str]]:
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
        messages, "constructor", stop=prompts.STOP, continue_final=config.continues
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


def best_new(state: State, candidates: Candidates) -> Link:
    """The first candidate that is not in the chain; without one the chain is complete."""
    for text, unit in zip(state.texts(candidates), candidates.facts, strict=True):
        if text not in state.chain:
            return Link(text, unit, False)
    return Link("", None, True)


# ----------------------------------------------------------------------------------------- reading


def read(state: State, ranked: Sequence[str]) -> Program[list[Attempt]]:
    """The reader's answer from the passages ranked first, or from the chain, by CIRAG's cascade."""
    config = state.config
    if config.reader == "nothing":
        return []
    by_id = {passage.id: passage for passage in state.evidence.seen}
    passages = [by_id[passage_id] for passage_id in ranked[: config.num_read]]
    if config.reader == "cascade":
        return (
            yield from cascade(state.question, state.evidence, passages, config, state.parse_errors)
        )
    texts = tuple(passage_line(passage) for passage in passages)
    if config.reader_format == "documents":
        messages = prompts.reading_messages(state.question, passages)
    else:
        messages = reading_prompts.answer_messages(
            state.question, "passage", texts, may_refuse=False, reader_format=config.reader_format
        )
    response: Generated = yield Generate(messages, "reader", max_tokens=config.answer_tokens)
    if config.reader_format == "documents":
        answer = prompts.parse_answer(response.text)
        sufficient, problem = bool(answer), None if answer else "empty"
    else:
        answer, sufficient, problem = parse_response(response, config.reader_format)
    if problem is not None:
        state.parse_errors[f"answer_{problem}"] += 1
    return [Attempt("passage", texts, response.text, answer, sufficient)]


def _step(
    state: State, query: str, retrieved: Retrieved, candidates: Candidates, link: Link
) -> Step:
    thought = "" if link.answer is None else f"{prompts.FINAL} {link.answer}."
    written = link.text if link.text and link.unit is None else ""
    return Step(
        query,
        tuple(passage.id for passage in retrieved.passages),
        candidates.facts,
        candidates.scores,
        thought,
        () if link.unit is None else (link.unit,),
        None if link.ends else state.retriever_query,
        link.response,
        notes={"written": written} if written else {},
    )


def _prediction(state: State, ranked: tuple[str, ...], attempts: list[Attempt]) -> Prediction:
    answer, granularity = outcome(attempts, state.config)
    facts = rank_facts(state.steps, state.config.normalization)
    return Prediction(
        answer=answer,
        granularity=granularity,
        passages=ranked,
        sentences=rank_sentences(facts),
        triples=tuple(fact for fact in facts if isinstance(fact, Triple)),
        steps=tuple(state.steps),
        attempts=tuple(attempts),
        parse_errors={kind: n for kind, n in sorted(state.parse_errors.items()) if n},
    )
