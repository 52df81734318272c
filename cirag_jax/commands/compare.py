"""Methods side by side: the answers of several runs of launch/answer.py to the same questions."""

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from cirag_jax.errors import UserError
from cirag_jax.evaluation import answers
from cirag_jax.evaluation.overlap import Ratio
from cirag_jax.evaluation.recall import recall_at
from cirag_jax.evaluation.significance import differences, intervals
from cirag_jax.llm.types import Usage
from cirag_jax.models.io import fingerprint
from cirag_jax.reports.tables import figure, lead, markdown, write_table
from cirag_jax.runtime import codec, journal
from cirag_jax.runtime.journal import Record
from cirag_jax.types import GRANULARITIES, Config

KS = (3, 5)
GRANULARITIES_FIGURE = "granularities.png"


class Run(NamedTuple):
    """What a workdir of launch/answer.py holds.

    Attributes:
      name: how tables call it.
      folder: the workdir.
      settings: what decided its answers; of the method's own as ``method.FIELD``.
      records: of its questions, by id; all have ended.
    """

    name: str
    folder: str
    settings: Mapping[str, Any]
    records: Mapping[str, Record]


def compare(config: Config, workdir: pathlib.Path) -> dict[str, Any]:
    """Scores every run and the lead of the first over each other one.

    Leaves ``table.md`` and ``granularities.png``, the share of questions answered at each one
    (CIRAG's Figures 3 and 5), in ``workdir``.

    Args:
      config: of configs/comparison.py.
      workdir: an existing folder.

    Returns:
      ``systems``: of each run ``em``, ``f1``, ``acc``, ``recall@3``, ``recall@5`` (of gold
      passages) with intervals (questions resampled), ``granularities``, ``failures``, ``calls`` and
      ``generated_tokens`` a question; ``differences``: the first run less each other;
      ``num_questions``, ``num_annotated`` (with gold passages), ``settings``.

    Raises:
      UserError: a run cannot be read, has not ended, is of other questions or passages, or differs
        in another setting from the first without ``config.allow_different``.
    """
    if config.bootstrap_samples < 1:
        raise UserError("config.bootstrap_samples must be at least 1.")
    answers.check_profile(config.profile)
    runs = _runs(config.runs)
    different = {run.name: _different(runs[0], run) for run in runs[1:]}
    for run in runs[1:]:
        if different[run.name] and not config.allow_different:
            field, (first, own) = next(iter(different[run.name].items()))
            raise UserError(
                f"{run.folder} has {field}={json.dumps(own)} where {runs[0].folder} has "
                f"{json.dumps(first)}, and {len(different[run.name]) - 1} other settings that "
                "differ; --config.allow_different=true compares them and prints what differs."
            )
    ids = list(runs[0].records)
    how_often = (config.bootstrap_samples, config.seed)
    scores = {run.name: _scores(run, ids, config.profile) for run in runs}
    first = runs[0].name
    result: dict[str, Any] = {
        "systems": {
            run.name: {**intervals(scores[run.name], *how_often), **_described(run, ids)}
            for run in runs
        },
        "differences": {
            f"{first}-{run.name}": differences(scores[first], scores[run.name], *how_often)
            for run in runs[1:]
        },
        "num_questions": len(ids),
        "num_annotated": int(scores[first]["recall@5"].bottom_Q.sum()),
        "settings": {"runs": {run.name: run.folder for run in runs}, "profile": config.profile},
        "different": different,
    }
    write_table(table_of(result), workdir)
    _draw(result, workdir / GRANULARITIES_FIGURE)
    return result


# --------------------------------------------------------------------------------------- the runs


def _runs(specs: Any) -> list[Run]:
    """The runs as the config names them, all of the same questions and passages."""
    specs = [specs] if isinstance(specs, str) else list(specs or ())
    if not specs:
        raise UserError(
            "config.runs is required: workdirs of launch/answer.py, \"('NAME=W1', 'NAME=W2')\"."
        )
    runs = [_run(str(spec)) for spec in specs]
    first = runs[0]
    for run in runs[1:]:
        if run.name in {other.name for other in runs if other is not run}:
            raise UserError(f"config.runs has two runs of the name {run.name}; name them NAME=W.")
        other = set(first.records) ^ set(run.records)
        if other:
            raise UserError(
                f"{run.folder} is a run of other questions than {first.folder}: {len(other)} are "
                f"in one alone, {min(other)} for one."
            )
        changed = [i for i, record in run.records.items() if record.input != first.records[i].input]
        if changed:
            raise UserError(
                f"{run.folder} and {first.folder} have other texts or annotations of question "
                f"{changed[0]}."
            )
        hashes = {r.settings["passages"] for r in (run, first) if "passages" in r.settings}
        if len(hashes) > 1:
            raise UserError(f"{run.folder} searched other passages than {first.folder}.")
    return runs


def _run(spec: str) -> Run:
    # A folder may have an equals sign in its own name.
    name, _, folder = ("", "", spec) if pathlib.Path(spec).is_dir() else spec.partition("=")
    folder = folder or name
    path = pathlib.Path(folder).expanduser()
    file = path / journal.FILE
    if not file.is_file():
        raise UserError(f"{folder} is no workdir of launch/answer.py: it has no {journal.FILE}.")
    settings = journal.read_settings(file)
    records = {record.id: record for record in journal.read_records(file)}
    if "method" not in settings or not records:
        raise UserError(f"{folder} holds no answers.")
    left = sum(record.outcome is None and record.error is None for record in records.values())
    if left:
        raise UserError(
            f"{folder} has not ended: {left} of {len(records)} questions are left; run its command "
            "again first."
        )
    own = f"{settings['method']}."
    settings = {
        f"method.{name.removeprefix(own)}" if name.startswith(own) else name: value
        for name, value in settings.items()
    }
    return Run(name or path.name, folder, settings, records)


