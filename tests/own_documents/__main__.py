"""Answers the questions of `collections.jsonl`, each over its own documents.

    python -m tests.own_documents [METHOD:PRESET] [KEY=VALUE ...]

Prints each answer with its verdict, and the number of right answers. A question that no document
answers is right if the answer is empty.
"""

import json
import pathlib
import sys
import tempfile
from collections.abc import Mapping
from typing import Any

from cirag_jax import Answer, Cirag
from cirag_jax.evaluation import answers

FILE = pathlib.Path(__file__).parent / "collections.jsonl"


def read_collections() -> list[dict[str, Any]]:
    """Returns the collections."""
    return [json.loads(line) for line in FILE.read_text("utf-8").splitlines()]


def ask(collection: Mapping[str, Any], method: str, settings: Mapping[str, Any]) -> Answer:
    """Answers the question of a collection."""
    name, _, preset = method.partition(":")
    with tempfile.TemporaryDirectory() as folder:
        for file, text in collection["documents"].items():
            (pathlib.Path(folder) / file).write_text(text, "utf-8")
        with Cirag.open(preset, documents=folder, method=name, settings=settings) as rag:
            return rag.answer(collection["question"])


def is_right(answer: str, golds: list[str]) -> bool:
    """Returns whether an answer equals a gold answer, or is empty if there is none."""
    return bool(answers.exact_match(answer, golds)) if golds else not answer.strip()


def main(arguments: list[str]) -> None:
    method = "cirag:small"
    if arguments and "=" not in arguments[0]:
        method = arguments.pop(0)
    settings = dict(argument.split("=", 1) for argument in arguments)
    collections = read_collections()
    verdicts = []
    for collection in collections:
        answer, golds = ask(collection, method, settings), collection["answers"]
        verdicts.append(is_right(answer.text, golds))
        found = any(gold in line for gold in golds for line in answer.evidence)
        print(
            f"{'right' if verdicts[-1] else 'WRONG'}  {collection['kind']:14}"
            f" {collection['name']:30} {answer.text!r}; gold: {golds[:1] or 'none'};"
            f" {answer.granularity}{'' if found or not golds else ', not in the evidence'}",
            flush=True,
        )
        for line in answer.evidence:
            print(f"         {line[:160]}")
    made_up = sum(
        not right for right, c in zip(verdicts, collections, strict=True) if not c["answers"]
    )
    print(f"{sum(verdicts)} of {len(verdicts)} right; {made_up} made up where no document answers")


if __name__ == "__main__":
    main(sys.argv[1:])
