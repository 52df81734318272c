"""Search-R1's Parquet files of questions, which verl and SkyRL also read.

A row has ``prompt`` (messages), ``reward_model.ground_truth.target`` (the answers),
``data_source``, ``ability`` and ``extra_info``; Search-R1's own files also have ``question`` and
``golden_answers``.
"""

import ast
import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cirag_jax.datasets.formats.base import Draft, Format, Reader, answers_of, id_of
from cirag_jax.datasets.formats.files import Source
from cirag_jax.datasets.records import field_error
from cirag_jax.io import replacing
from cirag_jax.types import Dataset, Question

_REWARDS = ("reward_model", "reward_spec")  # The second is SkyRL's name.
_MARK = "Question:"  # Precedes the question in prompts.


class SearchR1Reader(Reader):
    """Reads questions; there are no passages."""

    def drafts(self) -> Iterator[Draft]:
        """See `Reader`; the split of a question is the name of its file."""
        for split, default, (place, row) in self.source.rows_by_split(tables(self.source)):
            question = Question(
                id=id_of(row, place, "id", default=default),
                question=_question(place, row),
                answers=_answers(place, row),
                type=str(row["data_source"]) if row.get("data_source") else None,
                split=split,
            )
            yield Draft(place, question)


def _question(place: str, row: Mapping[str, Any]) -> str:
    """Returns the question: its own field, that of ``extra_info``, or the end of the prompt."""
    extra, prompt = row.get("extra_info"), row.get("prompt")
    for fields in (row, extra if isinstance(extra, dict) else {}):
        if isinstance(text := fields.get("question"), str) and text.strip():
            return text
    last = prompt[-1] if isinstance(prompt, list) and prompt else None
    text = last.get("content") if isinstance(last, dict) else None
    if not isinstance(text, str) or not text.strip():
        raise field_error(place, "question", "is missing, and the prompt has no message")
    return text.rpartition(_MARK)[2].strip()


def _answers(place: str, row: Mapping[str, Any]) -> tuple[str, ...]:
    if row.get("golden_answers") is not None:
        return answers_of(row["golden_answers"], place, "golden_answers")
    for name in _REWARDS:
        reward = row.get(name)
        truth = reward.get("ground_truth") if isinstance(reward, dict) else None
        target = truth.get("target") if isinstance(truth, dict) else truth
        if isinstance(target, str) and target.startswith("["):
            # Some copies of the data store lists as text.
            with contextlib.suppress(ValueError, SyntaxError, RecursionError, MemoryError):
                target = ast.literal_eval(target)
        if target is not None:
            return answers_of(target, place, f"{name}.ground_truth.target")
    raise field_error(place, "reward_model.ground_truth.target", "is missing")


def tables(source: Source) -> list[str]:
    """Returns the tables of questions, the training split first."""
    names = [name for name in source.tables if source.fields(name) & set(_REWARDS)]
    return sorted(names, key=lambda name: (not name.endswith("train"), name))


def write(dataset: Dataset, folder: Path, template: str = "{question}") -> None:
    """Writes a Parquet file per split; ``template`` is the prompt, with the field {question}."""
    import pyarrow
    import pyarrow.parquet

    splits: dict[str, list[dict[str, Any]]] = {}
    for question in dataset.questions:
        split = question.split or "test"
        rows = splits.setdefault(split, [])
        answers = list(question.answers)
        content = template.replace("{question}", question.question)
        rows.append(
            {
                "id": question.id,
                "question": question.question,
                "golden_answers": answers,
                "data_source": question.type or dataset.name,
                "prompt": [{"role": "user", "content": content}],
                "ability": "fact-reasoning",
                "reward_model": {"style": "rule", "ground_truth": {"target": answers}},
                "extra_info": {"split": split, "index": len(rows)},
            }
        )
    for split, rows in splits.items():
        with replacing(folder / f"{split}.parquet") as temporary:
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), temporary)


FORMAT = Format(lambda source: bool(tables(source)), SearchR1Reader, write)
