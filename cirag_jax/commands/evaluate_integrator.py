"""Evaluates an integrator's decisions step by step."""

import collections
import dataclasses
import functools
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from cirag_jax.commands import evaluation
from cirag_jax.datasets import load
from cirag_jax.distill import oracle
from cirag_jax.distill import trajectories as trajectories_lib
from cirag_jax.errors import UserError, check_at_least
from cirag_jax.evaluation import decisions
from cirag_jax.evaluation.decisions import Search, StepDecision
from cirag_jax.methods.cirag.compact import Units
from cirag_jax.methods.cirag.settings import PROMPT_FIELDS, CiragConfig
from cirag_jax.reports.tables import Column, captioned, percent_with_bounds, system_rows
from cirag_jax.retrieval.encoders import open_encoder_for
from cirag_jax.retrieval.index import open_retriever
from cirag_jax.runtime import codec
from cirag_jax.runtime.scheduler import Job
from cirag_jax.triples.normalization import Normalization
from cirag_jax.types import Config, Dataset, Trajectory, Triple

FILE = "decisions.jsonl"
ANNOTATIONS = "annotations"  # the teacher that decides according to gold annotations
_SHOWN = (*PROMPT_FIELDS, "prefilled_headers", "match_cutoff")

COLUMNS = (
    Column("core F1 [95 %]", "teacher/f1", percent_with_bounds),
    Column("core P", "teacher/precision", compared=False),
    Column("core R", "teacher/recall", compared=False),
    Column("F1 if any", "teacher/nonempty_f1"),
    Column("micro F1", "teacher/micro_f1"),
    Column("gold F1", "gold/f1"),
    Column("false keeps", "false_keeps"),
    Column("query F1", "query_f1"),
    Column("query cosine", "query_cosine"),
    Column("query recall", "query_recall"),
    Column("stops, solved", "stop_recall"),
    Column("stops, unsolved", "stop_unsolved"),
    Column("parsed", "parse_rate"),
    Column("tokens", "generated_tokens", "{:,}".format),
)


def evaluate(config: Config, workdir: pathlib.Path) -> dict[str, Any]:
    """Lets each model decide at all steps of ``config.trajectories`` and scores the decisions.

    Writes ``decisions.jsonl``, ``table.md`` and a journal per model. ``config`` comes from
    configs/integrator_eval.py.

    Returns:
      The result of `evaluation.report`. The systems are the models, the top-k baselines, the
      aligner, and keeping nothing, each with the scores of `decisions.score` and ``parse_errors``.
      Also ``num_steps``, and ``teacher``: the number of trajectories by teacher, how often teachers
      kept nothing or stopped, and the recall of the teachers' queries.
    """
    check_at_least(1, config, "integrator.max_tokens", "in_flight", "bootstrap_samples")
    check_at_least(0, config, "query_recall")
    trajectories, prompt_settings = _trajectories(config)
    has_models = config.checkpoint is not None or config.base.run
    models = evaluation.models_of(config, "integrator") if has_models else {}
    units = trajectories_lib.units_of(trajectories)
    _check_units(config, models, units)
    ids = {trajectory.question_id for trajectory in trajectories}
    num_trained_on = evaluation.count_trained_on(config.checkpoint, ids, "questions")
    normalization: Normalization = _prompt(config, {}, prompt_settings, units)["normalization"]
    dataset = load.load_dataset(config.data) if config.data.dir else None
    gold = _gold(dataset, trajectories, normalization, units)

    # ---- Decisions -------------------------------------------------------------------------------
    settings = {
        name: _cirag_config(
            config, name, _prompt(config, model.prompt_settings, prompt_settings, units)
        )
        for name, model in models.items()
    }
    jobs = {name: decisions.jobs(trajectories, values) for name, values in settings.items()}
    max_tokens = config.integrator.max_tokens

    def programs(name: str) -> tuple[list[Job], dict[str, Any]]:
        identity = {f"cirag.{k}": v for k, v in dataclasses.asdict(settings[name]).items()}
        return [job for row in jobs[name] for job in row], {**identity, "max_tokens": max_tokens}

    roles = {"integrator": max_tokens}
    results = evaluation.ask_models(config, workdir, models, roles, programs, "step")

    # ---- Scores ----------------------------------------------------------------------------------
    score = functools.partial(
        decisions.score,
        trajectories,
        normalization=normalization,
        gold=gold,
        search=_search(config, dataset) if dataset and config.query_recall else None,
        supporting={q.id: q.supporting or () for q in dataset.questions} if dataset else {},
    )
    similarity = evaluation.similarity(config.encoder) if config.query_cosine else None
    systems: dict[str, evaluation.System] = {}
    for name, (records, usage) in results.items():
        if records is None:
            continue  # stopped by the time limit or a budget
        decided = decisions.read(jobs[name], records)
        systems[name] = evaluation.System(
            score(decided, similarity=similarity),
            {"parse_errors": decisions.parse_errors(decided), **usage},
            _rows(name, trajectories, decided),
        )
    for name, decided in _baselines(config, trajectories, normalization, units).items():
        scores = score(decided, similarity=similarity)
        del scores["parse_rate"]  # baselines write no text
        counts = {"parse_errors": decisions.parse_errors(decided)}
        systems[name] = evaluation.System(scores, counts)
    query_recall = score(decisions.teacher(trajectories)).get("query_recall")
    extra = {
        "num_questions": len(ids),
        "num_trained_on": num_trained_on,
        "num_steps": sum(len(trajectory.steps) for trajectory in trajectories),
        "teacher": {
            **_teacher(trajectories),
            "query_recall": query_recall.value if query_recall else None,
        },
        "settings": {
            "checkpoint": config.checkpoint,
            "trajectories": config.trajectories,
            "keep": config.keep,
            "stop_below": config.stop_below,
            **{
                name: {key: getattr(values, key) for key in _SHOWN}
                for name, values in settings.items()
            },
        },
        "complete": all(records is not None for records, _ in results.values()),
    }
    return evaluation.report(config, workdir, systems, extra, table_of, FILE)


