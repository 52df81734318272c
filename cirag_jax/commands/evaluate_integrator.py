"""Evaluates an integrator's decisions step by step: what ``launch/evaluate.py`` runs for it."""

import collections
import dataclasses
import functools
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cirag_jax.commands import side_by_side, task
from cirag_jax.commands.side_by_side import Model
from cirag_jax.datasets import load
from cirag_jax.distill import oracle
from cirag_jax.distill import trajectories as trajectories_lib
from cirag_jax.errors import UserError, check_at_least
from cirag_jax.evaluation import decisions
from cirag_jax.evaluation.decisions import Decided, Search, Similarity
from cirag_jax.io import write_lines
from cirag_jax.methods.cirag.compact import Units
from cirag_jax.methods.cirag.settings import PROMPT_FIELDS, CiragConfig
from cirag_jax.reports.tables import captioned, figure, lead, write_table
from cirag_jax.retrieval.encoders import open_encoder_for
from cirag_jax.retrieval.index import open_retriever
from cirag_jax.runtime import codec
from cirag_jax.triples.normalization import Normalization
from cirag_jax.types import Config, Dataset, Trajectory, Triple

FILE = "decisions.jsonl"
ANNOTATIONS = "annotations"  # the teacher that decides as the gold annotations say
TOP_K, TOP_K_CHAIN, ALIGNER, NOTHING = "top_k", "top_k_chain", "aligner", "nothing"
BASELINES = (TOP_K, TOP_K_CHAIN, ALIGNER, NOTHING)  # which write no text
_SHOWN = (*PROMPT_FIELDS, "keep_above", "prefilled_headers", "match_cutoff")


def evaluate(config: Config, workdir: pathlib.Path) -> dict[str, Any]:
    """Lets every model decide at the steps of ``config.trajectories`` and scores its decisions.

    Leaves ``decisions.jsonl``, ``table.md`` and a journal a model in ``workdir``; a run that was
    stopped goes on from there. ``config`` is of configs/integrator_eval.py.

    Returns:
      ``systems``: of each model, the top-k baselines, the aligner and keeping nothing the scores of
      `decisions.score` with their intervals (questions resampled), ``parse_errors``, tokens and
      seconds; ``differences``: the student less each other system; ``num_questions``,
      ``num_trained_on`` (of them, by the student; None: not known), ``num_steps``,
      ``teacher`` (who it was, what it kept, whether it stopped, the recall of its queries),
      ``settings``, ``complete``.
    """
    _check(config)
    found, described = _trajectories(config)
    asks = config.checkpoint is not None or config.base.run
    models = side_by_side.models_of(config, "integrator") if asks else {}
    units = trajectories_lib.units_of(found)
    _check_units(config, models, units)
    questions = {trajectory.question_id for trajectory in found}
    num_trained_on = side_by_side.count_seen(
        side_by_side.student_learnt(models), questions, "questions"
    )
    normalization: Normalization = _prompt(config, described, {}, units)["normalization"]
    dataset = load.load_dataset(config.data) if config.data.dir else None
    gold = _gold(dataset, found, normalization, units)

    # ---- Every model at every step ---------------------------------------------------------------
    settings = {
        name: _settings(config, name, _prompt(config, described, model.described, units))
        for name, model in models.items()
    }
    decided, spent = _decide(config, workdir, models, settings, found)
    complete = len(decided) == len(models)
    decided |= _baselines(config, found, normalization, units)

    # ---- Figures ---------------------------------------------------------------------------------
    score = functools.partial(
        decisions.score, found, normalization=normalization, gold=gold, **_passages(config, dataset)
    )
    similarity = _similarity(config) if config.query_cosine else None
    scores = {name: score(rows, similarity=similarity) for name, rows in decided.items()}
    own = score(decisions.teachers_own(found)).get("query_recall")
    for name in BASELINES:
        del scores[name]["parse_rate"]  # there is nothing that could be parsed
    result: dict[str, Any] = {
        "systems": {
            name: {
                **side_by_side.bounded(config, ratios),
                "parse_errors": decisions.parse_errors(decided[name]),
                **spent.get(name, {}),
            }
            for name, ratios in scores.items()
        },
        "differences": side_by_side.leads(config, scores),
        "num_questions": len(questions),
        "num_trained_on": num_trained_on,
        "num_steps": sum(len(trajectory.steps) for trajectory in found),
        "teacher": {**_teacher(found), "query_recall": None if own is None else own.value},
        "settings": {
            "checkpoint": config.checkpoint,
            "trajectories": config.trajectories,
            "keep": config.keep,
            "stop_below": config.stop_below,
            **{name: {key: getattr(how, key) for key in _SHOWN} for name, how in settings.items()},
        },
        "complete": complete,
    }
    write_lines(workdir / FILE, _rows(found, decided))
    write_table(table_of(result), workdir)
    return result


