"""The JSON format of requests to OpenAI-compatible servers, and of their responses."""

import codecs
import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from cirag_jax.io import replace_surrogates
from cirag_jax.llm.thoughts import answer_span, without_thoughts
from cirag_jax.llm.types import FinishReason, Generate, Message, Token
from cirag_jax.server import MalformedResponse, RequestRejected

Server = Literal["openai", "vllm", "transformers", "llamacpp"]


@dataclasses.dataclass(frozen=True)
class ServerFeatures:
    """Features of a kind of server beyond plain chat.

    Attributes:
      continue_final: how requests continue an assistant turn: by extra ``fields``, by a final
        assistant message (``messages``), or unsupported (empty).
      json_schema: whether the server accepts ``response_format``.
      logprobs: whether the server returns log-probabilities.
      length_field: the request field that limits new tokens.
    """

    continue_final: Literal["fields", "messages", ""]
    json_schema: bool
    logprobs: bool
    length_field: str


SERVERS: dict[str, ServerFeatures] = {
    "openai": ServerFeatures("", True, True, "max_completion_tokens"),
    "vllm": ServerFeatures("fields", True, True, "max_tokens"),
    "transformers": ServerFeatures("", False, False, "max_tokens"),
    "llamacpp": ServerFeatures("messages", True, True, "max_tokens"),
}


_MAX_COUNT = 1 << 40  # larger token counts are errors of the server
_MIN_LOGPROB = -9999.0  # OpenAI's value for minus infinity, which JSON cannot represent


@dataclasses.dataclass(frozen=True)
class Completion:
    """The relevant part of a server's response; missing token counts are None."""

    text: str
    finish_reason: FinishReason
    tokens: tuple[Token, ...] | None
    prompt_tokens: int | None
    cached_tokens: int
    generated_tokens: int | None
    thoughts: str | None = None


def estimate_tokens(messages: Sequence[Message]) -> int:
    """Estimates the tokens of a prompt, at 3 bytes of UTF-8 per token (English has about 4.5)."""
    return 3 + sum(6 + math.ceil(len(m.text.encode("utf-8", "replace")) / 3) for m in messages)


