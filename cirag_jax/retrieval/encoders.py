"""Text encoders for retrieval, in Flax or from sentence-transformers."""

import collections
import contextlib
import dataclasses
import hashlib
import json
import pathlib
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from cirag_jax.errors import UserError, check_at_least, check_choice
from cirag_jax.identity import of_packages
from cirag_jax.io import cache_folder, is_training_workdir, read_object, say, write_json
from cirag_jax.models.encoder_config import EncoderConfig
from cirag_jax.models.io.fingerprint import hash_small_files
from cirag_jax.models.io.pretrained import TextEncoder, check_dimensions
from cirag_jax.models.io.tensor_files import check_finite
from cirag_jax.models.io.text_prefixes import declared_prefixes, instruction, prefixes_of
from cirag_jax.models.precision import round_weights
from cirag_jax.retrieval.encode import Progress, encode
from cirag_jax.retrieval.search import save_array
from cirag_jax.types import ROLES, Config, PositiveInt, Role
from cirag_jax.validation import check_value, parse_object

MAX_CACHED_BYTES = 1 << 30  # Maximum size of one collection's vectors in the disk cache.
_MAX_TEXTS = 1_000_000  # Maximum number of memoized texts per role; 1.5 GB at 384 dimensions.


class Encoder(Protocol):
    """Turns texts into unit-length vectors.

    Attributes:
      identity: everything that determines a vector, as JSON types; an index can only be searched
        with an encoder of equal identity.
      dim: length of a vector.
      truncated: numbers of texts, by role, of which the encoder has read only the beginning.
    """

    identity: Mapping[str, Any]
    dim: int
    truncated: collections.Counter[Role]

    def encode(
        self, texts: Sequence[str], kind: Role = "passage", progress: Progress | None = None
    ) -> np.ndarray:
        """Returns unit-length vectors, float32 [N, D], in input order.

        ``kind`` selects the prefix and the length limit. ``progress`` is called with the number of
        distinct texts just embedded.
        """
        ...


class FlaxEncoder:
    """An encoder of `cirag_jax.models.encoder`; batches are split over ``mesh`` if given.

    Lengths are in tokens, by default the model's own limit.
    """

    def __init__(
        self,
        encoder: TextEncoder,
        *,
        query_max_length: int | None = None,
        passage_max_length: int | None = None,
        mesh: jax.sharding.Mesh | None = None,
    ):
        if isinstance(encoder.config, EncoderConfig):  # Otherwise, every batch would round them.
            state = round_weights(encoder.state, encoder.config.dtype)
            encoder = dataclasses.replace(encoder, state=state)
        self._encoder = encoder
        self._mesh = mesh
        query, passage = (n or encoder.max_length for n in (query_max_length, passage_max_length))
        self._limits = _limits(query, passage, encoder.config.max_length)
        self.dim = encoder.dim
        self.truncated: collections.Counter[Role] = collections.Counter()
        self.identity: Mapping[str, Any] = {
            "backend": "flax",
            **encoder.manifest(),
            "dtype": encoder.config.dtype,
            "files": hash_small_files(encoder.folder),
            "packages": of_packages("tokenizers"),
            "query_max_length": self._limits["query"],
            "passage_max_length": self._limits["passage"],
        }

    def encode(
        self, texts: Sequence[str], kind: Role = "passage", progress: Progress | None = None
    ) -> np.ndarray:
        """See `Encoder.encode`."""
        vectors_ND = encode(
            self._encoder,
            None,
            texts,
            kind=kind,
            max_length=self._limits[kind],
            mesh=self._mesh,
            progress=progress,
            truncated=self.truncated,
        )
        return check_finite(vectors_ND, self._encoder.source)

    def lengths(self, texts: Sequence[str], kind: Role = "passage") -> tuple[list[int], int]:
        """Returns the number of tokens of each text, with its prefix, and the limit."""
        prefix, limit = self._encoder.prefix(kind), self._limits[kind]
        rows = self._encoder.tokenize([prefix + text for text in texts], limit)
        return [
            len(row.ids) + sum(len(part.ids) for part in row.overflowing) for row in rows
        ], limit


