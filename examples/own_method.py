"""A custom method in one file: it searches, searches again with the best passage, and answers.

    python examples/own_method.py                                  # one question
    PYTHONPATH=. python launch/answer.py --config=examples/own_method.py:small --workdir=W

The program yields requests and receives responses. Batching, the journal, metrics and the viewer
need no further code. docs/adding_a_method.md explains each part.
"""

import collections
import dataclasses
import pathlib
import sys
from typing import Any

# The repository runs without being installed.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from cirag_jax.methods.common.reading import ReaderFormat, read
from cirag_jax.methods.registry import Method
from cirag_jax.runtime.requests import Needs, Program, Retrieve, Retrieved
from cirag_jax.types import PositiveInt, Prediction, Question, Step
from cirag_jax.validation import check_fields
from configs.methods import blocks


@dataclasses.dataclass(frozen=True)
class OwnMethodConfig:
    """Settings of the method, set by flags such as ``--config.own_method.num_passages=5``.

    Attributes:
      num_passages: passages per search.
      reader_format: prompt and answer format of the reader; the shipped reader writes ``chain``.
    """

    needs = Needs(roles=("reader",))

    num_passages: PositiveInt = 3
    reader_format: ReaderFormat = "chain"

    def __post_init__(self):
        check_fields(self)


def two_searches(question: Question, config: OwnMethodConfig) -> Program[Prediction]:
    """Searches with the question, then also with the best passage; reads all passages."""
    first: Retrieved = yield Retrieve(question.question, config.num_passages)
    query = f"{question.question} {first.passages[0].text}"
    second: Retrieved = yield Retrieve(query, config.num_passages)

    passages = list({p.id: p for p in (*first.passages, *second.passages)}.values())
    errors = collections.Counter[str]()
    attempt = yield from read(question.question, "passage", passages, config.reader_format, errors)
    return Prediction(
        attempt.answer,
        "passage",
        passages=tuple(passage.id for passage in passages),
        steps=(
            Step(question.question, tuple(p.id for p in first.passages)),
            Step(query, tuple(p.id for p in second.passages)),
        ),
        attempts=(attempt,),
        parse_errors=dict(errors),
    )


METHOD = Method(two_searches, OwnMethodConfig)


def get_config(preset: str = "small") -> Any:
    """Returns the config; the file of a method may also be its config file."""
    config = blocks.method("examples.own_method")
    return blocks.shipped(config) if preset == "small" else blocks.preset(config, preset)


def main() -> str:
    """Answers one question with the method."""
    from cirag_jax import Cirag
    from examples.own_documents import DOCUMENTS, QUESTION

    with Cirag.open(documents=DOCUMENTS, method=__file__) as rag:
        answer = rag.answer(QUESTION)
    print(QUESTION, answer.text, sep="\n  ")
    return answer.text


if __name__ == "__main__":
    main()
