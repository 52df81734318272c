"""Separating a reasoning model's thoughts from its answer.

Reasoning models write their thoughts between tags in front of the answer. A chat template may
already have opened the thoughts, so that the response only closes them.
"""

import dataclasses
import json
import re

from cirag_jax.llm.types import Generated, Token

# Tags of DeepSeek-R1, Qwen3 and others; of Magistral; of Kimi; and the channels of gpt-oss.
_NAMES = r"(?:seed:)?(?:think(?:ing)?|thoughts?|reason(?:ing)?|reflection|scratchpad)"
_OPEN = re.compile(
    rf"<{_NAMES}>|\[THINK\]|◁think▷"
    r"|(?:<\|start\|>assistant)?<\|channel\|>(?:analysis|commentary)\b",
    re.IGNORECASE,
)
_CLOSE = re.compile(
    rf"</{_NAMES}>|\[/THINK\]|◁/think▷"
    r"|(?:<\|start\|>assistant)?<\|channel\|>final[^<\n]{0,40}<\|message\|>",
    re.IGNORECASE,
)
_END = re.compile(r"<\|(?:return|end)\|>\s*\Z")


def answer_span(text: str) -> tuple[int, int]:
    """Returns the start and the end of the answer in a response.

    The answer follows the last closing tag, or precedes the thoughts if nothing follows them. If
    the thoughts do not end, the answer is empty. A response in JSON has no thoughts, but may quote
    such tags.
    """
    opening = _OPEN.search(text)
    if not (opening or _CLOSE.search(text)) or _is_json(text):
        return 0, len(text)
    ends = [mark.end() for mark in _CLOSE.finditer(text)]
    for end in ends:
        if _is_json(text[end:]):  # which may quote tags
            return end, len(text)
    start = max(ends, default=0)
    unclosed = _OPEN.search(text, start)
    if unclosed:
        end = unclosed.start()
    else:
        ending = _END.search(text, start) if start else None
        end = ending.start() if ending else len(text)
    if opening and not text[start:end].strip() and text[: opening.start()].strip():
        return 0, opening.start()
    return start, end


def _is_json(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict | list)
    except (ValueError, RecursionError):
        return False


def without_thoughts(text: str) -> str:
    """Returns the answer of a response, which is the whole text if it has no thoughts."""
    start, end = answer_span(text)
    return text if (start, end) == (0, len(text)) else text[start:end].strip()


def drop_thoughts(response: Generated) -> Generated:
    """Moves the thoughts out of a response's text and tokens; sets ``usage.thoughts`` to 1."""
    whole, text = response.text, without_thoughts(response.text)
    if text == whole and response.thoughts is None:
        return response
    start = whole.find(text, answer_span(whole)[0])
    thoughts = f"{response.thoughts or ''}{whole[:start]}{whole[start + len(text) :]}".strip()
    return dataclasses.replace(
        response,
        text=text,
        thoughts=thoughts,
        usage=dataclasses.replace(response.usage, thoughts=1),
        tokens=response.tokens and _tokens_between(response.tokens, start, start + len(text)),
    )


def _tokens_between(tokens: tuple[Token, ...], start: int, end: int) -> tuple[Token, ...]:
    return tuple(
        dataclasses.replace(token, offset=max(0, token.offset - start))
        for token in tokens
        if token.offset + len(token.text) > start and token.offset < end
    )
