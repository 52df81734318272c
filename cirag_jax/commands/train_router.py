"""Trains CIRAG's granularity router from journals: ``launch/train.py --config=configs/router.py``.

The journals are those of runs that read a single granularity each, with the same questions and
rounds. They show what the cascade would answer at each granularity, so any router can be evaluated
without calls to a language model.
"""

import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from cirag_jax.commands import comparison
from cirag_jax.commands.comparison import FinishedRun, answered_of
from cirag_jax.commands.pool import Pool
from cirag_jax.datasets.chains import UNIT_KINDS
from cirag_jax.errors import UserError, check_at_least, check_positive
from cirag_jax.evaluation import answers
from cirag_jax.evaluation.overlap import Ratio, mean_of
from cirag_jax.evaluation.significance import interval, paired_interval
from cirag_jax.io import say, write_json
from cirag_jax.methods.cirag import routing
from cirag_jax.models.io.peft_format import TRAINING_FILE
from cirag_jax.models.router import Head, Router, head_name
from cirag_jax.reports import router as report
from cirag_jax.retrieval.encoders import Encoder
from cirag_jax.training.link_head import fit_logistic
from cirag_jax.types import Attempt, Config, Prediction, Question

# (granularity, first refusal or None) -> probability that reading the granularity is worthwhile.
Worth = Callable[[str, Attempt | None], float]


class Example(NamedTuple):
    """A question with its prediction from each granularity alone, in the cascade's order.

    A prediction has the attempt at its granularity and, with ``force_answer``, a forced attempt.
    """

    question: Question
    predictions: Mapping[str, Prediction]

    @property
    def first(self) -> Prediction:
        """The prediction from the finest granularity."""
        return next(iter(self.predictions.values()))


class Outcome(NamedTuple):
    """The answer of a cascade, and its number of calls to the reader."""

    answer: str
    calls: int


def train_and_evaluate(config: Config, workdir: pathlib.Path) -> dict[str, Any]:
    """Trains a router on ``config.runs``, and evaluates it on ``config.eval_runs``.

    Writes ``router.json`` and ``training.json`` and, with ``eval_runs``, ``table.md`` and
    ``router.png``. ``config`` comes from configs/router.py.

    Returns:
      ``num_questions`` of the training; ``heads``: for each head, its number of ``examples`` and
      the share of ``worthwhile`` ones; and the result of `evaluate`.
    """
    check_at_least(1, config, "bootstrap_samples")
    check_positive(config, "precision")
    thresholds = [float(t) for t in config.thresholds]
    if not thresholds or not all(0 <= t <= 1 for t in thresholds):
        raise UserError(f"config.thresholds={tuple(thresholds)} must lie between 0 and 1.")
    answers.check_profile(config.profile)
    examples = read_examples(config.runs, "config.runs")
    evaluated = read_examples(config.eval_runs, "config.eval_runs") if config.eval_runs else []
    shared = {e.question.id for e in examples} & {e.question.id for e in evaluated}
    if shared:
        raise UserError(
            f"{len(shared)} questions of config.eval_runs are in config.runs, such as "
            f"{min(shared)}; the router must be evaluated on other questions."
        )
    with Pool() as pool:
        encoder = pool.encoder(config.encoder)
        router, heads = train(examples, encoder, config.profile, config.precision)
        router.save(workdir)
        trained_on = [e.question.id for e in examples]
        write_json(workdir / TRAINING_FILE, {"component": "router", "trained_on": trained_on})
        result: dict[str, Any] = {"num_questions": len(examples), "heads": heads}
        if not evaluated:
            say("config.eval_runs is not set, so the router is not evaluated")
            return {**result, "complete": True}
        result |= evaluate(router, evaluated, encoder, config, thresholds)
    report.write(result, workdir)
    return {**result, "complete": True}


# ------------------------------------------------------------------------------------ the examples


def read_examples(specs: Any, field: str) -> list[Example]:
    """Reads runs of a single granularity each; failed questions are left out."""
    runs = comparison.read_runs(comparison.named_folders(specs), 1)
    by_level: dict[str, FinishedRun] = {}
    for run in runs:
        levels = list(run.settings.get("method.granularities") or ())
        if len(levels) != 1 or levels[0] in by_level or run.settings.get("method.router"):
            raise UserError(
                f"{field}: {run.folder} must be a run of CIRAG with one granularity and without a "
                "router (--config.cirag.granularities=\"('triple',)\"), a different one for each."
            )
        by_level[levels[0]] = run
    levels = [level for level in UNIT_KINDS if level in by_level]
    if len(levels) < 2:
        raise UserError(f"{field} needs runs of at least two granularities.")
    examples = []
    for name in runs[0].records:
        answered = {level: answered_of(by_level[level].records[name]) for level in levels}
        predictions = {level: a.prediction for level, a in answered.items() if a.prediction}
        if len(predictions) < len(levels) or any(p.error for p in predictions.values()):
            continue
        example = Example(answered[levels[0]].question, predictions)
        for level, prediction in predictions.items():
            if prediction.steps != example.first.steps:
                raise UserError(
                    f"{field}: {by_level[level].folder} has other rounds for question {name} than "
                    f"{by_level[levels[0]].folder}; use the same settings and models."
                )
        examples.append(example)
    if not any(example.question.answers for example in examples):
        raise UserError(f"{field}: no question has a gold answer, which the router learns from.")
    return [example for example in examples if example.question.answers]


