"""Trajectories on disk: written, read back, filtered, counted."""

import collections
import dataclasses
import os
import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cirag_jax.datasets.records import field_error, read_lines
from cirag_jax.distill.oracle import AnyGold
from cirag_jax.errors import UserError, check_choice
from cirag_jax.io import read_object, write_lines
from cirag_jax.methods.cirag.compact import Units
from cirag_jax.methods.cirag.decisions import PARSE_ERRORS
from cirag_jax.runtime import codec
from cirag_jax.types import Sentence, Step, Trajectory

FILE = "trajectories.jsonl"
SIDECAR = "trajectories.json"
# A note of a step whose decision is no example: it keeps nothing where something may have helped.
UNCLEAR = "unclear"
KEEPS = ("all", "parsed", "correct_only")
# Parse errors of a teacher's own turns; the others are those of retrieval and extraction.
_TURN_ERRORS = PARSE_ERRORS | {"asked_again", "no_decision"}


# -------------------------------------------------------------------------------- write and read


def write_trajectories(path: str | os.PathLike[str], trajectories: Iterable[Trajectory]) -> None:
    """Writes one trajectory a line, aside and then renamed.

    Raises:
      OSError: the folder cannot be written.
    """
    write_lines(Path(path), map(codec.encode, trajectories))


def read_trajectories(path: str | os.PathLike[str]) -> tuple[Trajectory, ...]:
    """The trajectories that ``path``, a workdir of launch/distill.py or a file, holds."""
    file = trajectory_file(path)
    found: dict[str, Trajectory] = {}
    for place, trajectory in read_lines(file, Trajectory):
        _check(place, trajectory)
        if trajectory.question_id in found:
            raise field_error(place, "question_id", f"repeats {trajectory.question_id!r}")
        found[trajectory.question_id] = trajectory
    return tuple(found.values())


def read_sidecar(path: str | os.PathLike[str]) -> dict[str, Any]:
    """How the trajectories of ``path`` were rendered and where they come from."""
    file = trajectory_file(path).with_suffix(".json")
    value = read_object(file)
    if "rendering" in value:
        raise UserError(
            f"{file} was written by an earlier version of this program, which described prompts by "
            "other names; run launch/distill.py again."
        )
    return value


def trajectory_file(path: str | os.PathLike[str]) -> Path:
    """The file of a workdir of launch/distill.py, or ``path`` itself."""
    path = Path(path).expanduser()
    file = path / FILE if path.is_dir() else path
    if not file.is_file():
        raise UserError(f"{file} does not exist; launch/distill.py writes it.")
    return file


def _check(place: str, trajectory: Trajectory) -> None:
    """What the types of a trajectory cannot say."""
    if not trajectory.steps:
        raise field_error(place, "steps", "is empty")
    for index, step in enumerate(trajectory.steps):
        if len(step.scores) != len(step.candidates):
            raise field_error(place, f"steps[{index}].scores", "must be as many as the candidates")
        if not set(step.kept) <= set(step.candidates):
            raise field_error(place, f"steps[{index}].kept", "holds a fact that is no candidate")
        if any(isinstance(fact, Sentence) and not fact.text for fact in step.candidates):
            raise field_error(place, f"steps[{index}].candidates", "has a sentence without text")


def units_of(trajectories: Iterable[Trajectory]) -> Units:
    """Of which kind the candidates are; triples where there is none."""
    facts = (fact for t in trajectories for step in t.steps for fact in step.candidates)
    kinds = {isinstance(fact, Sentence) for fact in facts}
    if len(kinds) > 1:
        raise UserError(
            "some trajectories are of units=triple and some of units=sentence; give those of one."
        )
    return "sentence" if True in kinds else "triple"


# ----------------------------------------------------------------------------------------- filter


def select(
    trajectories: Sequence[Trajectory],
    keep: str,
    seed: int = 0,
    limit: int = 0,
    min_steps: int = 1,
) -> tuple[Trajectory, ...]:
    """The trajectories to train on, in their order.

    Args:
      trajectories: of questions that ended.
      keep: ``all``; ``parsed``: those without a parse error in a teacher's turn; ``correct_only``:
        those of them that are known to be solved.
      seed: of the draw; a smaller draw with the same seed is part of a larger one.
      limit: most trajectories, drawn at random; 0: no limit.
      min_steps: trajectories of fewer rounds are dropped.
    """
    check_keep(keep)
    if limit < 0:
        raise UserError("config.limit must not be negative.")
    if keep == "correct_only" and trajectories and all(t.solved is None for t in trajectories):
        raise UserError(
            "keep=correct_only needs trajectories that say whether they are solved; those of a "
            "language model say so only if config.answer was true."
        )
    kept = [t for t in trajectories if drop_reason(t, keep, min_steps) is None]
    if limit and limit < len(kept):
        order = list(range(len(kept)))
        random.Random(seed).shuffle(order)
        kept = [kept[i] for i in sorted(order[:limit])]
    return tuple(kept)


def check_keep(keep: str) -> None:
    """Raises a `UserError` for an unknown filter."""
    check_choice("config.keep", keep, KEEPS)


