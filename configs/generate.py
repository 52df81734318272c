"""Generates a text for every conversation of a file.

python launch/generate.py --config=configs/generate.py --config.prompts=FILE.jsonl --workdir=W
python launch/generate.py --config.backend=openai --config.base_url=http://localhost:8000/v1 \
    --config.prompts=FILE.jsonl --workdir=W

Each line of FILE.jsonl is {"id": ..., "messages": [{"role": ..., "content": ...}, ...]};
docs/generation.md describes the further fields, the backends, budgets and resumption.
"""

from typing import Any

from ml_collections.config_dict import placeholder

from configs import common


def get_config() -> Any:
    """SmolLM2-135M-Instruct, greedy."""
    config = common.language_model()
    config.prompts = placeholder(str)  # The file; required.

    # What a line of the file may set for itself.
    config.max_tokens = 256  # Most new tokens.
    config.temperature = 0.0  # 0: greedy.
    config.top_p = 1.0  # Nucleus of sampling, in (0, 1].
    config.seed = 0  # Of every request's own random stream.
    config.stop = ()  # Strings that end the text and are cut from it.

    config.logprobs = False  # Also write each token with its log-probability.
    config.top_logprobs = 0  # And this many alternatives; implies logprobs.
    return config
