"""Engines with a tiny model, and requests to them."""

import dataclasses

import numpy as np

from cirag_jax.llm.engine.engine import Engine
from cirag_jax.llm.engine.shapes import EngineConfig
from cirag_jax.llm.types import Generate, Message

SIZES = {"batch_size": 3, "prefill_chunks": (64, 16), "decode_chunk": 8, "prefix_tokens": 4096}
WORDS = (
    *("the", "sailor", "was", "born", "in", "a", "harbour", "town"),
    *("and", "its", "patron", "saint", "is", "who", "where", "weaver"),
)


def open_engine(folder, **sizes):
    return Engine.open(str(folder), options=EngineConfig(**{**SIZES, **sizes}))


def set_attention(engine, attention):
    """Makes an unused engine read pages as on another platform; "xla" is an accelerator."""
    model = engine._model
    model.config = model.store._config = dataclasses.replace(model.config, attention=attention)


def text(length, seed):
    rng = np.random.default_rng(seed)
    return " ".join(rng.choice(WORDS, length))


def ask(*turns, **fields):
    """Returns a request whose turns alternate between user and assistant."""
    roles = ("user", "assistant")
    messages = tuple(Message(roles[i % 2], turn) for i, turn in enumerate(turns))
    return Generate(messages, **{"max_tokens": 20, "logprobs": True, **fields})


def mixed_requests():
    """Returns more requests than fit in a batch, with prompts of 20 to 200 tokens."""
    lengths = (3, 40, 9, 25, 60, 5, 17, 33)
    return [ask(text(n, i), max_tokens=5 + 7 * (i % 4)) for i, n in enumerate(lengths)]


def numbers(response):
    """Returns the id, the log-probability and the entropy of each token of a response."""
    return [(token.id, token.logprob, token.entropy) for token in response.tokens]


def pages_are_free(engine):
    """Returns whether every page is free or belongs only to the prefix cache."""
    pages = engine._model.store.allocator
    return len(pages.pool) + len(pages.tree) == pages.pool.count