def request_body(
    request: Generate, model: str, server: Server, omit: Sequence[str] = ()
) -> dict[str, Any]:
    """Returns the JSON body of a chat completion.

    Args:
      request: the request to encode.
      model: name of the model on the server.
      server: kind of server.
      omit: fields to omit, for models that reject these fields.

    Raises:
      RequestRejected: this kind of server does not support the request.
    """
    features = SERVERS[server]
    if request.attention or request.entropy:
        name = "attention" if request.attention else "entropy"
        raise RequestRejected(f"{name} is not available over HTTP; use backend=jax")
    wants_logprobs = request.logprobs or request.top_logprobs > 0
    if wants_logprobs and not features.logprobs:
        raise RequestRejected(
            f"log-probabilities are not available from a server of kind '{server}'"
        )
    if request.json_schema is not None and not features.json_schema:
        raise RequestRejected(f"json_schema is not enforced by a server of kind '{server}'")
    body: dict[str, Any] = {
        "model": model,
        "messages": [{"role": m.role, "content": m.text} for m in request.messages],
        features.length_field: request.max_tokens,
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
        body.update(_continuation(request, server, features))
    return {name: value for name, value in body.items() if name not in omit}


def _continuation(request: Generate, server: Server, features: ServerFeatures) -> dict[str, Any]:
    if request.messages[-1].role != "assistant":
        raise RequestRejected("continue_final needs a final assistant message to continue")
    if not features.continue_final:
        raise RequestRejected(
            f"continue_final is not supported by a server of kind '{server}'; "
            "use backend=jax or a vLLM server"
        )
    if features.continue_final == "fields":
        return {"continue_final_message": True, "add_generation_prompt": False}
    return {}


def read_completion(content: bytes, request: Generate) -> Completion:
    """Parses the body of a response with a success status.

    Raises:
      MalformedResponse: the body is empty, truncated, or not a chat completion.
      RequestRejected: the model declined, or the server ignored part of the request.
    """
    if not content.strip():
        raise MalformedResponse("the server sent an empty answer")
    try:
        data = json.loads(content)
    except (ValueError, RecursionError):
        raise MalformedResponse("the server's answer is not JSON or is truncated") from None
    return _parse_completion(data, request)


def _parse_completion(data: Any, request: Generate) -> Completion:
    choices = _object(data, "the answer").get("choices")
    if not isinstance(choices, list) or not choices:
        raise _malformed("choices", choices)
    choice = _object(choices[0], "choices[0]")
    message = _object(choice.get("message"), "choices[0].message")
    reason = choice.get("finish_reason")
    if refusal := message.get("refusal"):
        raise RequestRejected(f"the model refused: {_excerpt(refusal)}")
    if reason == "content_filter":
        raise RequestRejected("the server's content filter withheld the text")
    if message.get("tool_calls") or reason in ("tool_calls", "function_call"):
        raise RequestRejected("the model called a tool instead of answering")
    text = _text(message.get("content"))
    usage = _object(data.get("usage") or {}, "usage")
    details = _object(usage.get("prompt_tokens_details") or {}, "usage.prompt_tokens_details")
    generated = _count(usage, "completion_tokens")
    # Servers have many names for the end of a turn ("eos", "end_turn"), or none.
    is_cut = str(reason).casefold() in _CUT or (
        reason != "stop" and 0 < request.max_tokens <= (generated or 0)
    )
    # Some servers include the stop string; thoughts may contain it.
    start, _ = answer_span(text)
    stops = (text.find(stop, start) for stop in request.stop if stop in text[start:])
    text = text[: min(stops, default=None)]
    if request.json_schema is not None and not is_cut:
        try:
            json.loads(without_thoughts(text))
        except (ValueError, RecursionError):
            raise RequestRejected(
                "the server ignored json_schema: its text is not JSON; set server to the server's "
                "kind, or constrained=false"
            ) from None
    return Completion(
        text=text,
        finish_reason="length" if is_cut else "stop",
        tokens=_read_tokens(choice.get("logprobs"), request),
        prompt_tokens=_count(usage, "prompt_tokens"),
        cached_tokens=_count(details, "cached_tokens") or 0,
        generated_tokens=generated,
        thoughts=_thoughts(message),
    )


def _thoughts(message: Mapping[str, Any]) -> str | None:
    """Returns the thoughts that a server separated from the text."""
    for name in ("reasoning_content", "reasoning"):
        if isinstance(text := message.get(name), str) and text.strip():
            return replace_surrogates(text)
    return None


# Values of finish_reason that report a limit.
_CUT = frozenset({"length", "max_tokens", "max_length", "model_length", "max_new_tokens"})


def _text(content: Any) -> str:
    """Returns the text of a message: a string, a list of parts, or null if all were thoughts."""
    if isinstance(content, list):
        parts = [_object(part, "choices[0].message.content[]") for part in content]
        texts = [p for p in parts if p.get("type", "text") in ("text", "output_text")]
        content = "".join(str(part.get("text") or "") for part in texts)
    if content is None:
        return ""
    if not isinstance(content, str):
        raise _malformed("choices[0].message.content", content)
    return replace_surrogates(content)


def _object(value: Any, field: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _malformed(field, value)
    return value


def _malformed(field: str, value: Any) -> MalformedResponse:
    """Returns the error for a field with an unusable value."""
    return MalformedResponse(
        f"the server's answer is not a chat completion: {field} is {_excerpt(json.dumps(value))}; "
        "check that base_url is the address of a chat API"
    )


def _excerpt(value: Any) -> str:
    return " ".join(str(value).split())[:200]


def _count(usage: Mapping[str, Any], field: str) -> int | None:
    """Returns a token count; some servers omit it, or send it as a float or as -1."""
    value = usage.get(field)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return int(value) if 0 <= value < _MAX_COUNT and value == int(value) else None


def _read_tokens(logprobs: Any, request: Generate) -> tuple[Token, ...] | None:
    if not (request.logprobs or request.top_logprobs):
        return None
    if not isinstance(logprobs, dict) or logprobs.get("content") is None:
        raise RequestRejected("the server returned no log-probabilities")
    try:
        return _parse_tokens(logprobs["content"], request)
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError):
        raise _malformed("choices[0].logprobs.content", logprobs["content"]) from None


def _parse_tokens(content: Any, request: Generate) -> tuple[Token, ...]:
    tokens, offset = [], 0
    decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a token may end within a character
    for item in content:
        text, token_id, logprob = _read_token(item)
        top = tuple(map(_read_token, (item.get("top_logprobs") or ())[: request.top_logprobs]))
        tokens.append(Token(text, token_id, logprob, top, offset=offset))
        raw = item.get("bytes")
        offset += len(decoder.decode(text.encode() if raw is None else bytes(list(raw))))
    return tuple(tokens)


def _read_token(item: Any) -> tuple[str, int, float]:
    logprob = max(float(item["logprob"]), _MIN_LOGPROB)
    if not math.isfinite(logprob):
        raise ValueError
    return replace_surrogates(str(item["token"])), int(item.get("id", -1)), logprob
