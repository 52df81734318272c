"""Helpers for commands that run a method on the questions of a dataset."""

import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from cirag_jax import config_files
from cirag_jax.datasets import jsonl, load
from cirag_jax.datasets.corpus import Corpus
from cirag_jax.errors import UserError, check_at_least
from cirag_jax.io import say
from cirag_jax.methods.common import extraction, own_prompts
from cirag_jax.methods.common.extraction import ONLINE
from cirag_jax.methods.common.own_prompts import OwnPrompts
from cirag_jax.methods.common.reading import ANSWER_TOKENS
from cirag_jax.methods.registry import block_name, find_method, method_block
from cirag_jax.retrieval.run_index import RUN
from cirag_jax.runtime.requests import Needs, Program
from cirag_jax.runtime.scheduler import Job
from cirag_jax.triples.normalization import normalize
from cirag_jax.types import Config, Dataset, Prediction, Question

_CONFIGS = config_files.CONFIGS / "methods"


def method_config(method: str, preset: str = "", values: Sequence[str] = ()) -> Config:
    """Loads the config of a method.

    Args:
      method: the name of a file in configs/methods, or the path of a config file (``.py``).
      preset: a preset of the file; "" is the paper's setting.
      values: overrides ``KEY=VALUE``, as in ``--config.KEY=VALUE`` on the command line.
    """
    file = pathlib.Path(method) if method.endswith(".py") else _CONFIGS / f"{method}.py"
    if method == "blocks" or not file.is_file():
        names = ", ".join(sorted(f.stem for f in _CONFIGS.glob("*.py") if f.stem != "blocks"))
        raise UserError(
            f"method={method!r} is unknown; choose one of {names}, or the path of a config file."
        )
    overrides = [f"--config.{value}" for value in values]
    return config_files.load_config(f"{file}:{preset}" if preset else str(file), overrides)


class Task(NamedTuple):
    """The questions of a run and the passages to search.

    Attributes:
      needs: the models, indexes and data that the method needs.
      dataset: the complete dataset.
      questions: the questions to answer.
      corpus: the passages to search; empty if the method needs none.
      own_prompts: the prompts of ``config.prompt_file``.
    """

    needs: Needs
    dataset: Dataset
    questions: Sequence[Question]
    corpus: Corpus
    own_prompts: OwnPrompts = own_prompts.NONE


def roles_of(config: Config, needs: Needs) -> tuple[str, ...]:
    """Returns the roles of the method, and the extractor if triples are extracted online."""
    online = needs.triples and config.triples == ONLINE
    return (*needs.roles, "extractor") if online else needs.roles


def loads_triples(config: Config) -> bool:
    """Returns whether the questions or the index need all triples, not only those on request."""
    if config.data.triples == ONLINE:
        return False
    return config.data.only_with_triples or indexes_triples(config)


def indexes_triples(config: Config) -> bool:
    """Returns whether the index contains triples."""
    retriever = config.get("retriever", {})
    return retriever.get("units") == "triple" or retriever.get("kind") == "linked"


def asks_schemas(needs: Needs, *roles: str) -> bool:
    """Returns whether requests to one of the roles constrain the output to a JSON schema."""
    return any("json_schema" in needs.abilities.get(role, ()) for role in roles)


def needs_encoder(config: Config, needs: Needs) -> bool:
    """Returns whether a method uses ``config.encoder``."""
    rankers = (config.rankers[name] for name in needs.rankers)
    embeds = needs.demonstrations or needs.graph or needs.router
    embeds = embeds or (needs.index and config.retriever.kind not in ("bm25", RUN))
    return embeds or any(block.kind == "bi_encoder" and not block.model for block in rankers)


def demonstrations(task: Task) -> tuple[Question, ...]:
    """Returns the training questions that may be demonstrations; excludes the task's own."""
    ids = {question.id for question in task.questions}
    texts = {normalize(question.question, "unicode") for question in task.questions}
    return tuple(
        question
        for question in task.dataset.questions
        if question.split == "train"
        and question.fold in (None, "train")
        and question.id not in ids
        and normalize(question.question, "unicode") not in texts
    )


def most_tokens(config: Config, role: str) -> int:
    """Returns the output limit of a role; a reader's default depends on its format."""
    limit: int = config[role].max_tokens
    if limit or role != "reader":
        return limit
    return ANSWER_TOKENS[method_block(config).get("reader_format", "documents")]


