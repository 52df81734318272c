"""An OpenAI-compatible server of our engine and encoders: the command ``launch/serve.py``."""

import contextlib
import pathlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

from cirag_jax import config_files
from cirag_jax.commands import backends
from cirag_jax.commands.serve_http import ApiServer, Models
from cirag_jax.errors import UserError, check_at_least, check_positive
from cirag_jax.io import say
from cirag_jax.llm.engine.engine import Engine
from cirag_jax.retrieval.encoders import FlaxEncoder, open_encoder_for


def serve(config: Any) -> dict[str, Any]:
    """Serves models until SIGINT or SIGTERM; returns the address and the number of requests.

    ``config`` comes from configs/serve.py.
    """
    adapters = _check_config(config)
    with _until_signal() as ended, contextlib.ExitStack() as stack:
        engines, bases = _open_engines(config, adapters)
        for engine in engines.values():
            stack.callback(engine.close)
        encoder = _open_encoder(config, engines)
        models = Models(
            engines,
            encoder,
            bases,
            max_tokens=config.max_tokens,
            max_waiting=config.max_waiting,
        )
        stack.callback(models.close)
        server = stack.enter_context(_listen(config, models))
        thread = threading.Thread(target=server.serve_forever, args=(0.5,), name="server")
        thread.start()
        say(f"{', '.join(models.names)} at {server.url}; Ctrl-C ends the server")
        ended.wait()
        server.shutdown()
        thread.join()
        server.is_closing = True
        models.close()
        server.close_all()
    return {"url": server.url, "models": list(models.names), "num_requests": server.num_requests}


@contextlib.contextmanager
def _until_signal() -> Iterator[threading.Event]:
    """Yields an event that SIGINT and SIGTERM set; a second SIGINT interrupts."""
    ended = threading.Event()

    def end(number: int, frame: Any) -> None:
        del frame
        if number == signal.SIGINT and ended.is_set():
            raise KeyboardInterrupt
        ended.set()

    numbers = (signal.SIGINT, signal.SIGTERM)
    if threading.current_thread() is not threading.main_thread():
        numbers = ()
    previous = {number: signal.signal(number, end) for number in numbers}
    try:
        yield ended
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _check_config(config: Any) -> dict[str, str]:
    """Checks the config; returns the folders of the adapters by name."""
    backends.check_sizes(config)
    check_at_least(1, config, "decode_chunk", "max_tokens", "max_waiting", "max_connections")
    check_positive(config, "max_body_mib")
    if not 0 <= config.port < 1 << 16:
        raise UserError(f"config.port={config.port} must lie between 0 and {(1 << 16) - 1}.")
    specs = config_files.texts_of(config.adapter)
    if config.merge_adapter and len(specs) != 1:
        raise UserError("config.merge_adapter needs exactly one adapter.")
    if config.only_encoder and (specs or config.model or config.encoder.model is None):
        raise UserError("config.only_encoder needs config.encoder.model, and no other model.")
    adapters: dict[str, str] = {}
    for spec in specs:
        name, separator, folder = spec.partition("=")
        if not separator or "/" in name:
            name, folder = pathlib.Path(spec).name, spec
        if name in adapters:
            raise UserError(f"two adapters have the name {name}; use NAME=FOLDER.")
        adapters[name] = folder
    return adapters


def _name(spec: str) -> str:
    """Returns the name of a model in the API."""
    path = pathlib.Path(spec).expanduser()
    if path.exists():
        return path.resolve().name
    return spec.partition(":")[2] or spec


def _open_engines(
    config: Any, adapters: dict[str, str]
) -> tuple[dict[str, Engine], dict[str, str]]:
    """Returns the engines by name, and the base model of each adapter."""
    if config.only_encoder:
        return {}, {}
    config = config.copy_and_resolve_references().unlock()
    config.backend, config.overflow = "jax", "error"
    config.adapter = next(iter(adapters.values()), None)
    model = config.model = backends.model_name(config) or backends.DEFAULT_MODEL
    name = config.name or _name(model)
    if config.merge_adapter:
        (name,) = adapters
        return {name: backends.open_engine(config)}, {}
    if name in adapters:
        raise UserError(f"the model and an adapter have the name {name}; set config.name.")
    config.adapter = None
    base = backends.open_engine(config)
    engines = {
        other: base.with_adapter(backends.open_adapter(folder))
        for other, folder in adapters.items()
    }
    return {name: base, **engines}, dict.fromkeys(adapters, name)


def _open_encoder(config: Any, engines: dict[str, Engine]) -> tuple[str, FlaxEncoder] | None:
    if config.encoder.model is None:
        return None
    name = _name(config.encoder.model)
    if name in engines:
        raise UserError(f"the encoder and a language model have the name {name}; set config.name.")
    block = config.encoder.copy_and_resolve_references().unlock()
    block.backend, block.batch_size = "flax", 1
    encoder = open_encoder_for(block)
    assert isinstance(encoder, FlaxEncoder)
    return name, encoder


def _listen(config: Any, models: Models) -> ApiServer:
    try:
        return ApiServer(
            (config.host, config.port),
            models,
            max_bytes=round(config.max_body_mib * (1 << 20)),
            max_connections=config.max_connections,
        )
    except OSError as error:
        models.close()
        raise UserError(
            f"config.host={config.host}, config.port={config.port}: cannot listen there "
            f"({error.strerror or error})."
        ) from None
