"""The answer in a chain of thought, "So the answer is: ..." (IRCoT, FLARE, DRAGIN)."""

import re

from cirag_jax.datasets.sentences import split_sentences

FINAL = "So the answer is"
_MAX_CHARS = 300
_MARK = re.compile(r"\bthe (?:final )?answer is\b[\s:*]*", re.IGNORECASE)


def has_answer(text: str) -> bool:
    """Returns whether a text states its answer."""
    return _MARK.search(text) is not None


def first_sentence(text: str) -> str:
    """Returns the first sentence of a text, or an empty text."""
    return next(iter(split_sentences(text.strip())), "")


def written_answer(text: str) -> tuple[str, str | None]:
    """Returns the answer that a chain of thought states; never fails.

    Returns:
      The sentence after the last "the answer is", without its period; or the last sentence of a
      text without this mark. Also the kind of problem (``empty``, ``no_answer_mark``) or None.
    """
    marks = list(_MARK.finditer(text))
    if marks:
        answer = first_sentence(next(iter(text[marks[-1].end() :].splitlines()), ""))
        answer = answer.strip(" \t*").removesuffix(".").strip()[:_MAX_CHARS]
        return answer, None if answer else "empty"
    last = next(reversed(split_sentences(text.strip())), "")[:_MAX_CHARS]
    return last, "no_answer_mark" if last else "empty"
