"""What answers each kind of request: one batch for everything that waits."""

import collections
import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from cirag_jax.errors import UserError
from cirag_jax.llm import types as llm
from cirag_jax.retrieval.encoders import Encoder
from cirag_jax.retrieval.links import TitleIndex
from cirag_jax.retrieval.rankers import Ranker
from cirag_jax.retrieval.search import ExactIndex
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
    RequestError,
    Retrieve,
    Retrieved,
    Score,
    Scored,
)
from cirag_jax.runtime.scheduler import Call, Done, More
from cirag_jax.runtime.store import ResponseCache
from cirag_jax.triples.entity_index import EntityIndex
from cirag_jax.types import Passage, Question, Triple

# Finds rows: (queries, k, rows each may find, feedback of each) -> row_QK, score_QK.
Search = Callable[..., tuple[np.ndarray, np.ndarray]]
# Triples of each passage id; None where it was never extracted or failed.
TripleSource = Callable[[Sequence[str]], Mapping[str, tuple[Triple, ...] | None]]


class _Quick:
    """A handler that has no budget, and that pays to be asked before language models are."""

    is_slow = False
    is_exhausted = False


class RetrieveHandler(_Quick):
    """Passages by one search over the corpus for all queries of the same k.

    ``allowed`` are the rows that each program may find; None: all.
    """

    def __init__(
        self,
        search: Search,
        passages: Sequence[Passage],
        allowed: Mapping[str, np.ndarray] | None = None,
    ):
        self._search = search
        self._passages = passages
        self._allowed = allowed

    def __call__(self, calls: Sequence[Call], done: Done) -> None:
        """See `Handler`."""
        by_k: dict[int, list[int]] = collections.defaultdict(list)
        for index, call in enumerate(calls):
            request: Retrieve = call.request
            by_k[request.k].append(index)
        for k, indices in by_k.items():
            queries = [calls[index].request.query for index in indices]
            allowed = None
            if self._allowed is not None:
                allowed = [self._allowed[calls[index].key.program] for index in indices]
            feedback = [calls[index].request.feedback for index in indices]
            row_QK, score_QK = self._search(queries, k, allowed, feedback)
            for index, rows, scores in zip(indices, row_QK, score_QK, strict=True):
                found = [(int(r), float(s)) for r, s in zip(rows, scores, strict=True) if r >= 0]
                passages = tuple(self._passages[row] for row, _ in found)
                done(index, Retrieved(passages, tuple(score for _, score in found)))


class FetchHandler(_Quick):
    """Passages by their ids.

    Args:
      passages: the corpus.
    """

    def __init__(self, passages: Sequence[Passage]):
        self._passages = {passage.id: passage for passage in passages}

    def __call__(self, calls: Sequence[Call], done: Done) -> None:
        """See `Handler`."""
        for index, call in enumerate(calls):
            request: Fetch = call.request
            missing = [name for name in request.passage_ids if name not in self._passages]
            if missing:
                done(index, RequestError(f"the corpus has no passage {missing[0]!r}"))
                continue
            found = tuple(self._passages[name] for name in request.passage_ids)
            done(index, Retrieved(found, (1.0,) * len(found)))


class FollowHandler(_Quick):
    """Passages that texts name.

    Args:
      titles: of ``passages``.
      passages: the corpus.
      allowed: rows that each program may find; None: all.
    """

    def __init__(
        self,
        titles: TitleIndex,
        passages: Sequence[Passage],
        allowed: Mapping[str, np.ndarray] | None = None,
    ):
        self._titles = titles
        self._passages = passages
        self._allowed = allowed

    def __call__(self, calls: Sequence[Call], done: Done) -> None:
        """See `Handler`."""
        for index, call in enumerate(calls):
            request: Follow = call.request
            times = collections.Counter(r for t in request.texts for r in self._titles.named(t))
            rows = list(times)
            if self._allowed is not None:
                allowed = set(self._allowed[call.key.program].tolist())
                rows = [row for row in rows if row in allowed]
            rows = rows[: request.k]
            passages = tuple(self._passages[row] for row in rows)
            done(index, Retrieved(passages, tuple(float(times[row]) for row in rows)))


class ExtractHandler(_Quick):
    """Triples that were extracted before: a triple store's, or a dataset's."""

    def __init__(self, source: TripleSource):
        self._source = source

    def __call__(self, calls: Sequence[Call], done: Done) -> None:
        """See `Handler`."""
        wanted: dict[str, None] = {}
        for call in calls:
            request: Extract = call.request
            wanted.update(dict.fromkeys(passage.id for passage in request.passages))
        found = self._source(list(wanted))
        for index, call in enumerate(calls):
            done(index, Extracted(tuple(found.get(p.id) for p in call.request.passages)))


class AnchorHandler(_Quick):
    """Entities and the triples around them."""

    def __init__(self, index: EntityIndex):
        self._index = index

    def __call__(self, calls: Sequence[Call], done: Done) -> None:
        """See `Handler`."""
        for place, call in enumerate(calls):
            request: Anchor = call.request
            entities = self._index.anchors(request.surface, request.n, request.match)
            done(place, Anchored(entities, self._index.neighbours(entities)))


