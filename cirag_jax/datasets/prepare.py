"""Converts a benchmark's official files to a dataset folder, which every command reads.

    python -m cirag_jax.datasets.prepare --benchmark=two_wiki --manual_dir=files --out=data/2wiki

Prints progress on stderr and one JSON object on stdout; exits with 2 on bad input.
"""

import argparse
import dataclasses
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path

from cirag_jax.datasets.benchmarks import (
    BENCHMARKS,
    prepare_builder,
    to_dataset,
    whole_corpus,
)
from cirag_jax.datasets.corpus import POLICIES, WHOLE, build_corpus
from cirag_jax.datasets.jsonl import write_dataset
from cirag_jax.errors import UserError
from cirag_jax.io import check_arguments, one_line, say, standard_streams
from cirag_jax.types import Dataset, Passage, Question


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
    builder = prepare_builder(builder_class, config, data_dir or out / "tfds", manual_dir)
    dataset = to_dataset(builder)
    questions = _draw(_of_split(dataset, split), limit, seed)
    if builder.source is not None:
        return whole_corpus.write(builder, dataset.name, questions, out)
    passages = build_corpus(dataset, questions, corpus, seed).passages
    dataset = _restrict(dataset, questions, passages)
    write_dataset(dataset, out)
    whole_corpus.write_manifest(builder, out)
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
    dataset: Dataset, questions: Sequence[Question], passages: Sequence[Passage]
) -> Dataset:
    """Restricts a dataset to these questions and passages.

    A context that loses a passage becomes None, because a partial context would look complete.
    """
    corpus = {passage.id: passage for passage in passages}
    kept = tuple(
        question
        if all(passage_id in corpus for passage_id in question.context or ())
        else dataclasses.replace(question, context=None)
        for question in questions
    )
    return Dataset(dataset.name, kept, corpus, {})


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m cirag_jax.datasets.prepare")
    parser.add_argument("--benchmark", required=True, choices=BENCHMARKS)
    parser.add_argument("--config", help="see docs/data.md (default: the first)")
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
        dataset = prepare(**flags)
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
