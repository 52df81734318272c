"""Drives a method by hand: canned passages, triples and texts answer its requests, in order."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from cirag_jax.llm.types import Token
from cirag_jax.runtime.requests import (
    Anchor,
    Anchored,
    Demonstrate,
    Demonstrated,
    Extract,
    Extracted,
    Fetch,
    Follow,
    Generate,
    Generated,
    Rank,
    Ranked,
    Retrieve,
    Retrieved,
    Score,
    Scored,
)
from cirag_jax.triples.entity_index import EntityIndex
from cirag_jax.triples.normalization import triple_key
from cirag_jax.types import Passage, Question, Text, Triple


@dataclasses.dataclass
class Hand:
    """What answers the requests of one question, and a record of them.

    Attributes:
      found: query -> passages; ``None`` is the entry for every other query. Feedback is noted, and
        moves nothing.
      triples: passage id -> its triples; absent: never extracted.
      scores: key of a triple, text of a sentence or id of a passage -> the rankers' score; 0 where
        it has none.
      texts: role -> what its model says, call by call: a text, a Generated (why it ended too), for
        a Score the log-probabilities of its continuations.
      shown: questions that are demonstrated, the most similar first.
      named: title -> the passage that a text with it in it names.
      requests: everything that was asked, those of a list one by one.
    """

    found: Mapping[str | None, Sequence[Passage]]
    triples: Mapping[str, Sequence[Triple] | None]
    texts: Mapping[str, list[Any]]
    scores: Mapping[Any, float] = dataclasses.field(default_factory=dict)
    shown: Sequence[Question] = ()
    named: Mapping[str, Passage] = dataclasses.field(default_factory=dict)
    requests: list[Any] = dataclasses.field(default_factory=list)

    def drive(self, program) -> Any:
        """Runs the program to its end; every canned text must have been asked for."""
        response = None
        while True:
            try:
                request = program.send(response)
            except StopIteration as end:
                left = {role: texts for role, texts in self.texts.items() if texts}
                assert not left, f"never asked for: {left}"
                return end.value
            several = request if isinstance(request, list | tuple) else [request]
            self.requests += several
            responses = [self.answer(one) for one in several]
            response = responses if several is request else responses[0]

    def answer(self, request: Any) -> Any:
        match request:
            case Retrieve(query, k, _):
                passages = tuple(self.found.get(query, self.found.get(None, ())))[:k]
                return Retrieved(passages, tuple(1.0 / (i + 1) for i in range(len(passages))))
            case Follow(texts, k):
                named = self.named.items()
                found = [p for name, p in named if any(name in text for text in texts)][:k]
                return Retrieved(tuple(found), (1.0,) * len(found))
            case Fetch(ids):
                known = {p.id: p for passages in self.found.values() for p in passages}
                return Retrieved(tuple(known[i] for i in ids), (1.0,) * len(ids))
            case Extract(passages):
                found = (self.triples.get(passage.id) for passage in passages)
                return Extracted(tuple(None if t is None else tuple(t) for t in found))
            case Anchor(surface, n, match):
                index = EntityIndex(t for found in self.triples.values() for t in found or ())
                entities = index.anchors(surface, n, match)
                return Anchored(entities, index.neighbours(entities))
            case Rank(_, texts, n, _):
                score = {t: self.scores.get(_score_key(t), 0.0) for t in texts}
                best = sorted(texts, key=lambda t: -score[t])[: n or None]
                return Ranked(tuple(best), tuple(score[t] for t in best))
            case Demonstrate(_, n):
                return Demonstrated(tuple(self.shown[:n]))
            case Score(_, continuations, role):
                logprobs = zip(continuations, self.texts[role].pop(0), strict=True)
                return Scored(tuple((Token(text, -1, logprob),) for text, logprob in logprobs))
            case Generate(_, role):
                text = self.texts[role].pop(0)
                return text if isinstance(text, Generated) else Generated(text, "stop")
        raise AssertionError(request)

    def asked(self, kind: type, role: str | None = None) -> list[Any]:
        """The requests of a kind, of one role where it is given."""
        return [r for r in self.requests if isinstance(r, kind) and role in (None, _role(r))]

    def kinds(self) -> list[str]:
        """One word a request: its role, or its type."""
        return [_role(request) or type(request).__name__ for request in self.requests]


def _role(request: Any) -> str | None:
    return request.role if isinstance(request, Generate | Score) else None


def _score_key(text: Text) -> Any:
    match text:
        case Triple():
            return triple_key(text)
        case Passage():
            return text.id
    return text


def prompt(request: Generate) -> str:
    """The conversation as one text."""
    return "\n".join(message.text for message in request.messages)


def decision(thought: str, facts: str, question: str) -> str:
    """A well-formed integration response."""
    return (
        f"[[## thought ##]]\n{thought}\n\n[[## fact_after_filter ##]]\n{facts}\n\n"
        f"[[## question ##]]\n{question}"
    )
