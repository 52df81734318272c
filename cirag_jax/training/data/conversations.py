"""Loads the training and dev examples of language models, for all of their roles."""

import collections
import functools
import hashlib
import itertools
import json
import pathlib
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from cirag_jax.datasets import load
from cirag_jax.datasets.references import select_references
from cirag_jax.distill import examples as examples_lib
from cirag_jax.distill import trajectories as trajectories_lib
from cirag_jax.distill.examples import RoleExample
from cirag_jax.errors import UserError, check_at_least, check_choice
from cirag_jax.llm.chat import ChatTokenizer
from cirag_jax.methods import prompt_digests
from cirag_jax.methods.cirag.compact import Units
from cirag_jax.methods.cirag.settings import PROMPT_FIELDS, CiragConfig
from cirag_jax.methods.common import own_prompts
from cirag_jax.methods.common.own_prompts import OwnPrompts
from cirag_jax.methods.registry import find_method
from cirag_jax.training import state as state_lib
from cirag_jax.training.data import comparisons, lives
from cirag_jax.training.data import reading_examples as readings_lib
from cirag_jax.training.data.examples import Example, Part, trajectory_examples
from cirag_jax.training.data.extraction_examples import extraction_examples
from cirag_jax.training.data.reading_examples import Reading, ReadingSettings
from cirag_jax.training.data.role_examples import role_examples
from cirag_jax.types import Config, Dataset, Question, Trajectory

Item = TypeVar("Item")

# Fields of a trajectory file's metadata that describe what the teacher saw.
INPUTS = ("num_candidates", "num_passages", "max_steps", "encoder", "triples")


class Data(NamedTuple):
    """Training and dev examples.

    Attributes:
      train, dev: the examples.
      counts: numbers of examples and dropped items, for the training result.
      prompt_settings: settings of the prompts, saved in the checkpoint. Inference must use the
        same settings.
      num_candidates: maximum number of candidates per step in the trajectories; 0 without
        trajectories.
      inputs: the values of `INPUTS` with which the trajectories were made, or the method's settings
        with which the examples were; saved in the checkpoint.
      own_prompts: digest of the integrator's prompt in ``config.prompt_file``, or of each role's
        prompts with which the examples were made; saved in the checkpoint. None is this package's
        prompt.
      sizes: with ``config.weights``, numbers of training examples from each of `sources_of`, one
        after the other; otherwise empty.
    """

    train: list[Example]
    dev: list[Example]
    counts: dict[str, Any]
    prompt_settings: dict[str, Any]
    num_candidates: int = 0
    inputs: Mapping[str, Sequence[Any]] = types.MappingProxyType({})
    own_prompts: str | Mapping[str, str] | None = None
    sizes: Sequence[int] = ()

    @property
    def trained_on(self) -> tuple[str, ...]:
        """Sorted ids of the training questions (for the extractor, passages)."""
        return _sources(self.train)

    @property
    def measured_on(self) -> tuple[str, ...]:
        """Sorted ids of the dev questions (for the extractor, passages)."""
        return _sources(self.dev)

    @property
    def prompt_digest(self) -> str:
        """Hash of the prompt texts, which may change between versions of this package."""
        return prompt_digests.prompt_digest(self.prompt_settings)

    @property
    def identity(self) -> str:
        """SHA-256 of all examples, and of ``sizes``."""
        sha256 = hashlib.sha256(str(self.sizes).encode() if self.sizes else b"")
        for examples in (self.train, self.dev):
            for example in examples:
                sha256.update(example.tokens_T.tobytes() + example.weight_T.tobytes() + b"|")
            sha256.update(b"||")
        return sha256.hexdigest()


# Config field with the files or folders of a component's training examples, if it allows several.
SOURCES = {"integrator": "trajectories", "reader": "folders", "role": "conversations"}


def sources_of(config: Config) -> Sequence[str | None]:
    """Returns the files or folders of the training examples; None is the built-in dataset."""
    return _paths(config[SOURCES[config.component]]) or [None]


