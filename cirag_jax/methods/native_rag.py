"""NativeRAG: one retrieval with the question, one reading. What every method must beat."""

import dataclasses

from cirag_jax.errors import UserError
from cirag_jax.prompts import rag as prompts
from cirag_jax.runtime.requests import Generate, Generated, Needs, Program, Retrieve, Retrieved
from cirag_jax.types import Attempt, Prediction, Question, Step


@dataclasses.dataclass(frozen=True)
class NativeRagConfig:
    """NativeRAG's settings (FlashRAG's naive generation).

    Attributes:
      num_passages: passages retrieved, which recall looks at.
      num_read: how many of them the reader gets; the CIRAG paper's NativeRAG reads all ten.
    """

    needs = Needs(roles=("reader",))

    num_passages: int = 10
    num_read: int = 10

    def __post_init__(self):
        if not 1 <= self.num_read <= self.num_passages:
            raise UserError("num_read must lie between 1 and num_passages.")


def native_rag(asked: Question, config: NativeRagConfig) -> Program[Prediction]:
    """Retrieves once, reads once."""
    question = asked.question
    found: Retrieved = yield Retrieve(question, config.num_passages)
    read = found.passages[: config.num_read]
    response: Generated = yield Generate(prompts.reading_messages(question, read), "reader")
    answer, problem = prompts.parse_short_answer(response.text), ""
    if not answer:
        problem = "answer_empty"
    elif response.finish_reason == "length" and len(response.text.strip().splitlines()) == 1:
        problem = "answer_truncated"
    ids = tuple(passage.id for passage in found.passages)
    texts = tuple(f"{passage.title}\n{passage.text}" for passage in read)
    return Prediction(
        answer,
        "passage",
        passages=ids,
        steps=(Step(question, ids),),
        attempts=(Attempt("passage", texts, response.text, answer, bool(answer)),),
        parse_errors={problem: 1} if problem else {},
    )
