"""Compares a trained aligner with its initial model, one-shot retrieval and BM25."""

import pathlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from cirag_jax.commands import evaluation
from cirag_jax.commands.retrieval_systems import Aligners, Problem, Rankings, graph_settings
from cirag_jax.datasets import chains as chains_lib
from cirag_jax.datasets import load
from cirag_jax.datasets.formats import trec
from cirag_jax.errors import UserError, check_at_least, check_choice
from cirag_jax.evaluation import next_unit
from cirag_jax.evaluation.evidence import passage_substitutes
from cirag_jax.evaluation.overlap import mean_of
from cirag_jax.evaluation.ranking import ranking_scores
from cirag_jax.evaluation.recall import mean_scores, recall_at, set_scores
from cirag_jax.evaluation.scoring import Scoring
from cirag_jax.io import say, write_lines
from cirag_jax.methods.common.evidence import Evidence
from cirag_jax.methods.kirag.settings import Ranking
from cirag_jax.models.io.workdir import trained_units
from cirag_jax.reports.tables import LEADING, write_report
from cirag_jax.retrieval.encoders import Encoder, report_truncated
from cirag_jax.retrieval.graph import GraphOptions
from cirag_jax.retrieval.links import WalkOptions
from cirag_jax.retrieval.stopping import needed_rows
from cirag_jax.types import Config, PositiveInt, Prediction, Question, UnitInterval
from cirag_jax.validation import check_value

# All systems, the trained ones first.
SYSTEMS = (
    "linked", "trained", "frozen", "one_shot_trained", "one_shot_frozen", "bm25",
    "links", "links_one_shot_frozen", "links_trained", "graph_frozen",
)  # fmt: skip


def evaluate(config: Config, workdir: pathlib.Path, show: bool = True) -> dict[str, Any]:
    """Measures the ranking of passages and of the next unit of ``config.systems``.

    Writes ``rankings.jsonl`` (each system's ranking and chains for each question), ``SYSTEM.trec``,
    ``qrels.trec``, ``table.md`` and ``recall.png`` (also as SVG). ``show`` also prints the table.
    The result has differences with confidence intervals and ``num_trained_on``, the number of
    questions that the checkpoint was trained on, or None if the checkpoint does not record this.
    """
    _check_settings(config)
    start, ks = time.monotonic(), Scoring(recall_at=tuple(config.recall_at)).recall_at
    aligners = Aligners(config, _systems(config))
    trained: Any = trained_units(config.checkpoint) if config.checkpoint else None
    problem = _problem_of(config, config.data.units or trained or "triple")
    runs = _read_runs(config, problem)
    ids = [question.id for question in problem.questions]
    num_trained_on = evaluation.count_trained_on(config.checkpoint, ids, "questions")
    systems = _supported_systems(config, aligners, problem)
    rankings = Rankings(config, problem, aligners, max(ks))
    passage_ids = [passage.id for passage in problem.corpus.passages]
    ranked = {
        name: [[passage_ids[row] for row in rows[: max(ks)]] for rows in rankings.of(name)]
        for name in systems
    }
    ranked |= {name: [found[: max(ks)] for found in rows] for name, rows in runs.items()}
    write_lines(workdir / "rankings.jsonl", _ranking_records(problem, ranked, rankings.runs))
    for system, found in ranked.items():
        trec.write_run(workdir / f"{system}.trec", dict(zip(ids, found, strict=True)), system)
    trec.write_qrels(workdir / trec.QRELS, problem.questions)

    # ---- Scores ----------------------------------------------------------------------------------
    scores = {name: _scores(found, problem.questions, ks) for name, found in ranked.items()}
    ratios = {
        system: {name: mean_of(values) for name, values in by_name.items()}
        for system, by_name in scores.items()
    }
    embeds = {name: aligners.embeds[name] for name in rankings.runs}
    result: dict[str, Any] = {
        **_means(scores, slice(None)),
        "differences": evaluation.leads(config, ratios, LEADING),
        "stops": _stops(config, problem, aligners, rankings, systems),
        "per_hop": _by_group(scores, [question.hops for question in problem.questions]),
        "per_fold": _by_group(scores, [question.fold for question in problem.questions]),
        "next_unit": _next_unit(problem, embeds, ks),
        "settings": _settings(config, problem, aligners),
        "num_questions": len(problem.questions),
        "num_trained_on": num_trained_on,
        "num_passages": len(problem.texts),
        "truncated_texts": report_truncated(*aligners.encoders),
    }
    result["seconds"] = round(time.monotonic() - start, 1)
    write_report(result, workdir, show)
    return result


