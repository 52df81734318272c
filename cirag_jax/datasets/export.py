"""Writes a dataset, or the predictions of a run, in the format of another project.

    python -m cirag_jax.datasets.export --data_dir=DATA --format=flashrag --out=flashrag/2wiki
    python -m cirag_jax.datasets.export --data_dir=DATA --run=W --format=flashrag --out=results

``--data_dir`` is a dataset folder or files of another project, as for ``config.data.dir``. With
``--run``, the workdir of launch/answer.py, a result folder is written (flashrag), or a run file
(trec). docs/coming_from.md lists the formats. Prints one JSON object; exits with 2 on bad input.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from cirag_jax.datasets import demo, formats, jsonl
from cirag_jax.datasets.formats import flashrag, search_r1, trec
from cirag_jax.datasets.records import read_lines
from cirag_jax.errors import UserError
from cirag_jax.io import check_arguments, one_line, say, standard_streams, writing
from cirag_jax.types import Dataset

PREDICTIONS = "predictions.jsonl"


class _Prediction(msgspec.Struct):
    """A line of ``predictions.jsonl``."""

    id: str
    answer: str
    passages: tuple[str, ...] = ()


def export(
    format: str,
    out: Path,
    *,
    data_dir: Path | None = None,
    run: Path | None = None,
    split: str | None = None,
    template: Path | None = None,
) -> Dataset:
    """Writes a dataset, or the predictions of a run, to the folder ``out``.

    Args:
      format: one of `formats.WRITABLE`, or ``trec``, which writes ``qrels.trec`` and, with ``run``,
        ``run.trec``.
      out: the folder to write.
      data_dir: the dataset; None is the built-in dataset.
      run: a workdir of launch/answer.py, for the formats flashrag and trec.
      split: the only split to export; None exports all.
      template: a text file with the prompt of search_r1, in which {question} is replaced.
    """
    if data_dir is None:
        dataset = demo.build()
    else:
        read = jsonl.read_dataset if formats.is_own(data_dir) else formats.read
        dataset = read(data_dir, corpus=False)
    if split is not None:
        questions = tuple(q for q in dataset.questions if q.split == split)
        if not questions:
            splits = sorted({str(q.split) for q in dataset.questions})
            raise UserError(f"--split={split} has no questions; the splits are {', '.join(splits)}")
        dataset = dataclasses.replace(dataset, questions=questions)
    if run is not None and format not in ("flashrag", "trec"):
        raise UserError(f"--run needs --format=flashrag or trec, not {format}.")
    if template is not None and format != "search_r1":
        raise UserError("--template needs --format=search_r1.")
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
        if run is not None:
            _write_run(format, out, dataset, run)
        if format == "trec":
            trec.write_qrels(out / trec.QRELS, dataset.questions)
        elif template is not None:
            search_r1.write(dataset, out, _template(template))
        elif run is None:
            formats.write(format, dataset, out)
    return dataset


def _template(path: Path) -> str:
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--template={path} cannot be read: {error}.") from None
    if "{question}" not in text:
        raise UserError(f"--template={path} must contain {{question}}.")
    return text


def _write_run(format: str, out: Path, dataset: Dataset, run: Path) -> None:
    lines = [line for _, line in read_lines(run / PREDICTIONS, _Prediction)]
    known = {question.id for question in dataset.questions}
    lines = [line for line in lines if line.id in known]
    if not lines:
        raise UserError(f"{run / PREDICTIONS} has no question of the dataset.")
    if format == "trec":
        trec.write_run(out / trec.RUN, {line.id: line.passages for line in lines}, run.name)
        return
    for line in lines:
        for passage in line.passages:
            if passage not in dataset.corpus:
                raise UserError(
                    f"{run / PREDICTIONS} has passage {passage!r}, which the dataset does not have."
                )
    rows = ((line.id, line.answer, line.passages) for line in lines)
    flashrag.write_results(out, dataset, rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m cirag_jax.datasets.export")
    parser.add_argument("--format", required=True, choices=(*formats.WRITABLE, "trec"))
    parser.add_argument("--out", required=True, type=Path, help="the folder to write")
    parser.add_argument("--data_dir", type=Path, help="the dataset (default: the built-in one)")
    parser.add_argument("--run", type=Path, help="a workdir of launch/answer.py")
    parser.add_argument("--split", help="export only the questions of this split")
    parser.add_argument("--template", type=Path, help="search_r1: a file with the prompt")
    flags = vars(parser.parse_args(arguments))
    try:
        check_arguments(map(str, flags.values()))
        dataset = export(**flags)
    except UserError as error:
        say(f"export: {one_line(str(error))}")
        return 2
    counts = {"num_questions": len(dataset.questions), "num_passages": len(dataset.corpus)}
    print(json.dumps({"folder": str(flags["out"]), "format": flags["format"], **counts}))
    return 0


if __name__ == "__main__":
    with standard_streams():
        sys.exit(main())
