"""Loads the dataset of ``config.data`` and selects its questions."""

import dataclasses
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from cirag_jax.datasets import demo, formats, jsonl, triple_files
from cirag_jax.datasets.corpus import WHOLE, Corpus, build_corpus
from cirag_jax.errors import UserError, check_at_least
from cirag_jax.types import Config, Dataset, Question

ONLINE = "online"  # The value of `config.data.triples` that lets methods extract on request.


def load_dataset(
    data: Config, *, corpus: bool = True, questions: bool = True, on_request: bool = False
) -> Dataset:
    """Loads the dataset ``data.dir``, or the built-in dataset if it is null.

    It is our own dataset folder, or has one of `formats.FORMATS`. Its triples come from
    ``data.triples``, see `with_triples`, or if that is null from the dataset. With ``on_request``
    and without ``corpus``, no triples are read, because no passage is searched.
    """
    reads_triples = corpus or not on_request
    if not data.dir:
        dataset = demo.build()
    else:
        own_triples = reads_triples and getattr(data, "triples", None) in (None, ONLINE)
        folder = pathlib.Path(data.dir)
        read = jsonl.read_dataset if formats.is_own(folder) else formats.read
        dataset = read(folder, corpus=corpus, questions=questions, triples=own_triples)
    return with_triples(dataset, data, on_request=on_request) if reads_triples else dataset


def with_triples(dataset: Dataset, data: Config, *, on_request: bool = False) -> Dataset:
    """Returns the dataset with the triples of ``data.triples`` (`triple_files.read_triples`).

    With ``on_request``, the caller reads or extracts the triples of passages when they are needed;
    then a store is not loaded, and ``data.triples`` may be `ONLINE`.
    """
    source = getattr(data, "triples", None)
    if source is None or (on_request and source == ONLINE):
        return dataset
    if source == ONLINE:
        raise UserError(
            f"config.data.triples={ONLINE} extracts triples while answering, but this command "
            "needs them in advance; extract them first (launch/extract.py)."
        )
    if on_request and triple_files.is_store(source):
        return dataclasses.replace(dataset, triples={})
    return dataclasses.replace(dataset, triples=triple_files.read_triples(source, dataset.corpus))


def load_datasets(data: Config) -> tuple[Dataset, ...]:
    """Loads ``data.dir``, which may be a tuple of folders; see `load_dataset`."""
    return tuple(load_dataset(of_folder(data, folder)) for folder in folders_of(data))


def of_folder(
    data: Config,
    folder: str | None,
    folders: Sequence[str | None] | None = None,
    field: str = "config.data.dir",
) -> Config:
    """Returns a copy of ``data`` for one of its folders, with the triples of this folder.

    The folders are those of ``data.dir``, or else ``folders``, which come from ``field``.
    """
    folders = folders_of(data) if folders is None else tuple(folders)
    sources = getattr(data, "triples", None)
    listed = sources if isinstance(sources, tuple | list) else (sources,)
    if sources is not None and len(listed) != len(folders):
        raise UserError(
            f"config.data.triples has {len(listed)} entries, but {field} has "
            f"{len(folders)} folders; give one entry per folder (null is its openie.jsonl)."
        )
    own = ConfigDict({**data.to_dict(), "dir": folder, "triples": None})
    if sources is not None:
        own.triples = listed[folders.index(folder)]
    return own


def folders_of(data: Config) -> tuple[str | None, ...]:
    """Returns the folders of ``data.dir``, which may be a tuple; None is the built-in dataset."""
    return tuple(data.dir) if isinstance(data.dir, tuple | list) else (data.dir,)