def _limits(query_max_length: int, passage_max_length: int, longest: int) -> dict[Role, int]:
    passage = min(passage_max_length, longest)
    return {"query": min(query_max_length, longest), "passage": passage, "triple": passage}


class CachedEncoder:
    """An encoder that caches the vectors of complete lists of passages on disk.

    ``folder`` has a ``.npy`` file per list, named after a hash of its texts. Queries are not
    cached, nor are lists with more than 1 GiB of vectors; build an index for these
    (launch/index.py). Damaged files are computed again. If texts were cut, a ``.json`` file has
    their number.
    """

    def __init__(self, encoder: Encoder, folder: pathlib.Path):
        self._encoder = encoder
        self._folder = folder
        self.identity, self.dim = encoder.identity, encoder.dim
        self.truncated = encoder.truncated

    def encode(
        self, texts: Sequence[str], kind: Role = "passage", progress: Progress | None = None
    ) -> np.ndarray:
        """See `Encoder.encode`."""
        if kind == "query" or not 0 < 4 * len(texts) * self.dim <= MAX_CACHED_BYTES:
            return self._encoder.encode(texts, kind, progress)
        key = [self.identity, list(texts), *(["triple"] if kind == "triple" else [])]
        described = json.dumps(key, sort_keys=True, default=str)
        file = self._folder / f"{hashlib.sha256(described.encode()).hexdigest()[:32]}.npy"
        count_file = file.with_suffix(".json")
        with contextlib.suppress(OSError, ValueError, EOFError, UserError):
            cached_ND = np.load(file, allow_pickle=False)
            if cached_ND.shape == (len(texts), self.dim) and cached_ND.dtype == np.float32:
                check_finite(cached_ND, str(file))
                self.truncated[kind] += int(read_object(count_file, optional=True).get("cut", 0))
                if isinstance(self._encoder, MemoizingEncoder):
                    self._encoder.remember(texts, cached_ND, kind)
                return cached_ND
        before = self.truncated[kind]
        vectors_ND = self._encoder.encode(texts, kind, progress)
        with contextlib.suppress(OSError):  # The home folder may be read-only.
            self._folder.mkdir(parents=True, exist_ok=True)
            if self.truncated[kind] > before:
                write_json(count_file, {"cut": self.truncated[kind] - before})
            save_array(file, vectors_ND)
        return vectors_ND


def with_disk_cache(encoder: Encoder) -> Encoder:
    """Returns a `CachedEncoder` in the user's cache.

    Returns ``encoder`` itself if there is no cache, or if it is on a server, because a
    `ServerEncoder` has a cache of its own.
    """
    folder = cache_folder("vectors")
    if folder is None or encoder.identity.get("backend") == "openai":
        return encoder
    return CachedEncoder(encoder, folder)


