"""Shared parts of the benchmarks: building, random access, conversion to the project's types."""

import collections
import contextlib
import dataclasses
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, SupportsIndex

import msgspec
import tensorflow_datasets as tfds
from absl import logging

from cirag_jax.datasets import records
from cirag_jax.datasets.benchmarks.corpora import CorpusSource, OfficialCorpus
from cirag_jax.datasets.benchmarks.files import FoundFile, OfficialFile, find_files
from cirag_jax.errors import UserError
from cirag_jax.io import one_line
from cirag_jax.types import Dataset, Passage, Question

ARTICLES = "articles"  # The split of the passages, if they have their own file.


class OfficialBuilder(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """A TFDS builder that reads official files and stores their records as validated JSON."""

    Record: ClassVar[type[msgspec.Struct]]
    """The official record; absent fields are None."""

    Article: ClassVar[type[msgspec.Struct]]
    """The official record in the split `ARTICLES`, if that split exists."""

    FILES: ClassVar[Mapping[str, Mapping[str, OfficialFile]]]
    """Config -> split -> official file."""

    SHARED_IDS: ClassVar[frozenset[str]] = frozenset()
    """Configs in which several questions may share an id."""

    CORPORA: ClassVar[Mapping[str, OfficialCorpus]] = {}
    """Config -> complete corpus. Its questions name passages by the corpus's key, see `convert`."""

    found: Mapping[str, FoundFile]
    """The official file of every split."""

    source: CorpusSource | None = None
    """The corpus of the config, if it has one."""

    MIN_WRONG: ClassVar[float] = 0.25
    """Share of records of another version at which a file is refused."""

    HOMEPAGE: ClassVar[str]
    LICENSE: ClassVar[str]
    VERSION = tfds.core.Version("1.0.0")
    BUILDER_CONFIGS = [tfds.core.BuilderConfig(name="default")]
    MANUAL_DOWNLOAD_INSTRUCTIONS = "Place the official files here; docs/data.md names them."

    def _info(self) -> tfds.core.DatasetInfo:
        return tfds.core.DatasetInfo(
            builder=self,
            description=self.__doc__,
            features=tfds.features.FeaturesDict({"record": tfds.features.Text()}),
            homepage=self.HOMEPAGE,
            license=self.LICENSE,
            disable_shuffling=True,  # Papers use the first N records of the file.
        )

    # TFDS inspects this signature; an optional `pipeline` would make it load Apache Beam.
    def _split_generators(self, dl_manager):  # pyright: ignore[reportIncompatibleMethodOverride]
        files = self.FILES[self.builder_config.name]  # pyright: ignore[reportOptionalMemberAccess]
        try:
            manual_dir = Path(dl_manager.manual_dir)
        except AssertionError:  # absent or empty
            manual_dir = Path(str(dl_manager._manual_dir))
        found = self.found = find_files(files, dl_manager, manual_dir)
        corpus = self.CORPORA.get(self.builder_config.name)  # pyright: ignore[reportOptionalMemberAccess]
        self.source = None if corpus is None else corpus.find(dl_manager, manual_dir)
        return {s: self._generate_examples(found, s) for s in files if s in found}

    def _generate_examples(self, found: Mapping[str, FoundFile], split: str):
        kind = self.Article if split == ARTICLES else self.Record
        number, problems = 0, collections.Counter[str]()
        for number, (place, value) in enumerate(found[split].records(), start=1):
            record = records.convert(place, value, kind)
            self.check(place, record)
            if split != ARTICLES and (problem := self.wrong_version(value, split)) is not None:
                problems[problem] += 1
            yield number - 1, {"record": msgspec.json.encode(record).decode()}
        for problem, count in problems.items():
            if count >= self.MIN_WRONG * number:
                raise UserError(
                    f"{found[split].path}: {count:,} of {number:,} questions {problem}."
                )

    def wrong_version(self, value: Any, split: str) -> str | None:
        """Returns why a JSON record is of another benchmark or version, as a part of a sentence."""
        del value, split

    def check(self, place: str, record: Any) -> None:
        """Checks constraints that the types of a record cannot express."""

    @classmethod
    def convert(cls, record: Any, split: str, setting: str) -> "Converted":
        """Converts a record to a question and its context; a missing official id becomes "".

        With a config of `CORPORA`, the context is empty, and ``supporting``,
        ``supporting_sentences`` and ``context`` have titles or ids of passages of that corpus.
        """
        raise NotImplementedError

    @classmethod
    def convert_article(cls, article: Any) -> Passage:
        """Converts a record from the split `ARTICLES` to a passage."""
        raise NotImplementedError


class RecordSource:
    """Random access to the records of one split, for ``grain.MapDataset.source``."""

    def __init__(self, source: Sequence[Mapping[str, Any]]):
        self._source = source

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: SupportsIndex) -> dict[str, Any]:
        return msgspec.json.decode(self._source[index.__index__()]["record"])

    def __repr__(self) -> str:
        return f"RecordSource({len(self)} records)"