def _check_settings(config: Config) -> None:
    """Checks the settings that are used only after the slow encoding."""
    check_at_least(1, config, "steps", "k", "bootstrap_samples")
    for name in ("query_max_length", "unit_max_length", "passage_max_length"):
        check_value(f"config.{name}", config[name], PositiveInt | None)
    for stop in config.stops:
        check_value("config.stops", stop, UnitInterval)
    check_value("config.ranking", config.ranking, Ranking)
    check_value("config.retriever", config.retriever, Literal["units", "aligner", "frozen"])
    WalkOptions.of(config.links)
    GraphOptions.of(config.graph)
    graph_settings(config)


def _systems(config: Config) -> tuple[str, ...]:
    """Returns the systems to compare, by default all."""
    for system in config.systems:
        check_choice("config.systems", system, SYSTEMS)
    return tuple(name for name in SYSTEMS if name in (config.systems or SYSTEMS))


def _supported_systems(config: Config, aligners: Aligners, problem: Problem) -> tuple[str, ...]:
    """Returns `_systems` without those that the model or the data does not support.

    ``linked`` needs a link head for these units, and ``graph_frozen`` needs triples.
    """
    head, systems = aligners.head, _systems(config)
    if not any(problem.dataset.triples.get(p.id) for p in problem.corpus.passages):
        if "graph_frozen" in config.systems:
            raise UserError(
                f"no passage of {problem.dataset.name} has triples, which the system graph_frozen "
                "needs; extract them (launch/extract.py) and set --config.data.triples=FOLDER"
            )
        systems = tuple(name for name in systems if name != "graph_frozen")
    if head is not None and head.units == problem.kind:
        return systems
    if head is not None and "linked" in config.systems:
        raise UserError(
            f"the link head of {config.checkpoint} was trained on {head.units}s; set "
            f"--config.data.units={head.units}"
        )
    return tuple(name for name in systems if name != "linked")


def _read_runs(config: Config, problem: Problem) -> dict[str, list[list[str]]]:
    """Returns the ids of each question's passages for the run files ``NAME=FILE``."""
    known = {passage.id for passage in problem.corpus.passages}
    ids = [question.id for question in problem.questions]
    runs: dict[str, list[list[str]]] = {}
    for entry in config.runs:
        name, equals, file = str(entry).partition("=")
        if not equals or not name.isidentifier() or name in (*SYSTEMS, *runs):
            raise UserError(
                f"config.runs={entry!r} must be NAME=FILE, with a name of letters and digits that "
                "no other system has"
            )
        rankings = trec.read_run(pathlib.Path(file), ids, known)
        missing = sum(name not in rankings for name in ids)
        if missing == len(ids):
            raise UserError(f"{file} ranks passages for none of the {len(ids):,} questions")
        if missing:
            say(f"WARNING: {file} lacks {missing:,} of {len(ids):,} questions; their recall is 0")
        for question in ids:
            for passage in rankings.get(question, ()):
                if passage not in known:
                    raise UserError(
                        f"{file} ranks passage {passage!r} for question {question!r}, which the "
                        "corpus does not have"
                    )
        runs[name] = [rankings.get(question, []) for question in ids]
    return runs


def _settings(config: Config, problem: Problem, aligners: Aligners) -> dict[str, Any]:
    return {
        "steps": config.steps,
        "linked_steps": aligners.head.steps if aligners.head else None,
        "k": config.k,
        "units": problem.kind,
        "retriever": config.retriever,
        "ranking": config.ranking,
        "links": config.links.to_dict(),
        "graph": config.graph.to_dict(),
        "corpus": problem.corpus.policy,
        "runs": [str(entry).partition("=")[0] for entry in config.runs],
        "checkpoint": config.checkpoint,
        "step": aligners.meta.get("step"),
        "frozen": aligners.frozen,
        "data": problem.dataset.name,
        "split": config.data.split,
        "fold": config.data.fold,
        "setting": config.data.setting,
    }