class MemoizingEncoder:
    """An encoder that embeds every distinct text at most once per role.

    It keeps at most `_MAX_TEXTS` vectors per role; if a role would exceed this limit, all its
    vectors are dropped. The vectors of a list above this limit are not kept.

    Attributes:
      requested: number of texts requested so far, with repetitions.
      embedded: number of texts embedded so far.
    """

    def __init__(self, encoder: Encoder):
        self._encoder = encoder
        self.identity, self.dim = encoder.identity, encoder.dim
        self.truncated = encoder.truncated
        self.requested = self.embedded = 0
        self.forget()

    def forget(self) -> None:
        """Drops all vectors."""
        self._stores = {role: _VectorStore(self.dim) for role in ROLES}

    def encode(
        self, texts: Sequence[str], kind: Role = "passage", progress: Progress | None = None
    ) -> np.ndarray:
        """See `Encoder.encode`."""
        distinct = list(dict.fromkeys(texts))
        self.requested += len(texts)
        if len(distinct) > _MAX_TEXTS:
            self.embedded += len(distinct)
            return self._encoder.encode(texts, kind, progress)
        new, store = self._unknown(distinct, kind)
        if new:
            self.embedded += len(new)
            store.add(new, self._encoder.encode(new, kind, progress))
        return store.vectors_ND[[store.row[text] for text in texts]]

    def remember(self, texts: Sequence[str], vectors_ND: np.ndarray, kind: Role) -> None:
        """Keeps vectors that were embedded earlier."""
        row_of = {text: row for row, text in enumerate(texts)}
        if len(row_of) <= _MAX_TEXTS:
            new, store = self._unknown(list(row_of), kind)
            store.add(new, vectors_ND[[row_of[text] for text in new]])

    def _unknown(self, distinct: list[str], kind: Role) -> tuple[list[str], "_VectorStore"]:
        """Returns the texts without a vector, and the store, which has room for them."""
        store = self._stores[kind]
        new = [text for text in distinct if text not in store.row]
        if len(store.row) + len(new) > _MAX_TEXTS:
            store = self._stores[kind] = _VectorStore(self.dim)
            new = distinct
        return new, store


class _VectorStore:
    """Vectors by text, in an array that doubles when it is full."""

    def __init__(self, dim: int):
        self.row: dict[str, int] = {}
        self.vectors_ND = np.zeros((0, dim), np.float32)

    def add(self, texts: Sequence[str], vectors_ND: np.ndarray) -> None:
        used, size = len(self.row), len(self.row) + len(texts)
        if size > len(self.vectors_ND):
            grown_ND = np.zeros((max(2 * used, size), self.vectors_ND.shape[1]), np.float32)
            grown_ND[:used] = self.vectors_ND[:used]
            self.vectors_ND = grown_ND
        self.vectors_ND[used:size] = vectors_ND
        self.row.update((text, used + offset) for offset, text in enumerate(texts))


