"""The prompt of FlashRAG's naive generation, which requests a short answer from passages."""

from collections.abc import Sequence

from cirag_jax.llm.types import Message
from cirag_jax.methods.common.own_prompts import Prompt
from cirag_jax.types import Passage

PROMPT = Prompt("reader.documents", labels={"question": "Question:"}, written={"answer": "Answer:"})
CLOSED_BOOK = Prompt("reader.question", labels=PROMPT.labels, written=PROMPT.written)
_BRIEFLY = (
    "Give the answer alone, a name, a date, a number or a short phrase, without any other words."
)


def reading_messages(question: str, passages: Sequence[Passage]) -> tuple[Message, ...]:
    """Returns the conversation that requests an answer from passages.

    Without passages, it requests an answer from the model's own knowledge.
    """
    query = Message("user", f"Question: {question}")
    if not passages:
        return CLOSED_BOOK.conversation(f"Answer the question. {_BRIEFLY}", (), query)
    documents = "\n".join(
        f"Doc {number} (Title: {passage.title}) {passage.text}"
        for number, passage in enumerate(passages, start=1)
    )
    instruction = f"Answer the question from the documents below. {_BRIEFLY}\n\n"
    return PROMPT.conversation(Message("system", instruction, documents), (), query)


def parse_short_answer(text: str) -> str:
    """Returns the first line with content, without a label such as ``Answer:``."""
    for line in text.splitlines():
        line = line.strip(" \t*")
        label, colon, rest = line.partition(":")
        if colon and label.strip(" *").lower() in ("answer", "the answer is", "final answer"):
            line = rest.strip(" \t*")
        if line:
            return line
    return ""