def _sources(examples: Iterable[Example]) -> tuple[str, ...]:
    sources = {example.source for example in examples}
    return tuple(sorted({id for source in sources for id in comparisons.sources(source)}))


def load_data(config: Config, tokenizer: ChatTokenizer, max_length: int) -> Data:
    """Loads the examples of ``config.component`` that have at most ``max_length`` tokens."""
    loaders: dict[str, Callable[[Config, ChatTokenizer, int], Data]] = {
        "integrator": _decisions,
        "extractor": _extractions,
        "reader": _readings,
        "role": _role_examples,
    }
    check_choice("config.component", config.component, loaders)
    data = loaders[config.component](config, tokenizer, max_length)
    if not any(np.any(example.weight_T[1:]) for example in data.train):
        raise UserError(
            f"there are no supervised tokens in {len(data.train)} examples of at most "
            f"config.length={max_length} tokens ({json.dumps(data.counts)}); training needs at "
            "least one example: add data, or raise config.length if they were too long"
        )
    return data if config.get("weights") is not None else data._replace(sizes=())


def hold_out(
    config: Config, items: Sequence[Item], name_of: Callable[[Item], str]
) -> tuple[list[Item], list[Item]]:
    """Returns (training items, dev items), split by name.

    A random fraction ``config.dev_fraction`` of the names, at most ``config.num_dev``, is held out.
    """
    names, fraction = list(dict.fromkeys(map(name_of, items))), config.dev_fraction
    if not 0.0 <= fraction < 1.0:
        raise UserError(f"config.dev_fraction={fraction} must be at least 0 and below 1")
    count = round(fraction * len(names))
    count = min(count, config.num_dev) if config.num_dev else count
    if count and count >= len(names):
        raise UserError(
            f"config.dev_fraction={fraction} holds out {count} of {len(names)} questions or "
            f"passages; at least one must remain, so lower it"
        )
    order = np.random.default_rng(config.seed).permutation(len(names))
    dev_names = {names[place] for place in order[len(names) - count :]}
    train = [item for item in items if name_of(item) not in dev_names]
    return train, [item for item in items if name_of(item) in dev_names]


def _sizes(items: Iterable[Item], sets: Sequence[Sequence[Item]]) -> list[int]:
    """Returns how many of ``items`` come from each set; sets may have equal items."""
    set_of = {id(item): which for which, members in enumerate(sets) for item in members}
    counts = collections.Counter(set_of[id(item)] for item in items)
    return [counts[which] for which in range(len(sets))]


def _render_sets(
    render: Callable[[Sequence[Item]], tuple[list[Example], dict[str, int]]],
    items: Iterable[Item],
    sizes: Sequence[int],
) -> tuple[list[Example], dict[str, int], tuple[int, ...]]:
    """Renders ``sizes`` items of each set; returns their examples, counts and examples per set."""
    rest, examples, lengths = iter(items), [], []
    counts: collections.Counter[str] = collections.Counter()
    for size in sizes:
        set_examples, set_counts = render(list(itertools.islice(rest, size)))
        examples += set_examples
        lengths.append(len(set_examples))
        counts.update(set_counts)
    return examples, dict(counts), tuple(lengths)


def _check_disjoint(
    train: Iterable[Item], dev: Iterable[Item], name_of: Callable[[Item], str], noun: str
) -> None:
    if common := {*map(name_of, train)} & {*map(name_of, dev)}:
        raise UserError(
            f"config.dev has {len(common)} of the training {noun} (first: {min(common)})"
        )


# -------------------------------------------------------------------------------------- integrator