# ------------------------------------------------------------------------------------- the inputs


def _check(config: Config) -> None:
    if not config.trajectories:
        raise UserError(
            "config.trajectories is required: a workdir of launch/distill.py, or a .jsonl file."
        )
    check_at_least(1, config, "integrator.max_tokens", "in_flight", "bootstrap_samples")
    check_at_least(0, config, "query_recall")


def _trajectories(config: Config) -> tuple[tuple[Trajectory, ...], dict[str, Any]]:
    """The trajectories to score on, and how they were rendered, as far as that is known."""
    file = trajectories_lib.trajectory_file(config.trajectories)
    described = {}
    if file.with_suffix(".json").exists():
        described = trajectories_lib.read_sidecar(file)
    found = trajectories_lib.select(
        trajectories_lib.read_trajectories(file), config.keep, config.seed, config.limit
    )
    if not found:
        raise UserError(f"config.keep={config.keep} leaves no trajectory of {file}.")
    return found, described


def _check_units(config: Config, models: Mapping[str, Model], units: Units) -> None:
    """Refuses a student that was trained on other candidates than the trajectories have."""
    described = models[side_by_side.STUDENT].described if side_by_side.STUDENT in models else {}
    trained_on = described.get("units", "triple") if described else units
    if trained_on != units:
        raise UserError(
            f"{config.checkpoint} was trained on units={trained_on}, and {config.trajectories} has "
            f"units={units}."
        )


def _prompt(
    config: Config, trajectories: Mapping[str, Any], checkpoint: Mapping[str, Any], units: Units
) -> dict[str, Any]:
    """How conversations are rendered: as asked for, else as trained on, else as they were made."""
    found, default = {}, CiragConfig()
    for name in PROMPT_FIELDS:
        asked = (
            *(config.get(name), checkpoint.get(name), trajectories.get(name)),
            getattr(default, name),
        )
        found[name] = next(value for value in asked if value is not None)
    return {**found, "units": units}


def _settings(config: Config, name: str, prompt: Mapping[str, Any]) -> CiragConfig:
    """How one system is asked; the base may be led through the sections, with an example."""
    own: dict[str, Any] = {**prompt, "keep_above": config.keep_above}
    prefilled_headers = config.prefilled_headers
    if name == side_by_side.BASE:
        prefilled_headers = config.base.prefilled_headers
        if config.base.few_shot is not None:
            own["few_shot"] = config.base.few_shot
        own["keep_above"] = config.base.keep_above
    return CiragConfig(**own, prefilled_headers=prefilled_headers, match_cutoff=config.match_cutoff)


def _decide(
    config: Config,
    workdir: pathlib.Path,
    models: Mapping[str, Model],
    settings: Mapping[str, CiragConfig],
    found: Sequence[Trajectory],
) -> tuple[dict[str, list[list[Decided]]], dict[str, dict[str, Any]]]:
    """What the models decide at every step, without those that did not come to the end; and what
    each took.
    """
    until = task.deadline(config)
    max_tokens = config.integrator.max_tokens
    decided, spent = {}, {}
    for name, model in models.items():
        plain = {f"cirag.{k}": value for k, value in dataclasses.asdict(settings[name]).items()}
        bound = {**plain, "max_tokens": max_tokens}
        jobs = decisions.jobs(found, settings[name])
        records, spent[name] = side_by_side.ask(
            config,
            workdir / f"{name}.sqlite",
            model,
            bound,
            ("integrator", max_tokens),
            [job for row in jobs for job in row],
            until,
            "step",
        )
        if records is not None:
            decided[name] = decisions.read(jobs, records)
    return decided, spent


