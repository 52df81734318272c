"""Teachers that answer the integrator's requests while trajectories are collected.

A teacher runs in CIRAG's loop of retrieval, extraction and ranking, so it makes its decisions from
the same inputs as a student.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

from cirag_jax.datasets import triple_files
from cirag_jax.datasets.annotations import fact_of, overlap
from cirag_jax.distill.oracle import (
    AnyGold,
    Gold,
    Round,
    SentenceGold,
    add_statements,
    decide,
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

KINDS = ("annotations", "llm")

_QUERY = "[[## Original Query ##]]\n"
_FACTS = "[[## fact_before_filter ##]]\n"


class AnnotationTeacher:
    """A handler that answers with decisions of the oracle, in the format of the prompt.

    It reads earlier rounds from the conversation, so that a killed run can resume.

    Args:
      golds: annotations by question id, which is the program id of the calls.
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
        """Returns the decision that follows a conversation from `integration_messages`.

        The prompt format must be multi_turn for triples and compact for sentences.
        """
        if isinstance(gold, SentenceGold):
            rounds, query, lines = compact.read_conversation(messages)
            step = decide(gold, [Round(*fields) for fields in rounds], query, lines)
            return compact.render_decision(dataclasses.replace(step, candidates=lines))
        rounds, query, candidates = read_conversation(messages, gold.normalization)
        step = decide(gold, rounds, query, candidates)
        return prompts.render_decision(step, gold.normalization)


def read_conversation(
    messages: Sequence[Message], normalization: Normalization
) -> tuple[list[Round], str, tuple[Triple, ...]]:
    """Returns the earlier rounds, and the query and candidates of the current round.

    ``messages`` must have the format multi_turn. A worked example is skipped.
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


class InsertingHandler:
    """A handler that inserts annotations into the responses of another handler.

    ``insert`` maps a call and its response to the new response.
    """

    def __init__(self, handler: Handler, insert: Callable[[Call, Any], Response]):
        self._handler = handler
        self._insert = insert
        self.is_slow = handler.is_slow

    @property
    def is_exhausted(self) -> bool:
        """Whether the budget of the other handler is exhausted."""
        return self._handler.is_exhausted

    def __call__(self, calls: Sequence[Call], respond: Respond) -> None:
        """See `Handler`."""

        def insert(index: int, response: Response | RequestError) -> None:
            failed = isinstance(response, RequestError)
            respond(index, response if failed else self._insert(calls[index], response))

        self._handler(calls, insert)


def insert_facts(
    missing: Mapping[str, Sequence[Triple]], questions: Set[str], call: Call, extracted: Extracted
) -> Extracted:
    """Adds the ``missing`` facts of passages to the triples that were extracted for ``questions``.

    A passage may also be retrieved for held-out questions.
    """
    if call.key.program not in questions:
        return extracted
    return Extracted(
        tuple(
            (*(triples or ()), *facts) if (facts := missing.get(passage.id)) else triples
            for passage, triples in zip(call.request.passages, extracted.triples, strict=True)
        )
    )


# Question id -> query -> gold passage for the query.
GoldPassages = Mapping[str, Mapping[str, Passage]]


def insert_passage(gold: GoldPassages, call: Call, retrieved: Retrieved) -> Retrieved:
    """Appends a query's gold passage to the retrieved passages unless it is among them."""
    passage = gold.get(call.key.program, {}).get(call.request.query)
    if passage is None or passage in retrieved.passages:
        return retrieved
    lowest = min(retrieved.scores, default=0.0)
    return Retrieved((*retrieved.passages, passage), (*retrieved.scores, lowest))


def gold_passages(golds: Mapping[str, SentenceGold], corpus: Mapping[str, Passage]) -> GoldPassages:
    """Returns question id -> query -> gold passage, for all queries that the teacher may write."""
    by_question: dict[str, dict[str, Passage]] = {}
    for key, gold in golds.items():
        by_query = by_question.setdefault(key, {})
        for index, hop in enumerate(gold.hops):
            known = {i: answer for i, answer in enumerate(gold.answers) if i in hop.parents}
            for query in queries(gold, index, known):
                by_query.setdefault(query, corpus[gold.passages[index]])
    return by_question


def unstated_hops(gold: Gold) -> list[int]:
    """Returns the hops that no triple of the gold passages supports, given the other answers."""
    stated = [triples[0] for triples in gold.statements.values()]
    return [
        index
        for index in range(len(gold.hops))
        if not any(s.hop == index for s in gold.supports(stated, _other_answers(gold, index)))
    ]


def _other_answers(gold: Gold, index: int) -> dict[int, str]:
    return {i: hop.answers[0] for i, hop in enumerate(gold.hops) if hop.answers and i != index}


def missing_facts(golds: Mapping[str, Gold]) -> dict[str, list[Triple]]:
    """Returns gold passage id -> annotated facts of hops that no extracted triple supports.

    Hops whose sub-question cannot be written as a fact are skipped and remain unsupported.
    """
    missing: dict[str, dict[Triple, None]] = {}
    for gold in golds.values():
        for index in unstated_hops(gold):
            hop = gold.hops[index]
            fact = fact_of(hop, _other_answers(gold, index))
            places = [i for i, _ in hop.places if i in gold.passages]
            if fact is None or not places:
                continue
            head = fact[0]
            passage = max(places, key=lambda i: overlap(gold.passages[i].title, head))
            missing.setdefault(passage, {})[Triple(*fact, passage)] = None
    return {passage: list(triples) for passage, triples in missing.items()}


def with_facts(
    gold: Gold, facts: Mapping[str, Sequence[Triple]], normalization: Normalization
) -> Gold:
    """Returns ``gold`` with the given facts of the gold passages as additional statements."""
    new = [triple for passage_id in gold.passages for triple in facts.get(passage_id, ())]
    statements = add_statements(gold.statements, new, normalization)
    return dataclasses.replace(gold, statements=statements)


def read_golds(
    config: Config, dataset: Dataset, questions: Sequence[Question], settings: CiragConfig
) -> dict[str, Gold] | dict[str, SentenceGold]:
    """Returns question id -> annotations, for the questions that have annotations.

    For triples, the annotations include the triples of gold passages, unless triples are extracted
    online.
    """
    if settings.units == "sentence":
        sentence_golds = {q.id: sentence_gold_of(q, dataset) for q in questions}
        return {key: gold for key, gold in sentence_golds.items() if gold.hops}
    triples: Mapping[str, Sequence[Triple] | None] = dataset.triples
    if config.data.triples == ONLINE:
        triples = {}
    elif triple_files.is_store(config.data.triples):
        ids = dict.fromkeys(i for q in questions for i in q.supporting or () if i in dataset.corpus)
        with TripleStore.open(config.data.triples) as store:
            triples = store.triples(ids)
    golds = {q.id: gold_of(q, dataset.corpus, triples, settings.normalization) for q in questions}
    return {question_id: gold for question_id, gold in golds.items() if gold.hops}
