"""What integrator, extractor and reader are trained on: examples, and what was left out of them."""

import collections
import hashlib
import json
import pathlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from cirag_jax.datasets import load
from cirag_jax.datasets.references import select_references
from cirag_jax.distill import trajectories as trajectories_lib
from cirag_jax.errors import UserError, check_at_least
from cirag_jax.llm.chat import ChatTokenizer
from cirag_jax.methods import prompt_digests
from cirag_jax.methods.cirag.compact import Units
from cirag_jax.methods.cirag.settings import PROMPT_FIELDS, CiragConfig
from cirag_jax.training import state as state_lib
from cirag_jax.training.data import comparisons, lives
from cirag_jax.training.data.examples import Example, Part, trajectory_examples
from cirag_jax.training.data.extraction_examples import extraction_examples
from cirag_jax.training.data.query_examples import WEIGHTS, written_queries
from cirag_jax.training.data.reading_examples import (
    Reading,
    ReadingSettings,
    make_readings,
    reading_examples,
)
from cirag_jax.types import Config, Dataset, Question, Trajectory

Item = TypeVar("Item")


class Data(NamedTuple):
    """What a run trains on and is measured by.

    Attributes:
      train, dev: examples, none longer than asked for.
      counts: for the result: how many of what, and how many were cut or dropped for which reason.
      described: for the checkpoint: how conversations are rendered, which inference must repeat.
      num_candidates: most candidates that a teacher was shown; 0: the extractor.
    """

    train: list[Example]
    dev: list[Example]
    counts: dict[str, Any]
    described: dict[str, Any]
    num_candidates: int = 0

    @property
    def trained_on(self) -> tuple[str, ...]:
        """Ids of the questions (extractor: passages) of the training examples, sorted."""
        return _sources(self.train)

    @property
    def measured_on(self) -> tuple[str, ...]:
        """As `trained_on`, of the dev examples."""
        return _sources(self.dev)

    @property
    def prompt_digest(self) -> str:
        """A hash of how the prompts read; another version of this program may word them anew."""
        return prompt_digests.prompt_digest(self.described)

    @property
    def identity(self) -> str:
        """SHA-256 of all examples."""
        found = hashlib.sha256()
        for examples in (self.train, self.dev):
            for example in examples:
                found.update(example.tokens_T.tobytes() + example.weight_T.tobytes() + b"|")
            found.update(b"||")
        return found.hexdigest()


def _sources(examples: Iterable[Example]) -> tuple[str, ...]:
    sources = {example.source for example in examples}
    return tuple(sorted({one for source in sources for one in comparisons.sources(source)}))


def load_data(config: Config, tokenizer: ChatTokenizer, max_length: int) -> Data:
    """The examples of ``config.component``.

    Args:
      config: of configs/integrator.py, configs/extractor.py or configs/reader.py.
      tokenizer: of the student.
      max_length: most tokens of an example.
    """
    loaders: dict[str, Callable[[Config, ChatTokenizer, int], Data]] = {
        "integrator": _decisions,
        "extractor": _extractions,
        "reader": _readings,
    }
    if config.component not in loaders:
        raise UserError(
            f"config.component is {config.component!r}; it must be one of {', '.join(loaders)}"
        )
    data = loaders[config.component](config, tokenizer, max_length)
    if not any(np.any(example.weight_T[1:]) for example in data.train):
        raise UserError(
            f"there is nothing to train on: no supervised token in {len(data.train)} examples of "
            f"at most {max_length} tokens ({json.dumps(data.counts)})"
        )
    return data


def held_out_names(names: Iterable[str], fraction: float, limit: int, seed: int) -> set[str]:
    """The last ``fraction`` of the distinct names by a seeded permutation, at most ``limit``."""
    distinct = list(dict.fromkeys(names))
    if not 0.0 <= fraction < 1.0:
        raise UserError(f"config.dev_fraction={fraction} must be in [0, 1)")
    count = round(fraction * len(distinct))
    count = min(count, limit) if limit else count
    if count and count >= len(distinct):
        raise UserError(
            f"config.dev_fraction={fraction} would leave none of the {len(distinct)} questions to "
            "train on"
        )
    order = np.random.default_rng(seed).permutation(len(distinct))
    return {distinct[place] for place in order[len(distinct) - count :]}


def _held_out(
    config: Config, found: Sequence[Item], name_of: Callable[[Item], str]
) -> tuple[list[Item], list[Item]]:
    """What is trained on and what is dev, by `held_out_names` of the names."""
    held = held_out_names(map(name_of, found), config.dev_fraction, config.num_dev, config.seed)
    train = [one for one in found if name_of(one) not in held]
    return train, [one for one in found if name_of(one) in held]


def _check_apart(
    found: Iterable[Item], dev: Iterable[Item], name_of: Callable[[Item], str], names: str
) -> None:
    """Refuses a dev set that shares a name with what is trained on."""
    if clash := {name_of(one) for one in found} & {name_of(one) for one in dev}:
        raise UserError(
            f"config.dev holds {len(clash)} of the training {names} (first: {min(clash)})"
        )


