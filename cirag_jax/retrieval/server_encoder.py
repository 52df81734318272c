"""An encoder on an OpenAI-compatible server (``/v1/embeddings``), with a cache of paid vectors.

Servers differ, so a response is accepted in all of these forms: vectors as base64 or as lists of
numbers, in any order, of unit length or not. Wrong counts and numbers that are not finite are
errors.
"""

import asyncio
import base64
import binascii
import collections
import dataclasses
import hashlib
import itertools
import json
import math
import pathlib
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from cirag_jax.errors import InUse, UserError
from cirag_jax.io import cache_folder, replace_surrogates, say
from cirag_jax.models.io.text_prefixes import prefixes_of
from cirag_jax.retrieval.encode import Progress
from cirag_jax.server import (
    Failure,
    MalformedResponse,
    OutOfBudget,
    ServerClient,
    ServerConfig,
    TooLong,
    run_coroutine,
)
from cirag_jax.sqlite import MEMORY, WRITE_TOGETHER, Database
from cirag_jax.types import NonNegativeFloat, PositiveInt, Role

_DEFAULT_URL = "api.openai.com"
_PROBE = "dimension"  # a text whose vector shows the dimension
_TOO_MANY = ("batch size", "too many inputs", "tokens per request", "array too long")
_SHORTEST = 16  # characters to which a text is cut at least
_KEYS = 500  # keys per query of the cache
_MANY = 4096  # new texts of one call before which an estimate is printed


@dataclasses.dataclass(frozen=True)
class EmbeddingConfig(ServerConfig):
    """Settings of `ServerEncoder`.

    Attributes:
      dimensions: requested dimension of vectors; longer vectors are cut. None is the model's own.
      encoding: requested form of vectors; the other form is accepted, too.
      batch_size: maximum number of texts per request.
      batch_tokens: maximum number of tokens per request, as estimated from the bytes of the texts.
      overflow: ``truncate`` shortens texts that the server rejects as too long; ``error`` stops.
      price: price per million tokens, for estimates and ``budget_cost``.
      budget_cost: maximum cost, in the currency of ``price``.
    """

    dimensions: PositiveInt | None = None
    encoding: Literal["base64", "float"] = "base64"
    batch_size: PositiveInt = 32
    batch_tokens: PositiveInt = 50_000
    overflow: Literal["error", "truncate"] = "error"
    price: NonNegativeFloat | None = None
    budget_cost: NonNegativeFloat | None = None

    def field(self, name: str) -> str:
        """Returns the name of a field of ``config.encoder`` in error messages."""
        is_shared = name in ("model", "dimensions", "batch_size")
        return f"config.encoder.{name}" if is_shared else f"config.encoder.server.{name}"


class EmbeddingCache(Database):
    """Vectors by a hash of the text and of everything that determines its vector.

    Several processes may use the file. ``vector`` is float32; ``cut`` tells whether the server read
    only the beginning of the text.
    """

    _SCHEMA = """
        CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT) WITHOUT ROWID;
        CREATE TABLE vectors (key BLOB PRIMARY KEY, vector BLOB, cut INTEGER) WITHOUT ROWID
    """
    _FORMAT = 1
    _OTHER_FORMAT = "{path} was written by another version of this program; remove it."

    def find(self, keys: Sequence[bytes]) -> dict[bytes, tuple[np.ndarray, bool]]:
        """Returns the vectors of known keys; damaged vectors are unknown."""
        found = {}
        for start in range(0, len(keys), _KEYS):
            part = keys[start : start + _KEYS]
            places = ", ".join("?" * len(part))
            rows = self._rows(f"SELECT * FROM vectors WHERE key IN ({places})", part)
            for key, blob, cut in rows:
                if isinstance(blob, bytes) and blob and len(blob) % 4 == 0:
                    vector_D = np.frombuffer(blob, np.float32)
                    if abs(float(np.linalg.norm(vector_D)) - 1.0) < 1e-3:
                        found[key] = vector_D, bool(cut)
        return found

    def add(self, vectors: Mapping[bytes, tuple[np.ndarray, bool]]) -> None:
        """Stores vectors."""
        with self._transaction():
            for key, (vector_D, cut) in vectors.items():
                row = key, vector_D.astype(np.float32).tobytes(), int(cut)
                self._write("INSERT OR REPLACE INTO vectors VALUES (?, ?, ?)", row)


