"""Steps shared by the evaluations of language models: a student, its base model, and baselines.

The function ``evaluate`` of each component gets the models from `models_of`, runs programs with
`ask_models`, scores the responses, and writes the result with `report`.
"""

import contextlib
import dataclasses
import pathlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from cirag_jax.commands import backends, identity, task
from cirag_jax.commands.opening import check_prompts
from cirag_jax.errors import UserError
from cirag_jax.evaluation.decisions import Similarity
from cirag_jax.evaluation.overlap import Ratio
from cirag_jax.evaluation.significance import differences as paired_differences
from cirag_jax.evaluation.significance import intervals
from cirag_jax.io import is_training_workdir, local_path, say, write_lines
from cirag_jax.llm.types import Usage
from cirag_jax.models.io import workdir as workdir_lib
from cirag_jax.models.io.peft_format import CONFIG_FILE
from cirag_jax.reports.tables import write_table
from cirag_jax.retrieval.encoders import open_encoder_for
from cirag_jax.runtime.handlers import GenerateHandler
from cirag_jax.runtime.records import Record
from cirag_jax.runtime.run import Runner
from cirag_jax.runtime.scheduler import Handler, Job
from cirag_jax.runtime.store import Journal, ResponseCache
from cirag_jax.types import Config

STUDENT, BASE = "student", "base"


@dataclasses.dataclass(frozen=True)
class Model:
    """A language model to evaluate.

    Attributes:
      block: the model's config, a `configs.common.language_model`.
      prompt_settings: the prompt settings of the model's training, from the checkpoint.
      schemas: whether requests constrain the output to a JSON schema.
    """

    block: Config
    prompt_settings: Mapping[str, Any]
    schemas: bool = False

    @property
    def identity(self) -> dict[str, Any]:
        """The settings that determine the model's responses, as JSON."""
        return identity.of_language_model(self.block, self.schemas)


class System(NamedTuple):
    """The evaluation of a language model or a baseline.

    Attributes:
      scores: scores by name; ``a/b`` is nested in the result.
      counts: other entries of the result, such as tokens and failures.
      rows: lines of the output file.
    """

    scores: Mapping[str, Ratio]
    counts: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]] = ()


def models_of(config: Config, role: str) -> dict[str, Model]:
    """Returns the language models to compare.

    ``student`` is ``config.<role>`` with the adapter ``config.checkpoint``. ``base`` is the same
    model without the adapter, included if ``config.base.run`` is set or there is no checkpoint.
    If ``config.<role>.model`` is null, the checkpoint determines the model.
    """
    block, spec = config[role].copy_and_resolve_references(), config.checkpoint
    if block.adapter is not None:
        raise UserError(f"config.{role}.adapter is not used here; set config.checkpoint.")
    schemas = bool(config.get("constrained"))
    models: dict[str, Model] = {}
    if spec is not None:
        if not is_training_workdir(spec) and not (local_path(spec) / CONFIG_FILE).is_file():
            raise UserError(
                f"{spec} is neither a training workdir (it has no checkpoints/) nor a PEFT folder "
                f"(it has no {CONFIG_FILE})."
            )
        meta = workdir_lib.check_role(spec, role)
        prompt_settings = meta.get("prompt") or {}
        if "method" in prompt_settings:
            raise UserError(
                f"{spec} was trained on examples of {prompt_settings['method']}; evaluate it with "
                f"launch/answer.py and --config.{role}.adapter={spec}."
            )
        if meta:
            check_prompts(spec, meta)
        if meta.get("own_prompts"):
            raise UserError(
                f"{spec} was trained with the prompts of a file, which this evaluation does not "
                "use; evaluate its answers (launch/answer.py with config.prompt_file)."
            )
        if is_training_workdir(spec):
            block.model = block.model or meta["model"]
        student = block.copy_and_resolve_references()
        student.adapter = spec
        models[STUDENT] = Model(student, prompt_settings, schemas)
    if config.base.run or spec is None:
        models[BASE] = Model(block, {}, schemas)
    return models


def count_trained_on(checkpoint: str | None, ids: Collection[str], subject: str) -> int | None:
    """Counts the ``ids`` that a checkpoint was trained on, and warns if there are any.

    Returns None and prints a message if the checkpoint does not record its training data, as an
    adapter in PEFT's format.
    """
    trained_on = workdir_lib.training_ids(checkpoint) if checkpoint else frozenset[str]()
    if trained_on is None:
        say(f"the checkpoint does not record whether it was trained on these {subject}")
        return None
    count = len(trained_on & set(ids))
    if count:
        say(
            f"WARNING: the checkpoint was trained on {count} of these {len(ids)} {subject}; its "
            "scores are not held-out"
        )
    return count


# ------------------------------------------------------------------------------------- the requests