def _baselines(
    config: Config, found: Sequence[Trajectory], normalization: Normalization, units: Units
) -> dict[str, list[list[Decided]]]:
    chain = CiragConfig(
        units=units,
        integrator=ALIGNER,
        normalization=normalization,
        stop_below=config.stop_below,
    )
    return {
        TOP_K: decisions.top_k(found),
        TOP_K_CHAIN: decisions.top_k(found, chain=True, units=units),
        ALIGNER: decisions.aligner(found, chain),
        NOTHING: decisions.nothing(found),
    }


def _passages(config: Config, dataset: Dataset | None) -> dict[str, Any]:
    """What recall of queries needs: a search, and the gold passages of every question."""
    if dataset is None:
        return {"search": None, "supporting": {}}
    return {
        "search": _search(config, dataset) if config.query_recall else None,
        "supporting": {question.id: question.supporting or () for question in dataset.questions},
    }


def _gold(
    dataset: Dataset | None,
    found: Sequence[Trajectory],
    normalization: Normalization,
    units: Units = "triple",
) -> list[list[Sequence[Any] | None]]:
    """The annotated core facts of every step; None where nothing is annotated.

    The annotation teacher's own are gold. At the steps of a language model they are what that
    teacher would keep in its place, if ``dataset`` has the annotations.
    """
    questions = {question.id: question for question in dataset.questions} if dataset else {}
    gold: list[list[Sequence[Any] | None]] = []
    for trajectory in found:
        question = questions.get(trajectory.question_id)
        if trajectory.teacher == ANNOTATIONS:
            gold.append([step.kept for step in trajectory.steps])
            continue
        if dataset is None or question is None:
            gold.append([None] * len(trajectory.steps))
            continue
        if units == "sentence":
            known = oracle.sentence_gold_of(question, dataset)
        else:
            triples = {**_candidates(trajectory), **dataset.triples}
            known = oracle.gold_of(question, dataset.corpus, triples, normalization)
        rounds: list[oracle.Round] = []
        row: list[Sequence[Any] | None] = []
        for step in trajectory.steps:
            kept = None
            if known.hops:
                kept = oracle.decide(known, rounds, step.query, step.candidates).kept
            row.append(kept)
            rounds.append(oracle.Round(step.query, step.kept))
        gold.append(row)
    return gold


def _candidates(trajectory: Trajectory) -> dict[str, Sequence[Triple]]:
    """Every triple that a trajectory was shown, by passage: what can have been kept."""
    found: dict[str, list[Triple]] = collections.defaultdict(list)
    for triple in dict.fromkeys(t for step in trajectory.steps for t in step.candidates):
        if isinstance(triple, Triple) and triple.passage_id is not None:
            found[triple.passage_id].append(triple)
    return dict(found)


def _similarity(config: Config) -> Similarity:
    """Cosine of two queries by ``config.encoder``."""
    encoder = open_encoder_for(config.encoder)

    def cosine(pairs: Sequence[tuple[str, str]]) -> np.ndarray:
        texts = list(dict.fromkeys(text for pair in pairs for text in pair))
        place = {text: index for index, text in enumerate(texts)}
        vector_ND = encoder.encode(texts, "query").astype(np.float64)
        left_ND = vector_ND[[place[a] for a, _ in pairs]]
        right_ND = vector_ND[[place[b] for _, b in pairs]]
        return np.einsum("nd,nd->n", left_ND, right_ND)

    return cosine