class ServerEncoder:
    """Embeds texts on a server; see `Encoder`.

    Every text is paid once: its vector is stored as soon as it arrives, so that an interrupted
    command resumes, in the file ``embeddings/vectors.sqlite`` of the user's cache.

    Args:
      config: the server and the model.
      instructions: texts that are put in front of all texts, by role. A missing role or None means
        none; triples have the instruction of passages unless they have their own.
    """

    def __init__(self, config: EmbeddingConfig, instructions: Mapping[str, str | None]):
        config = _with_cost_limit(config)
        self._client = ServerClient(config)
        self._config = dataclasses.replace(config, model=self._client.config.model)
        self._lock = threading.Lock()
        self._cache, self._folder = _open_cache()
        self.truncated: collections.Counter[Role] = collections.Counter()
        query, passage, triple = (instructions.get(r) for r in ("query", "passage", "triple"))
        self._prefixes = prefixes_of(query or "", passage or "", triple)
        self._kind: dict[str, Any] = {
            "backend": "openai",
            "model": self._config.model,
            "dimensions": config.dimensions,
            "extra_body": dict(config.extra_body),
        }
        # Local servers may have different models of the same name.
        self._origin = {**self._kind, "base_url": config.base_url}
        self.dim = 0
        self.dim = config.dimensions or len(self._vectors([_PROBE])[0][0])
        self.identity: Mapping[str, Any] = {
            **self._kind,
            "normalize": True,
            "dimension": self.dim,
            "query_prefix": self._prefixes["query"],
            "passage_prefix": self._prefixes["passage"],
            "triple_prefix": triple,
        }

    def encode(
        self, texts: Sequence[str], kind: Role = "passage", progress: Progress | None = None
    ) -> np.ndarray:
        """See `Encoder.encode`."""
        unique = list(dict.fromkeys(texts))
        if not unique:
            return np.zeros((0, self.dim), np.float32)
        with self._lock:
            vectors = self._vectors([self._prefixes[kind] + text for text in unique], progress)
        self.truncated[kind] += sum(cut for _, cut in vectors)
        row = {text: index for index, text in enumerate(unique)}
        return np.stack([vector_D for vector_D, _ in vectors])[[row[text] for text in texts]]

    def estimate(self, texts: Iterable[str], kind: Role = "passage") -> str:
        """Returns a sentence with the largest number of tokens that texts can have, and its cost.

        Vectors in the cache cost nothing.
        """
        count = new = tokens = 0
        remaining = iter(texts)
        while part := list(itertools.islice(remaining, _KEYS)):
            given = {_text(self._prefixes[kind] + text): None for text in part}
            known = self._known([self._key(text) for text in given])
            sizes = [_estimate(text) for text in given if self._key(text) not in known]
            count, new, tokens = count + len(part), new + len(sizes), tokens + sum(sizes)
        price = self._config.price
        cost = "" if price is None else f", which cost at most {tokens * price / 1e6:,.2f}"
        return (
            f"{self._config.model}: {new:,} of {count:,} texts are not in the cache and have at "
            f"most about {tokens:,} tokens{cost}"
        )

    def usage(self) -> dict[str, float | None]:
        """Returns the tokens that the server has read, and their cost at ``price``."""
        tokens, price = self._client.budget.spent, self._config.price
        return {"tokens": tokens, "cost": None if price is None else tokens * price / 1e6}

    def close(self) -> None:
        """Closes the cache."""
        self._cache.close()

    def _key(self, text: str) -> bytes:
        described = json.dumps([self._origin, text], sort_keys=True)
        return hashlib.sha256(described.encode()).digest()

    def _known(self, keys: Sequence[bytes]) -> dict[bytes, tuple[np.ndarray, bool]]:
        """Returns vectors in the cache, of shortened texts only if texts may be shortened."""
        may_cut = self._config.overflow == "truncate"
        return {
            key: entry for key, entry in self._cache.find(keys).items() if may_cut or not entry[1]
        }

    def _keep(
        self, texts: Sequence[str], vectors: Sequence[np.ndarray], cut: bool
    ) -> list[tuple[np.ndarray, bool]]:
        """Stores paid vectors at once, because another request of the batch may still fail."""
        entries = [(vector_D, cut) for vector_D in vectors]
        self._cache.add(dict(zip(map(self._key, texts), entries, strict=True)))
        return entries

    def _vectors(
        self, texts: Sequence[str], progress: Progress | None = None
    ) -> list[tuple[np.ndarray, bool]]:
        """Returns the vector of each text, and whether the text was cut."""
        texts = [_text(text) for text in texts]
        keys = [self._key(text) for text in texts]
        known = self._known(keys)
        if progress is not None and known:
            progress(sum(key in known for key in keys))
        new = {key: text for key, text in zip(keys, texts, strict=True) if key not in known}
        if len(new) > _MANY:
            tokens = sum(map(_estimate, new.values()))
            say(f"{self._config.model} embeds {len(new):,} texts, at most about {tokens:,} tokens")
        if new:
            run_coroutine(self._embed_all(list(new.values()), known, progress))
        return [known[key] for key in keys]

    async def _embed_all(
        self,
        texts: Sequence[str],
        known: dict[bytes, tuple[np.ndarray, bool]],
        progress: Progress | None,
    ) -> None:
        """Adds the vectors of texts to ``known`` and to the cache.

        After the first error, no further request is sent; the requests under way are completed.
        """
        waiting = collections.deque(self._batches(texts))
        errors: list[Exception] = []

        async def work(client: Any) -> None:
            while waiting and not errors:
                batch = waiting.popleft()
                try:
                    vectors = await self._embed(client, batch)
                except (Failure, OutOfBudget, TooLong, UserError) as error:
                    errors.append(error)
                    return
                known.update(zip(map(self._key, batch), vectors, strict=True))
                if progress is not None:
                    progress(len(batch))

        async with self._client.open_client() as client, asyncio.TaskGroup() as group:
            for _ in range(min(self._config.max_concurrency, len(waiting))):
                group.create_task(work(client))
        if errors:
            raise self._error(errors[0])

    def _error(self, error: Exception) -> UserError:
        if isinstance(error, UserError):
            return error
        where = self._config.base_url or _DEFAULT_URL
        saved = "vectors so far are kept in the cache; run the same command to resume"
        if self._folder is None:
            saved = "vectors are not kept, because CIRAG_JAX_CACHE=0 disables the cache"
        return UserError(
            f"the model {self._config.model!r} of {where} does not embed: "
            f"{self._client.scrub(str(error))}; {saved}"
        )

    def _batches(self, texts: Sequence[str]) -> Iterator[list[str]]:
        """Yields texts in order, in batches within the limits of texts and tokens."""
        batch: list[str] = []
        size = 0
        for text in texts:
            tokens = _estimate(text)
            is_full = len(batch) == self._config.batch_size
            if batch and (is_full or size + tokens > self._config.batch_tokens):
                yield batch
                batch, size = [], 0
            batch.append(text)
            size += tokens
        if batch:
            yield batch

    async def _embed(self, client: Any, texts: Sequence[str]) -> list[tuple[np.ndarray, bool]]:
        """Embeds a batch; if the server finds it too large, in halves."""
        try:
            return self._keep(texts, await self._request(client, texts), False)
        except TooLong as error:
            failure: Exception = error
        except Failure as error:
            if not any(words in str(error).casefold() for words in _TOO_MANY):
                raise
            failure = error
        if len(texts) > 1:
            middle = len(texts) // 2
            return [
                *await self._embed(client, texts[:middle]),
                *await self._embed(client, texts[middle:]),
            ]
        if not isinstance(failure, TooLong):
            raise failure
        return [await self._embed_long(client, texts[0], failure)]

    async def _embed_long(self, client: Any, text: str, error: TooLong) -> tuple[np.ndarray, bool]:
        """Embeds the longest beginning of a text that the server accepts."""
        if self._config.overflow != "truncate":
            raise UserError(
                f"a text of {len(text):,} characters is too long for the model "
                f"{self._config.model!r} ({self._client.scrub(str(error))}); set "
                "--config.encoder.server.overflow=truncate to embed its beginning. The text "
                f"starts with {text[:60]!r}"
            )
        start = text
        while True:
            length = math.floor(len(start) * (1.0 - error.excess))
            if length < _SHORTEST:
                raise error
            start = start[:length]
            try:
                (entry,) = self._keep([text], await self._request(client, [start]), True)
                return entry
            except TooLong as again:
                error = again

    async def _request(self, client: Any, texts: Sequence[str]) -> list[np.ndarray]:
        config = self._config
        is_sent = config.dimensions is not None and "dimensions" not in config.omit
        body = {"dimensions": config.dimensions} if is_sent else {}
        estimate = sum(map(_estimate, texts))
        response = await self._client.retry(
            lambda: client.embeddings.with_raw_response.create(
                model=config.model,
                input=list(texts),
                encoding_format=config.encoding,
                extra_body={**body, **config.extra_body},
            ),
            lambda content: read_embeddings(content, len(texts)),
            reserved=estimate,
            spent=lambda response: estimate if response.tokens is None else response.tokens,
            remedies={name: f"add {name!r} to {config.field('omit')}" for name in body},
        )
        return self._cut(response.vectors)

    def _cut(self, vectors: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Returns unit-length vectors of the expected dimension; longer ones are cut."""
        expected = self._config.dimensions or self.dim
        results = []
        for vector_D in vectors:
            has = len(vector_D)
            if expected and (has < expected or (has > expected and not self._config.dimensions)):
                raise UserError(
                    f"the model {self._config.model!r} returned a vector of {has} dimensions; "
                    f"expected {expected}; check config.encoder.model and "
                    "config.encoder.dimensions"
                )
            vector_D = vector_D[: expected or has]
            norm = float(np.linalg.norm(vector_D))
            if not norm:
                raise UserError(
                    f"the model {self._config.model!r} returned a vector of zeros, which cannot be "
                    "normalized"
                )
            results.append((vector_D / norm).astype(np.float32))
        return results


@dataclasses.dataclass(frozen=True)
class Embeddings:
    """The content of a response: float64 vectors in the order of the texts, and the tokens read."""

    vectors: list[np.ndarray]
    tokens: int | None


def read_embeddings(content: bytes, count: int) -> Embeddings:
    """Parses a response with a success status.

    Raises:
      MalformedResponse: the body does not contain one finite vector for each of ``count`` texts.
    """
    try:
        data = json.loads(content)
    except (ValueError, RecursionError):
        raise MalformedResponse("the server's answer is not JSON or is truncated") from None
    rows = data.get("data") if isinstance(data, dict) else None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise MalformedResponse(
            "the server's answer is not a list of embeddings; check that base_url is the address "
            "of an API with /embeddings, and that the model is an embedding model"
        )
    if len(rows) != count:
        raise MalformedResponse(f"the server returned {len(rows)} vectors for {count} texts")
    indices = [row.get("index") for row in rows]
    if any(index is not None for index in indices):
        if sorted(i for i in indices if type(i) is int) != list(range(count)):
            raise MalformedResponse(f"the server's field index is not 0 to {count - 1}, once each")
        rows = [row for _, row in sorted(zip(indices, rows, strict=True), key=lambda pair: pair[0])]
    vectors = [_vector(row.get("embedding"), place) for place, row in enumerate(rows)]
    if len({len(vector_D) for vector_D in vectors}) > 1:
        raise MalformedResponse("the server returned vectors of different dimensions")
    usage = data.get("usage")
    tokens = None
    for name in ("prompt_tokens", "total_tokens"):
        value = usage.get(name) if isinstance(usage, dict) else None
        if tokens is None and type(value) is int and 0 < value < 1 << 40:
            tokens = value
    return Embeddings(vectors, tokens)


def _vector(value: Any, place: int) -> np.ndarray:
    try:
        if isinstance(value, str):
            vector_D = np.frombuffer(base64.b64decode(value, validate=True), "<f4")
        else:
            vector_D = np.array(value, np.float64)  # null becomes NaN
    except (binascii.Error, ValueError, TypeError, OverflowError):
        vector_D = np.zeros((0, 0))
    if vector_D.ndim != 1 or not vector_D.size:
        raise MalformedResponse(
            f"embedding {place} of the server's answer is neither a list of numbers nor base64"
        )
    if not np.isfinite(vector_D).all():
        raise MalformedResponse(f"embedding {place} of the server's answer is not finite")
    return vector_D.astype(np.float64)


def _with_cost_limit(config: EmbeddingConfig) -> EmbeddingConfig:
    """Returns the settings with the budget in tokens that ``budget_cost`` allows."""
    if config.budget_cost is None:
        return config
    if config.price is None:
        raise UserError(
            "config.encoder.server.budget_cost needs config.encoder.server.price, the price per "
            "million tokens"
        )
    limits = [] if config.budget_tokens is None else [config.budget_tokens]
    if config.price:
        limits.append(math.floor(config.budget_cost / config.price * 1e6))
    return dataclasses.replace(config, budget_tokens=min(limits, default=None))


def _open_cache() -> tuple[EmbeddingCache, pathlib.Path | None]:
    """Opens the cache in the user's cache folder, or else one in memory."""
    folder = cache_folder("embeddings")
    if folder is not None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            return EmbeddingCache(folder / "vectors.sqlite", WRITE_TOGETHER), folder
        except OSError as error:
            say(
                f"WARNING: {folder} cannot be written ({error.strerror}); vectors from the server "
                "are not kept, so another run pays for them again"
            )
        except InUse:
            raise
        except UserError as error:
            raise UserError(
                f"the cache of vectors is damaged ({str(error).partition(';')[0]}); remove "
                f"{folder}, and its vectors will be requested again"
            ) from None
    return EmbeddingCache(MEMORY, WRITE_TOGETHER), None


def _text(text: str) -> str:
    """Returns a text that servers accept: valid Unicode, not empty."""
    return replace_surrogates(text) or " "


def _estimate(text: str) -> int:
    """Returns an upper bound of a text's tokens, at 3 bytes of UTF-8 per token."""
    return 2 + math.ceil(len(text.encode()) / 3)