def _decisions(config: Config, tokenizer: ChatTokenizer, max_length: int) -> Data:
    """Loads the decisions in trajectories, for the integrator."""
    sets, candidates, dev, prompt_settings = _trajectories(config)
    dropped = collections.Counter(
        f"dropped_{reason}"
        for t in candidates
        if (reason := trajectories_lib.drop_reason(t, config.keep))
    )
    drawn = _select(config, candidates)
    train = trajectories_lib.shuffled(drawn, config.shuffled, config.seed)

    def render(
        trajectories: Sequence[Trajectory], weights: Mapping[Part, float]
    ) -> tuple[list[Example], dict[str, int]]:
        examples: list[Example] = []
        reasons: collections.Counter[str] = collections.Counter()
        for trajectory in trajectories:
            new_examples, new_reasons = trajectory_examples(
                tokenizer, trajectory, **prompt_settings, max_length=max_length, weights=weights
            )
            examples += new_examples
            reasons.update(new_reasons)
        return examples, dict(reasons)

    own = _own_prompts(config.prompt_file, prompt_settings)
    weights = {Part.FACTS: config.kept_weight, Part.STOP: config.stop_weight}
    with own_prompts.active(own):
        render_train = functools.partial(render, weights=weights)
        train_examples, train_counts, sizes = _render_sets(render_train, train, _sizes(drawn, sets))
        dev_examples, dev_counts = render(dev, {})
    counts = {
        "num_trajectories": len(train),
        "num_dev_trajectories": len(dev),
        "left_out": {**dropped, **train_counts},
        "left_out_of_dev": dev_counts,
        "teachers": dict(collections.Counter(t.teacher for t in train)),
    }
    num_candidates = max((len(step.candidates) for t in train for step in t.steps), default=0)
    return Data(
        train_examples,
        dev_examples,
        counts,
        prompt_settings,
        num_candidates,
        _inputs(_paths(config.trajectories)),
        own_prompts.digest(own) if own else None,
        sizes,
    )


def _own_prompts(path: str | None, prompt_settings: Mapping[str, Any]) -> OwnPrompts:
    """Reads the integrator's prompt from a prompt file, whose other prompts are not used."""
    if path is None:
        return own_prompts.NONE
    settings = CiragConfig(**prompt_settings)
    own = own_prompts.read(path, lambda: find_method("cirag").render(settings), "cirag")
    if "integrator" not in own:
        raise UserError(
            f"{path} has no [integrator], the only prompt with which the integrator is trained."
        )
    return {"integrator": own["integrator"]}


def _inputs(paths: Sequence[str]) -> dict[str, list[Any]]:
    """Returns the distinct values of each of `INPUTS` in the metadata of trajectories."""
    sidecars = [sidecar for _, sidecar in map(_sidecar, paths)]
    found = {
        name: [value for s in sidecars if (value := s.get(name)) is not None] for name in INPUTS
    }
    return {name: list(dict.fromkeys(values)) for name, values in found.items() if values}


def _trajectories(
    config: Config,
) -> tuple[
    Sequence[Sequence[Trajectory]], Sequence[Trajectory], Sequence[Trajectory], dict[str, Any]
]:
    """Returns all trajectories by file, those to select from, the dev ones, the prompt settings."""
    paths, dev_paths = _paths(config.trajectories), _paths(config.dev)
    if not paths:
        raise UserError(
            "config.trajectories is required: a workdir of launch/distill.py, or a .jsonl file"
        )
    _warn_of_held_out(map(_sidecar, paths))
    sets = [trajectories_lib.read_trajectories(path) for path in paths]
    train = [t for trajectories in sets for t in trajectories]
    dev = [t for path in dev_paths for t in trajectories_lib.read_trajectories(path)]
    units = trajectories_lib.units_of([*train, *dev])
    prompt_settings = _prompt_settings(config, [*paths, *dev_paths], units)
    if dev_paths:
        dev = trajectories_lib.select(dev, config.keep, config.seed, config.num_dev)
        _check_disjoint(train, dev, lambda t: t.question_id, "questions")
    else:
        train, dev = hold_out(config, train, lambda t: t.question_id)
    return sets, train, trajectories_lib.select(dev, config.keep), prompt_settings


def _select(config: Config, trajectories: Sequence[Trajectory]) -> tuple[Trajectory, ...]:
    """Selects ``config.num_trajectories`` trajectories."""
    kept = trajectories_lib.select(trajectories, config.keep)
    if config.num_trajectories > len(kept):
        raise UserError(
            f"config.num_trajectories={config.num_trajectories} exceeds the {len(kept)} training "
            f"trajectories (config.keep={config.keep}, without dev questions)"
        )
    return trajectories_lib.select(kept, "all", config.seed, config.num_trajectories)


