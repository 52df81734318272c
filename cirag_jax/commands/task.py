"""What commands share that run programs over the questions of a data set."""

import contextlib
import dataclasses
import json
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cirag_jax.commands import backends, opening
from cirag_jax.datasets import load
from cirag_jax.datasets.corpus import Corpus, build_corpus
from cirag_jax.errors import UserError
from cirag_jax.models.io import fingerprint
from cirag_jax.retrieval.index import hash_corpus, read_manifest
from cirag_jax.runtime import codec
from cirag_jax.runtime.journal import Journal
from cirag_jax.runtime.requests import Program
from cirag_jax.runtime.scheduler import Handler, Job, Scheduler, progress_bar
from cirag_jax.types import Config, Dataset, Prediction, Question

OpenHandlers = Callable[[contextlib.ExitStack], Mapping[type | str, Handler]]


def select(
    dataset: Dataset, data: Config, default_split: str
) -> tuple[tuple[Question, ...], Corpus]:
    """The questions that ``config.data`` selects and the passages they may find.

    Args:
      dataset: of ``data``.
      data: ``config.data``.
      default_split: of the built-in dataset, where ``data.split`` is unset.

    Raises:
      UserError: no question is left, or the corpus policy does not fit.
    """
    data = data.copy_and_resolve_references()
    if not data.dir and not data.split:
        data.split = default_split
    questions = load.select_questions(dataset, data)
    return questions, build_corpus(dataset, questions, data.corpus)


def job(question: Question, start: Callable[[], Program[Prediction]]) -> Job:
    """A program about a question, whose annotations the journal keeps."""
    return Job(question.id, json.loads(codec.dump(dataclasses.asdict(question))), start)


def settings(config: Config, method: Any, dataset: Dataset, corpus: Corpus) -> dict[str, Any]:
    """What decides the results of a run, flat: the message of a refusal names one field.

    Args:
      config: of configs/methods, or with the same blocks.
      method: with ``roles`` and ``uses_triples``.
      dataset: with the triples of its passages.
      corpus: the passages to search.
    """
    found: dict[str, Any] = {"method": config.method, "seed": config.seed}
    found |= {f"{config.method}.{k}": v for k, v in plain(config[config.method]).items()}
    blocks = ["retriever", "encoder"] + (["reranker"] if method.uses_triples else [])
    for block in blocks:
        found |= {f"{block}.{name}": value for name, value in plain(config[block]).items()}
    found |= _models(config, method)
    found["code"] = fingerprint.of_code(method.program.__module__)
    for role in opening.roles_of(config, method.roles):
        found |= {f"{role}.{k}": v for k, v in backends.fingerprint(config[role]).items()}
        found[f"{role}.max_tokens"] = config[role].max_tokens
    if method.uses_triples:
        found |= opening.triples_settings(config, dataset, corpus)
    if config.get("question") is None:
        found["data.corpus"] = corpus.policy
    found["passages"] = hash_corpus(corpus.passages)
    return found


def _models(config: Config, method: Any) -> dict[str, Any]:
    """What embeds and ranks, beside what the config says of it."""
    found: dict[str, Any] = {}
    if config.retriever.folder:
        found["retriever.index"] = read_manifest(pathlib.Path(config.retriever.folder))
    if config.retriever.kind != "bm25" or method.uses_triples:
        found["encoder.weights"] = fingerprint.of_model(config.encoder.model)
        readers = ("sentence-transformers", "transformers")
        used = readers if config.encoder.backend == "sentence_transformers" else ()
        found["encoder.packages"] = fingerprint.of_packages("tokenizers", *used)
    if method.uses_triples and config.reranker.model:
        found["reranker.weights"] = fingerprint.of_model(config.reranker.model)
    return found


def plain(config: Config) -> dict[str, Any]:
    """A block of a config as keyword arguments of a frozen dataclass."""
    return {k: tuple(v) if isinstance(v, list) else v for k, v in config.to_dict().items()}


def run(
    config: Config, open_handlers: OpenHandlers, jobs: Sequence[Job], book: Journal
) -> tuple[bool, float]:
    """Runs what is left of ``jobs``; whether everything ended, and seconds until the first request.

    Args:
      config: with ``stop_after_minutes`` and ``in_flight``.
      open_handlers: opens what answers; given a stack that closes it.
      jobs: programs whose result is a `Prediction`.
      book: where responses and results are recorded.

    Raises:
      UserError: a setting is out of range, or a handler cannot work.
    """
    begun, deadline = time.monotonic(), None
    if config.stop_after_minutes < 0:
        raise UserError("config.stop_after_minutes must not be negative.")
    if config.in_flight < 1:
        raise UserError("config.in_flight must be at least 1.")
    if config.stop_after_minutes:
        deadline = begun + 60 * config.stop_after_minutes
    with contextlib.ExitStack() as stack:
        handlers = open_handlers(stack)
        with progress_bar(len(jobs)) as show:
            scheduler = Scheduler(
                handlers,
                book,
                in_flight=config.in_flight,
                encode=codec.encode_prediction,
                on_progress=show,
            )
            for handler in set(handlers.values()):
                if isinstance(handler, opening.GenerateHandler):
                    handler.on_tokens = lambda tokens: show(scheduler.progress, tokens)
            load_seconds = time.monotonic() - begun
            return scheduler.run(jobs, deadline=deadline), load_seconds
