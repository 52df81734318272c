"""Handlers, which answer requests in batches; each answers one kind."""

import abc
import collections
import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from cirag_jax.datasets.passage_file import PassageFile, PassagesById
from cirag_jax.errors import UserError
from cirag_jax.llm import types as llm
from cirag_jax.llm.thoughts import drop_thoughts
from cirag_jax.models.router import Router
from cirag_jax.retrieval.encoders import Encoder
from cirag_jax.retrieval.graph import TripleGraph, WalkSeeds
from cirag_jax.retrieval.links import TitleIndex
from cirag_jax.retrieval.rankers import Ranker
from cirag_jax.retrieval.search import ExactIndex
from cirag_jax.runtime import requests
from cirag_jax.runtime.requests import RequestError, Response, Retrieved
from cirag_jax.runtime.scheduler import Call, MoreCalls, Respond
from cirag_jax.runtime.store import ResponseCache
from cirag_jax.triples.entity_index import EntityIndex
from cirag_jax.types import Passage, Question, Triple

# (queries, k, allowed rows of each, feedback of each) -> row_QK, score_QK.
Search = Callable[..., tuple[np.ndarray, np.ndarray]]
# Returns the triples by passage id; None if they were not extracted or extraction failed.
TripleSource = Callable[[Sequence[str]], Mapping[str, tuple[Triple, ...] | None]]


class _FastHandler(abc.ABC):
    """A handler that has no budget and runs before language models are called."""

    is_slow = False
    is_exhausted = False

    def __call__(self, calls: Sequence[Call], respond: Respond) -> None:
        for index, response in enumerate(self._responses(calls)):
            respond(index, response)

    @abc.abstractmethod
    def _responses(self, calls: Sequence[Call]) -> Iterable[Response | RequestError]:
        """Returns the responses to the calls, in order."""


class RetrieveHandler(_FastHandler):
    """Retrieves passages, with one search for all queries with the same k.

    ``allowed`` limits the rows of the corpus that each program may retrieve.
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

    def _responses(self, calls: Sequence[Call]) -> Iterable[Response]:
        indices_by_k: dict[int, list[int]] = collections.defaultdict(list)
        for index, call in enumerate(calls):
            indices_by_k[call.request.k].append(index)
        responses: dict[int, Retrieved] = {}
        for k, indices in indices_by_k.items():
            queries = [calls[index].request.query for index in indices]
            allowed = None
            if self._allowed is not None:
                allowed = [self._allowed[calls[index].key.program] for index in indices]
            feedback = [calls[index].request.feedback for index in indices]
            row_QK, score_QK = self._search(queries, k, allowed, feedback)
            for index, rows, scores in zip(indices, row_QK, score_QK, strict=True):
                hits = [(int(r), float(s)) for r, s in zip(rows, scores, strict=True) if r >= 0]
                passages = tuple(self._passages[row] for row, _ in hits)
                responses[index] = Retrieved(passages, tuple(score for _, score in hits))
        return [responses[index] for index in range(len(calls))]


class FetchHandler(_FastHandler):
    """Returns passages of the corpus by their ids."""

    def __init__(self, passages: Sequence[Passage]):
        self._passages: Mapping[str, Passage] = (
            PassagesById(passages)
            if isinstance(passages, PassageFile)
            else {passage.id: passage for passage in passages}
        )

    def _responses(self, calls: Sequence[Call]) -> Iterable[Response | RequestError]:
        for call in calls:
            ids = call.request.passage_ids
            missing = [name for name in ids if name not in self._passages]
            if missing:
                yield RequestError(f"the corpus has no passage {missing[0]!r}")
            else:
                yield Retrieved(tuple(self._passages[name] for name in ids), (1.0,) * len(ids))


class FollowHandler(_FastHandler):
    """Retrieves the passages whose titles occur in texts.

    ``titles`` is an index of the titles of ``passages``. ``allowed`` limits the rows that each
    program may retrieve.
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

    def _responses(self, calls: Sequence[Call]) -> Iterable[Response]:
        for call in calls:
            request: requests.Follow = call.request
            counts = collections.Counter(r for t in request.texts for r in self._titles.named(t))
            rows = list(counts)
            if self._allowed is not None:
                allowed = set(self._allowed[call.key.program].tolist())
                rows = [row for row in rows if row in allowed]
            rows = rows[: request.k]
            passages = tuple(self._passages[row] for row in rows)
            yield Retrieved(passages, tuple(float(counts[row]) for row in rows))