Converted = tuple[Question, tuple[Passage, ...]]


def prepare_builder(
    builder_class: type[OfficialBuilder],
    config: str,
    data_dir: str | Path,
    manual_dir: str | Path | None = None,
) -> OfficialBuilder:
    """Writes the ArrayRecord files of one benchmark and returns the builder that reads them.

    TFDS keeps its files in ``data_dir``, with downloads in the subfolder ``downloads``. Official
    files placed by hand are expected in ``manual_dir``, by default ``downloads/manual``.
    """
    if config not in builder_class.FILES:
        known = ", ".join(builder_class.FILES)
        raise UserError(f"{builder_class.name} has no config {config!r}; known: {known}.")
    if manual_dir is not None and not Path(manual_dir).is_dir():
        raise UserError(f"manual_dir {manual_dir} is not a folder.")
    download_config = tfds.download.DownloadConfig(
        manual_dir=manual_dir and Path(manual_dir).resolve(),
        # Always builds again, because the files placed by hand may have changed.
        download_mode=tfds.GenerateMode.REUSE_CACHE_IF_EXISTS,
        try_download_gcs=False,
    )
    try:
        builder = builder_class(config=config, data_dir=data_dir, file_format="array_record")
        with contextlib.redirect_stdout(sys.stderr):  # Keeps stdout for results.
            builder.download_and_prepare(download_config=download_config)
    except (OSError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or one_line(str(error))
        if not isinstance(error, OSError) and "write() failed" not in reason:
            raise  # ArrayRecord's writer raises RuntimeError if the disk is full.
        raise UserError(f"{data_dir} cannot be written ({reason}).") from error
    return builder


def data_source(builder: OfficialBuilder, split: str) -> RecordSource:
    """Returns the records of a split of a prepared benchmark."""
    if split not in builder.info.splits:
        known = ", ".join(builder.info.splits)
        raise UserError(f"{builder.info.full_name} has no split {split!r}; built: {known}.")
    source = builder.as_data_source(split=split)  # pyright: ignore[reportCallIssue]
    return RecordSource(source)


def to_dataset(builder: OfficialBuilder) -> Dataset:
    """Converts the splits of a prepared benchmark, in official order.

    A passage is identified by its title and text, so questions share equal passages. If two
    questions share an id (answerable and unanswerable twins of MuSiQue-Full), the second id gets
    the suffix ``__2``. A question without an id is called ``<split>_<number>``, counted from 0. All
    passages of the split `ARTICLES` are included. If that split is missing, questions whose gold
    passages are articles get ``supporting=None``.
    """
    config = builder.builder_config.name  # pyright: ignore[reportOptionalMemberAccess]
    built = [split for split in builder.FILES[config] if split in builder.info.splits]
    corpus: dict[str, Passage] = {}
    if ARTICLES in built:
        built.remove(ARTICLES)
        for article in _records(builder, ARTICLES, builder.Article):
            passage = builder.convert_article(article)
            if corpus.setdefault(passage.id, passage) != passage:
                raise UserError(f"{builder.info.full_name}: two articles have id {passage.id!r}.")
    questions: dict[str, Question] = {}
    unplaced = 0
    for split in built:
        for index, record in enumerate(_records(builder, split, builder.Record)):
            question, passages = builder.convert(record, split, config)
            question = dataclasses.replace(question, id=question.id or f"{split}_{index}")
            for passage in passages:
                corpus.setdefault(passage.id, passage)
            if (
                not set(question.supporting or ()) <= corpus.keys()
                and config not in builder.CORPORA
            ):
                question = dataclasses.replace(question, supporting=None)
            unplaced += question.supporting is None and bool(passages and question.answers)
            if question.id in questions and config in builder.SHARED_IDS:
                question = dataclasses.replace(question, id=f"{question.id}__2")
            if question.id in questions:
                raise UserError(f"{builder.info.full_name}: two questions have id {question.id!r}.")
            questions[question.id] = question
    if unplaced:
        logging.warning("%s: %d questions lack a gold passage in their context", config, unplaced)
    return Dataset(f"{builder.name}_{config}", tuple(questions.values()), corpus, {})


def _records(builder: OfficialBuilder, split: str, kind: type[msgspec.Struct]) -> Iterator[Any]:
    source = data_source(builder, split)
    return (msgspec.convert(source[index], kind) for index in range(len(source)))
