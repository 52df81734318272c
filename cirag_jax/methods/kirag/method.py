"""KiRAG: iterative retrieval along a reasoning chain of knowledge triples (paper, section 3).

Names follow the paper: q_i is the query of step i, T^i the units of its passages, T_q^i those that
the aligner puts first, T_q all of them with their scores; the constructor extends the chain.
"""

import collections
import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from cirag_jax.datasets.chains import query_text, sentence_texts
from cirag_jax.llm.types import Message
from cirag_jax.methods.cirag.cascade import cascade, outcome
from cirag_jax.methods.common import reading_prompts
from cirag_jax.methods.common.evidence import (
    Evidence,
    passage_line,
    place_of,
    rank_facts,
    rank_sentences,
)
from cirag_jax.methods.common.reading import parse_response
from cirag_jax.methods.kirag import prompts
from cirag_jax.methods.kirag.settings import DOCUMENTS, KiragConfig
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
from cirag_jax.triples.normalization import normalise, triple_key
from cirag_jax.types import (
    Attempt,
    Passage,
    Prediction,
    Question,
    Sentence,
    Step,
    Triple,
    Unit,
)

_CLOSED_ANSWERS = ("yes", "no")
_LEAST_F1 = 0.6  # released code: above it a chain's text is taken for a unit of the pool


def kirag(asked: Question, config: KiragConfig) -> Program[Prediction]:
    """Builds the reasoning chain step by step, ranks passages by its candidates, reads them."""
    search = Search(asked.question, config)
    if config.needs.demonstrations:
        search.demonstrations = yield from demonstrate(asked.question, config)
    for _ in range(config.max_steps):
        query = search.retriever_query
        found: Retrieved = yield Retrieve(query, config.num_passages)
        yield from decompose(search, found.passages)
        shown = yield from align(search, found.passages)
        link = yield from construct(search, shown)
        search.append(link)
        search.steps.append(_step(search, query, found, shown, link))
        if link.ends:
            break
    ranked = search.ranked_passages()
    attempts = yield from read(search, ranked)
    return _prediction(search, ranked, attempts)


METHOD = Method(kirag, KiragConfig)


# -------------------------------------------------------------------------------- what is collected


@dataclasses.dataclass
class Scored:
    """A unit of T_q: equal texts of several passages are one.

    Attributes:
      unit: the first of them.
      passages: ids of the passages that state it.
      score: the best that it had at any step, with what the released code adds.
    """

    unit: Unit
    passages: dict[str, None]
    score: float


class Candidates(NamedTuple):
    """Units that may extend the chain, best first."""

    texts: tuple[str, ...]
    units: tuple[Unit, ...]
    scores: tuple[float, ...]


class Link(NamedTuple):
    """What a step adds to the chain.

    Attributes:
      text: as queries and prompts have it; empty: nothing.
      unit: the unit; None where the constructor wrote none that is known.
      ends: whether the chain is complete.
      answer: what the constructor says the answer is.
      response: as it wrote it.
    """

    text: str
    unit: Unit | None
    ends: bool
    answer: str | None = None
    response: str = ""