def run_cascade(example: Example, worth: Worth | None, threshold: float = 0.0) -> Outcome:
    """Returns what `methods.cirag.cascade` would answer with a router, or without (None)."""
    calls, refusal, last = 0, None, list(example.predictions)[-1]
    for level, prediction in example.predictions.items():
        attempt = prediction.attempts[0]
        if not attempt.evidence:
            continue
        if worth is not None and level != last and worth(level, refusal) < threshold:
            continue
        calls += 1
        if attempt.sufficient:
            return Outcome(attempt.answer, calls)
        refusal = refusal or attempt
    forced = example.predictions[last].attempts[1:]
    return Outcome(forced[0].answer if forced else "", calls + len(forced))


def _after(example: Example, level: str) -> Outcome:
    """Returns the outcome of the cascade after ``level``."""
    levels = list(example.predictions)
    rest = levels[levels.index(level) + 1 :]
    return run_cascade(
        example._replace(predictions={name: example.predictions[name] for name in rest}), None
    )


# ------------------------------------------------------------------------------------ the training


def train(
    examples: Sequence[Example], encoder: Encoder, profile: str, precision: float
) -> tuple[Router, dict[str, Any]]:
    """Fits a head for each granularity before the last, and for each one after a refusal.

    Reading a granularity is worthwhile if the reader answers from it, and the F1 of this answer is
    at least that of the cascade without it.

    Returns:
      The router, and the number of examples and share of worthwhile ones of each head.
    """
    x_QD = encoder.encode([e.question.question for e in examples], "query")
    levels = list(examples[0].predictions)
    heads, counts = {}, {}
    for place, level in enumerate(levels[:-1]):
        for refused in (False, True) if place else (False,):
            rows, features = [], []
            for row, example in enumerate(examples):
                refusal = _first_refusal(example, levels[:place]) if refused else None
                has_evidence = bool(example.predictions[level].attempts[0].evidence)
                if has_evidence and (not refused or (refusal and refusal.logprobs)):
                    scalars = routing.scalars(example.first.steps, refusal)
                    rows.append(row)
                    features.append(np.concatenate([x_QD[row], scalars]))
            name = head_name(level, refused)
            if not rows:
                say(f"no head {name}: no question was refused with log-probabilities before")
                continue
            is_worthwhile = [_is_worthwhile(examples[row], level, profile) for row in rows]
            weight_F, bias = fit_logistic(
                np.stack(features), np.array(is_worthwhile), precision=precision
            )
            heads[name] = Head(tuple(map(float, weight_F)), bias)
            share = float(np.mean(is_worthwhile))
            counts[name] = {"examples": len(rows), "worthwhile": share}
    return Router(dict(encoder.identity), encoder.dim, heads), counts


def _first_refusal(example: Example, levels: Sequence[str]) -> Attempt | None:
    """Returns the first refusal of ``levels``; None without any, or if one of them answers."""
    attempts = [example.predictions[level].attempts[0] for level in levels]
    if any(attempt.sufficient for attempt in attempts):
        return None
    return next((attempt for attempt in attempts if attempt.evidence), None)


def _is_worthwhile(example: Example, level: str, profile: str) -> bool:
    attempt = example.predictions[level].attempts[0]
    here, after = (
        _f1(example, answer, profile) for answer in (attempt.answer, _after(example, level).answer)
    )
    return attempt.sufficient and here >= after


def _f1(example: Example, answer: str, profile: str) -> float:
    return answers.f1(answer, answers.golds_of(example.question, profile), profile)


# ---------------------------------------------------------------------------------- the evaluation


def evaluate(
    router: Router,
    examples: Sequence[Example],
    encoder: Encoder,
    config: Config,
    thresholds: Sequence[float],
) -> dict[str, Any]:
    """Compares the router at each threshold with the cascade and with the finest granularity.

    Returns:
      ``num_evaluated``, and ``systems``: the ``cascade``, ``first`` (only the finest granularity,
      whose name is ``finest``) and ``router@THRESHOLD``, each with intervals of ``f1`` and of
      ``calls`` to the reader per question. Routers also have paired intervals of
      ``calls_saved/SYSTEM`` and ``f1_lost/SYSTEM``, compared with ``cascade`` and ``first``.
    """
    x_QD = encoder.encode([e.question.question for e in examples], "query")
    bootstrap = (config.bootstrap_samples, config.seed)

    def measure(outcomes: Sequence[Outcome]) -> tuple[Ratio, Ratio]:
        scores = [_f1(e, o.answer, config.profile) for e, o in zip(examples, outcomes, strict=True)]
        return mean_of(scores), mean_of([float(outcome.calls) for outcome in outcomes])

    finest = list(examples[0].predictions)[0]
    alone = [e._replace(predictions={finest: e.first}) for e in examples]
    measured = {
        "cascade": measure([run_cascade(e, None) for e in examples]),
        "first": measure([run_cascade(e, None) for e in alone]),
    }
    references = list(measured)
    worths = [_worth(router, e, x_D) for e, x_D in zip(examples, x_QD, strict=True)]
    for threshold in thresholds:
        measured[f"router@{threshold:g}"] = measure(
            [run_cascade(e, w, threshold) for e, w in zip(examples, worths, strict=True)]
        )
    systems: dict[str, Any] = {}
    for name, (f1, calls) in measured.items():
        systems[name] = {"f1": interval(f1, *bootstrap), "calls": interval(calls, *bootstrap)}
        for reference in references if name not in references else ():
            other_f1, other_calls = measured[reference]
            systems[name] |= {
                f"calls_saved/{reference}": paired_interval(other_calls, calls, *bootstrap),
                f"f1_lost/{reference}": paired_interval(other_f1, f1, *bootstrap),
            }
    return {"num_evaluated": len(examples), "finest": finest, "systems": systems}


def _worth(router: Router, example: Example, x_D: np.ndarray) -> Worth:
    def worth(level: str, refusal: Attempt | None) -> float:
        refused = refusal is not None and bool(refusal.logprobs)
        return router.worth(level, refused, x_D, routing.scalars(example.first.steps, refusal))

    return worth