def _problem_of(config: Config, kind: chains_lib.UnitKind) -> Problem:
    dataset = load.load_dataset(config.data)
    selected = load.select_questions(dataset, config.data)
    questions = tuple(q for q in selected if q.supporting)
    if not questions:
        raise UserError(
            f"none of the {len(selected)} selected questions of {dataset.name} has gold passages "
            "(`supporting`), which recall needs"
        )
    corpus = load.select_corpus(dataset, questions, config.data)
    allowed = None
    if corpus.allowed is not None:
        allowed = tuple(corpus.allowed[q.id] for q in questions)
    texts = tuple(chains_lib.passage_text(passage) for passage in corpus.passages)
    return Problem(dataset, questions, corpus, texts, allowed, kind)


def _scores(
    ranked: Sequence[Sequence[str]], questions: Sequence[Question], ks: Sequence[int]
) -> dict[str, np.ndarray]:
    """Returns recall@K and `ranking_scores` of each question."""
    rows = []
    for top, question in zip(ranked, questions, strict=True):
        gold, substitutes = question.supporting or (), passage_substitutes(question)
        recalls = {f"recall@{k}": recall_at(top, gold, k, substitutes) for k in ks}
        rows.append(recalls | ranking_scores(top, gold, ks, substitutes))
    return {name: np.array([row[name] for row in rows]) for name in rows[0]}


def _stops(
    config: Config,
    problem: Problem,
    aligners: Aligners,
    rankings: Rankings,
    systems: Sequence[str],
) -> list[dict[str, Any]] | None:
    """Returns the `SetScores` of the linked search for each threshold of ``config.stops``.

    Returns None without a linked search or a stopping rule.
    """
    rule = aligners.head.stop if aligners.head else None
    if rule is None or "linked" not in systems:
        return None
    passages = problem.corpus.passages
    searches = [(found.rows, rule.probability(found.stop_KF)) for found in rankings.linked]
    stops = []
    for stop in config.stops:
        scores = [
            set_scores(
                [passages[row].id for row in needed_rows(rows, probability_K, stop)],
                question.supporting or (),
                passage_substitutes(question),
            )
            for (rows, probability_K), question in zip(searches, problem.questions, strict=True)
        ]
        stops.append({"stop": stop, **mean_scores(scores)._asdict()})
    return stops


_Scores = Mapping[str, Mapping[str, np.ndarray]]  # system -> score -> value per question


def _means(scores: _Scores, rows: slice | Sequence[int]) -> dict[str, dict[str, float]]:
    return {
        system: {name: float(values[rows].mean()) for name, values in by_name.items()}
        for system, by_name in scores.items()
    }


def _by_group(scores: _Scores, groups: Sequence[int | str | None]) -> dict[str, Any]:
    """Returns mean scores by group; ignores questions without a group."""
    rows_of: dict[int | str, list[int]] = {}
    for row, group in enumerate(groups):
        if group is not None:
            rows_of.setdefault(group, []).append(row)
    return {
        str(group): {"num_questions": len(rows_of[group]), **_means(scores, rows_of[group])}
        for group in sorted(rows_of, key=str)
    }


def _next_unit(
    problem: Problem, embeds: Mapping[str, Encoder], ks: Sequence[int]
) -> dict[str, Any] | None:
    """Returns MRR and Recall@K of the next unit among the candidates of its question."""
    try:
        chains = chains_lib.silver_chains(problem.dataset, problem.questions, problem.kind)
    except UserError:
        return None  # chains need more annotations than gold passages
    by_id = {question.id: question for question in problem.questions}
    pools = [
        chains_lib.pool_of(problem.dataset, by_id[chain.question_id], problem.kind)
        for chain in chains
    ]
    problems = next_unit.next_units(chains, pools, problem.kind)
    return {
        name: next_unit.evaluate_next_unit(
            problems,
            lambda texts, role, encode=encoder.encode: encode(
                texts, "query" if role == "query" else chains_lib.role_of(problem.kind)
            ),
            ks,
        )
        for name, encoder in embeds.items()
    }


def _ranking_records(
    problem: Problem,
    ranked: Mapping[str, Sequence[Sequence[str]]],
    runs: Mapping[str, Sequence[Prediction]],
) -> Iterator[dict[str, Any]]:
    evidence = Evidence("unicode")
    evidence.add_retrieved(problem.corpus.passages)
    for index, question in enumerate(problem.questions):
        yield {
            "id": question.id,
            "question": question.question,
            "supporting": question.supporting,
            "ranked": {system: found[index] for system, found in ranked.items()},
            "chains": {
                name: [evidence.text(unit) for step in run[index].steps for unit in step.kept]
                for name, run in runs.items()
            },
        }
