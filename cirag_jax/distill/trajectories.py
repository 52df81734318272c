"""Files, filters and statistics of trajectories (a teacher's decisions on a question)."""

import collections
import dataclasses
import os
import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from cirag_jax.datasets.records import field_error, read_lines
from cirag_jax.distill.oracle import AnyGold
from cirag_jax.errors import UserError
from cirag_jax.io import read_object, write_lines
from cirag_jax.methods.cirag.compact import Units
from cirag_jax.methods.cirag.decisions import PARSE_ERRORS
from cirag_jax.runtime import codec
from cirag_jax.types import Sentence, Step, Trajectory, UnitInterval
from cirag_jax.validation import check_value

FILE = "trajectories.jsonl"
SIDECAR = "trajectories.json"
# Marks steps that keep nothing although a candidate may help; students are not trained on them.
UNCLEAR = "unclear"
Keep = Literal["all", "parsed", "correct_only"]
# Errors in the teacher's turns, as opposed to errors of retrieval and extraction.
_TURN_ERRORS = PARSE_ERRORS | {"asked_again", "no_decision"}


# -------------------------------------------------------------------------------- write and read


def write_trajectories(path: str | os.PathLike[str], trajectories: Iterable[Trajectory]) -> None:
    """Writes one trajectory per line, atomically."""
    write_lines(Path(path), map(codec.encode, trajectories))


def read_trajectories(path: str | os.PathLike[str]) -> tuple[Trajectory, ...]:
    """Reads trajectories from a file or a workdir of launch/distill.py."""
    trajectories: dict[str, Trajectory] = {}
    for place, trajectory in read_lines(trajectory_file(path), Trajectory):
        _check(place, trajectory)
        if trajectory.question_id in trajectories:
            raise field_error(place, "question_id", f"repeats {trajectory.question_id!r}")
        trajectories[trajectory.question_id] = trajectory
    return tuple(trajectories.values())