def _different(first: Run, other: Run) -> dict[str, tuple[Any, Any]]:
    """Setting -> (first's value, the other's), of settings that both have.

    Two methods differ in name, code and in what only one of them has; that they do is the point.
    """
    free = {"code", "method"} if first.settings["method"] != other.settings["method"] else set()
    shared = (first.settings.keys() & other.settings.keys()) - free
    old, new = ({k: r.settings[k] for k in r.settings if k in shared} for r in (first, other))
    return dict(fingerprint.differences(old, new))


# ------------------------------------------------------------------------------------- the scores


def _scores(run: Run, ids: Sequence[str], profile: str) -> dict[str, Ratio]:
    """Sums over questions; a failed one has answered and found nothing."""
    records = [run.records[i] for i in ids]
    outcomes = [record.outcome or {} for record in records]
    texts = [outcome.get("answer", "") for outcome in outcomes]
    golds = [record.input.get("answers") or () for record in records]
    asked_Q = np.array([bool(gold) for gold in golds], np.float64)
    pairs = list(zip(texts, golds, strict=True))
    metrics = {"em": answers.exact_match, "f1": answers.f1, "acc": answers.accuracy}
    found = {}
    for name, metric in metrics.items():
        values = [metric(text, gold, profile) if gold else 0.0 for text, gold in pairs]
        found[name] = Ratio(np.array(values), asked_Q)
    supports = [tuple(record.input.get("supporting") or ()) for record in records]
    annotated_Q = np.array([bool(gold) for gold in supports], np.float64)
    for k in KS:
        recalls = [
            recall_at(list(outcome.get("passages", ())), gold, k) if gold else 0.0
            for outcome, gold in zip(outcomes, supports, strict=True)
        ]
        found[f"recall@{k}"] = Ratio(np.array(recalls), annotated_Q)
    return found


def _described(run: Run, ids: Sequence[str]) -> dict[str, Any]:
    """What is counted and not resampled."""
    records = [run.records[i] for i in ids]
    found = [codec.decode_prediction(r.outcome) for r in records if r.outcome is not None]
    usage = sum((record.usage for record in records), start=Usage())
    return {
        "granularities": {
            granularity: sum(p.granularity == granularity for p in found)
            for granularity in GRANULARITIES
        },
        "failures": len(records) - len(found),
        "calls": sum(sum(r.calls.values()) for r in records) / len(records),
        "generated_tokens": usage.generated_tokens / len(records),
    }


# ------------------------------------------------------------------------------------- the results


def table_of(result: Mapping[str, Any]) -> str:
    """The figures in per cent, one row a run, then the first run's leads in points."""
    names = ("f1", "em", "acc", "recall@3", "recall@5")
    header = ["run", "F1 [95 %]", "EM", "Acc", "R@3", "R@5 [95 %]", *GRANULARITIES, "tokens"]
    rows = []
    for name, system in result["systems"].items():
        row = [figure(system[n], bounds=n in ("f1", "recall@5")) for n in names]
        total = max(sum(system["granularities"].values()), 1)
        shares = [
            f"{100 * system['granularities'][granularity] / total:.0f} %"
            for granularity in GRANULARITIES
        ]
        rows.append([name, *row, *shares, f"{system['generated_tokens']:,.0f}"])
    for name, scores in result["differences"].items():
        leads = [lead(scores[n]) for n in names]
        rows.append([name, *leads, *[""] * (len(GRANULARITIES) + 1)])
    caption = (
        f"{result['num_questions']} questions, {result['num_annotated']} with gold passages; share "
        "of the answers read from triples, sentences, passages and by default; tokens written a "
        "question"
    )
    first = next(iter(result["systems"]))
    for name, fields in result["different"].items():
        told = (f"{field} {json.dumps(a)} / {json.dumps(b)}" for field, (a, b) in fields.items())
        if fields:
            caption += f"\n\nSettings of {first} / {name}: " + "; ".join(told)
    return f"{caption}\n\n{markdown([header, *rows])}"


def _draw(result: Mapping[str, Any], path: pathlib.Path) -> None:
    """One stacked bar a run."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    systems = result["systems"]
    drawn, axes = plt.subplots(figsize=(7, 0.6 * len(systems) + 1.4), layout="constrained")
    left = np.zeros(len(systems))
    for granularity in GRANULARITIES:
        totals = [max(sum(s["granularities"].values()), 1) for s in systems.values()]
        shares = [s["granularities"][granularity] for s in systems.values()]
        width = 100 * np.array(shares) / np.array(totals)
        axes.barh(list(systems), width, left=left, label=granularity)
        left += width
    axes.invert_yaxis()
    axes.set_xlim(0, 100)
    axes.set_xlabel("questions answered from, %")
    axes.legend(
        ncols=len(GRANULARITIES), loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False
    )
    drawn.savefig(path, dpi=150)
    plt.close(drawn)
