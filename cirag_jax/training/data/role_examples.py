"""Training examples of any role of a method, from a teacher's conversations."""

from collections.abc import Sequence

import numpy as np

from cirag_jax.distill.examples import RoleExample
from cirag_jax.errors import UserError
from cirag_jax.llm.chat import ChatTokenizer, PromptError
from cirag_jax.llm.types import Message
from cirag_jax.training.data.examples import Example, Part, chat_examples, continued_example


def role_examples(
    tokenizer: ChatTokenizer, records: Sequence[tuple[str, RoleExample]], *, max_length: int
) -> tuple[list[Example], dict[str, int]]:
    """Returns the examples of at most ``max_length`` tokens, and the numbers of dropped ones.

    The loss is on the target and the token that ends it. ``records`` are pairs of ``file:line`` and
    an example.
    """
    examples = []
    for place, record in records:
        try:
            example = _render(tokenizer, record)
        except PromptError as error:
            raise UserError(f"{place} does not fit the student: {error}.") from None
        examples.append(example)
    kept = [example for example in examples if len(example.tokens_T) <= max_length]
    num_dropped = len(examples) - len(kept)
    return kept, {"dropped_too_long": num_dropped} if num_dropped else {}


def _render(tokenizer: ChatTokenizer, record: RoleExample) -> Example:
    if record.messages[-1].role == "assistant":
        tokens_T, start = continued_example(tokenizer, record.messages, record.target)
        weight_T = (np.arange(len(tokens_T)) >= start).astype(np.float32)
        part_T = (weight_T * Part.ANSWER).astype(np.uint8)
        return Example(tokens_T, weight_T, part_T, record.question_id)
    turns = [*record.messages, Message("assistant", record.target)]
    return chat_examples(
        tokenizer,
        turns,
        (len(turns) - 1,),
        source=record.question_id,
        split=lambda _: ((0, Part.ANSWER),),
    )