class DemonstrateHandler(_Quick):
    """Training questions by the cosine of their embeddings.

    Args:
      questions: those that may be shown; there may be none.
      encoder: embeds them, all as queries.
    """

    def __init__(self, questions: Sequence[Question], encoder: Encoder):
        self._questions = questions
        self._encoder = encoder
        if questions:
            self._index = ExactIndex(encoder.encode([q.question for q in questions], "query"))

    def __call__(self, calls: Sequence[Call], done: Done) -> None:
        """See `Handler`."""
        requests: list[Demonstrate] = [call.request for call in calls]
        if not self._questions:
            for index in range(len(requests)):
                done(index, Demonstrated(()))
            return
        query_QD = self._encoder.encode([request.query for request in requests], "query")
        row_QK, _ = self._index.search(query_QD, max(request.n for request in requests))
        for index, request in enumerate(requests):
            rows = row_QK[index, : request.n]
            done(index, Demonstrated(tuple(self._questions[row] for row in rows)))


class RankHandler(_Quick):
    """Texts by a ranker's score, best first; ties keep the order they came in."""

    def __init__(self, ranker: Ranker):
        self._ranker = ranker

    def __call__(self, calls: Sequence[Call], done: Done) -> None:
        """See `Handler`."""
        requests: list[Rank] = [call.request for call in calls]
        scored = self._ranker.score([r.query for r in requests], [r.texts for r in requests])
        for index, (request, scores) in enumerate(zip(requests, scored, strict=True)):
            order = np.argsort(-np.asarray(scores), kind="stable")[: request.n or None]
            texts = tuple(request.texts[i] for i in order)
            done(index, Ranked(texts, tuple(float(scores[i]) for i in order)))


class GenerateHandler:
    """Texts and scores by one language model, for one role or for several that share it.

    Args:
      backend: the model.
      max_tokens: of each role, where a request names none.
      seed: of sampled requests; each has its own stream, by its place in its program. None: the
        requests say theirs.
      cache: responses of earlier runs to the same request; None: none.
      identity: what decides the model's texts, for the cache.

    Attributes:
      on_tokens: called while it works with the tokens written of responses not yet handed on.
    """

    is_slow = True

    def __init__(
        self,
        backend: llm.Backend,
        max_tokens: Mapping[str, int],
        *,
        seed: int | None = 0,
        cache: ResponseCache | None = None,
        identity: Any = None,
    ):
        self._backend: Any = backend
        self._max_tokens = max_tokens
        self._seed = seed
        self._cache = cache
        self._identity = identity
        self.on_tokens: Callable[[int], Any] = lambda tokens: None

    @property
    def is_exhausted(self) -> bool:
        """Whether the backend's budget has ended."""
        return bool(getattr(self._backend, "budget_exhausted", False))

    @property
    def backend(self) -> llm.Backend:
        """The model."""
        return self._backend

    @property
    def takes_more(self) -> bool:
        """Whether the backend takes requests while it answers others."""
        return bool(getattr(self._backend, "takes_more", False))

    def __call__(self, calls: Sequence[Call], done: Done, more: More | None = None) -> None:
        """See `Handler`; responses are journalled one by one, as the backend has them."""
        asked: list[Generate | Score] = []
        texts: list[int] = []  # places of those that the backend generates, in its order
        scores: list[int] = []

        def receive(index: int, response: Generated | Scored) -> None:
            if response.error is not None:
                done(index, RequestError(response.error))
                return
            if self._cache is not None:
                self._cache.keep(self._identity, asked[index], response)
            done(index, response)

        def admit(calls: Sequence[Call]) -> list[Generate]:
            """Answers what is cached; returns what is to be generated."""
            new = []
            for call in calls:
                request, index = self.request(call), len(asked)
                asked.append(request)
                known = self._cache.find(self._identity, request) if self._cache else None
                if known is not None:
                    done(index, known)
                elif isinstance(request, Score):
                    scores.append(index)
                else:
                    texts.append(index)
                    new.append(request)
            return new

        def take() -> list[Generate]:
            """What has come since; after responses that were cached, there may be more."""
            assert more is not None
            new: list[Generate] = []
            while not new and (calls := more()):
                new = admit(calls)
            return new

        first = admit(calls)
        if first:
            self._generate(first, lambda i, r: receive(texts[i], r), None if more is None else take)
        if scores:
            found = self._backend.score([asked[index] for index in scores])
            for index, response in zip(scores, found, strict=True):
                receive(index, response)

    def _generate(
        self, requests: Sequence[Generate], receive: llm.Done, more: llm.More | None
    ) -> None:
        received = 0

        def count(index: int, response: Generated) -> None:
            nonlocal received
            received += response.usage.generated_tokens
            receive(index, response)

        def show(rows: int, tokens: int) -> None:
            self.on_tokens(tokens - received)

        try:
            if more is None:
                self._backend.generate(requests, show, count)
            else:
                self._backend.generate(requests, show, count, more)
        except ExceptionGroup as group:  # a server's tasks wrap what ``done`` raised (a full disk)
            users = group.subgroup(UserError)
            raise _first(users or group) from None

    def request(self, call: Call) -> Generate | Score:
        """A call's request with the role's limit, and with a seed of its place where it samples."""
        asked: Generate | Score = call.request
        if isinstance(asked, Score):
            return asked
        limit = asked.max_tokens or self._max_tokens[asked.role]
        if self._seed is None:
            return dataclasses.replace(asked, max_tokens=limit)
        name = f"{self._seed}/{call.key.program}/{call.key.ordinal}.{call.key.part}"
        bits = hashlib.sha256(name.encode("utf-8", "surrogatepass")).digest()
        seed = int.from_bytes(bits[:4], "little") >> 1 if asked.temperature else 0
        return dataclasses.replace(asked, max_tokens=limit, seed=asked.seed or seed)


def _first(error: Exception) -> Exception:
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error