# ------------------------------------------------------------------------------------- the inputs


def _trajectories(config: Config) -> tuple[tuple[Trajectory, ...], dict[str, Any]]:
    """Reads the trajectories, and their prompt settings if there is a sidecar."""
    if not config.trajectories:
        raise UserError(
            "config.trajectories is required: a workdir of launch/distill.py, or a .jsonl file."
        )
    file = trajectories_lib.trajectory_file(config.trajectories)
    prompt_settings = {}
    if file.with_suffix(".json").exists():
        prompt_settings = trajectories_lib.read_sidecar(file)
    trajectories = trajectories_lib.select(
        trajectories_lib.read_trajectories(file), config.keep, config.seed, config.limit
    )
    if not trajectories:
        raise UserError(f"{file} has no trajectory that passes config.keep={config.keep}.")
    return trajectories, prompt_settings


def _check_units(config: Config, models: Mapping[str, evaluation.Model], units: Units) -> None:
    """Raises `UserError` if the student was trained on other units than the trajectories'."""
    student = models.get(evaluation.STUDENT)
    prompt_settings = student.prompt_settings if student else {}
    trained_on = prompt_settings.get("units", "triple") if prompt_settings else units
    if trained_on != units:
        raise UserError(
            f"{config.checkpoint} was trained on units={trained_on}, but {config.trajectories} has "
            f"units={units}."
        )


def _prompt(
    config: Config, checkpoint: Mapping[str, Any], trajectories: Mapping[str, Any], units: Units
) -> dict[str, Any]:
    """Returns the prompt settings: the config's, else the checkpoint's or trajectories'."""
    defaults = dataclasses.asdict(CiragConfig())
    prompt = {}
    for name in PROMPT_FIELDS:
        values = [source.get(name) for source in (config, checkpoint, trajectories, defaults)]
        prompt[name] = next(value for value in values if value is not None)
    return {**prompt, "units": units}


def _cirag_config(config: Config, name: str, prompt: Mapping[str, Any]) -> CiragConfig:
    """Returns CIRAG's settings for one model; ``config.base`` has the base model's settings."""
    block = config.base if name == evaluation.BASE else config
    few_shot = prompt["few_shot"] if block.few_shot is None else block.few_shot
    return CiragConfig(
        **{**prompt, "few_shot": few_shot},
        prefilled_headers=block.prefilled_headers,
        match_cutoff=config.match_cutoff,
    )


def _baselines(
    config: Config, trajectories: Sequence[Trajectory], normalization: Normalization, units: Units
) -> dict[str, list[list[StepDecision]]]:
    """Returns the decisions of the systems without a language model."""
    chain = CiragConfig(
        units=units,
        integrator="aligner",
        normalization=normalization,
        stop_below=config.stop_below,
    )
    return {
        "top_k": decisions.top_k(trajectories),
        "top_k_chain": decisions.top_k(trajectories, chain=True, units=units),
        "aligner": decisions.aligner(trajectories, chain),
        "nothing": decisions.nothing(trajectories),
    }


