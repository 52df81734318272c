"""Generates a response for each conversation of a file (docs/generation.md).

python launch/generate.py --config=configs/generate.py --config.prompts=FILE.jsonl --workdir=W
python launch/generate.py --config.backend=openai --config.base_url=http://localhost:8000/v1 \
    --config.prompts=FILE.jsonl --workdir=W

Needs a file with lines {"id": ..., "messages": [{"role": ..., "content": ...}, ...]}. Writes the
responses to W; run the same command to resume. The default is SmolLM2-135M-Instruct.
"""

from typing import Any

from ml_collections.config_dict import placeholder

from configs import common


def get_config() -> Any:
    config = common.language_model()
    config.prompts = placeholder(str)  # The file of conversations; required.

    # Defaults of fields that a line of the file may set.
    config.max_tokens = 256  # Maximum new tokens.
    config.temperature = 0.0  # 0 is greedy decoding.
    config.top_p = 1.0  # Nucleus sampling, in (0, 1].
    config.seed = 0  # Random seed; each request has a separate random stream.
    config.stop = ()  # Strings that end the response and are removed from it.

    config.logprobs = False  # Also write the log-probability of each token.
    config.top_logprobs = 0  # Also write this many alternatives per token; implies logprobs.
    return config