def drop_reason(trajectory: Trajectory, keep: str, min_steps: int = 1) -> str | None:
    """Why the filter drops a trajectory; None: it does not.

    ``no_decision`` (nothing to imitate at its end), ``short``, ``parse_errors``, ``not_solved`` or
    ``unknown``.
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


def without_vain_rounds(steps: Sequence[Step]) -> tuple[Step, ...]:
    """The rounds up to the second that kept nothing.

    From one such round a student learns to keep nothing and to ask anew; from many in a row, which
    is how an annotated search for a fact that no triple states ends, that asking never helps.
    """
    vain = [index for index, step in enumerate(steps) if not step.kept]
    return tuple(steps[: vain[1]] if len(vain) > 1 else steps)


def shuffled(trajectories: Sequence[Trajectory], share: float, seed: int) -> tuple[Trajectory, ...]:
    """The trajectories, a ``share`` of them with the candidates of every round in random order.

    Where retrieval is easy, the best candidate is nearly always the right one, and a student learns
    its number instead of reading it. A trajectory that is given twice is drawn for twice.

    Args:
      trajectories: with candidates by falling score.
      share: in [0, 1], of the trajectories.
      seed: of the draw and of the orders.
    """
    if not 0.0 <= share <= 1.0:
        raise UserError(f"config.shuffled={share} must be in [0, 1].")
    found = []
    for place, trajectory in enumerate(trajectories):
        rng = random.Random(f"{seed}/{place}/{trajectory.question_id}")
        if rng.random() < share:
            steps = tuple(_shuffled(step, rng) for step in trajectory.steps)
            trajectory = dataclasses.replace(trajectory, steps=steps)
        found.append(trajectory)
    return tuple(found)


def _shuffled(step: Step, rng: random.Random) -> Step:
    order = rng.sample(range(len(step.candidates)), len(step.candidates))
    candidates = tuple(step.candidates[i] for i in order)
    kept = tuple(fact for fact in candidates if fact in step.kept)
    scores = tuple(step.scores[i] for i in order)
    return dataclasses.replace(step, candidates=candidates, scores=scores, kept=kept)


def marked(steps: Sequence[Step], gold: AnyGold) -> tuple[Step, ...]:
    """The rounds, those that are `Gold.is_unclear` with a note that training heeds (`UNCLEAR`)."""
    found: list[Step] = []
    for step in steps:
        known = gold.known([fact for past in found for fact in past.kept])
        if gold.is_unclear(step.candidates, known):
            step = dataclasses.replace(step, notes={**step.notes, UNCLEAR: True})
        found.append(step)
    return tuple(found)


# ------------------------------------------------------------------------------------- statistics


def statistics(
    trajectories: Sequence[Trajectory], golds: Mapping[str, AnyGold] | None = None
) -> dict[str, Any]:
    """What trajectories look like; means are None over nothing.

    Args:
      trajectories: to count.
      golds: annotations by question id; what needs them is averaged over the questions in it.

    Returns:
      ``trajectories``; ``teachers``, ``ends``, ``step_counts`` and ``core_sizes``: counts;
      ``steps``: mean rounds; ``candidates`` and ``core``: mean facts a round; ``empty_core``:
      share of rounds that kept none; ``retried``: share of trajectories that asked on after such a
      round; ``solved``: share of those where it is known; ``early_stops``: share of those
      that stopped though not solved; ``retrieval_misses``: share of rounds without a candidate for
      any hop that could be reached; ``gold_retrieved``: mean share of gold passages that some round
      retrieved; ``unclear``: share of rounds that are no example; ``parse_errors``: sums.
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
    """Of each round that began with an open hop, whether no candidate helped."""
    gold, kept, found = golds[trajectory.question_id], [], []
    for step in trajectory.steps:
        known, shown = gold.known(kept), list[Any](step.candidates)
        if len(known) < len(gold.hops):
            found.append(not gold.supports(shown, known))
        kept += step.kept
    return found


def _recall(trajectory: Trajectory, golds: Mapping[str, AnyGold]) -> float | None:
    gold = golds.get(trajectory.question_id)
    wanted = set(gold.question.supporting or ()) if gold else set()
    seen = {passage_id for step in trajectory.steps for passage_id in step.passages}
    return len(wanted & seen) / len(wanted) if wanted else None


def _counts(values: Iterable[Any]) -> dict[str, int]:
    return {str(value): n for value, n in sorted(collections.Counter(values).items())}


def _mean(values: Iterable[float]) -> float | None:
    values = list(values)
    return sum(values) / len(values) if values else None


def table(stats: Mapping[str, Any]) -> str:
    """The statistics for a person."""
    rows = {
        "trajectories": ("trajectories", "{:,}"),
        "steps": ("rounds per trajectory", "{:.2f}"),
        "candidates": ("candidates per round", "{:.2f}"),
        "core": ("core facts per round", "{:.2f}"),
        "empty_core": ("rounds without core facts", "{:.1%}"),
        "retrieval_misses": ("rounds without a gold candidate", "{:.1%}"),
        "unclear": ("rounds that are no example", "{:.1%}"),
        "retried": ("trajectories that asked again", "{:.1%}"),
        "early_stops": ("trajectories that stopped unsolved", "{:.1%}"),
        "solved": ("trajectories solved", "{:.1%}"),
        "gold_retrieved": ("gold passages retrieved", "{:.1%}"),
    }
    lines = []
    for name, (words, form) in rows.items():
        text = "unknown" if stats[name] is None else form.format(stats[name])
        lines.append(f"  {words:<48}{text.replace('%', ' %'):>10}")
    return "\n".join(lines)