def _gold(
    dataset: Dataset | None,
    trajectories: Sequence[Trajectory],
    normalization: Normalization,
    units: Units = "triple",
) -> list[list[Sequence[Any] | None]]:
    """Returns the gold core facts of each step; None without annotations.

    If the annotation teacher made a step, these are the facts that the teacher kept. If a language
    model made it and ``dataset`` has annotations, these are the facts that the annotation teacher
    would keep.
    """
    questions = {question.id: question for question in dataset.questions} if dataset else {}
    gold: list[list[Sequence[Any] | None]] = []
    for trajectory in trajectories:
        question = questions.get(trajectory.question_id)
        if trajectory.teacher == ANNOTATIONS:
            gold.append([step.kept for step in trajectory.steps])
            continue
        if dataset is None or question is None:
            gold.append([None] * len(trajectory.steps))
            continue
        if units == "sentence":
            annotated = oracle.sentence_gold_of(question, dataset)
        else:
            triples = {**_candidates(trajectory), **dataset.triples}
            annotated = oracle.gold_of(question, dataset.corpus, triples, normalization)
        rounds: list[oracle.Round] = []
        row: list[Sequence[Any] | None] = []
        for step in trajectory.steps:
            kept = None
            if annotated.hops:
                kept = oracle.decide(annotated, rounds, step.query, step.candidates).kept
            row.append(kept)
            rounds.append(oracle.Round(step.query, step.kept))
        gold.append(row)
    return gold


def _candidates(trajectory: Trajectory) -> dict[str, Sequence[Triple]]:
    """Returns the candidate triples of a trajectory, by passage."""
    by_passage: dict[str, list[Triple]] = collections.defaultdict(list)
    for triple in dict.fromkeys(t for step in trajectory.steps for t in step.candidates):
        if isinstance(triple, Triple) and triple.passage_id is not None:
            by_passage[triple.passage_id].append(triple)
    return dict(by_passage)


def _search(config: Config, dataset: Dataset) -> Search:
    """Opens ``config.retriever``; returns a search that caches its results."""
    passages = list(dataset.corpus.values())
    encoder = None if config.retriever.kind == "bm25" else open_encoder_for(config.encoder)
    index = open_retriever(config.retriever, passages, encoder, triples=dataset.triples)
    retrieved: dict[str, list[str]] = {}

    def search(queries: Sequence[str]) -> list[list[str]]:
        new = [query for query in dict.fromkeys(queries) if query not in retrieved]
        if new:
            row_QK, _ = index.search(new, config.query_recall)
            for query, row_K in zip(new, row_QK, strict=True):
                retrieved[query] = [passages[row].id for row in row_K if row >= 0]
        return [retrieved[query] for query in queries]

    return search


# ------------------------------------------------------------------------------------ the results


def _teacher(trajectories: Sequence[Trajectory]) -> dict[str, Any]:
    """Counts trajectories by teacher, and how often teachers keep nothing or stop."""
    steps = [step for trajectory in trajectories for step in trajectory.steps]
    return {
        "teachers": dict(collections.Counter(trajectory.teacher for trajectory in trajectories)),
        "empty_core": sum(not step.kept for step in steps) / len(steps),
        "stops": sum(step.next_query is None for step in steps) / len(steps),
    }


def _rows(
    name: str, trajectories: Sequence[Trajectory], decided: Sequence[Sequence[StepDecision]]
) -> list[dict[str, Any]]:
    return [
        {
            "question": trajectory.question_id,
            "step": index + 1,
            "system": name,
            "response": decision.response,
            "parsed": {
                "thought": decision.thought,
                "kept": [codec.encode(fact) for fact in decision.kept],
                "next_query": decision.next_query,
                "has_question": decision.has_question,
            },
            "parse_errors": decision.parse_errors,
            "error": decision.error,
        }
        for trajectory, row in zip(trajectories, decided, strict=True)
        for index, decision in enumerate(row)
    ]


def table_of(result: Mapping[str, Any]) -> str:
    """Returns a table of scores in per cent: one row per system, then the student's lead over each.

    Scores of core facts are means over steps. "gold" scores compare with the annotations.
    """
    rows = system_rows("decisions of", COLUMNS, result)
    teacher = result["teacher"]
    empty, stops = 100 * teacher["empty_core"], 100 * teacher["stops"]
    caption = (
        f"{result['num_steps']} steps of {result['num_questions']} questions, histories of "
        f"{', '.join(teacher['teachers'])}, which kept nothing at {empty:.0f} % of the steps and "
        f"stopped at {stops:.0f} %"
    )
    if teacher["query_recall"] is not None:
        caption += f"; the teacher's queries have a recall of {100 * teacher['query_recall']:.1f}"
    return captioned(caption, rows, result["complete"])
