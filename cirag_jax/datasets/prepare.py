"""Converts a benchmark's official files to a dataset folder, which every command reads.

    python -m cirag_jax.datasets.prepare --benchmark=two_wiki --manual_dir=files --out=data/2wiki
    python -m cirag_jax.datasets.prepare --source=FlashRAG/2wiki --out=data/2wiki

The second form converts files of other projects (docs/coming_from.md).

Prints progress on stderr and one JSON object on stdout; exits with 2 on bad input.
"""

import argparse
import contextlib
import dataclasses
import fcntl
import json
import random
import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from cirag_jax.datasets import formats, jsonl
from cirag_jax.datasets.benchmarks import (
    BENCHMARKS,
    prepare_builder,
    to_dataset,
    whole_corpus,
)
from cirag_jax.datasets.corpus import POLICIES, WHOLE, build_corpus
from cirag_jax.datasets.formats import base, trec
from cirag_jax.datasets.jsonl import write_dataset
from cirag_jax.errors import UserError
from cirag_jax.io import check_arguments, one_line, say, standard_streams
from cirag_jax.types import Dataset, Passage, Question

# Flags of one kind of input only.
_BUILT = ("benchmark", "config", "manual_dir", "data_dir")
_CONVERTED = ("source", "format", "passages")


def prepare(
    benchmark: str,
    out: Path,
    *,
    config: str | None = None,
    manual_dir: Path | None = None,
    data_dir: Path | None = None,
    corpus: str = WHOLE,
    split: str | None = None,
    limit: int = 0,
    seed: int = 0,
) -> Dataset:
    """Builds a benchmark, selects questions and passages, and writes the dataset folder.

    Args:
      benchmark: name of the benchmark.
      out: the folder to write.
      config: name of the benchmark's config; None is the first one.
      manual_dir: folder of official files placed by hand; None downloads them.
      data_dir: folder for downloads and ArrayRecord files of TFDS; None is ``out/tfds``.
      corpus: corpus policy. ``per_question`` writes the same passages as ``selected_questions``,
        because it restricts the search, not the corpus.
      split: the only split whose questions to keep; None keeps all.
      limit: number of random questions per split; 0 keeps all.
      seed: seed of the random questions and of the policy.
    """
    if limit < 0:
        raise UserError(f"--limit={limit} must not be negative.")
    builder_class = BENCHMARKS[benchmark]
    config = config or next(iter(builder_class.FILES))
    if config in builder_class.CORPORA and corpus != WHOLE:
        raise UserError(
            f"--corpus={corpus} does not apply to {benchmark} with --config={config}, which has "
            "its own corpus; select passages later, with config.data.corpus"
        )
    data_dir = data_dir or out / "tfds"
    with _locked(data_dir):
        builder = prepare_builder(builder_class, config, data_dir, manual_dir)
        dataset = to_dataset(builder)
        questions = _draw(_of_split(dataset, split), limit, seed)
        if builder.source is not None:
            return whole_corpus.write(builder, dataset.name, questions, out)
        passages = build_corpus(dataset, questions, corpus, seed).passages
        dataset = _restrict(dataset, questions, passages)
        write_dataset(dataset, out)
        whole_corpus.write_manifest(builder, out)
    return dataset


@contextlib.contextmanager
def _locked(data_dir: Path) -> Iterator[None]:
    """Waits until no other process uses the files of TFDS, because each builds them again."""
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        file = (data_dir / ".lock").open("a")
    except OSError as error:
        raise UserError(f"{data_dir} cannot be written ({error.strerror}).") from error
    with file:
        with contextlib.suppress(OSError):  # Some network file systems have no locks.
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def convert(
    source: Path,
    out: Path,
    *,
    format: str | None = None,
    passages: Path | None = None,
    corpus: str = WHOLE,
    split: str | None = None,
    limit: int = 0,
    seed: int = 0,
) -> Dataset:
    """Converts a dataset of another project to a dataset folder; see `prepare`.

    Passages are written as they are read, so the corpus may be larger than memory, unless a policy
    selects passages. Rankings of a result folder are written to ``run.trec``.

    Args:
      source: a folder, a zip archive or a file.
      out: the folder to write.
      format: one of `formats.FORMATS`; None recognizes the format.
      passages: a file or folder of the passages, if ``source`` does not contain them.
      corpus: corpus policy.
      split: the only split whose questions to keep; None keeps all.
      limit: number of random questions per split; 0 keeps all.
      seed: seed of the random questions and of the policy.
    """
    reader = formats.open_reader(source, format)
    name = reader.source.path.resolve().name.partition(".")[0]
    drafts = list(reader.drafts())
    rankings = reader.rankings()
    if passages is not None:
        reader = formats.open_reader(passages, format)
    jsonl.write_passages(out, name, base.unique_passages(reader))
    by_id = jsonl.read_corpus(out) if (out / jsonl.CORPUS).is_file() else {}
    questions = base.resolve(drafts, by_id.values(), reader.notes)
    dataset = Dataset(name, questions, by_id, reader.triples(by_id) if by_id else {})
    if questions:
        chosen = _draw(_of_split(dataset, split), limit, seed)
        selected = by_id.values()
        if corpus != WHOLE:
            selected = build_corpus(dataset, chosen, corpus, seed).passages
            jsonl.write_passages(out, name, selected)
        dataset = _restrict(dataset, chosen, selected)
    jsonl.write_annotations(out, dataset)
    if rankings:
        trec.write_run(out / trec.RUN, rankings, name)
    base.report(source, reader.notes)
    return dataset


