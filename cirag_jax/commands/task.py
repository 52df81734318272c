"""What commands share that run programs over the questions of a data set."""

import json
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from cirag_jax import config_files
from cirag_jax.datasets import jsonl, load
from cirag_jax.datasets.corpus import Corpus
from cirag_jax.errors import UserError, check_at_least
from cirag_jax.methods.common.extraction import ONLINE
from cirag_jax.methods.common.reading import ANSWER_TOKENS
from cirag_jax.methods.registry import block_name, find_method, method_block
from cirag_jax.runtime import codec
from cirag_jax.runtime.requests import Needs, Program
from cirag_jax.runtime.scheduler import Job
from cirag_jax.triples.normalization import normalise
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


class Task(NamedTuple):
    """The questions of a run and the passages to search.

    Attributes:
      needs: of the method with its settings.
      dataset: with the triples of its passages.
      questions: those that are answered.
      corpus: the passages to search; none where none are needed.
    """

    needs: Needs
    dataset: Dataset
    questions: Sequence[Question]
    corpus: Corpus


def roles_of(config: Config, needs: Needs) -> tuple[str, ...]:
    """Returns the roles of a run: the method's, and the extractor where it extracts online."""
    online = needs.triples and config.triples == ONLINE
    return (*needs.roles, "extractor") if online else needs.roles


def asks_schemas(needs: Needs, *roles: str) -> bool:
    """Returns whether one of the roles is asked for JSON of a schema."""
    return any("json_schema" in needs.abilities.get(role, ()) for role in roles)


def needs_encoder(config: Config, needs: Needs) -> bool:
    """Returns whether something embeds with ``config.encoder``."""
    rankers = (config.rankers[name] for name in needs.rankers)
    embeds = needs.demonstrations or (needs.index and config.retriever.kind != "bm25")
    return embeds or any(block.kind == "bi_encoder" and not block.model for block in rankers)


def demonstrations(task: Task) -> tuple[Question, ...]:
    """Returns the training questions to show: none that is answered or held out."""
    ids = {question.id for question in task.questions}
    texts = {normalise(question.question, "unicode") for question in task.questions}
    return tuple(
        question
        for question in task.dataset.questions
        if question.split == "train"
        and question.fold in (None, "train")
        and question.id not in ids
        and normalise(question.question, "unicode") not in texts
    )


def most_tokens(config: Config, role: str) -> int:
    """Returns the most tokens that a role may write; a reader's default depends on its format."""
    most: int = config[role].max_tokens
    if most or role != "reader":
        return most
    own = method_block(config)
    return ANSWER_TOKENS[own.get("reader_format", "documents")]


def select(dataset: Dataset, data: Config, default_split: str, needs: Needs) -> Task:
    """The questions that ``data`` (``config.data``) selects and the passages they may find.

    ``default_split`` is that of the built-in dataset, where ``data.split`` is unset. Where
    ``needs`` has no corpus there are no passages.
    """
    data = data.copy_and_resolve_references()
    if not data.dir and not data.split:
        data.split = default_split
    questions = load.select_questions(dataset, data)
    if not needs.corpus:
        return Task(needs, dataset, questions, Corpus("none", ()))
    return Task(needs, dataset, questions, load.select_corpus(dataset, questions, data))


def job(
    question: Question, program: Callable[[Question, Any], Program[Prediction]], settings: Any
) -> Job:
    """A program about a question; the annotations are the journal's, not the program's to see."""
    given = question if settings.needs.gold else Question(question.id, question.question, ())
    annotated = json.loads(codec.dump(jsonl.question_record(question)))
    return Job(question.id, annotated, lambda: program(given, settings))


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


def refuse_budgets(config: Config) -> None:
    """Raises `UserError` where a budget is set, which several processes cannot share."""
    for name, block in config.items():
        if isinstance(block, ConfigDict) and block.get("budget_tokens") is not None:
            raise UserError(f"config.{name}.budget_tokens holds in one process, not over several.")