class ExtractHandler(_FastHandler):
    """Looks up the triples of passages in a triple store or a dataset.

    ``by_question`` has other triples of some passages for single programs (question ids).
    """

    def __init__(
        self,
        source: TripleSource,
        by_question: Mapping[str, Mapping[str, tuple[Triple, ...]]] | None = None,
    ):
        self._source = source
        self._by_question = by_question or {}

    def _responses(self, calls: Sequence[Call]) -> Iterable[Response]:
        ids = dict.fromkeys(passage.id for call in calls for passage in call.request.passages)
        triples = self._source(list(ids))
        for call in calls:
            passages: Sequence[Passage] = call.request.passages
            own = self._by_question.get(call.key.program, {})
            yield requests.Extracted(tuple(own.get(p.id, triples.get(p.id)) for p in passages))


class AnchorHandler(_FastHandler):
    """Finds entities by name, and the triples that contain them."""

    def __init__(self, index: EntityIndex):
        self._index = index

    def _responses(self, calls: Sequence[Call]) -> Iterable[Response]:
        for call in calls:
            request: requests.Anchor = call.request
            entities = self._index.anchors(request.surface, request.n, request.match)
            yield requests.Anchored(entities, self._index.neighbors(entities))


class LinkHandler(_FastHandler):
    """Finds the triples of a graph that are nearest to queries.

    ``allowed`` has the rows of each program's passages, of which only the triples are searched.
    """

    def __init__(self, graph: TripleGraph, allowed: Mapping[str, np.ndarray] | None = None):
        self._graph = graph
        self._allowed = allowed

    def _responses(self, calls: Sequence[Call]) -> Iterable[Response]:
        most = max(call.request.n for call in calls)
        queries = [call.request.query for call in calls]
        linked = self._graph.link(queries, most, _allowed_rows(self._allowed, calls))
        for call, (triples, scores, lowest) in zip(calls, linked, strict=True):
            n = call.request.n
            yield requests.Linked(triples[:n], scores[:n], lowest)


