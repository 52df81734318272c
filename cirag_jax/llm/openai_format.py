"""What goes over the wire to an OpenAI-compatible server, and what its answer means."""

import codecs
import dataclasses
import json
import math
import re
from collections.abc import Sequence
from typing import Any, Literal

from cirag_jax.llm.types import FinishReason, Generate, Message, Token

Server = Literal["openai", "vllm", "transformers", "llamacpp"]


@dataclasses.dataclass(frozen=True)
class Abilities:
    """What a kind of server can do beyond plain chat.

    Attributes:
      continue_final: goes on with an assistant turn: ``fields`` by request fields, ``messages`` by
        a final assistant message alone, or not at all.
      json_schema: takes ``response_format``.
      logprobs: returns log-probabilities.
      length_field: name of the limit of new tokens.
    """

    continue_final: Literal["fields", "messages", ""]
    json_schema: bool
    logprobs: bool
    length_field: str


SERVERS: dict[str, Abilities] = {
    "openai": Abilities("", True, True, "max_completion_tokens"),
    "vllm": Abilities("fields", True, True, "max_tokens"),
    "transformers": Abilities("", False, False, "max_tokens"),
    "llamacpp": Abilities("messages", True, True, "max_tokens"),
}


_MOST_TOKENS = 1 << 40  # that a count may claim: beyond it, it is none
_LEAST_LOGPROB = -9999.0  # as OpenAI writes minus infinity, for which JSON has no number


class BadAnswer(Exception):
    """An answer that is not what the API promises; another try may bring a good one."""


class Refused(Exception):
    """The request cannot be served and trying again will not help; the message is one sentence."""


@dataclasses.dataclass(frozen=True)
class Answer:
    """The useful part of a server's answer; token counts are None where it gives none."""

    text: str
    finish_reason: FinishReason
    tokens: tuple[Token, ...] | None
    prompt_tokens: int | None
    cached_tokens: int
    generated_tokens: int | None


def estimate_tokens(messages: Sequence[Message]) -> int:
    """Tokens of a prompt, on the high side: 3 bytes of UTF-8 a token (English has about 4.5)."""
    return 3 + sum(6 + math.ceil(len(m.text.encode("utf-8", "replace")) / 3) for m in messages)


def request_body(
    request: Generate, model: str, server: Server, omit: Sequence[str] = ()
) -> dict[str, Any]:
    """The JSON body of a chat completion.

    Args:
      request: what is asked.
      model: name of the model on the server.
      server: kind of server, which decides how some wishes are expressed.
      omit: fields never sent, for models that refuse them.

    Raises:
      Refused: this kind of server cannot do what is asked.
    """
    can = SERVERS[server]
    if request.attention or request.entropy:
        what = "attention" if request.attention else "entropy"
        raise Refused(f"{what} is not available over HTTP; use backend=jax")
    wants_logprobs = request.logprobs or request.top_logprobs > 0
    if wants_logprobs and not can.logprobs:
        raise Refused(f"log-probabilities are not available from a server of kind '{server}'")
    if request.json_schema is not None and not can.json_schema:
        raise Refused(f"json_schema is not enforced by a server of kind '{server}'")
    body: dict[str, Any] = {
        "model": model,
        "messages": [{"role": m.role, "content": m.text} for m in request.messages],
        can.length_field: request.max_tokens,
        "temperature": request.temperature,
    }
    if request.temperature > 0:
        body["top_p"] = request.top_p
        body["seed"] = request.seed
    if request.stop:
        body["stop"] = list(request.stop)
    if wants_logprobs:
        body["logprobs"] = True
        if request.top_logprobs:
            body["top_logprobs"] = request.top_logprobs
    if request.json_schema is not None:
        schema = {"name": "response", "schema": dict(request.json_schema), "strict": True}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    if request.continue_final:
        body.update(_continuation(request, server, can))
    return {name: value for name, value in body.items() if name not in omit}


def _continuation(request: Generate, server: Server, can: Abilities) -> dict[str, Any]:
    if request.messages[-1].role != "assistant":
        raise Refused("continue_final needs a final assistant message to go on with")
    if not can.continue_final:
        raise Refused(
            f"continue_final is not possible with a server of kind '{server}'; "
            "use backend=jax or a vLLM server"
        )
    if can.continue_final == "fields":
        return {"continue_final_message": True, "add_generation_prompt": False}
    return {}


