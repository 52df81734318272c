"""Messages of retrieve-then-read: passages in, a short answer out."""

from collections.abc import Sequence

from cirag_jax.llm.types import Message
from cirag_jax.types import Passage

_INSTRUCTION = (
    "Answer the question from the documents below. Give the answer alone, a name, a date, a number "
    "or a short phrase, without any other words.\n\n"
)


def reading_messages(question: str, passages: Sequence[Passage]) -> tuple[Message, ...]:
    """The conversation of a reader that answers from passages (FlashRAG's naive generation)."""
    documents = "\n".join(
        f"Doc {number} (Title: {passage.title}) {passage.text}"
        for number, passage in enumerate(passages, start=1)
    )
    return (
        Message("system", _INSTRUCTION, documents),
        Message("user", f"Question: {question}"),
    )


def parse_short_answer(text: str) -> str:
    """The first line that holds something, without the label that some models put before it."""
    for line in text.splitlines():
        line = line.strip(" \t*")
        label, colon, rest = line.partition(":")
        if colon and label.strip(" *").lower() in ("answer", "the answer is", "final answer"):
            line = rest.strip(" \t*")
        if line:
            return line
    return ""