class Search:
    """The state of one question."""

    def __init__(self, question: str, config: KiragConfig):
        self.question = question
        self.config = config
        self.evidence = Evidence(config.normalization)
        self.units: dict[str, tuple[Unit, ...]] = {}  # of each passage
        self.pool: dict[str, Scored] = {}  # T_q by text
        self.chain: list[str] = []
        self.links: list[Unit] = []
        self.steps: list[Step] = []
        self.demonstrations: tuple[tuple[Message, ...], ...] = ()
        self.parse_errors = collections.Counter[str]()

    @property
    def retriever_query(self) -> str:
        """q_i as the retriever gets it."""
        if self.config.retriever_query == "last":
            return " ".join([self.question, *self.chain[-1:]])
        return query_text(self.question, self.chain, self.config.units)

    @property
    def aligner_query(self) -> str:
        """q_i as the aligner gets it."""
        empty = self.config.list_when_empty
        return query_text(self.question, self.chain, self.config.units, list_when_empty=empty)

    def merge(self, candidates: Candidates, sources: dict[str, dict[str, None]]) -> None:
        """Adds T_q^i to T_q: a unit keeps the best of its scores."""
        for text, unit, score in zip(*candidates, strict=True):
            known = self.pool.setdefault(text, Scored(unit, {}, score))
            known.passages.update(sources[text])
            known.score = max(known.score, score)

    def best_of_pool(self) -> Candidates:
        """The first ``pool_size`` of T_q."""
        best = sorted(self.pool.items(), key=lambda item: -item[1].score)
        best = best[: self.config.pool_size]
        return Candidates(
            tuple(text for text, _ in best),
            tuple(scored.unit for _, scored in best),
            tuple(scored.score for _, scored in best),
        )

    def append(self, link: Link) -> None:
        """Extends the chain, and raises scores as the released code does."""
        if link.text:
            self.chain.append(link.text)
        if link.unit is not None:
            self.links.append(link.unit)
            self.evidence.keep([link.unit])
        if self.config.boost:
            self._boost(link)

    def nearest(self, text: str) -> str | None:
        """The text of T_q that a chain's text stands for by the released code's rule."""
        best = max(self.pool, key=lambda known: token_f1(known, text), default="")
        return best if token_f1(best, text) >= _LEAST_F1 else None

    def _boost(self, link: Link) -> None:
        chosen = self.nearest(link.text)
        if chosen is not None:
            self.pool[chosen].score += self.config.boost
        said = prompts.answer_in(link.text) if link.text else link.answer
        answer = normalise(said or "", "unicode")
        if not answer or answer in _CLOSED_ANSWERS:
            return
        for text in sorted(self.pool, key=lambda text: -self.pool[text].score):
            if f" {answer} " in f" {normalise(text, 'unicode')} ":
                self.pool[text].score += self.config.boost
                return

    def ranked_passages(self) -> tuple[str, ...]:
        """D_q: each passage by its best unit (section 3.3), then the others as retrieved."""
        best: dict[str, float] = {}
        for scored in self.pool.values():
            for passage in scored.passages:
                best[passage] = max(best.get(passage, scored.score), scored.score)
        by_score = sorted(best, key=lambda passage: -best[passage])
        first: list[str] = []
        if self.config.ranking == "chain" or not self.config.use_aligner:
            first = [passage for passage, _ in map(place_of, self.links) if passage is not None]
        seen = (passage.id for passage in self.evidence.seen)
        return tuple(dict.fromkeys([*first, *by_score, *seen]))


def token_f1(text: str, other: str) -> float:
    """F1 of two texts' words."""
    a, b = (collections.Counter(normalise(t, "unicode").split()) for t in (text, other))
    total = a.total() + b.total()
    return 2 * (a & b).total() / total if total else 0.0


# ------------------------------------------------------------------------------------------ a step


def demonstrate(question: str, config: KiragConfig) -> Program[tuple[tuple[Message, ...], ...]]:
    """The most similar training questions whose annotations give a chain."""
    # Not every one does: some more are asked for.
    shown: Demonstrated = yield Demonstrate(question, 4 * config.num_demonstrations)
    found = (prompts.demonstration(similar) for similar in shown.questions)
    turns = [turn for turn in found if turn is not None][: config.num_demonstrations]
    return tuple(reversed(turns))  # the most similar one last, next to what is asked


def decompose(search: Search, passages: Sequence[Passage]) -> Program[None]:
    """Knowledge decomposition: the units of passages that no earlier step had."""
    new = tuple(passage for passage in passages if passage.id not in search.units)
    search.evidence.see(new)
    if search.config.units == "sentence":
        for passage in new:
            places = sentence_texts(passage).values()
            search.units[passage.id] = tuple(Sentence(passage.id, place) for place in places)
    elif search.config.units == "passage":
        search.units |= {passage.id: (passage.id,) for passage in new}
    elif new:
        extracted: Extracted = yield Extract(new)
        for passage, triples in zip(new, extracted.triples, strict=True):
            search.parse_errors["passage_not_extracted"] += triples is None
            search.parse_errors["passage_without_triples"] += triples == ()
            search.units[passage.id] = tuple(t for t in triples or () if any(triple_key(t)))


def align(search: Search, passages: Sequence[Passage]) -> Program[Candidates]:
    """Candidate identification: T^i -> T_q^i, the N units nearest to question and chain.

    Returns:
      What the constructor is shown.
    """
    config = search.config
    among = search.evidence.seen if config.accumulate else passages
    units: dict[str, Unit] = {}
    sources: dict[str, dict[str, None]] = collections.defaultdict(dict)
    for passage in among:
        for unit in search.units[passage.id]:
            text = search.evidence.text(unit)
            units.setdefault(text, unit)
            sources[text][passage.id] = None
    if config.use_aligner and units:
        asked = {u if isinstance(u, Triple) else text: text for text, u in units.items()}
        ranked: Ranked = yield Rank(
            search.aligner_query, tuple(asked), config.num_candidates, "aligner"
        )
        texts, scores = tuple(asked[text] for text in ranked.texts), ranked.scores
    else:
        texts, scores = tuple(units), (0.0,) * len(units)
    found = Candidates(texts, tuple(units[text] for text in texts), scores)
    search.merge(found, sources)
    return search.best_of_pool() if config.pool_size else found


