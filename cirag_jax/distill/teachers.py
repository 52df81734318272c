"""Who answers the integrator's requests while trajectories are collected.

The loop around a teacher is CIRAG's own, with its retrieval, triples and ranking; so what a teacher
decides on is what a student will see.
"""

import dataclasses
import json
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from cirag_jax.datasets.annotations import fact_of, overlap
from cirag_jax.distill.oracle import (
    AnyGold,
    Gold,
    Round,
    SentenceGold,
    decide,
    fact_key,
    gold_of,
    queries,
    sentence_gold_of,
)
from cirag_jax.llm.types import Message
from cirag_jax.methods.cirag import compact, prompts
from cirag_jax.methods.cirag.settings import CiragConfig
from cirag_jax.methods.common.extraction import ONLINE
from cirag_jax.runtime.requests import Extracted, Generate, Generated, Response, Retrieved
from cirag_jax.runtime.scheduler import Call, Handler, RequestError, Respond
from cirag_jax.triples.normalization import Normalization
from cirag_jax.triples.store import TripleStore
from cirag_jax.types import Config, Dataset, Passage, Question, Triple

Teacher = Literal["annotations", "llm"]
KINDS = ("annotations", "llm", "mixture")

_QUERY = "[[## Original Query ##]]\n"
_FACTS = "[[## fact_before_filter ##]]\n"


class AnnotationTeacher:
    """The oracle as a model: its decisions, in the format that a language model is asked for.

    All it needs to know of earlier rounds is in the conversation, so that a killed run resumes as
    if it had not been.

    Args:
      golds: annotations by question id, which is a program's id.
    """

    is_slow = False
    is_exhausted = False

    def __init__(self, golds: Mapping[str, AnyGold]):
        self._golds = golds

    def __call__(self, calls: Sequence[Call], respond: Respond) -> None:
        """See `Handler`."""
        for index, call in enumerate(calls):
            request: Generate = call.request
            gold = self._golds[call.key.program]
            respond(index, Generated(self.respond(gold, request.messages), "stop"))

    def respond(self, gold: AnyGold, messages: Sequence[Message]) -> str:
        """The decision after a conversation that `integration_messages` rendered.

        Triples are read in the format multi_turn, sentences in compact.
        """
        if isinstance(gold, SentenceGold):
            past, query, lines = compact.read_conversation(messages)
            step = decide(gold, [Round(*one) for one in past], query, lines)
            return compact.render_decision(dataclasses.replace(step, candidates=lines))
        rounds, query, candidates = read_conversation(messages, gold.normalization)
        step = decide(gold, rounds, query, candidates)
        return prompts.render_decision(step, gold.normalization)


def read_conversation(
    messages: Sequence[Message], normalization: Normalization
) -> tuple[list[Round], str, tuple[Triple, ...]]:
    """The rounds decided so far, this round's query and its candidates, as they were shown.

    Args:
      messages: in the format multi_turn; a worked example before it is skipped.
      normalization: normalisation of the facts in it.
    """
    start = max(i for i, message in enumerate(messages) if _QUERY in message.text)
    query = messages[start].text.split(_QUERY, 1)[1].partition(f"\n\n{_FACTS}")[0]
    rounds: list[Round] = []
    candidates: tuple[Triple, ...] = ()
    for message in messages[start:]:
        if message.role == "user":
            facts = json.loads(message.text.rpartition(_FACTS)[2])["fact"]
            candidates = tuple(Triple(*fact) for fact in facts)
        else:
            decision = prompts.parse_decision(message.text, candidates, normalization=normalization)
            rounds.append(Round(query, decision.kept))
            query = decision.next_query or ""
    return rounds, query, candidates


class Mixture:
    """Routes every question to its own teacher.

    Args:
      teachers: handlers by name.
      teacher_of: the name for a program's id.
    """

    is_slow = True

    def __init__(self, teachers: Mapping[str, Handler], teacher_of: Callable[[str], str]):
        self._teachers = teachers
        self._teacher_of = teacher_of

    @property
    def is_exhausted(self) -> bool:
        """Whether the budget of one of them is exhausted."""
        return any(teacher.is_exhausted for teacher in self._teachers.values())

    def __call__(self, calls: Sequence[Call], respond: Respond) -> None:
        """See `Handler`."""
        for name, teacher in self._teachers.items():
            own = [i for i, c in enumerate(calls) if self._teacher_of(c.key.program) == name]
            if own:
                teacher([calls[i] for i in own], lambda i, r, own=own: respond(own[i], r))


def assign(question: Question, has_gold: bool, kind: str, share: float, seed: int) -> Teacher:
    """The teacher of a question; in a mixture, the language model has a ``share`` of them.

    The draw depends on the seed and the question alone, so that adding questions changes no
    teacher. A question without annotations goes to the language model.
    """
    if kind == "annotations" or (
        kind == "mixture" and has_gold and random.Random(f"{seed}/{question.id}").random() >= share
    ):
        return "annotations"
    return "llm"