class SentenceTransformersEncoder:
    """An encoder that runs a PyTorch model with sentence-transformers.

    ``model`` is a loaded ``SentenceTransformer``, and ``name`` is recorded in the identity.
    ``instructions`` override the model's own prompts by role, see `text_prefixes.instruction`.
    Lengths are in tokens, at most the model's limit, which is the default. ``dimensions`` is the
    number of leading dimensions to keep, by default the model's ``truncate_dim``.
    """

    def __init__(
        self,
        model: Any,
        name: str,
        *,
        instructions: Mapping[str, str | None] | None = None,
        dimensions: int | None = None,
        query_max_length: int | None = None,
        passage_max_length: int | None = None,
        batch_size: int = 32,
    ):
        self._model = model
        self._lock = threading.Lock()  # The library stores the token limit in the model.
        self._batch_size = batch_size
        prompts = {key: value or "" for key, value in (model.prompts or {}).items()}
        names = [f"{role}_prefix" for role in ROLES]
        declared = declared_prefixes(prompts, model.default_prompt_name)
        prefixes: dict[str, Any] = dict(zip(names, declared, strict=True))
        for role, text in (instructions or {}).items():
            if text is not None:
                prefixes[f"{role}_prefix"] = instruction(text, prompts, name)
        self._prefixes = prefixes_of(*(prefixes[name] for name in names))
        if dimensions is not None:
            model.truncate_dim = None
            check_dimensions(dimensions, int(model.get_embedding_dimension() or dimensions), name)
            model.truncate_dim = dimensions
        longest = model.max_seq_length or sys.maxsize
        self._limits = _limits(query_max_length or longest, passage_max_length or longest, longest)
        self.truncated: collections.Counter[Role] = collections.Counter()
        self.dim = int(model.get_embedding_dimension() or 0)
        self.identity: Mapping[str, Any] = {
            "backend": "sentence_transformers",
            "model": name,
            "revision": _torch_revision(model),
            "pooling": " > ".join(type(module).__name__ for module in model),
            "normalize": True,
            "dimension": self.dim,
            **prefixes,
            "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
            "packages": of_packages("sentence-transformers", "transformers", "tokenizers"),
            "query_max_length": self._limits["query"],
            "passage_max_length": self._limits["passage"],
        }

    def encode(
        self, texts: Sequence[str], kind: Role = "passage", progress: Progress | None = None
    ) -> np.ndarray:
        """See `Encoder.encode`."""
        unique = list(dict.fromkeys(texts))
        if not unique:
            return np.zeros((0, self.dim), np.float32)
        with self._lock:
            if self._limits[kind] != sys.maxsize:
                self._model.max_seq_length = self._limits[kind]
            vectors_ND = self._encode_unique(unique, kind, progress)
        position = {text: row for row, text in enumerate(unique)}
        return vectors_ND[[position[text] for text in texts]]

    def _count_long(self, texts: Sequence[str], kind: Role) -> int:
        """Returns how many texts have more tokens than the limit."""
        tokenizer = getattr(self._model, "tokenizer", None)
        if not callable(tokenizer):
            return 0
        given = [self._prefixes[kind] + text for text in texts]
        rows: Any = tokenizer(given, truncation=False, verbose=False)
        return sum(len(row) > self._limits[kind] for row in rows["input_ids"])

    def _encode_unique(
        self, texts: Sequence[str], kind: Role, progress: Progress | None
    ) -> np.ndarray:
        encode_part = self._model.encode_query if kind == "query" else self._model.encode_document
        blocks = []
        step = 32 * self._batch_size  # The library sorts each part by length.
        for start in range(0, len(texts), step):
            part = texts[start : start + step]
            self.truncated[kind] += self._count_long(part, kind)
            vectors = encode_part(
                part,
                prompt=self._prefixes[kind],
                batch_size=self._batch_size,
                normalize_embeddings=True,
                show_progress_bar=False,
                convert_to_tensor=True,
            )
            blocks.append(vectors.float().cpu().numpy())
            if progress is not None:
                progress(len(part))
        return check_finite(np.concatenate(blocks), self.identity["model"])


def report_truncated(*encoders: Encoder, before: Mapping[str, int] | None = None) -> dict[str, int]:
    """Returns how many texts of each role encoders have cut, and prints a warning if any.

    ``before`` are the numbers at the start, as returned earlier by `count_truncated`.
    """
    counts = count_truncated(*encoders)
    counts = {role: count - (before or {}).get(role, 0) for role, count in counts.items()}
    if any(counts.values()):
        cut = " and ".join(f"{n:,} texts as {role}" for role, n in counts.items() if n)
        fields = [f"{name}={encoders[0].identity.get(name)}" for name in LENGTHS]
        say(
            f"WARNING: the encoder read only the beginning of {cut}, because they are longer than "
            f"its limit in tokens ({', '.join(fields)})"
        )
    return counts


def count_truncated(*encoders: Encoder) -> dict[str, int]:
    """Returns how many texts of each role encoders have cut so far."""
    return {role: sum(encoder.truncated[role] for encoder in encoders) for role in ROLES}


LENGTHS = ("query_max_length", "passage_max_length")


def open_encoder_for(config: Config, mesh: jax.sharding.Mesh | None = None) -> Encoder:
    """Opens the encoder of a ``configs.retrievers.encoder()`` block; Flax uses ``mesh``."""
    check_at_least(1, config, "batch_size", prefix="config.encoder.")
    for name in (*LENGTHS, "dimensions"):
        check_value(f"config.encoder.{name}", config[name], PositiveInt | None)
    check_choice("config.encoder.backend", config.backend, tuple(_OPENERS))
    return _OPENERS[config.backend](config, mesh)