def _paths(value: Any) -> list[str]:
    """Returns the paths in a config field, which may be one path, several or null."""
    if value is None or value == "":
        return []
    return [str(path) for path in value] if isinstance(value, (list, tuple)) else [str(value)]


def _sidecar(path: str) -> tuple[pathlib.Path, dict[str, Any]]:
    """Returns path and content of the metadata file of trajectories; empty if it is missing."""
    file = trajectories_lib.trajectory_file(path).with_suffix(".json")
    return file, trajectories_lib.read_sidecar(path) if file.is_file() else {}


def _warn_of_held_out(sidecars: Iterable[tuple[pathlib.Path, Mapping[str, Any]]]) -> None:
    """Warns if training data answers questions that are meant for evaluation."""
    for file, sidecar in sidecars:
        for place, count in (sidecar.get("held_out") or {}).items():
            state_lib.announce(
                f"WARNING: {file}: training on up to {count} questions of {place}; do not evaluate "
                "on them"
            )


def _prompt_settings(config: Config, paths: Sequence[str], units: Units) -> dict[str, Any]:
    """Returns the prompt settings of the conversations.

    A setting comes from the config or, if the config has null, from the trajectories' metadata.
    Settings other than the units may differ from the metadata, because prompts are rendered again.
    """
    fields: dict[str, Any] = {
        name: config[name] for name in PROMPT_FIELDS if config.get(name) is not None
    }
    fields["units"] = units
    files: dict[str, pathlib.Path] = {}  # The metadata file that each value is from.
    for path in paths:
        file, sidecar = _sidecar(path)
        for name in PROMPT_FIELDS:
            value = sidecar.get(name)
            if value is None or (name in fields and name not in files):
                continue
            if fields.setdefault(name, value) != value:
                raise UserError(
                    f"{file}: field {name} is {value!r}, but {fields[name]!r} in {files[name]}; "
                    f"choose one with --config.{name}"
                )
            files.setdefault(name, file)
    settings = CiragConfig(**fields)
    return {name: getattr(settings, name) for name in PROMPT_FIELDS}


# --------------------------------------------------------------------------------------- extractor


def _extractions(config: Config, tokenizer: ChatTokenizer, max_length: int) -> Data:
    """Loads the extractor's two conversations per passage, with the reference as answers."""
    check_at_least(0, config, "num_passages")
    references, counts = select_references(config.data, limit=config.num_passages, seed=config.seed)
    if config.dev:
        dev_data = config.data.copy_and_resolve_references()
        dev_data.fold = config.dev
        dev, _ = select_references(dev_data, limit=config.num_dev, seed=config.seed)
        _check_disjoint(references, dev, lambda r: r.passage.id, "passages")
    else:
        references, dev = hold_out(config, references, lambda r: r.passage.id)
    train_examples, reasons = extraction_examples(tokenizer, references, max_length=max_length)
    dev_examples, dev_reasons = extraction_examples(tokenizer, dev, max_length=max_length)
    result = {
        "num_passages": len(references),
        "num_dev_passages": len(dev),
        "passages": counts,
        "left_out": reasons,
        "left_out_of_dev": dev_reasons,
    }
    return Data(train_examples, dev_examples, result, {})


# ------------------------------------------------------------------------------------------ reader


def reading_settings(config: Config, **changes: Any) -> ReadingSettings:
    """Returns the settings in ``config.evidence``, with ``changes`` applied."""
    values = {**config.evidence.to_dict(), "seed": config.seed, **changes}
    return ReadingSettings(**{**values, "granularities": tuple(values["granularities"])})