class Inserting:
    """What another handler finds, and what is annotated beside it.

    Args:
      handler: the other.
      insert: makes of a call and its response the one to give.
    """

    def __init__(self, handler: Handler, insert: Callable[[Call, Any], Response]):
        self._handler = handler
        self._insert = insert
        self.is_slow = handler.is_slow

    @property
    def is_exhausted(self) -> bool:
        """Whether the other's budget is exhausted."""
        return self._handler.is_exhausted

    def __call__(self, calls: Sequence[Call], respond: Respond) -> None:
        """See `Handler`."""

        def insert(index: int, found: Response | RequestError) -> None:
            failed = isinstance(found, RequestError)
            respond(index, found if failed else self._insert(calls[index], found))

        self._handler(calls, insert)


def insert_facts(
    missing: Mapping[str, Sequence[Triple]], call: Call, found: Extracted
) -> Extracted:
    """The triples of passages, and by passage annotated facts that nobody extracted."""
    return Extracted(
        tuple(
            (*(triples or ()), *more) if (more := missing.get(passage.id)) else triples
            for passage, triples in zip(call.request.passages, found.triples, strict=True)
        )
    )


# Of a question the passage that a query is to find.
Wanted = Mapping[str, Mapping[str, Passage]]


def insert_passage(wanted: Wanted, call: Call, found: Retrieved) -> Retrieved:
    """The passages that a query retrieves, and the one that it is to find where it is not there."""
    passage = wanted.get(call.key.program, {}).get(call.request.query)
    if passage is None or passage in found.passages:
        return found
    return Retrieved((*found.passages, passage), (*found.scores, min(found.scores, default=0.0)))


def wanted_passages(golds: Mapping[str, SentenceGold], corpus: Mapping[str, Passage]) -> Wanted:
    """By question, what the teacher asks about a hop -> the hop's passage, of ``corpus``."""
    found: dict[str, dict[str, Passage]] = {}
    for key, gold in golds.items():
        texts = found.setdefault(key, {})
        for index, hop in enumerate(gold.hops):
            known = {i: answer for i, answer in enumerate(gold.answers) if i in hop.parents}
            for text in queries(gold, index, known):
                texts.setdefault(text, corpus[gold.passages[index]])
    return found


def missing_facts(golds: Mapping[str, Gold]) -> dict[str, list[Triple]]:
    """By gold passage, the annotated facts of hops that no triple of a gold passage supports.

    A sub-question in free words makes no triple; its hop stays unsupported.
    """
    found: dict[str, dict[Triple, None]] = {}
    for gold in golds.values():
        stated = [triples[0] for triples in gold.statements.values()]
        answers = {i: hop.answers[0] for i, hop in enumerate(gold.hops) if hop.answers}
        for index, hop in enumerate(gold.hops):
            known = {i: answer for i, answer in answers.items() if i != index}
            fact = fact_of(hop, known)
            places = [i for i, _ in hop.places if i in gold.passages]
            if (
                fact is None
                or not places
                or any(support.hop == index for support in gold.supports(stated, known))
            ):
                continue
            head = fact[0]
            passage = max(places, key=lambda i: overlap(gold.passages[i].title, head))
            found.setdefault(passage, {})[Triple(*fact, passage)] = None
    return {passage: list(triples) for passage, triples in found.items()}


def with_facts(
    gold: Gold, facts: Mapping[str, Sequence[Triple]], normalization: Normalization
) -> Gold:
    """``gold`` with further statements of its passages."""
    statements = dict(gold.statements)
    for passage_id in gold.passages:
        for triple in facts.get(passage_id, ()):
            key = fact_key(triple, normalization)
            statements[key] = (*statements.get(key, ()), triple)
    return dataclasses.replace(gold, statements=statements)


def read_golds(
    config: Config, dataset: Dataset, questions: Sequence[Question], settings: CiragConfig
) -> dict[str, Gold] | dict[str, SentenceGold]:
    """The annotations of those questions that have any: of triples, with those of gold passages.

    Args:
      config: with ``triples``, where the candidates come from; of triples that are extracted online
        only what a candidate itself says is known.
      dataset: with the corpus.
      questions: the questions.
      settings: with ``units`` and the normalisation of triples.
    """
    if settings.units == "sentence":
        of_sentences = {q.id: sentence_gold_of(q, dataset) for q in questions}
        return {key: gold for key, gold in of_sentences.items() if gold.hops}
    ids = dict.fromkeys(i for q in questions for i in q.supporting or () if i in dataset.corpus)
    triples: Mapping[str, Sequence[Triple] | None] = dataset.triples
    if config.triples == ONLINE:
        triples = {}
    elif config.triples is not None:
        with TripleStore.open(config.triples) as store:
            triples = store.triples(list(ids))
    golds = {q.id: gold_of(q, dataset.corpus, triples, settings.normalization) for q in questions}
    return {question_id: gold for question_id, gold in golds.items() if gold.hops}