def _open_flax(config: Config, mesh: jax.sharding.Mesh | None) -> FlaxEncoder:
    from cirag_jax.models.io.workdir import hash_arrays, open_encoder

    encoder, meta = open_encoder(
        config.model,
        dtype=config.dtype,
        mesh=mesh,
        instructions=config.instructions,
        dimensions=config.dimensions,
        tasks=config.tasks,
    )
    if meta:  # Two training runs may end at the same step; only their weights differ.
        trained, frozen = encoder.split()
        base = f"{encoder.revision}+" if frozen else ""
        revision = f"{base}sha256:{hash_arrays(trained)}"
        encoder = dataclasses.replace(encoder, revision=revision)
    lengths = {name: config[name] for name in LENGTHS}
    return FlaxEncoder(encoder, mesh=mesh, **lengths)


def _open_server(config: Config, mesh: jax.sharding.Mesh | None) -> Encoder:
    from cirag_jax.retrieval.server_encoder import EmbeddingConfig, ServerEncoder

    del mesh
    for name in LENGTHS:
        if config[name] is not None:
            raise UserError(
                f"config.encoder.{name}={config[name]} needs the model's tokenizer, which "
                "config.encoder.backend=openai does not have; leave it null"
            )
    if config.model.startswith(("package:", "shipped:")) or is_training_workdir(config.model):
        raise UserError(
            f"config.encoder.model={config.model} is not the name of a model on a server, which "
            "config.encoder.backend=openai needs"
        )
    instructions = {
        role: text and instruction(text, {}, "a server")
        for role, text in config.instructions.items()
    }
    block = config.server.to_dict()
    block["extra_body"] = parse_object("config.encoder.server.extra_body", block["extra_body"])
    block["omit"] = tuple(block["omit"])
    for name in block["omit"]:
        check_choice("config.encoder.server.omit", name, ("dimensions",))
    shared = {name: config[name] for name in ("model", "dimensions", "batch_size")}
    return ServerEncoder(EmbeddingConfig(**shared, **block), instructions)


def _open_sentence_transformers(
    config: Config, mesh: jax.sharding.Mesh | None
) -> SentenceTransformersEncoder:
    del mesh
    check_choice("config.encoder.dtype", config.dtype, ("float32", "bfloat16"))
    try:
        import sentence_transformers
        import torch
    except ModuleNotFoundError as error:
        raise UserError(
            "config.encoder.backend=sentence_transformers needs the Python package "
            f"{error.name!r}, which is not installed (pip install sentence-transformers)"
        ) from None
    from cirag_jax.models.io.folders import resolve_model_folder

    is_local = config.model.startswith("package:") or pathlib.Path(config.model).is_dir()
    name = str(resolve_model_folder(config.model)) if is_local else config.model
    try:
        model = sentence_transformers.SentenceTransformer(
            name,
            trust_remote_code=config.trust_remote_code,
            model_kwargs={"dtype": getattr(torch, config.dtype), "use_safetensors": True},
        )
    except Exception as error:  # The library raises many types of errors.
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        hint = ""
        if "trust_remote_code" in str(error):
            hint = " (--config.encoder.trust_remote_code=true runs the code in its repository)"
        raise UserError(
            f"sentence-transformers cannot load {config.model!r}: {reason}{hint}"
        ) from error
    names = ("instructions", "dimensions", *LENGTHS, "batch_size")
    options = {name: config[name] for name in names}
    return SentenceTransformersEncoder(model, config.model, **options)


_OPENERS: dict[str, Callable[[Config, jax.sharding.Mesh | None], Encoder]] = {
    "flax": _open_flax,
    "sentence_transformers": _open_sentence_transformers,
    "openai": _open_server,
}


def _torch_revision(model: Any) -> str:
    """Returns the commit of a model from the hub, or else the SHA-256 of its parameters."""
    for module in model:
        config = getattr(getattr(module, "auto_model", None), "config", None)
        commit = getattr(config, "_commit_hash", None)
        if commit:
            return str(commit)
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().float().cpu().numpy().tobytes())
    return f"sha256:{digest.hexdigest()}"