def select_corpus(dataset: Dataset, questions: Sequence[Question], data: Config) -> Corpus:
    """Returns the passages that ``questions`` search under the corpus policy ``data.corpus``.

    Without ``data.contexts_as_corpus``, a HotpotQA folder must have the complete corpus.
    """
    if data.corpus == WHOLE and not getattr(data, "contexts_as_corpus", True):
        settings = {question.setting for question in questions} & {"distractor", "fullwiki"}
        if settings:
            raise UserError(
                f"{dataset.name} has only the contexts of HotpotQA's questions "
                f"({len(dataset.corpus):,} passages), but the paper searches the 5,233,329 "
                "abstracts of Wikipedia; prepare them (--benchmark=hotpotqa --config=abstracts, "
                "docs/data.md), or set --config.data.contexts_as_corpus=true"
            )
    return build_corpus(dataset, questions, data.corpus, data.seed)


def _with_ids(questions: Sequence[Question], path: str, field: str, name: str) -> list[Question]:
    """Returns the questions whose ids a file lists: one per line, or a JSON list of ids or records.

    The order is that of the dataset.
    """
    file = pathlib.Path(path).expanduser()
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not valid UTF-8"
        raise UserError(f"{field}={path} cannot be read: {reason}.") from None
    rows: list[Any] = [line.strip() for line in text.split("\n") if line.strip()]
    if file.suffix in (".json", ".jsonl"):
        try:
            rows = json.loads(text) if file.suffix == ".json" else [*map(json.loads, rows)]
        except (ValueError, RecursionError) as error:
            raise UserError(f"{field}={path} is not valid JSON: {error}.") from None
    if not isinstance(rows, list):
        raise UserError(f"{field}={path} must be a list of ids or of questions, not an object.")
    ids = dict[str, None]()
    for number, row in enumerate(rows, start=1):
        value = row.get("id", row.get("_id")) if isinstance(row, dict) else row
        if not isinstance(value, str):
            raise UserError(f"{field}={path}: item {number} has no id (a string, or id or _id).")
        ids[value] = None
    kept = [question for question in questions if question.id in ids]
    missing = ids.keys() - {question.id for question in kept}
    if missing or not ids:
        first = next((value for value in ids if value in missing), "none")
        raise UserError(
            f"{field}={path}: {len(missing):,} of {len(ids):,} ids are not among the "
            f"{len(questions):,} selected questions of {name} (first: {first}); choose their "
            "split, or another file."
        )
    return kept


def select_questions(
    dataset: Dataset, data: Config, prefix: str = "config.data."
) -> tuple[Question, ...]:
    """Selects by ``data.split``, ``.fold``, ``.setting``, ``.only_with_triples`` and ``.ids``.

    ``data.limit`` then keeps the first N questions; 0 keeps all. With ``data.random``, it keeps N
    random questions in their original order. For the same ``data.seed``, a larger sample contains
    every smaller one. ``prefix`` precedes the names of fields in messages.
    """
    check_at_least(0, data, "limit", prefix="config.data.")
    questions: Sequence[Question] = dataset.questions
    for field in ("split", "fold", "setting"):
        value = data[field]
        if not value:
            continue
        kept = [q for q in questions if getattr(q, field) == value]
        if not kept:
            values = sorted({str(getattr(q, field) or "null") for q in questions})
            raise UserError(
                f"{prefix}{field}={value} matches no question of {dataset.name}; "
                f"available values: {', '.join(values)}"
            )
        questions = kept
    if data.only_with_triples:
        questions = [
            q for q in questions if q.context and all(p in dataset.triples for p in q.context)
        ]
        if not questions:
            raise UserError(
                f"config.data.only_with_triples matches no question of {dataset.name}: none has "
                "triples (openie.jsonl or config.data.triples) for every passage of its context"
            )
    if data.get("ids"):
        questions = _with_ids(questions, data.ids, f"{prefix}ids", dataset.name)
    if not data.limit or data.limit >= len(questions):
        return tuple(questions)
    if not data.random:
        return tuple(questions[: data.limit])
    drawn = np.random.default_rng(data.seed).permutation(len(questions))[: data.limit]
    return tuple(questions[index] for index in sorted(drawn))