# -------------------------------------------------------------------------------------- integrator


def _decisions(config: Config, tokenizer: ChatTokenizer, max_length: int) -> Data:
    """Decisions of the teachers' trajectories."""
    found, dev, described = _trajectories(config)
    dropped = collections.Counter(
        f"dropped_{why}" for t in found if (why := trajectories_lib.drop_reason(t, config.keep))
    )
    found = _chosen(config, found)
    queries = _query_writing(config, {t.question_id for t in dev})

    def render(
        trajectories: Sequence[Trajectory], weights: Mapping[Part, float]
    ) -> tuple[list[Example], dict[str, int]]:
        examples: list[Example] = []
        reasons: collections.Counter[str] = collections.Counter()
        for trajectory in trajectories:
            made, why = trajectory_examples(
                tokenizer, trajectory, **described, max_length=max_length, weights=weights
            )
            examples += made
            reasons.update(why)
        return examples, dict(reasons)

    weights = {Part.FACTS: config.kept_weight, Part.STOP: config.stop_weight}
    train_examples, cut = render(found, weights)
    query_examples, query_cut = render(queries, {**weights, **WEIGHTS})
    dev_examples, dev_cut = render(dev, {})
    counts = {
        "num_trajectories": len(found),
        "num_query_writing": len(queries),
        "num_dev_trajectories": len(dev),
        "left_out": {**dropped, **cut},
        "left_out_of_query_writing": query_cut,
        "left_out_of_dev": dev_cut,
        "teachers": dict(collections.Counter(t.teacher for t in found)),
    }
    shown = max((len(step.candidates) for t in found for step in t.steps), default=0)
    return Data(train_examples + query_examples, dev_examples, counts, described, shown)


def _trajectories(
    config: Config,
) -> tuple[Sequence[Trajectory], Sequence[Trajectory], dict[str, Any]]:
    """Those to choose from for training, those of dev, and how both are rendered."""
    paths, dev_paths = _paths(config.trajectories), _paths(config.dev)
    if not paths:
        raise UserError(
            "config.trajectories is required: a workdir of launch/distill.py, or a .jsonl file"
        )
    _warn_of_held_out(paths)
    found = [t for path in paths for t in trajectories_lib.read_trajectories(path)]
    dev = [t for path in dev_paths for t in trajectories_lib.read_trajectories(path)]
    units = trajectories_lib.units_of([*found, *dev])
    described = _described(config, [*paths, *dev_paths], units)
    if units == "sentence" and _paths(config.query_folders):
        raise UserError(
            "config.query_folders shows annotated triples, and the trajectories are of "
            "units=sentence; leave it out."
        )
    if dev_paths:
        dev = trajectories_lib.select(dev, config.keep, config.seed, config.num_dev)
        _check_apart(found, dev, lambda t: t.question_id, "questions")
    else:
        found, dev = _held_out(config, found, lambda t: t.question_id)
    return found, trajectories_lib.select(dev, config.keep), described


def _chosen(config: Config, found: Sequence[Trajectory]) -> tuple[Trajectory, ...]:
    """As many of the trajectories as are asked for, some with their candidates shuffled."""
    found = trajectories_lib.select(found, config.keep)
    if config.num_trajectories > len(found):
        raise UserError(
            f"config.num_trajectories={config.num_trajectories}, but there are {len(found)} to "
            f"train on (config.keep={config.keep}, dev questions left out)"
        )
    found = trajectories_lib.select(found, "all", config.seed, config.num_trajectories)
    return trajectories_lib.shuffled(found, config.shuffled, config.seed)


def _query_writing(config: Config, held_out: Collection[str]) -> list[Trajectory]:
    """Decomposed training questions of ``config.query_folders`` but those that are held out."""
    found = []
    for folder in _paths(config.query_folders):
        dataset, questions = _read_folder(config, folder, "train", None)
        wanted = [question for question in questions if question.id not in held_out]
        found += written_queries(wanted, dataset.corpus)
    return found


def _paths(value: Any) -> list[str]:
    """One path or several; null is none."""
    if value is None or value == "":
        return []
    return [str(path) for path in value] if isinstance(value, (list, tuple)) else [str(value)]


def _sidecar(path: str) -> tuple[pathlib.Path, dict[str, Any]]:
    """Where the description of trajectories is, and what it says: nothing, where there is none."""
    file = trajectories_lib.trajectory_file(path).with_suffix(".json")
    return file, trajectories_lib.read_sidecar(path) if file.is_file() else {}


def _warn_of_held_out(paths: Sequence[str]) -> None:
    """Says which trajectories are of questions that others evaluate on."""
    for file, made in map(_sidecar, paths):
        for where, count in (made.get("held_out") or {}).items():
            state_lib.announce(
                f"WARNING: {file}: up to {count} questions of {where} are trained on; do not "
                "evaluate on them"
            )


