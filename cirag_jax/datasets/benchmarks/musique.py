"""MuSiQue v1.0 (Trivedi et al., TACL 2022): MuSiQue-Ans and MuSiQue-Full."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow_datasets as tfds

from cirag_jax.datasets.benchmarks.base import (
    Converted,
    OfficialBuilder,
    passage_of,
    present_fields,
    texts,
)
from cirag_jax.datasets.benchmarks.files import OfficialFile
from cirag_jax.datasets.records import Record
from cirag_jax.types import Question, SubQuestion

_ARCHIVE = "musique_data_v1.0.zip"
# This host gives the file itself, where drive.google.com asks first whether to skip a virus scan.
_URL = (
    "https://drive.usercontent.google.com/download"
    "?id=1tGdADlNjWFaHLeZZGShh2IRcpO6Lv24h&export=download&confirm=t"
)
_NOWHERE = -1  # stands for a null paragraph_support_idx
_OPTIONAL = ("answer", "answer_aliases", "answerable", "question_decomposition")


def _files(config: str) -> dict[str, OfficialFile]:
    return {
        split: OfficialFile(f"musique_{config}_v1.0_{split}.jsonl", _URL, _ARCHIVE)
        for split in ("train", "dev", "test")
    }


class MuSiQue(OfficialBuilder):
    """Questions of two to four hops with a decomposition; Full adds unanswerable twins."""

    name = "musique"
    VERSION = tfds.core.Version("1.0.0")
    BUILDER_CONFIGS = [
        tfds.core.BuilderConfig(name="ans", description="answerable questions"),
        tfds.core.BuilderConfig(name="full", description="each with an unanswerable twin"),
    ]
    FILES = {"ans": _files("ans"), "full": _files("full")}
    SHARED_IDS = frozenset({"full"})

    def _info(self) -> tfds.core.DatasetInfo:
        text, sequence = tfds.features.Text, tfds.features.Sequence
        features = {
            "id": text(),
            "question": text(),
            "present": sequence(text()),
            "answer": text(),
            "answer_aliases": sequence(text()),
            "answerable": np.bool_,
            "paragraphs": sequence(
                {
                    "idx": np.int32,
                    "title": text(),
                    "paragraph_text": text(),
                    "is_supporting": np.bool_,
                }
            ),
            "question_decomposition": sequence(
                {
                    "id": text(),
                    "question": text(),
                    "answer": text(),
                    "paragraph_support_idx": np.int32,
                }
            ),
        }
        return tfds.core.DatasetInfo(
            builder=self,
            description="Multi-hop questions composed of single-hop questions.",
            features=tfds.features.FeaturesDict(features),
            homepage="https://github.com/StonyBrookNLP/musique",
            license="CC BY 4.0",
            disable_shuffling=True,
        )

    @classmethod
    def encode(cls, record: Record) -> dict[str, Any]:
        """See `OfficialBuilder.encode`."""
        paragraphs = record.parts("paragraphs", required=True) or []
        present = present_fields(record, _OPTIONAL)
        if all(part.value.get("is_supporting") is not None for part in paragraphs):
            present.append("is_supporting")
        return {
            "id": record.text("id", filled=True),
            "question": record.text("question", filled=True),
            "present": present,
            "answer": record.maybe_text("answer") or "",
            "answer_aliases": record.texts("answer_aliases") or (),
            "answerable": bool(record.maybe("answerable", bool)),
            "paragraphs": [
                {
                    "idx": part.check_index("idx", part.required("idx", int)),
                    "title": part.text("title"),
                    "paragraph_text": part.text("paragraph_text"),
                    "is_supporting": bool(part.maybe("is_supporting", bool)),
                }
                for part in paragraphs
            ],
            "question_decomposition": [
                _encode_step(part, {p.value["idx"] for p in paragraphs})
                for part in record.parts("question_decomposition") or ()
            ],
        }

    @classmethod
    def decode(cls, example: Mapping[str, Any]) -> dict[str, Any]:
        """See `OfficialBuilder.decode`."""
        present = set(texts(example["present"]))
        paragraphs, steps = example["paragraphs"], example["question_decomposition"]
        record = {
            "id": example["id"].decode(),
            "question": example["question"].decode(),
            "answer": example["answer"].decode(),
            "answer_aliases": texts(example["answer_aliases"]),
            "answerable": bool(example["answerable"]),
            "paragraphs": [
                {
                    "idx": int(idx),
                    "title": title,
                    "paragraph_text": text,
                    "is_supporting": bool(gold) if "is_supporting" in present else None,
                }
                for idx, title, text, gold in zip(
                    paragraphs["idx"],
                    texts(paragraphs["title"]),
                    texts(paragraphs["paragraph_text"]),
                    paragraphs["is_supporting"],
                    strict=True,
                )
            ],
            "question_decomposition": [
                {
                    "id": step_id,
                    "question": question,
                    "answer": answer,
                    "paragraph_support_idx": None if idx == _NOWHERE else int(idx),
                }
                for step_id, question, answer, idx in zip(
                    texts(steps["id"]),
                    texts(steps["question"]),
                    texts(steps["answer"]),
                    steps["paragraph_support_idx"],
                    strict=True,
                )
            ],
        }
        for name in _OPTIONAL:
            if name not in present:
                record[name] = None
        return record

    @classmethod
    def convert(cls, record: Mapping[str, Any], split: str, setting: str) -> Converted:
        """See `OfficialBuilder.convert`.

        The id begins with the shape of the question, such as ``3hop1``: its type and its hops.
        ``setting`` says whether the context suffices, since Full has both kinds.
        """
        del setting
        shape = record["id"].split("__", 1)[0]
        by_idx = {
            paragraph["idx"]: passage_of(paragraph["title"], paragraph["paragraph_text"])
            for paragraph in record["paragraphs"]
        }
        gold = [(p["idx"], p["is_supporting"]) for p in record["paragraphs"]]
        known = all(is_gold is not None for _, is_gold in gold)
        question = Question(
            id=record["id"],
            question=record["question"],
            answers=_answers(record),
            type=shape,
            hops=int(shape[0]) if shape[:1].isdigit() else None,
            split=split,
            setting={None: None, True: "answerable", False: "unanswerable"}[record["answerable"]],
            supporting=tuple(dict.fromkeys(by_idx[idx].id for idx, is_gold in gold if is_gold))
            if known
            else None,
            context=tuple(passage.id for passage in by_idx.values()),
            decomposition=_decomposition(record, by_idx),
        )
        return question, tuple(by_idx.values())


def _encode_step(step: Record, known: set[int]) -> dict[str, Any]:
    idx = step.maybe_count("paragraph_support_idx")
    if idx is not None and idx not in known:
        raise step.error("paragraph_support_idx", f"names paragraph {idx}, which is not there")
    return {
        "id": str(step.value.get("id", "")),  # a number or a string, as the source had it
        "question": step.text("question"),
        "answer": step.text("answer"),
        "paragraph_support_idx": _NOWHERE if idx is None else idx,
    }


def _answers(record: Mapping[str, Any]) -> tuple[str, ...]:
    if record["answer"] is None:
        return ()
    return tuple(dict.fromkeys((record["answer"], *(record["answer_aliases"] or ()))))


def _decomposition(record: Mapping[str, Any], by_idx: Mapping[int, Any]):
    if record["question_decomposition"] is None:
        return None
    return tuple(
        SubQuestion(
            step["question"],
            step["answer"],
            None
            if step["paragraph_support_idx"] is None
            else by_idx[step["paragraph_support_idx"]].id,
        )
        for step in record["question_decomposition"]
    )
