"""Fake handlers, which answer a method's requests from tables of passages, triples and texts."""

import dataclasses
import random
from collections.abc import Iterator, Mapping, Sequence
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
    Link,
    Linked,
    Rank,
    Ranked,
    RequestError,
    Retrieve,
    Retrieved,
    Route,
    Routed,
    Score,
    Scored,
    Walk,
)
from cirag_jax.triples.entity_index import EntityIndex
from cirag_jax.triples.normalization import triple_key
from cirag_jax.types import Passage, Question, Text, Triple


@dataclasses.dataclass
class FakeHandlers:
    """Handlers that answer the requests of one question from tables, and record them.

    Attributes:
      passages: the passages for each query; the key ``None`` applies to all other queries. Feedback
        is recorded and has no effect.
      triples: the triples of each passage id; without an entry, extraction has not been run.
      scores: the rankers' scores by a triple's key, a sentence's text or a passage's id; else 0.
      texts: the responses of each role, in order. A response is a text, a `Generated`, or a
        `RequestError` to raise; for a `Score` it is the log-probabilities of its continuations.
      demonstrated: the questions for `Demonstrate`, the most similar first.
      routed: the router's probability of each granularity.
      linked: the passage of each title; it is linked from every text that contains the title.
      requests: all requests, one by one.
    """

    passages: Mapping[str | None, Sequence[Passage]]
    triples: Mapping[str, Sequence[Triple] | None]
    texts: Mapping[str, list[Any]]
    scores: Mapping[Any, float] = dataclasses.field(default_factory=dict)
    demonstrated: Sequence[Question] = ()
    linked: Mapping[str, Passage] = dataclasses.field(default_factory=dict)
    routed: Mapping[str, float] = dataclasses.field(default_factory=dict)
    requests: list[Any] = dataclasses.field(default_factory=list)

    def drive(self, program) -> Any:
        """Runs the program to its end, and checks that it requested all texts."""
        response, step = None, program.send
        while True:
            try:
                request = step(response)
            except StopIteration as end:
                unused = {role: texts for role, texts in self.texts.items() if texts}
                assert not unused, f"texts that were not requested: {unused}"
                return end.value
            requests = request if isinstance(request, list | tuple) else [request]
            self.requests += requests
            step = program.send
            try:
                responses = [self.answer(r) for r in requests]
                response = responses if requests is request else responses[0]
            except RequestError as error:
                response, step = error, program.throw

    def answer(self, request: Any) -> Any:
        match request:
            case Retrieve(query, k, _):
                passages = tuple(self.passages.get(query, self.passages.get(None, ())))[:k]
                return Retrieved(passages, tuple(1.0 / (i + 1) for i in range(len(passages))))
            case Follow(texts, k):
                titles = [t for t in self.linked if any(t in text for text in texts)][:k]
                return Retrieved(tuple(map(self.linked.get, titles)), (1.0,) * len(titles))
            case Fetch(ids):
                by_id = {p.id: p for passages in self.passages.values() for p in passages}
                return Retrieved(tuple(by_id[i] for i in ids), (1.0,) * len(ids))
            case Extract(passages):
                triples = (self.triples.get(passage.id) for passage in passages)
                return Extracted(tuple(None if t is None else tuple(t) for t in triples))
            case Anchor(surface, n, match):
                index = EntityIndex(t for triples in self.triples.values() for t in triples or ())
                entities = index.anchors(surface, n, match)
                return Anchored(entities, index.neighbors(entities))
            case Link(_, n):
                triples = [t for found in self.triples.values() for t in found or ()]
                scores = {t: self.scores.get(triple_key(t), 0.0) for t in triples}
                best = sorted(triples, key=lambda t: -scores[t])[:n]
                lowest = min(scores.values(), default=0.0)
                return Linked(tuple(best), tuple(scores[t] for t in best), lowest)
            case Walk(_, triples, _, k):
                by_id = {p.id: p for passages in self.passages.values() for p in passages}
                ids = dict.fromkeys([*(t.passage_id for t in triples), *by_id])
                passages = tuple(by_id[i] for i in ids)[:k]
                return Retrieved(passages, tuple(1.0 / (i + 1) for i in range(len(passages))))
            case Rank(_, texts, n, _):
                score = {t: self.scores.get(_score_key(t), 0.0) for t in texts}
                best = sorted(texts, key=lambda t: -score[t])[: n or None]
                return Ranked(tuple(best), tuple(score[t] for t in best))
            case Route(_, granularity):
                return Routed(self.routed[granularity])
            case Demonstrate(_, n):
                return Demonstrated(tuple(self.demonstrated[:n]))
            case Score(_, continuations, role):
                logprobs = zip(continuations, self.texts[role].pop(0), strict=True)
                return Scored(tuple((Token(text, -1, logprob),) for text, logprob in logprobs))
            case Generate(_, role):
                text = self.texts[role].pop(0)
                if isinstance(text, RequestError):
                    raise text
                return text if isinstance(text, Generated) else Generated(text, "stop")
        raise AssertionError(request)

    def received(self, kind: type, role: str | None = None) -> list[Any]:
        """Returns the requests of this type and, if given, of this role."""
        return [r for r in self.requests if isinstance(r, kind) and role in (None, _role(r))]

    def kinds(self) -> list[str]:
        """Returns the role of each request, or its type if it has no role."""
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
    """Returns the conversation of a request as one text."""
    return "\n".join(message.text for message in request.messages)


def decision(thought: str, facts: str, question: str) -> str:
    """Returns a well-formed integration response."""
    return (
        f"[[## thought ##]]\n{thought}\n\n[[## fact_after_filter ##]]\n{facts}\n\n"
        f"[[## question ##]]\n{question}"
    )


def mutated_texts(
    outputs: Sequence[str], pieces: Sequence[str], seed: int, max_edits: int = 5
) -> Iterator[tuple[str, random.Random]]:
    """Yields 2,000 damaged copies of outputs, each with a random generator for more choices."""
    rng = random.Random(seed)
    for number in range(2_000):
        text = outputs[number % len(outputs)]
        for _ in range(rng.randint(1, max_edits)):
            at = rng.randrange(len(text) + 1)
            text = text[:at] + rng.choice(pieces) + text[min(len(text), at + rng.randint(0, 9)) :]
        yield text, rng