class WalkHandler(_FastHandler):
    """Ranks passages by walks over a graph.

    Args:
      graph: a graph of ``passages``, in this order.
      search: finds the passages that are seeds.
      passages: the corpus.
      allowed: the rows of each program's passages, to which its walks are limited.
    """

    _MAX_SCORES = 1 << 24  # Maximum number of passages' scores in memory: 64 MiB.

    def __init__(
        self,
        graph: TripleGraph,
        search: Search,
        passages: Sequence[Passage],
        allowed: Mapping[str, np.ndarray] | None = None,
    ):
        self._graph = graph
        self._search = search
        self._passages = passages
        self._allowed = allowed

    def _responses(self, calls: Sequence[Call]) -> Iterable[Response]:
        size = max(self._MAX_SCORES // max(len(self._passages), 1), 1)
        responses: dict[int, Response] = {}
        groups: dict[tuple[int, int, float], list[int]] = collections.defaultdict(list)
        for index, call in enumerate(calls):
            request: requests.Walk = call.request
            groups[request.k, request.num_seeds, request.restart].append(index)
        for settings, indices in groups.items():
            for start in range(0, len(indices), size):
                part = indices[start : start + size]
                found = self._walk([calls[index] for index in part], *settings)
                responses.update(zip(part, found, strict=True))
        return [responses[index] for index in range(len(calls))]

    def _walk(
        self, calls: Sequence[Call], k: int, num_seeds: int, restart: float
    ) -> list[Retrieved]:
        allowed = _allowed_rows(self._allowed, calls)
        queries = [call.request.query for call in calls]
        row_QK, score_QK = self._search(queries, num_seeds or len(self._passages), allowed, ())
        seeds = []
        for call, row_K, score_K in zip(calls, row_QK, score_QK, strict=True):
            request: requests.Walk = call.request
            row_R, score_R = row_K[row_K >= 0], score_K[row_K >= 0]
            weight_R = request.passage_weight * relative(score_R)
            seeds.append(
                WalkSeeds(request.triples, request.weights, request.num_entities, row_R, weight_R)
            )
        return [
            Retrieved(tuple(self._passages[row] for row in rows), tuple(map(float, ranks)))
            for rows, ranks in self._graph.walk(seeds, k, restart, allowed)
        ]


def _allowed_rows(
    allowed: Mapping[str, np.ndarray] | None, calls: Sequence[Call]
) -> list[np.ndarray] | None:
    return None if allowed is None else [allowed[call.key.program] for call in calls]


def relative(score_K: np.ndarray) -> np.ndarray:
    """Maps the highest score to 1, the lowest to 0, and the others between; equal scores to 1."""
    if not len(score_K):
        return score_K
    lowest, highest = score_K.min(), score_K.max()
    return (score_K - lowest) / (highest - lowest) if highest > lowest else np.ones_like(score_K)


class RouteHandler(_FastHandler):
    """Applies a granularity router to questions, which ``encoder`` embeds as queries."""

    def __init__(self, router: Router, encoder: Encoder):
        self._router = router
        self._encoder = encoder

    def _responses(self, calls: Sequence[Call]) -> Iterable[Response]:
        x_QD = self._encoder.encode([call.request.question for call in calls], "query")
        for call, x_D in zip(calls, x_QD, strict=True):
            route: requests.Route = call.request
            yield requests.Routed(
                self._router.worth(route.granularity, route.refused, x_D, route.scalars)
            )


class DemonstrateHandler(_FastHandler):
    """Selects training questions by the cosine similarity of their embeddings.

    ``questions`` are the candidates and may be empty. ``encoder`` embeds them as queries.
    """

    def __init__(self, questions: Sequence[Question], encoder: Encoder):
        self._questions = questions
        self._encoder = encoder
        if questions:
            self._index = ExactIndex(encoder.encode([q.question for q in questions], "query"))

    def _responses(self, calls: Sequence[Call]) -> Iterable[Response]:
        if not self._questions:
            return [requests.Demonstrated(())] * len(calls)
        query_QD = self._encoder.encode([call.request.query for call in calls], "query")
        row_QK, _ = self._index.search(query_QD, max(call.request.n for call in calls))
        return [
            requests.Demonstrated(tuple(self._questions[row] for row in rows[: call.request.n]))
            for call, rows in zip(calls, row_QK, strict=True)
        ]


class RankHandler(_FastHandler):
    """Sorts texts by a ranker's score, best first; ties keep their order."""

    def __init__(self, ranker: Ranker):
        self._ranker = ranker

    def _responses(self, calls: Sequence[Call]) -> Iterable[Response]:
        batch: list[requests.Rank] = [call.request for call in calls]
        all_scores = self._ranker.score([r.query for r in batch], [r.texts for r in batch])
        for request, scores in zip(batch, all_scores, strict=True):
            order = np.argsort(-np.asarray(scores), kind="stable")[: request.n or None]
            texts = tuple(request.texts[i] for i in order)
            yield requests.Ranked(texts, tuple(float(scores[i]) for i in order))


class GenerateHandler:
    """Generates and scores texts with one language model, for the roles that share it.

    Args:
      backend: the model.
      max_tokens: token limit per role, for requests without a limit.
      seed: base seed (or any text) of sampled requests without a seed; a request's seed also
        depends on its position in the program. None changes no seeds.
      cache: responses of earlier runs; None disables caching.
      identity: identifies the model in the cache.

    Attributes:
      on_tokens: called during generation with the number of tokens of incomplete responses.
    """

    is_slow = True

    def __init__(
        self,
        backend: llm.Backend,
        max_tokens: Mapping[str, int],
        *,
        seed: int | str | None = 0,
        cache: ResponseCache | None = None,
        identity: Any = None,
    ):
        self.backend: Any = backend
        self._max_tokens = max_tokens
        self._seed = seed
        self._cache = cache
        self._identity = identity
        self.on_tokens: Callable[[int], Any] = lambda tokens: None

    @property
    def is_exhausted(self) -> bool:
        """Whether the backend's budget is exhausted."""
        return bool(getattr(self.backend, "budget_exhausted", False))

    @property
    def accepts_more(self) -> bool:
        """Whether the backend accepts further requests while it generates."""
        return bool(getattr(self.backend, "accepts_more", False))

    def __call__(
        self, calls: Sequence[Call], respond: Respond, more: MoreCalls | None = None
    ) -> None:
        """Answers ``calls``, and the further calls that ``more`` returns; see `Handler`."""
        batch: list[llm.Generate | llm.Score] = []
        generate_indices: list[int] = []  # in ``batch``, in the order of the backend's requests
        score_indices: list[int] = []

        def receive(index: int, response: llm.Generated | llm.Scored) -> None:
            if response.error is not None:
                respond(index, RequestError(response.error))
                return
            if isinstance(response, llm.Generated):
                response = self.response(response)
            if self._cache is not None:
                self._cache.keep(self._identity, batch[index], response)
            respond(index, response)

        def admit(calls: Sequence[Call]) -> list[llm.Generate]:
            """Answers cached requests, and returns the requests to generate."""
            uncached = []
            for call in calls:
                request, index = self.request(call), len(batch)
                batch.append(request)
                cached = self._cache.find(self._identity, request) if self._cache else None
                if cached is not None:
                    respond(index, cached)
                elif isinstance(request, llm.Score):
                    score_indices.append(index)
                else:
                    generate_indices.append(index)
                    uncached.append(request)
            return uncached

        def more_requests() -> list[llm.Generate]:
            assert more is not None
            uncached: list[llm.Generate] = []
            # Responses from the cache may lead to further calls.
            while not uncached and (calls := more()):
                uncached = admit(calls)
            return uncached

        if first := admit(calls):
            self._generate(
                first,
                lambda index, response: receive(generate_indices[index], response),
                None if more is None else more_requests,
            )
        if score_indices:
            responses = self.backend.score([batch[index] for index in score_indices])
            for index, response in zip(score_indices, responses, strict=True):
                receive(index, response)

    def _generate(
        self, batch: Sequence[llm.Generate], receive: llm.OnResponse, more: llm.MoreRequests | None
    ) -> None:
        received = 0

        def done(index: int, response: llm.Generated) -> None:
            nonlocal received
            received += response.usage.generated_tokens
            receive(index, response)

        def progress(responses: int, tokens: int) -> None:
            self.on_tokens(tokens - received)

        try:
            self.backend.generate(batch, progress, done, *([] if more is None else [more]))
        except ExceptionGroup as group:  # ``done`` failed in a task of a server's client
            raise _first_error(group.subgroup(UserError) or group) from None

    def response(self, response: llm.Generated) -> llm.Generated:
        """Returns a backend's response as programs receive it, without thoughts in its text."""
        return drop_thoughts(response)

    def request(self, call: Call) -> llm.Generate | llm.Score:
        """Returns a call's request with a token limit and, if it is sampled, with a seed."""
        request: llm.Generate | llm.Score = call.request
        if isinstance(request, llm.Score):
            return request
        limit = request.max_tokens or self._max_tokens[request.role]
        if self._seed is None:
            return dataclasses.replace(request, max_tokens=limit)
        name = f"{self._seed}/{call.key.program}/{call.key.ordinal}.{call.key.part}"
        bits = hashlib.sha256(name.encode("utf-8", "surrogatepass")).digest()
        seed = int.from_bytes(bits[:4], "little") >> 1 if request.temperature else 0
        return dataclasses.replace(request, max_tokens=limit, seed=request.seed or seed)


class SamplingHandler(GenerateHandler):
    """Answers the requests of one role by samples from the model's own distribution.

    Responses have all tokens with their log-probabilities, also those of thoughts, so that a policy
    can be trained on them (`training.policy`).
    """

    def request(self, call: Call) -> llm.Generate | llm.Score:
        """Returns a call's request; a text is sampled at temperature 1."""
        if isinstance(call.request, llm.Score):
            return super().request(call)
        sampled = dataclasses.replace(call.request, temperature=1.0, top_p=1.0, logprobs=True)
        return super().request(dataclasses.replace(call, request=sampled))

    def response(self, response: llm.Generated) -> llm.Generated:
        """Returns a response without thoughts in its text, but with all tokens."""
        return dataclasses.replace(super().response(response), tokens=response.tokens)


def _first_error(error: Exception) -> Exception:
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error
