"""What the configs of all methods share."""

import dataclasses
from collections.abc import Callable
from typing import Any

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from cirag_jax.methods.registry import find_method
from configs import common, retrievers


def role(max_tokens: int, block: Callable[[], Any] = common.language_model) -> Any:
    """A language model and how much it may write."""
    config = block()
    config.max_tokens = max_tokens
    return config


def method(name: str) -> Any:
    """Everything but the presets: ``config.<name>`` holds the method's own settings."""
    config: Any = ConfigDict()
    config.method = name
    # Fields and defaults of the method's dataclass, which describes them (cirag_jax/methods).
    config[name] = ConfigDict(dataclasses.asdict(find_method(name).config()))

    config.question = placeholder(str)  # One question of your own instead of the data set's.
    # CIRAG's corpus: the union of the selected questions' contexts; a question of your own
    # searches everything.
    config.data = common.data(split="")
    config.data.split = placeholder(str)  # null: all; of the built-in dataset: test.
    config.data.corpus = "selected_questions"
    config.profile = "musique"  # Scorer of answers: evaluation/answers.py lists them.

    config.retriever = retrievers.retriever()
    config.encoder = retrievers.encoder()

    config.seed = 0
    config.in_flight = 64  # Questions that advance together.
    config.stop_after_minutes = 0.0  # Ends cleanly; the same command goes on from there. 0: never.
    config.cache = placeholder(str)  # A file of responses that several runs share; null: none.
    return config


def triples(config: Any) -> None:
    """Adds where triples come from and how they are ranked."""
    config.triples = placeholder(str)  # null: the data set's openie.jsonl; a store; "online".
    config.reranker = ConfigDict()
    config.reranker.kind = "bi_encoder"  # bi_encoder | cross_encoder
    # bi_encoder: null is the encoder above, else an encoder as config.encoder.model names one;
    # cross_encoder: a training workdir, a folder or a hub id.
    config.reranker.model = placeholder(str)
