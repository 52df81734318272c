"""Estimates of the tokens and the time that an extraction takes."""

import contextlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from cirag_jax.commands import backends
from cirag_jax.commands.extract_selection import Selection, selected_passages
from cirag_jax.datasets.corpus_scan import CorpusScan
from cirag_jax.io import say
from cirag_jax.llm.openai_format import estimate_tokens
from cirag_jax.methods.common import dialects
from cirag_jax.methods.common.extraction import ExtractionSettings, weight_files
from cirag_jax.methods.common.extraction_prompts import entity_messages, triple_messages
from cirag_jax.runtime.records import JournalReader
from cirag_jax.runtime.store import JOURNAL
from cirag_jax.triples import store as stores
from cirag_jax.triples.store import TripleStore
from cirag_jax.types import Config, Passage

# Assumed speeds. For a machine: parameters per second, operations per second, rows per batch.
# For a server: tokens per second and request.
_MACHINE = {"cpu": (2e9, 1e11, 16), "other": (5e11, 1e14, 64)}
_SERVER_RATE = 40.0
_BYTES = {".gguf": 0.6, ".safetensors": 2.0}  # typical size of a parameter


def estimate_only(
    config: Config, workdir: Path, settings: ExtractionSettings, identity: Mapping[str, Any]
) -> dict[str, Any]:
    """Estimates the cost of an extraction, without changing ``workdir``."""
    with contextlib.ExitStack() as stack:
        store = rate = None
        if (workdir / stores.FILE).exists():
            store = stack.enter_context(TripleStore.open(workdir))
        if (workdir / JOURNAL).exists():
            with JournalReader(workdir / JOURNAL) as journal:
                rate = measured_rate(journal)
        corpus = stack.enter_context(CorpusScan(config.data.dir))
        selection = Selection(config, identity, corpus, store, selected_passages(config), (0, 1))
        return {**estimate(selection.pending(), config, settings, rate), "complete": False}


def measured_rate(journal: JournalReader) -> float | None:
    """Returns passages per second over all runs of a journal."""
    return journal.totals().programs / journal.seconds if journal.seconds else None


def estimate(
    passages: Iterable[Passage], config: Config, settings: ExtractionSettings, rate: float | None
) -> dict[str, Any]:
    """Prints and returns an upper estimate of the cost of extracting ``passages``.

    ``rate`` is the measured speed in passages per second. Without it, the time is guessed from the
    size of the model: each decoding step reads all parameters once per batch. A server is assumed
    to generate 40 tokens per second and request.
    """
    count = text_tokens = 0
    for passage in passages:
        size = sum(len(text.encode("utf-8", "replace")) for text in (passage.title, passage.text))
        count, text_tokens = count + 1, text_tokens + size // 3 + 1
    empty = Passage("", "", "")
    if settings.dialect == dialects.OPENIE:
        shared = estimate_tokens((*entity_messages(empty), *triple_messages(empty, ())))
        new = (
            2 * text_tokens + count * settings.entity_tokens // 2
        )  # two prompts with the text, one with the entities
        generated = count * (settings.entity_tokens + settings.triple_tokens)
    else:
        shared, new = estimate_tokens(dialects.messages(empty, settings.dialect)), text_tokens
        generated = count * settings.triple_tokens
    prompt = count * shared + new
    seconds = count / rate if rate else _guess(config.extractor, count, new, generated)
    if count:
        say(
            f"estimate: {count:,} passages: at most about {prompt:,} prompt tokens and "
            f"{generated:,} generated tokens, in about {_duration(seconds)} "
            f"({'at the measured rate' if rate else 'a guess; no rate has been measured'})"
        )
    return {
        "passages": count,
        "prompt_tokens": prompt,
        "generated_tokens": generated,
        "seconds": seconds,
    }


def _guess(config: Any, passages: int, prompt_tokens: int, generated_tokens: int) -> float:
    model = backends.model_name(config)
    if config.backend == "openai" or model is None:
        return generated_tokens / (_SERVER_RATE * config.max_concurrency)
    import jax

    machine = "cpu" if jax.default_backend() == "cpu" else "other"
    reading, operations, rows = _MACHINE[machine]
    rows = min(config.batch_size or rows, max(passages, 1))
    files = weight_files(model)
    parameters = sum(file.stat().st_size / _BYTES.get(file.suffix, 2.0) for file in files)
    decoding = generated_tokens / rows * parameters / reading
    return decoding + prompt_tokens * 2 * parameters / operations


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} minutes"
    if seconds < 172_800:
        return f"{seconds / 3600:.1f} hours"
    return f"{seconds / 86_400:.1f} days"
