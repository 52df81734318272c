"""What commands share that run programs over the questions of a data set."""

import dataclasses
import json
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cirag_jax import config_files
from cirag_jax.commands import backends, opening
from cirag_jax.datasets import jsonl, load
from cirag_jax.datasets.corpus import Corpus
from cirag_jax.errors import UserError, check_at_least
from cirag_jax.methods.registry import block_name, find_method
from cirag_jax.models.io import fingerprint
from cirag_jax.retrieval import bm25, faiss_index
from cirag_jax.retrieval.index import hash_corpus, read_manifest
from cirag_jax.retrieval.rankers import TripleText, triple_text_of
from cirag_jax.runtime import codec
from cirag_jax.runtime.requests import Needs, Program
from cirag_jax.runtime.scheduler import Job
from cirag_jax.types import Config, Dataset, Prediction, Question

_CONFIGS = config_files.CONFIGS / "methods"


def method_config(method: str, preset: str = "", values: Sequence[str] = ()) -> Config:
    """The config of a method, locked.

    Args:
      method: its name, for ``configs/methods/METHOD.py``, or the path of a config file (``.py``).
      preset: "" is the paper's setting.
      values: ``KEY=VALUE`` each, as ``--config.KEY=VALUE`` on the command line.
    """
    file = pathlib.Path(method) if method.endswith(".py") else _CONFIGS / f"{method}.py"
    if method == "blocks" or not file.is_file():
        known = ", ".join(sorted(f.stem for f in _CONFIGS.glob("*.py") if f.stem != "blocks"))
        raise UserError(
            f"method={method!r} is unknown; there are {known}, or give the path of a config file."
        )
    overrides = [f"--config.{value}" for value in values]
    return config_files.load_config(f"{file}:{preset}" if preset else str(file), overrides)


def select(dataset: Dataset, data: Config, default_split: str, needs: Needs) -> opening.Task:
    """The questions that ``data`` (``config.data``) selects and the passages they may find.

    ``default_split`` is that of the built-in dataset, where ``data.split`` is unset. Where
    ``needs`` has no corpus there are no passages.
    """
    data = data.copy_and_resolve_references()
    if not data.dir and not data.split:
        data.split = default_split
    questions = load.select_questions(dataset, data)
    if not needs.corpus:
        return opening.Task(needs, dataset, questions, Corpus("none", ()))
    return opening.Task(needs, dataset, questions, load.select_corpus(dataset, questions, data))


def job(
    question: Question, program: Callable[[Question, Any], Program[Prediction]], settings: Any
) -> Job:
    """A program about a question; the annotations are the journal's, not the program's to see."""
    given = question if settings.needs.gold else Question(question.id, question.question, ())
    annotated = json.loads(codec.dump(jsonl.question_record(question)))
    return Job(question.id, annotated, lambda: program(given, settings))


def settings(config: Config, code: str, task: opening.Task) -> dict[str, Any]:
    """What decides the results of a run, flat: the message of a refusal names one field.

    ``config`` is of configs/methods, or has the same blocks; ``code`` is the name of the module
    with the program.
    """
    needs, corpus = task.needs, task.corpus
    found: dict[str, Any] = {"method": config.method, "seed": config.seed}
    block = block_name(config.method)
    found |= {f"{block}.{k}": v for k, v in plain(config[block]).items()}
    blocks = {f"rankers.{name}": config.rankers[name] for name in needs.rankers}
    if needs.index:
        blocks["retriever"] = config.retriever
    if opening.needs_encoder(config, needs):
        blocks["encoder"] = config.encoder
    for name, block in blocks.items():
        found |= {f"{name}.{field}": value for field, value in plain(block).items()}
    found |= _models(config, blocks)
    found["packages"] = _packages(config, needs, blocks)
    if needs.corpus and config.get("question") is None:
        found["data.corpus"] = corpus.policy
    if needs.corpus:
        found["passages"] = hash_corpus(corpus.passages)
    found["code"] = fingerprint.of_code(code)
    for role in opening.roles_of(config, needs):
        made_by = backends.fingerprint(config[role], opening.asks_schemas(needs, role))
        found |= {f"{role}.{k}": v for k, v in made_by.items()}
        found[f"{role}.max_tokens"] = opening.most_tokens(config, role)
    if needs.triples:
        found |= opening.triples_settings(config, task)
    if needs.demonstrations:
        shown = codec.encode(opening.demonstrations(task))
        found["demonstrations"] = codec.digest(codec.dump(shown))
    return found


def _models(config: Config, blocks: Mapping[str, Config]) -> dict[str, Any]:
    """What embeds and ranks, beside what the config says of it."""
    found: dict[str, Any] = {}
    if "retriever" in blocks and config.retriever.folder:
        found["retriever.index"] = read_manifest(pathlib.Path(config.retriever.folder))
    for name, block in blocks.items():
        if block.get("model"):
            found[f"{name}.weights"] = fingerprint.of_model(block.model)
        if name.startswith("rankers."):
            text, _ = triple_text_of(config, name.removeprefix("rankers."))
            if text != TripleText("tuple", block.normalization):  # as all did before it was noted
                found[f"{name}.writes"] = dataclasses.asdict(text)
    return found


def _packages(config: Config, needs: Needs, blocks: Mapping[str, Config]) -> dict[str, str]:
    """What splits passages, indexes, ranks and embeds; language models name their own."""
    kinds = {block.kind for name, block in blocks.items() if name != "encoder"}
    found = fingerprint.of_packages("sentencex") if needs.corpus else {}
    if kinds & {"bm25", "linked"}:
        found |= bm25.packages()
    if kinds & {*faiss_index.FAISS_KINDS}:
        found |= faiss_index.packages()
    if "encoder" in blocks or kinds & {"bi_encoder", "aligner", "cross_encoder"}:
        found |= fingerprint.of_packages(*backends.encoder_packages(config.encoder))
    return found


def method_settings(config: Config) -> Any:
    """The settings of ``config.method``, of its own block of a config of configs/methods."""
    method, block = find_method(config.method), block_name(config.method)
    if block not in config:
        raise UserError(f"config.method={config.method!r} needs its settings, config.{block}.")
    try:
        return method.config(**plain(config[block]))
    except UserError as error:
        raise UserError(f"config.{block}: {error}") from None


def plain(config: Config) -> dict[str, Any]:
    """A block of a config as keyword arguments of a frozen dataclass."""
    return {k: tuple(v) if isinstance(v, list) else v for k, v in config.to_dict().items()}


def deadline(config: Config) -> float | None:
    """When ``config.stop_after_minutes``, counted from now, are over."""
    check_at_least(0, config, "stop_after_minutes")
    if not config.stop_after_minutes:
        return None
    return time.monotonic() + 60 * config.stop_after_minutes
