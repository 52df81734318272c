"""Serves language models and an encoder to clients of OpenAI's API (docs/generation.md).

python launch/serve.py --config=configs/serve.py --config.model=MODEL --config.port=8000
python launch/serve.py --config.adapter="('runs/reader','runs/extractor')" \
    --config.encoder.model=runs/aligner

The default is SmolLM2-135M-Instruct, without an encoder.
"""

from typing import Any

from ml_collections.config_dict import placeholder

from configs import common, retrievers


def get_config() -> Any:
    config = common.language_model()
    del config.backend, config.overflow  # Always our engine, which refuses long prompts.
    del config.base_url, config.server, config.api_key_env, config.max_concurrency
    del config.timeout, config.max_retries, config.budget_tokens
    del config.omit, config.extra_body, config.adapter
    # A folder, a .gguf file, package:NAME or a hub id; null is SmolLM2, or the base model of the
    # first adapter if that is a training workdir.
    config.model = placeholder(str)
    # A PEFT folder or a training workdir, or a tuple of them. Each is served as a model with the
    # name of its folder, or NAME of "NAME=FOLDER", next to the model without an adapter.
    config.adapter = placeholder(object)
    config.merge_adapter = False  # Add the only adapter to the weights; only it is served then.
    config.name = placeholder(str)  # Name of the model in the API; null is its folder or package.
    # Tokens decoded between two parts of a stream, for which new requests wait, too.
    config.decode_chunk = 8
    config.max_tokens = 1024  # Maximum new tokens of a chat whose request has no limit.

    config.encoder = retrievers.encoder()
    config.encoder.model = placeholder(str)  # The encoder of /v1/embeddings; null is none.
    config.only_encoder = False  # Serve no language model.
    # Our encoders only, because the server counts tokens.
    del config.encoder.backend, config.encoder.batch_size, config.encoder.trust_remote_code
    del config.encoder.server

    # Address to listen on. Other machines can connect to 0.0.0.0, without a password.
    config.host = "127.0.0.1"
    config.port = 8000  # 0 is any free port.
    config.max_body_mib = 8.0  # Maximum size of a request.
    config.max_waiting = 1024  # Maximum requests that wait for a batch; further ones are refused.
    config.max_connections = 256  # Maximum open connections; further ones are refused.
    return config