def select(dataset: Dataset, data: Config, default_split: str, needs: Needs) -> Task:
    """Selects questions and passages according to ``data``, a ``config.data``.

    ``default_split`` applies to the built-in dataset if ``data.split`` is not set.
    """
    data = data.copy_and_resolve_references()
    if not data.dir and not data.split:
        data.split = default_split
    questions = load.select_questions(dataset, data)
    if not needs.corpus:
        return Task(needs, dataset, questions, Corpus("none", ()))
    return Task(needs, dataset, questions, load.select_corpus(dataset, questions, data))


def read_prompts(config: Config, settings: Any) -> OwnPrompts:
    """Reads ``config.prompt_file``; warns of prompts that no role of the run uses.

    ``settings`` are the settings of ``config.method``, see `method_settings`.
    """
    if config.get("prompt_file") is None:
        return {}
    own = own_prompts.read(config.prompt_file, _render(config, settings), config.method)
    roles = roles_of(config, settings.needs)
    unused = [name for name in own if name.partition(".")[0] not in roles]
    if unused:
        say(
            f"WARNING: {config.prompt_file}: [{unused[0]}] is not used, because {config.method} "
            f"has only these roles with the present settings: {', '.join(roles) or 'none'}"
        )
    return own


def export_prompts(config: Config, settings: Any) -> dict[str, Any]:
    """Writes the prompts of ``config.method`` to ``config.export_prompts``, a prompt file."""
    render = _render(config, settings)
    return own_prompts.export_file(config.export_prompts, render)


def _render(config: Config, settings: Any) -> Callable[[], None]:
    def render() -> None:
        find_method(config.method).render(settings)
        if settings.needs.triples:
            extraction.render(config.extractor.dialect)

    return render


def job(
    question: Question,
    program: Callable[[Question, Any], Program[Prediction]],
    settings: Any,
    prompts: OwnPrompts = own_prompts.NONE,
) -> Job:
    """Returns the job of a question; only programs that need gold annotations receive them."""
    bare = question if settings.needs.gold else Question(question.id, question.question, ())
    record, run = jsonl.question_record(question), own_prompts.run_with
    return Job(question.id, record, lambda: run(prompts, program(bare, settings)))


def fill_in(config: Config, own_documents: bool) -> None:
    """Sets the null settings that depend on whether the passages are a user's own documents."""
    block = config.get(block_name(config.method), {})
    with config.unlocked():
        for name, value in (
            ("force_answer", not own_documents),
            ("grounded_answers", own_documents),
        ):
            if name in block and block[name] is None:
                block[name] = value


def method_settings(config: Config) -> Any:
    """Returns the settings of ``config.method``, from the block of that name."""
    fill_in(config, own_documents=bool(config.get("documents")))
    method, block = find_method(config.method), block_name(config.method)
    if block not in config:
        raise UserError(f"config.method={config.method!r} needs the block config.{block}.")
    try:
        return method.config(**plain(config[block]))
    except UserError as error:
        raise UserError(f"config.{block}: {error}") from None


def plain(config: Config) -> dict[str, Any]:
    """Returns a block of a config as keyword arguments of a frozen dataclass."""
    return {k: tuple(v) if isinstance(v, list) else v for k, v in config.to_dict().items()}


def deadline(config: Config) -> float | None:
    """Returns `time.monotonic` plus ``config.stop_after_minutes``; None if the latter is 0."""
    check_at_least(0, config, "stop_after_minutes")
    if not config.stop_after_minutes:
        return None
    return time.monotonic() + 60 * config.stop_after_minutes


def refuse_budgets(config: Config) -> None:
    """Raises `UserError` if a budget is set, because processes cannot share one."""
    for name, block in config.items():
        if isinstance(block, ConfigDict) and block.get("budget_tokens") is not None:
            raise UserError(f"config.{name}.budget_tokens works in one process only; unset it.")
        server = block.get("server") if isinstance(block, ConfigDict) else None
        for field in ("budget_tokens", "budget_cost"):
            if isinstance(server, ConfigDict) and server[field] is not None:
                raise UserError(
                    f"config.{name}.server.{field} works in one process only; unset it."
                )
