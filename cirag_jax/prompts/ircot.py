"""IRCoT's messages: one more sentence of reasoning about what was read."""

from collections.abc import Iterable, Sequence

from cirag_jax.datasets.sentences import split_sentences
from cirag_jax.llm.types import Message
from cirag_jax.types import Passage

FINAL = "So the answer is"
_INSTRUCTION = (
    "Reason about the question in short sentences that state one fact of the documents each. Write "
    f'only the next sentence. As soon as the facts suffice, write "{FINAL}: " and the answer.\n\n'
)


def thought_messages(
    question: str, passages: Iterable[Passage], thoughts: Sequence[str]
) -> tuple[Message, ...]:
    """Asks for the sentence that follows ``thoughts``."""
    documents = "\n\n".join(f"{passage.title}\n{passage.text}" for passage in passages)
    reasoning = f"Question: {question}\nReasoning: {' '.join(thoughts)}".rstrip()
    return (Message("system", _INSTRUCTION, documents), Message("user", reasoning))


def parse_thought(text: str) -> str:
    """The first sentence of a response; empty where there is none."""
    return next((s.strip() for s in split_sentences(text.strip()) if s.strip()), "")