def read_folders(
    config: Config,
    settings: ReadingSettings,
    split: str,
    fold: str | None,
    prefix: str = "config.data.",
) -> tuple[list[list[Reading]], int]:
    """Returns the readings of a split in each of ``config.folders``, see `make_readings`.

    The second result is the number of questions without gold.
    ``config`` is from configs/reader.py or configs/reader_eval.py. If ``fold`` is None, the folds
    for evaluation are excluded from the training split. ``prefix`` precedes ``split`` and ``fold``
    in messages.
    """
    sets: list[list[Reading]] = []
    num_without_gold = 0
    for folder in _paths(config.folders) or [None]:
        if folder == "lives" and split != "train":
            sets.append([])
            continue
        dataset, questions = _read_folder(config, folder, split, fold, prefix)
        if split == "train":
            count = config.get("recombined", 0)
            new_questions = comparisons.recombine(dataset, questions, count, config.seed)
            questions = [*questions, *new_questions]
        readings, without_gold = readings_lib.make_readings(dataset, questions, settings)
        sets.append(readings)
        num_without_gold += without_gold
    return sets, num_without_gold


def _read_folder(
    config: Config, folder: str | None, split: str, fold: str | None, prefix: str
) -> tuple[Dataset, Sequence[Question]]:
    """Reads a folder or a built-in dataset, and selects questions; see `read_folders`."""
    is_built_in = folder in (None, "demo", "lives")  # Built-in datasets have different folds.
    folders = _paths(config.folders) or [None]
    data = load.of_folder(config.data, folder, folders, "config.folders")
    data.dir, data.split = None if is_built_in else folder, split
    data.fold = None if is_built_in else fold
    dataset = lives.build() if folder == "lives" else load.load_dataset(data)
    questions = load.select_questions(dataset, data, prefix)
    if split == "train" and fold is None:
        questions = tuple(q for q in questions if q.fold in (None, "train"))
    return dataset, questions


def _readings(config: Config, tokenizer: ChatTokenizer, max_length: int) -> Data:
    """Loads the reader's conversations: questions with evidence, and an answer or a refusal."""
    settings = reading_settings(config)
    sets, without_gold = read_folders(config, settings, config.data.split, config.data.fold)
    train = [reading for readings in sets for reading in readings]
    if config.dev.split:
        part = config.dev.split, config.dev.fold
        dev_sets, _ = read_folders(config, settings, *part, "config.dev.")
        dev = [reading for readings in dev_sets for reading in readings]
        dev = _draw(dev, config.num_dev, config.seed)
        _check_disjoint(train, dev, lambda reading: reading.question.id, "questions")
    else:
        train, dev = hold_out(config, train, lambda reading: reading.question.id)
    render = functools.partial(
        readings_lib.reading_examples,
        tokenizer,
        reader_format=settings.reader_format,
        max_length=max_length,
    )
    render_train = functools.partial(render, answer_weight=config.get("answer_weight", 1.0))
    train_examples, reasons, sizes = _render_sets(render_train, train, _sizes(train, sets))
    dev_examples, dev_reasons = render(dev)
    granularities = collections.Counter(reading.granularity for reading in train)
    counts = {
        "num_questions": len(train),
        "num_dev_questions": len(dev),
        "granularities": dict(sorted(granularities.items())),
        "insufficient": sum(not reading.sufficient for reading in train),
        "left_out": {**reasons, "without_gold": without_gold},
        "left_out_of_dev": dev_reasons,
    }
    prompt_settings = {"reader_format": settings.reader_format}
    return Data(train_examples, dev_examples, counts, prompt_settings, sizes=sizes)


# --------------------------------------------------------------------------------------- any role


def roles_of(config: Config) -> list[str]:
    """Returns the roles of ``config.role``, which is one role or several."""
    roles = _paths(config.role)
    if not roles:
        raise UserError(
            "config.role is required: the role to train, such as reasoner, or a tuple of roles"
        )
    return roles