def _described(config: Config, paths: Sequence[str], units: Units) -> dict[str, Any]:
    """How conversations are rendered: as configured, else as all trajectories were made.

    They are written anew from the steps, so that any setting will do but for the units. A file
    without a sidecar says nothing.
    """
    found: dict[str, Any] = {
        name: config[name] for name in PROMPT_FIELDS if config.get(name) is not None
    }
    found["units"] = units
    told: dict[str, pathlib.Path] = {}
    for path in paths:
        file, made = _sidecar(path)
        for name in PROMPT_FIELDS:
            value = made.get(name)
            if value is None or (name in found and name not in told):
                continue
            if found.setdefault(name, value) != value:
                raise UserError(
                    f"{file}: field {name} is {value!r}, but {told[name]} says {found[name]!r}; "
                    f"say which it shall be with --config.{name}"
                )
            told.setdefault(name, file)
    settings = CiragConfig(**found)
    return {name: getattr(settings, name) for name in PROMPT_FIELDS}


# --------------------------------------------------------------------------------------- extractor


def _extractions(config: Config, tokenizer: ChatTokenizer, max_length: int) -> Data:
    """The two calls about each passage, answered by its reference."""
    check_at_least(0, config, "num_passages")
    references, counts = select_references(config.data, limit=config.num_passages, seed=config.seed)
    if config.dev:
        wanted = config.data.copy_and_resolve_references()
        wanted.fold = config.dev
        dev, _ = select_references(wanted, limit=config.num_dev, seed=config.seed)
        _check_apart(references, dev, lambda r: r.passage.id, "passages")
    else:
        references, dev = _held_out(config, references, lambda r: r.passage.id)
    train_examples, reasons = extraction_examples(tokenizer, references, max_length=max_length)
    dev_examples, dev_reasons = extraction_examples(tokenizer, dev, max_length=max_length)
    found = {
        "num_passages": len(references),
        "num_dev_passages": len(dev),
        "passages": counts,
        "left_out": reasons,
        "left_out_of_dev": dev_reasons,
    }
    return Data(train_examples, dev_examples, found, {})


# ------------------------------------------------------------------------------------------ reader


def reading_settings(config: Config, **changes: Any) -> ReadingSettings:
    """The evidence that ``config.evidence`` describes."""
    values = {**config.evidence.to_dict(), "seed": config.seed, **changes}
    return ReadingSettings(**{**values, "granularities": tuple(values["granularities"])})


def read_folders(
    config: Config, settings: ReadingSettings, split: str, fold: str | None
) -> tuple[list[Reading], int]:
    """The readings of the questions of a split in all of ``config.folders``.

    Args:
      config: of configs/reader.py or configs/reader_eval.py.
      settings: what the evidence looks like.
      split: of the questions.
      fold: of the questions; None: all that are not of another use's fold.

    Returns:
      The readings, and how many questions have no gold passages.
    """
    found, without = [], 0
    for folder in _paths(config.folders) or [None]:
        if folder == "lives" and split != "train":
            continue
        dataset, questions = _read_folder(config, folder, split, fold)
        if split == "train":
            more = comparisons.recombine(
                dataset, questions, config.get("recombined", 0), config.seed
            )
            questions = [*questions, *more]
        made, lacking = make_readings(dataset, questions, settings)
        found += made
        without += lacking
    return found, without


def _read_folder(
    config: Config, folder: str | None, split: str, fold: str | None
) -> tuple[Dataset, Sequence[Question]]:
    """A folder, or built-in dataset, and its questions of a split; see `read_folders`."""
    data = config.data.copy_and_resolve_references()
    own = folder in (None, "demo", "lives")  # Their folds are of another kind.
    data.dir, data.split = None if own else folder, split
    data.fold = None if own else fold
    dataset = lives.build() if folder == "lives" else load.load_dataset(data)
    questions = load.select_questions(dataset, data)
    if split == "train" and fold is None:
        questions = tuple(q for q in questions if q.fold in (None, "train"))
    return dataset, questions


def _readings(config: Config, tokenizer: ChatTokenizer, max_length: int) -> Data:
    """Evidence with its answer, or with the refusal where a part of it is missing."""
    settings = reading_settings(config)
    found, without = read_folders(config, settings, config.data.split, config.data.fold)
    if config.dev.split:
        dev, _ = read_folders(config, settings, config.dev.split, config.dev.fold)
        order = np.random.default_rng(config.seed).permutation(len(dev))
        dev = [dev[i] for i in sorted(order[: config.num_dev or len(dev)])]
        _check_apart(found, dev, lambda made: made.question.id, "questions")
    else:
        found, dev = _held_out(config, found, lambda made: made.question.id)
    how = settings.reader_format
    train_examples, reasons = reading_examples(
        tokenizer, found, how, max_length=max_length, answer_weight=config.get("answer_weight", 1.0)
    )
    dev_examples, dev_reasons = reading_examples(tokenizer, dev, how, max_length=max_length)
    kinds = collections.Counter(made.granularity for made in found)
    counts = {
        "num_questions": len(found),
        "num_dev_questions": len(dev),
        "granularities": dict(sorted(kinds.items())),
        "insufficient": sum(not made.sufficient for made in found),
        "left_out": {**reasons, "without_gold": without},
        "left_out_of_dev": dev_reasons,
    }
    return Data(train_examples, dev_examples, counts, {"reader_format": how})