def _search(config: Config, dataset: Dataset) -> Search:
    """The passages that queries retrieve, by ``config.retriever``, each query once."""
    passages = list(dataset.corpus.values())
    encoder = None if config.retriever.kind == "bm25" else open_encoder_for(config.encoder)
    index = open_retriever(config.retriever, passages, encoder, triples=dataset.triples)
    known: dict[str, list[str]] = {}

    def search(queries: Sequence[str]) -> list[list[str]]:
        new = [query for query in dict.fromkeys(queries) if query not in known]
        if new:
            row_QK, _ = index.search(new, config.query_recall)
            for query, row_K in zip(new, row_QK, strict=True):
                known[query] = [passages[row].id for row in row_K if row >= 0]
        return [known[query] for query in queries]

    return search


# ------------------------------------------------------------------------------------ the results


def _teacher(found: Sequence[Trajectory]) -> dict[str, Any]:
    """Who decided, how often it kept nothing, and how often it stopped."""
    steps = [step for trajectory in found for step in trajectory.steps]
    return {
        "teachers": dict(collections.Counter(trajectory.teacher for trajectory in found)),
        "empty_core": sum(not step.kept for step in steps) / len(steps),
        "stops": sum(step.next_query is None for step in steps) / len(steps),
    }


def _rows(
    found: Sequence[Trajectory], decided: Mapping[str, Sequence[Sequence[Decided]]]
) -> list[dict[str, Any]]:
    """One line a model and step; the baselines write nothing, so they have none."""
    return [
        {
            "question": trajectory.question_id,
            "step": index + 1,
            "system": name,
            "response": one.response,
            "parsed": {
                "thought": one.thought,
                "kept": [codec.encode(fact) for fact in one.kept],
                "next_query": one.next_query,
                "has_question": one.has_question,
            },
            "parse_errors": one.parse_errors,
            "error": one.error,
        }
        for name, rows in decided.items()
        if name not in BASELINES
        for trajectory, row in zip(found, rows, strict=True)
        for index, one in enumerate(row)
    ]


def table_of(result: Mapping[str, Any]) -> str:
    """The figures in per cent, one row a system, then the student's leads.

    Core facts are scored as means over steps; "gold" against the annotations.
    """
    header = ["decisions of", "core F1 [95 %]", "core P", "core R", "F1 if any", "micro F1"]
    header += ["gold F1", "false keeps", "query F1", "query cosine", "query recall"]
    header += ["stops, solved", "stops, unsolved", "parsed", "tokens"]
    flat = ("false_keeps", "query_f1", "query_cosine", "query_recall", "stop_recall")
    flat += ("stop_unsolved", "parse_rate")
    rows = []
    for name, system in result["systems"].items():
        core = system["teacher"]
        row = [name, figure(core["f1"], bounds=True)]
        row += [figure(core[s]) for s in ("precision", "recall", "nonempty_f1")]
        row += [figure(core["micro_f1"])]
        row += [figure(system.get("gold", {}).get("f1"))]
        row += [figure(system.get(s)) for s in flat]
        tokens = system.get("generated_tokens")
        rows.append([*row, "" if tokens is None else f"{tokens:,}"])
    for name, scores in result["differences"].items():
        core = scores["teacher"]
        row = [name, lead(core["f1"]), "", "", lead(core["nonempty_f1"])]
        row += [lead(core["micro_f1"])]
        row += [lead(scores.get("gold", {}).get("f1"))]
        rows.append([*row, *(lead(scores.get(s)) for s in flat), ""])
    teacher = result["teacher"]
    empty, stops = 100 * teacher["empty_core"], 100 * teacher["stops"]
    caption = (
        f"{result['num_steps']} steps of {result['num_questions']} questions, histories of "
        f"{', '.join(teacher['teachers'])}, which kept nothing at {empty:.0f} % of the steps and "
        f"stopped at {stops:.0f} %"
    )
    if teacher["query_recall"] is not None:
        caption += f"; its own queries have a recall of {100 * teacher['query_recall']:.1f}"
    return captioned(caption, [header, *rows], result["complete"])