def construct(search: Search, shown: Candidates) -> Program[Link]:
    """Chain construction: the constructor completes the chain; its first new unit is appended."""
    config = search.config
    if not config.use_constructor:
        return best_new(search, shown)
    completion, response = yield from _complete(search, shown)
    is_lost = completion.candidate is None and not _says_answer(completion)
    if config.prefilled_opening and is_lost and shown.texts and config.units == "triple":
        search.parse_errors["asked_again"] += 1
        completion, response = yield from _complete(search, shown, opening=True)
    if config.as_written:
        text = completion.written
        nearest = search.nearest(text)
        unit = None if nearest is None else search.pool[nearest].unit
        is_answer = prompts.answer_in(text) is not None
    elif completion.candidate is not None:
        text, unit = shown.texts[completion.candidate], shown.units[completion.candidate]
        is_answer = False
    elif config.append_best and not _says_answer(completion):
        return best_new(search, shown)._replace(response=response)
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
    search: Search, shown: Candidates, opening: bool = False
) -> Program[tuple[prompts.Completion, str]]:
    config = search.config
    messages = prompts.constructor_messages(
        search.question,
        shown.texts,
        search.chain,
        config.units,
        demonstrations=search.demonstrations,
        opening=opening,
        continues=config.continues,
    )
    response: Generated = yield Generate(
        messages, "constructor", stop=prompts.STOP, continue_final=config.continues
    )
    completion = prompts.parse_completion(
        response.text,
        shown.texts,
        search.chain,
        config.units,
        cutoff=config.match_cutoff,
        opening=opening,
        truncated=response.finish_reason == "length",
    )
    search.parse_errors.update(completion.parse_errors)
    return completion, response.text


def best_new(search: Search, shown: Candidates) -> Link:
    """The first candidate that is not in the chain; without one the chain is complete."""
    for text, unit in zip(shown.texts, shown.units, strict=True):
        if text not in search.chain:
            return Link(text, unit, False)
    return Link("", None, True)


# ----------------------------------------------------------------------------------------- reading


def read(search: Search, ranked: Sequence[str]) -> Program[list[Attempt]]:
    """The reader's answer from the passages ranked first, or from the chain, by CIRAG's cascade."""
    config = search.config
    if config.reader == "nothing":
        return []
    by_id = {passage.id: passage for passage in search.evidence.seen}
    passages = [by_id[passage_id] for passage_id in ranked[: config.num_read]]
    if config.reader == "cascade":
        return (
            yield from cascade(
                search.question, search.evidence, passages, config, search.parse_errors
            )
        )
    texts = tuple(passage_line(passage) for passage in passages)
    if config.reader_format == DOCUMENTS:
        messages = prompts.reading_messages(search.question, passages)
    else:
        messages = reading_prompts.answer_messages(
            search.question, "passage", texts, may_refuse=False, reader_format=config.reader_format
        )
    response: Generated = yield Generate(messages, "reader", max_tokens=config.answer_tokens)
    if config.reader_format == DOCUMENTS:
        answer = prompts.parse_answer(response.text)
        sufficient, problem = bool(answer), None if answer else "empty"
    else:
        answer, sufficient, problem = parse_response(response, config.reader_format)
    if problem is not None:
        search.parse_errors[f"answer_{problem}"] += 1
    return [Attempt("passage", texts, response.text, answer, sufficient)]


def _step(search: Search, query: str, found: Retrieved, shown: Candidates, link: Link) -> Step:
    thought = "" if link.answer is None else f"{prompts.FINAL} {link.answer}."
    written = link.text if link.text and link.unit is None else ""
    return Step(
        query,
        tuple(passage.id for passage in found.passages),
        shown.units,
        shown.scores,
        thought,
        () if link.unit is None else (link.unit,),
        None if link.ends else search.retriever_query,
        link.response,
        notes={"written": written} if written else {},
    )


def _prediction(search: Search, ranked: tuple[str, ...], attempts: list[Attempt]) -> Prediction:
    answer, granularity = outcome(attempts, search.config)
    facts = rank_facts(search.steps, search.config.normalization)
    return Prediction(
        answer=answer,
        granularity=granularity,
        passages=ranked,
        sentences=rank_sentences(facts),
        triples=tuple(fact for fact in facts if isinstance(fact, Triple)),
        steps=tuple(search.steps),
        attempts=tuple(attempts),
        parse_errors={kind: n for kind, n in sorted(search.parse_errors.items()) if n},
    )