def _of_split(dataset: Dataset, split: str | None) -> tuple[Question, ...]:
    if split is None:
        return dataset.questions
    questions = tuple(question for question in dataset.questions if question.split == split)
    if not questions:
        splits = sorted({str(question.split) for question in dataset.questions})
        raise UserError(f"--split={split} has no questions; the splits are {', '.join(splits)}.")
    return questions


def _draw(questions: Sequence[Question], limit: int, seed: int) -> tuple[Question, ...]:
    """Draws ``limit`` questions from each split, in official order."""
    if not limit:
        return tuple(questions)
    rng = random.Random(seed)
    kept: set[str] = set()
    for split in dict.fromkeys(question.split for question in questions):
        ids = [question.id for question in questions if question.split == split]
        kept.update(rng.sample(ids, min(limit, len(ids))))
    return tuple(question for question in questions if question.id in kept)


def _restrict(
    dataset: Dataset, questions: Sequence[Question], passages: Collection[Passage]
) -> Dataset:
    """Restricts a dataset to these questions and passages.

    A context that loses a passage becomes None, because a partial context would look complete.
    """
    if len(passages) == len(dataset.corpus):
        return dataclasses.replace(dataset, questions=tuple(questions))
    corpus = {passage.id: passage for passage in passages}
    triples = {name: found for name, found in dataset.triples.items() if name in corpus}
    kept = tuple(
        question
        if all(passage_id in corpus for passage_id in question.context or ())
        else dataclasses.replace(question, context=None)
        for question in questions
    )
    return Dataset(dataset.name, kept, corpus, triples)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m cirag_jax.datasets.prepare")
    kind = parser.add_mutually_exclusive_group(required=True)
    kind.add_argument("--benchmark", choices=BENCHMARKS)
    kind.add_argument("--source", type=Path, help="a folder, archive or file of another project")
    parser.add_argument("--config", help="of a benchmark; see docs/data.md (default: the first)")
    parser.add_argument(
        "--format", choices=formats.FORMATS, help="of --source (default: recognized)"
    )
    parser.add_argument("--passages", type=Path, help="the corpus, if --source does not have it")
    parser.add_argument("--out", required=True, type=Path, help="the dataset folder to write")
    parser.add_argument("--manual_dir", type=Path, help="folder of official files placed by hand")
    parser.add_argument("--data_dir", type=Path, help="folder of TFDS's files (default: OUT/tfds)")
    parser.add_argument("--corpus", default=WHOLE, choices=POLICIES)
    parser.add_argument("--split", help="keep only the questions of this split")
    parser.add_argument("--limit", type=int, default=0, help="random questions per split; 0: all")
    parser.add_argument("--seed", type=int, default=0)
    flags = vars(parser.parse_args(arguments))
    try:
        check_arguments(map(str, flags.values()))
        others = _CONVERTED if flags["benchmark"] else _BUILT
        for name in others:
            if flags.pop(name) is not None and name not in ("benchmark", "source"):
                wanted = "--source" if flags.get("benchmark") else "--benchmark"
                raise UserError(f"--{name} needs {wanted}.")
        dataset = prepare(**flags) if flags.get("benchmark") else convert(**flags)
    except UserError as error:
        say(f"prepare: {one_line(str(error))}")
        return 2
    splits = [question.split for question in dataset.questions]
    result = {
        "folder": str(flags["out"]),
        "name": dataset.name,
        "num_questions": {str(split): splits.count(split) for split in dict.fromkeys(splits)},
        "num_passages": len(dataset.corpus),
        "corpus": flags["corpus"],
    }
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    with standard_streams():
        sys.exit(main())