def read_answer(content: bytes, request: Generate) -> Answer:
    """Checks and reads the body of a successful answer.

    Raises:
      BadAnswer: empty, cut short, not JSON or not a chat completion.
      Refused: the model declined, or the server did not do what was asked.
    """
    if not content.strip():
        raise BadAnswer("the server sent an empty answer")
    try:
        data = json.loads(content)
    except (ValueError, RecursionError):
        raise BadAnswer("the server's answer is not JSON or was cut short") from None
    try:
        return _read_completion(data, request)
    except (KeyError, IndexError, TypeError, AttributeError, ValueError, OverflowError):
        raise BadAnswer("the server's answer is JSON but not a chat completion") from None


def _read_completion(data: Any, request: Generate) -> Answer:
    choice = data["choices"][0]
    message, reason = choice["message"], choice.get("finish_reason")
    text = message.get("content")
    if message.get("refusal"):
        raise Refused(f"the model refused: {' '.join(str(message['refusal']).split())[:200]}")
    if reason == "content_filter":
        raise Refused("the server's content filter withheld the text")
    if message.get("tool_calls") or reason in ("tool_calls", "function_call"):
        raise Refused("the model called a tool instead of answering")
    if text is None and reason == "length":
        text = ""  # a reasoning model that spent all its tokens before the answer
    if not isinstance(text, str) or reason not in ("stop", "length"):
        raise ValueError
    text = whole(text)
    # Some servers leave it in.
    text = text[: min((text.find(stop) for stop in request.stop if stop in text), default=None)]
    if request.json_schema is not None and reason == "stop":
        try:
            json.loads(text)
        except (ValueError, RecursionError):
            raise Refused("the server ignored json_schema: its text is not JSON") from None
    usage = data.get("usage") or {}
    details = usage.get("prompt_tokens_details") or {}
    return Answer(
        text=text,
        finish_reason="stop" if reason == "stop" else "length",
        tokens=_read_tokens(choice.get("logprobs"), request),
        prompt_tokens=_count(usage.get("prompt_tokens")),
        cached_tokens=_count(details.get("cached_tokens")) or 0,
        generated_tokens=_count(usage.get("completion_tokens")),
    )


def whole(text: str) -> str:
    """The text with replacement signs for halves of surrogate pairs, which no file can hold."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _count(value: Any) -> int | None:
    if value is None:
        return None
    if type(value) is not int or not 0 <= value < _MOST_TOKENS:
        raise ValueError
    return value


def _logprob(value: Any) -> float:
    found = max(float(value), _LEAST_LOGPROB)
    if not math.isfinite(found):
        raise ValueError
    return found


def _read_tokens(logprobs: Any, request: Generate) -> tuple[Token, ...] | None:
    if not (request.logprobs or request.top_logprobs):
        return None
    if not logprobs or logprobs.get("content") is None:
        raise Refused("the server returned no log-probabilities")
    found, offset = [], 0
    characters = codecs.getincrementaldecoder("utf-8")("replace")  # of which a token may end amid
    for item in logprobs["content"]:
        text, raw = whole(str(item["token"])), item.get("bytes")
        found.append(
            Token(
                text=text,
                id=int(item.get("id", -1)),
                logprob=_logprob(item["logprob"]),
                top=tuple(
                    (whole(str(one["token"])), int(one.get("id", -1)), _logprob(one["logprob"]))
                    for one in (item.get("top_logprobs") or ())[: request.top_logprobs]
                ),
                offset=offset,
            )
        )
        offset += len(characters.decode(text.encode() if raw is None else bytes(list(raw))))
    return tuple(found)


_TOO_LONG = re.compile(
    r"context[ _](length|size|window)|maximum (context|model) length|prompt is too long"
    r"|input is too long|exceeds? the (available )?context",
    re.IGNORECASE,
)


def is_too_long(status: int, body: str) -> bool:
    """Whether a refusal says that the prompt does not fit the model."""
    return status in (400, 413, 422) and bool(_TOO_LONG.search(body))