def ask_models(
    config: Config,
    workdir: pathlib.Path,
    models: Mapping[str, Model],
    roles: dict[str, int],
    programs: Callable[[str], tuple[Sequence[Job], Mapping[str, Any]]],
    unit: str,
) -> dict[str, tuple[dict[str, Record] | None, dict[str, Any]]]:
    """Runs programs with each model; repeating the call with the same workdir resumes them.

    Args:
      config: has ``in_flight``, ``seed``, ``stop_after_minutes`` and ``cache``, a file of responses
        that several runs share.
      workdir: the folder of the models' journals, NAME.sqlite.
      models: models by name. A model is opened only if some of its programs have not ended. Usage
        in its journal counts against its budget.
      roles: the role of the programs' requests, and the token limit of a response.
      programs: returns the programs for a model, and the settings that determine their results.
      unit: the unit of the progress bars, such as "question".

    Returns:
      For each model, the records of its programs by id, or None if the time limit or a budget
      stopped them; and the tokens and seconds of all runs so far.
    """
    until = task.deadline(config)
    results: dict[str, tuple[dict[str, Record] | None, dict[str, Any]]] = {}
    for name, model in models.items():
        jobs, settings = programs(name)

        def open_handlers(
            stack: contextlib.ExitStack, journal: Journal, model: Model = model
        ) -> dict[type | str, Handler]:
            handler = stack.enter_context(open_model(config, model, roles, journal))
            return dict.fromkeys(roles, handler)

        with Runner(
            workdir / f"{name}.sqlite",
            {**model.identity, **settings},
            open_handlers,
            in_flight=config.in_flight,
            until=until,
        ) as runner:
            complete = runner.run(jobs, unit=unit, name=name)
            records = runner.records(jobs)
            usage = sum((record.usage for record in records.values()), start=Usage())
            costs = {**usage.counts, "seconds": runner.seconds()}
        results[name] = records if complete else None, costs
    return results


@contextlib.contextmanager
def open_model(
    config: Config, model: Model, roles: dict[str, int], journal: Journal
) -> Iterator[GenerateHandler]:
    """Opens the handler of one model for ``roles``, each with its token limit."""
    with contextlib.ExitStack() as stack:
        cache = stack.enter_context(ResponseCache(config.cache)) if config.cache else None
        backend = backends.open_for_run(model.block, stack, journal)
        yield GenerateHandler(
            backend, roles, seed=config.seed, cache=cache, identity=model.identity
        )


def similarity(block: Config) -> Similarity:
    """Opens an encoder; returns a function that computes the cosines of pairs of queries."""
    encoder = open_encoder_for(block)

    def cosine(pairs: Sequence[tuple[str, str]]) -> np.ndarray:
        texts = list(dict.fromkeys(text for pair in pairs for text in pair))
        row_of = {text: row for row, text in enumerate(texts)}
        vector_ND = encoder.encode(texts, "query").astype(np.float64)
        left_ND = vector_ND[[row_of[a] for a, _ in pairs]]
        right_ND = vector_ND[[row_of[b] for _, b in pairs]]
        return np.einsum("nd,nd->n", left_ND, right_ND)

    return cosine


# -------------------------------------------------------------------------------------- the result


def report(
    config: Config,
    workdir: pathlib.Path,
    systems: Mapping[str, System],
    extra: Mapping[str, Any],
    table_of: Callable[[Mapping[str, Any]], str],
    file: str,
    differences: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Writes the rows of all systems to ``file`` and the table of the result to ``table.md``.

    Returns:
      ``systems`` with their scores, 95 % intervals and counts; ``differences``, by default the
      `leads` of the student; and ``extra``.
    """
    scores = {name: system.scores for name, system in systems.items()}
    result = {
        "systems": {
            name: {
                **by_kind(intervals(system.scores, config.bootstrap_samples, config.seed)),
                **system.counts,
            }
            for name, system in systems.items()
        },
        "differences": leads(config, scores, [STUDENT]) if differences is None else differences,
        **extra,
    }
    write_lines(workdir / file, (row for system in systems.values() for row in system.rows))
    write_table(table_of(result), workdir)
    return result


def leads(
    config: Config, scores: Mapping[str, Mapping[str, Ratio]], leading: Sequence[str]
) -> dict[str, Any]:
    """Compares each ``leading`` system with all other systems, each pair once.

    Returns:
      ``FIRST-SECOND``: the scores of the first minus the second with intervals, see `by_kind`.
    """
    compared: dict[str, Any] = {}
    for place, first in enumerate(leading):
        for second, ratios in scores.items():
            if first in scores and second not in leading[: place + 1]:
                compared[f"{first}-{second}"] = by_kind(
                    paired_differences(scores[first], ratios, config.bootstrap_samples, config.seed)
                )
    return compared


def by_kind(scores: Mapping[str, Any]) -> dict[str, Any]:
    """Returns ``{"a/b": x, "c": y}`` as ``{"a": {"b": x}, "c": y}``."""
    nested: dict[str, Any] = {}
    for name, value in scores.items():
        kind, _, rest = name.rpartition("/")
        (nested.setdefault(kind, {}) if kind else nested)[rest] = value
    return nested