def read_sidecar(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads the metadata of trajectories: their prompt settings and origin."""
    file = trajectory_file(path).with_suffix(".json")
    sidecar = read_object(file)
    if "rendering" in sidecar:
        raise UserError(
            f"{file} was written by an earlier version of this program with different field names; "
            "run launch/distill.py again."
        )
    return sidecar


def trajectory_file(path: str | os.PathLike[str]) -> Path:
    """Returns the trajectory file in a workdir of launch/distill.py, or ``path`` itself."""
    path = Path(path).expanduser()
    file = path / FILE if path.is_dir() else path
    if not file.is_file():
        raise UserError(f"{file} does not exist; launch/distill.py writes it.")
    return file


def _check(place: str, trajectory: Trajectory) -> None:
    """Raises `UserError` for invalid values that have the correct types."""
    if not trajectory.steps:
        raise field_error(place, "steps", "is empty")
    for index, step in enumerate(trajectory.steps):
        if len(step.scores) != len(step.candidates):
            raise field_error(place, f"steps[{index}].scores", "must have one score per candidate")
        if not set(step.kept) <= set(step.candidates):
            raise field_error(place, f"steps[{index}].kept", "has a fact that is not a candidate")
        if any(isinstance(fact, Sentence) and not fact.text for fact in step.candidates):
            raise field_error(place, f"steps[{index}].candidates", "has a sentence without text")


def units_of(trajectories: Iterable[Trajectory]) -> Units:
    """Returns the kind of the candidates, by default triples."""
    facts = (fact for t in trajectories for step in t.steps for fact in step.candidates)
    kinds = {isinstance(fact, Sentence) for fact in facts}
    if len(kinds) > 1:
        raise UserError(
            "some trajectories have units=triple and some have units=sentence; use only one kind."
        )
    return "sentence" if True in kinds else "triple"


# ----------------------------------------------------------------------------------------- filter


def select(
    trajectories: Sequence[Trajectory], keep: str, seed: int = 0, limit: int = 0, min_steps: int = 1
) -> tuple[Trajectory, ...]:
    """Returns the trajectories to train on, in order.

    Args:
      trajectories: trajectories of finished questions.
      keep: ``all``, ``parsed`` (no parse error in a teacher's turn) or ``correct_only`` (parsed,
        and known to be solved).
      seed: seed of the random selection. With the same seed, a smaller selection is part of a
        larger one.
      limit: maximum number of trajectories, selected at random; 0 is no limit.
      min_steps: minimum number of rounds.
    """
    check_keep(keep)
    if limit < 0:
        raise UserError("config.limit must not be negative.")
    if keep == "correct_only" and trajectories and all(t.solved is None for t in trajectories):
        raise UserError(
            "keep=correct_only needs trajectories that record whether they are solved; with a "
            "language model as teacher, run launch/distill.py with config.answer=true."
        )
    kept = [t for t in trajectories if drop_reason(t, keep, min_steps) is None]
    if limit and limit < len(kept):
        order = list(range(len(kept)))
        random.Random(seed).shuffle(order)
        kept = [kept[i] for i in sorted(order[:limit])]
    return tuple(kept)


def check_keep(keep: str) -> None:
    """Raises `UserError` for an unknown filter."""
    check_value("config.keep", keep, Keep)


def drop_reason(trajectory: Trajectory, keep: str, min_steps: int = 1) -> str | None:
    """Returns why the filter drops a trajectory, or None if it keeps it.

    The reasons are ``no_decision`` (in the last round), ``short``, ``parse_errors``, ``not_solved``
    and ``unknown``.
    """
    if trajectory.end == "no_decision":
        return "no_decision"
    if len(trajectory.steps) < min_steps:
        return "short"
    if keep == "all":
        return None
    if any(trajectory.parse_errors.get(kind) for kind in _TURN_ERRORS):
        return "parse_errors"
    if keep == "correct_only" and not trajectory.solved:
        return "unknown" if trajectory.solved is None else "not_solved"
    return None


def until_second_empty_round(steps: Sequence[Step]) -> tuple[Step, ...]:
    """Returns the rounds before the second round that kept nothing.

    One such round teaches the student to keep nothing and to rephrase the query. Many such rounds
    (for example, because no triple states an annotated fact) would teach that new queries never
    help.
    """
    empty = [index for index, step in enumerate(steps) if not step.kept]
    return tuple(steps[: empty[1]] if len(empty) > 1 else steps)


def shuffled(trajectories: Sequence[Trajectory], share: float, seed: int) -> tuple[Trajectory, ...]:
    """Shuffles the candidates of every round in a random ``share`` of the trajectories.

    If retrieval is easy, the first candidate is nearly always correct, and a student learns to
    choose the first candidate without reading. Copies of a trajectory are shuffled independently.
    """
    check_value("config.shuffled", share, UnitInterval)
    result = []
    for place, trajectory in enumerate(trajectories):
        rng = random.Random(f"{seed}/{place}/{trajectory.question_id}")
        if rng.random() < share:
            steps = tuple(_shuffled(step, rng) for step in trajectory.steps)
            trajectory = dataclasses.replace(trajectory, steps=steps)
        result.append(trajectory)
    return tuple(result)


def _shuffled(step: Step, rng: random.Random) -> Step:
    order = rng.sample(range(len(step.candidates)), len(step.candidates))
    candidates = tuple(step.candidates[i] for i in order)
    kept = tuple(fact for fact in candidates if fact in step.kept)
    scores = tuple(step.scores[i] for i in order)
    return dataclasses.replace(step, candidates=candidates, scores=scores, kept=kept)


def mark_unclear(steps: Sequence[Step], gold: AnyGold) -> tuple[Step, ...]:
    """Adds the note `UNCLEAR` to steps for which `Gold.is_unclear` is true."""
    marked: list[Step] = []
    for step in steps:
        known = gold.known([fact for earlier in marked for fact in earlier.kept])
        if gold.is_unclear(step.candidates, known):
            step = dataclasses.replace(step, notes={**step.notes, UNCLEAR: True})
        marked.append(step)
    return tuple(marked)


# ------------------------------------------------------------------------------------- statistics


def statistics(
    trajectories: Sequence[Trajectory], golds: Mapping[str, AnyGold] | None = None
) -> dict[str, Any]:
    """Returns statistics of trajectories, with None for means of empty sets.

    ``golds`` are annotations by question id, for ``retrieval_misses`` and ``gold_retrieved``.

    Returns:
      Counts: ``trajectories``, ``teachers``, ``ends``, ``step_counts``, ``core_sizes`` and
      ``parse_errors``. Means: rounds per trajectory (``steps``), ``candidates`` and ``core`` facts
      per round, and the share of gold passages that were retrieved (``gold_retrieved``). Shares of
      rounds: ``empty_core`` (no core facts), ``unclear``, and ``retrieval_misses`` (no candidate
      supports a reachable hop; among rounds with unsolved hops). Shares of trajectories:
      ``retried`` (continued after a round without core facts), ``solved``, and ``early_stops``
      (stopped unsolved); the last two are among trajectories that record ``solved``.
    """
    golds = golds or {}
    steps = [step for t in trajectories for step in t.steps]
    solved = [t.solved for t in trajectories if t.solved is not None]
    misses = [m for t in trajectories if t.question_id in golds for m in _misses(t, golds)]
    recalls = [r for t in trajectories if (r := _recall(t, golds)) is not None]
    parse_errors: collections.Counter[str] = collections.Counter()
    for trajectory in trajectories:
        parse_errors.update(trajectory.parse_errors)
    return {
        "trajectories": len(trajectories),
        "teachers": _counts(t.teacher for t in trajectories),
        "steps": _mean(len(t.steps) for t in trajectories),
        "step_counts": _counts(len(t.steps) for t in trajectories),
        "ends": _counts(t.end for t in trajectories),
        "candidates": _mean(len(step.candidates) for step in steps),
        "core": _mean(len(step.kept) for step in steps),
        "core_sizes": _counts(len(step.kept) for step in steps),
        "empty_core": _mean(not step.kept for step in steps),
        "retried": _mean(any(not s.kept for s in t.steps[:-1]) for t in trajectories),
        "solved": _mean(solved),
        "early_stops": _mean(
            t.end == "stopped" and not t.solved for t in trajectories if t.solved is not None
        ),
        "retrieval_misses": _mean(misses),
        "gold_retrieved": _mean(recalls),
        "unclear": _mean(bool(step.notes.get(UNCLEAR)) for step in steps),
        "parse_errors": dict(sorted(parse_errors.items())),
    }


def _misses(trajectory: Trajectory, golds: Mapping[str, AnyGold]) -> list[bool]:
    """Returns, for each round with unsolved hops, whether no candidate supports such a hop."""
    gold, kept, misses = golds[trajectory.question_id], [], []
    for step in trajectory.steps:
        known = gold.known(kept)
        if len(known) < len(gold.hops):
            misses.append(not gold.supports(list[Any](step.candidates), known))
        kept += step.kept
    return misses


def _recall(trajectory: Trajectory, golds: Mapping[str, AnyGold]) -> float | None:
    gold = golds.get(trajectory.question_id)
    supporting = set(gold.question.supporting or ()) if gold else set()
    retrieved = {passage_id for step in trajectory.steps for passage_id in step.passages}
    return len(supporting & retrieved) / len(supporting) if supporting else None


def _counts(values: Iterable[Any]) -> dict[str, int]:
    return {str(value): n for value, n in sorted(collections.Counter(values).items())}


def _mean(values: Iterable[float]) -> float | None:
    values = list(values)
    return sum(values) / len(values) if values else None


def table(stats: Mapping[str, Any]) -> str:
    """Formats the statistics as a table."""
    rows = {
        "trajectories": ("trajectories", "{:,}"),
        "steps": ("rounds per trajectory", "{:.2f}"),
        "candidates": ("candidates per round", "{:.2f}"),
        "core": ("core facts per round", "{:.2f}"),
        "empty_core": ("rounds without core facts", "{:.1%}"),
        "retrieval_misses": ("rounds without a gold candidate", "{:.1%}"),
        "unclear": ("unclear rounds (not trained on)", "{:.1%}"),
        "retried": ("trajectories with a new query after one", "{:.1%}"),
        "early_stops": ("trajectories that stopped unsolved", "{:.1%}"),
        "solved": ("trajectories solved", "{:.1%}"),
        "gold_retrieved": ("gold passages retrieved", "{:.1%}"),
    }
    lines = []
    for name, (words, form) in rows.items():
        text = "unknown" if stats[name] is None else form.format(stats[name])
        lines.append(f"  {words:<48}{text.replace('%', ' %'):>10}")
    return "\n".join(lines)