def _role_examples(config: Config, tokenizer: ChatTokenizer, max_length: int) -> Data:
    """Loads a teacher's conversations in the roles of ``config.role``."""
    check_at_least(0, config, "num_examples")
    roles, paths, dev_paths = roles_of(config), _paths(config.conversations), _paths(config.dev)
    if not paths:
        raise UserError(
            "config.conversations is required: a workdir of launch/distill.py with a method's "
            "config, or a .jsonl file"
        )
    sidecars = [_read_role_sidecar(path) for path in (*paths, *dev_paths)]
    _warn_of_held_out(sidecars[: len(paths)])
    prompt_settings = _role_prompts(sidecars, roles)
    sets = [_read_roles(path, roles) for path in paths]
    train = [record for records in sets for record in records]
    if dev_paths:
        dev = [record for path in dev_paths for record in _read_roles(path, roles)]
        dev = _draw(dev, config.num_dev, config.seed)
        _check_disjoint(train, dev, _question_id, "questions")
    else:
        train, dev = hold_out(config, train, _question_id)
    if config.num_examples > len(train):
        raise UserError(
            f"config.num_examples={config.num_examples} exceeds the {len(train)} training examples"
        )
    train = _draw(train, config.num_examples, config.seed)
    render = functools.partial(role_examples, tokenizer, max_length=max_length)
    train_examples, reasons, sizes = _render_sets(render, train, _sizes(train, sets))
    dev_examples, dev_reasons = render(dev)
    mixture = collections.Counter(record.role for _, record in train)
    listed = ", ".join(f"{mixture[role]:,} of {role}" for role in roles)
    state_lib.announce(f"training examples: {listed}, sum {len(train):,}")
    counts = {
        "roles": {role: mixture[role] for role in roles},
        "num_questions": len({*map(_question_id, train)}),
        "num_dev_questions": len({*map(_question_id, dev)}),
        "left_out": reasons,
        "left_out_of_dev": dev_reasons,
    }
    inputs: dict[str, list[Any]] = {}
    for _, sidecar in sidecars[: len(paths)]:
        for name, value in sidecar["settings"].items():
            if value is not None and value not in inputs.setdefault(name, []):
                inputs[name].append(value)
    own = sidecars[0][1].get("own_prompts") or None
    return Data(
        train_examples,
        dev_examples,
        counts,
        prompt_settings,
        inputs=inputs,
        own_prompts=own,
        sizes=sizes,
    )


def _read_role_sidecar(path: str) -> tuple[pathlib.Path, dict[str, Any]]:
    file = examples_lib.example_file(path).with_suffix(".json")
    return file, examples_lib.read_sidecar(path)


def _role_prompts(
    sidecars: Sequence[tuple[pathlib.Path, Mapping[str, Any]]], roles: Sequence[str]
) -> dict[str, Any]:
    """Returns the method and settings that determine the prompts, equal in all files."""
    found = [
        {
            "method": sidecar["method"],
            "roles": list(roles),
            "settings": sidecar["settings"],
        }
        for _, sidecar in sidecars
    ]

    kinds = [
        (prompt["method"], sidecar.get("own_prompts"), prompt_digests.prompt_digest(prompt))
        for (_, sidecar), prompt in zip(sidecars, found, strict=True)
    ]
    for (file, _), kind in zip(sidecars, kinds, strict=True):
        if kind != kinds[0]:
            raise UserError(
                f"{file} and {sidecars[0][0]} have examples of different prompts; use only one kind"
            )
    return found[0]


def _read_roles(path: str, roles: Sequence[str]) -> list[tuple[str, RoleExample]]:
    """Returns ``file:line`` and example of each example of the roles, all of which must exist."""
    records = list(examples_lib.read_examples(path))
    available = collections.Counter(record.role for _, record in records)
    if missing := [role for role in roles if role not in available]:
        raise UserError(
            f"{examples_lib.example_file(path)} has no examples of the role {missing[0]!r}; it has "
            f"{', '.join(f'{count} of {role}' for role, count in available.items())}"
        )
    return [(place, record) for place, record in records if record.role in roles]


def _question_id(record: tuple[str, RoleExample]) -> str:
    return record[1].question_id


def _draw(items: Sequence[Item], count: int, seed: int) -> list[Item]:
    """Draws ``count`` items at random, in order; 0 is all."""
    order = np.random.default_rng(seed).permutation(len(items))
    return [items[i] for i in sorted(order[: count or len(items)])]
