"""The JSON format of our own OpenAI-compatible server: its requests, responses and errors.

`openai_format` has the format of requests to other servers.
"""

import base64
import dataclasses
import json
import re
import secrets
import time
import types as types_lib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
import numpy as np

from cirag_jax.errors import UserError, parsing
from cirag_jax.llm.grammar import check_schema
from cirag_jax.llm.types import Complete, Completed, Generate, Generated, Message, Token
from cirag_jax.types import Role
from cirag_jax.validation import check_value

MAX_CHOICES = 256  # requests to the engine in one request to the server
_MAX_TEXTS = 2048  # texts of a request for embeddings
_MAX_MESSAGE = 500  # characters of an error message
_MIN_LOGPROB = -9999.0  # OpenAI's value for minus infinity, which JSON cannot represent
_SEED_STEP = 0x9E3779B1  # between the seeds of the choices of a request

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")  # may be half of a pair

_Stop = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
_Stops = Annotated[list[_Stop], msgspec.Meta(max_length=16)]
_Tokens = list[Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]]

# Fields that both kinds of generation share, with their types; null is like a missing field.
_SAMPLING: Mapping[str, Any] = {
    "model": str,
    "max_tokens": Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)],
    "temperature": Annotated[float, msgspec.Meta(ge=0, le=100)],
    "top_p": Annotated[float, msgspec.Meta(gt=0, le=1)],
    "n": Annotated[int, msgspec.Meta(ge=1, le=MAX_CHOICES)],
    "seed": Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)],
    "stream": bool,
    "stream_options": dict[str, Any],
    "stop": Any,
}
_CHAT: Mapping[str, Any] = {
    **_SAMPLING,
    "messages": list[Any],
    "max_completion_tokens": _SAMPLING["max_tokens"],
    "logprobs": bool,
    "top_logprobs": Annotated[int, msgspec.Meta(ge=0, le=20)],
    "response_format": dict[str, Any],
    "continue_final_message": bool,
    "add_generation_prompt": bool,
}
_COMPLETION: Mapping[str, Any] = {
    **_SAMPLING,
    "prompt": Any,
    "logprobs": Annotated[int, msgspec.Meta(ge=0, le=20)],
    "echo": bool,
}
_EMBEDDING: Mapping[str, Any] = {
    "model": str,
    "input": Any,
    "encoding_format": Literal["float", "base64"],
    "dimensions": Annotated[int, msgspec.Meta(ge=1)],
    "input_type": Literal["query", "passage", "document"],
}
# Fields that do not affect the response.
_HARMLESS = ("user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention")
# Fields that are not supported, and the values that would not affect the response.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "best_of": (1,),
    "suffix": ("",),
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "modalities": (["text"],),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "top_k": (-1, 0),
    "min_p": (0,),
}
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


class ApiError(UserError):
    """An error of a request, with its HTTP status and OpenAI's fields."""

    def __init__(
        self, message: str, status: int = 400, *, param: str | None = None, code: str | None = None
    ):
        super().__init__(message)
        self.status, self.param, self.code = status, param, code


def error_body(error: ApiError) -> dict[str, Any]:
    """Returns the body of a response with an error."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    message = " ".join(str(error).split())
    if len(message) > _MAX_MESSAGE:
        message = f"{message[: _MAX_MESSAGE - 4]} ..."
    return {
        "error": {"message": message, "type": kind, "param": error.param, "code": error.code},
    }


@dataclasses.dataclass(frozen=True)
class Job:
    """A parsed request for texts.

    Attributes:
      kind: kind of the response's id and object.
      model: name of the model.
      requests: requests to the engine, one per choice.
      texts: the given text of each choice, if it is repeated.
      num_prompts: number of prompts; each has equally many choices.
      streams: whether the response is a stream.
      include_usage: whether a stream ends with the usage.
    """

    kind: Literal["chat", "completion"]
    model: str
    requests: tuple[Generate, ...]
    texts: tuple[str, ...] = ()
    num_prompts: int = 1
    streams: bool = False
    include_usage: bool = False
    id: str = dataclasses.field(default_factory=lambda: secrets.token_hex(12))
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))


def parse_json(content: bytes) -> dict[str, Any]:
    """Parses the body of a request; drops fields that are null."""

    def refuse(name: str) -> Any:
        raise ValueError(f"{name} is not a number")

    try:
        body = json.loads(content.decode(), parse_constant=refuse)
        if _SURROGATE.search(content):
            json.dumps(body, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise ApiError(f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise ApiError("the body must be a JSON object")
    return {name: value for name, value in body.items() if value is not None}


def _check_fields(
    body: Mapping[str, Any],
    types: Mapping[str, Any],
    neutral: Mapping[str, tuple[Any, ...]] = types_lib.MappingProxyType({}),
) -> None:
    """Refuses unknown fields, and values of other types than ``types`` or not in ``neutral``."""
    for name, value in body.items():
        if name in types:
            try:
                check_value(name, value, types[name])
            except UserError as error:
                raise ApiError(str(error), param=name) from None
        elif name in neutral:
            if value not in neutral[name]:
                raise ApiError(f"{name} is not supported; leave it out", param=name)
        elif name not in _HARMLESS:
            name = name[:80]
            raise ApiError(f"{name!r} is not a field that this server supports", param=name)


def _required(body: Mapping[str, Any], name: str) -> Any:
    if name not in body:
        raise ApiError(f"{name} is required", param=name)
    return body[name]


def _sampling(body: Mapping[str, Any], max_tokens: int) -> dict[str, Any]:
    """Returns the fields of `Generate` that both kinds of requests share."""
    stop = body.get("stop", [])
    stop = [stop] if isinstance(stop, str) else stop
    try:
        check_value("stop", stop, _Stops)
    except UserError:
        message = "stop must be at most 16 strings of 1 to 256 characters"
        raise ApiError(message, param="stop") from None
    return {
        "max_tokens": body.get("max_tokens", max_tokens),
        "temperature": float(body.get("temperature", 1.0)),
        "top_p": float(body.get("top_p", 1.0)),
        "stop": tuple(stop),
    }


def _choices(requests: Sequence[Generate], body: Mapping[str, Any]) -> tuple[Generate, ...]:
    """Returns ``n`` requests for each request, with different seeds."""
    n = body.get("n", 1)
    if len(requests) * n > MAX_CHOICES:
        raise ApiError(f"a request may have at most {MAX_CHOICES} choices (prompts times n)")
    seed = body.get("seed", secrets.randbits(32))
    return tuple(
        dataclasses.replace(request, seed=(seed + _SEED_STEP * i) % (1 << 32))
        for request in requests
        for i in range(n)
    )


def _streaming(body: Mapping[str, Any]) -> dict[str, Any]:
    options, streams = body.get("stream_options"), body.get("stream", False)
    if options is not None:
        if not streams:
            raise ApiError("stream_options needs stream=true", param="stream_options")
        _check_fields(options, {"include_usage": bool, "include_obfuscation": bool})
        if options.get("include_obfuscation"):
            raise ApiError("include_obfuscation is not supported", param="stream_options")
    return {"streams": streams, "include_usage": bool(options and options.get("include_usage"))}


def parse_chat(body: Mapping[str, Any], max_tokens: int) -> Job:
    """Parses a request for a chat completion; ``max_tokens`` is the default limit."""
    _check_fields(body, _CHAT, _NEUTRAL)
    if "max_tokens" in body and "max_completion_tokens" in body:
        raise ApiError("max_tokens and max_completion_tokens are alternatives; set only one")
    limit = body.get("max_tokens", body.get("max_completion_tokens", max_tokens))
    if limit < 1:
        raise ApiError(f"max_tokens={limit} must be at least 1", param="max_tokens")
    continues = body.get("continue_final_message", False)
    if body.get("add_generation_prompt", not continues) == continues:
        message = "add_generation_prompt must be the opposite of continue_final_message"
        raise ApiError(message, param="add_generation_prompt")
    top = body.get("top_logprobs", 0)
    if top and not body.get("logprobs"):
        raise ApiError("top_logprobs needs logprobs=true", param="top_logprobs")
    messages = _required(body, "messages")
    request = Generate(
        tuple(_message(message, place) for place, message in enumerate(messages)),
        **{**_sampling(body, max_tokens), "max_tokens": limit},
        logprobs=body.get("logprobs", False),
        top_logprobs=top,
        continue_final=continues,
        json_schema=_schema(body.get("response_format", {"type": "text"})),
    )
    requests = _choices([request], body)
    return Job("chat", _required(body, "model"), requests, **_streaming(body))


def _message(message: Any, place: int) -> Message:
    field = f"messages[{place}]"
    if not isinstance(message, dict):
        raise ApiError(f"{field} must be an object", param="messages")
    for name in message:
        # Responses of this server, sent back as part of the conversation, have empty fields.
        if name not in ("role", "content") and message[name]:
            raise ApiError(f"{field}.{name[:80]} is not supported", param="messages")
    role, content = message.get("role"), message.get("content")
    if role not in tuple(_ROLES):
        raise ApiError(f"{field}.role must be one of {', '.join(_ROLES)}", param="messages")
    if isinstance(content, list) and content:
        parts = content
        if not all(isinstance(p, dict) and p.get("type") == "text" for p in parts):
            raise ApiError(f"{field}.content may only have parts of type text", param="messages")
        texts = [part.get("text") for part in parts]
        content = "".join(texts) if all(isinstance(text, str) for text in texts) else None
    if not isinstance(content, str):
        raise ApiError(f"{field}.content must be a string or a list of texts", param="messages")
    return Message(_ROLES[role], content)


def _schema(response_format: Mapping[str, Any]) -> Mapping[str, Any] | None:
    kind = response_format.get("type")
    if kind == "text":
        return None
    schema: Any = {"type": "object"}
    if kind == "json_schema":
        outer = response_format.get("json_schema")
        schema = outer.get("schema") if isinstance(outer, dict) else None
        if not isinstance(schema, dict):
            message = "response_format.json_schema.schema must be an object"
            raise ApiError(message, param="response_format")
    elif kind != "json_object":
        message = "response_format.type must be text, json_object or json_schema"
        raise ApiError(message, param="response_format")
    try:
        with parsing("json_schema cannot be enforced"):
            check_schema(schema)
    except UserError as error:
        raise ApiError(str(error), param="response_format") from None
    return schema


def parse_completion(
    body: Mapping[str, Any],
    encode: Callable[[str], list[int]],
    decode: Callable[[Sequence[int]], str],
    max_tokens: int = 16,
) -> Job:
    """Parses a request to continue texts or lists of tokens."""
    _check_fields(body, _COMPLETION, _NEUTRAL)
    echo = body.get("echo", False)
    if echo and body.get("stream"):
        raise ApiError("echo is not supported together with stream", param="echo")
    prompts = _prompts(_required(body, "prompt"))
    logprobs = body.get("logprobs")
    shared = {
        **_sampling(body, max_tokens),
        "logprobs": logprobs is not None,
        "top_logprobs": logprobs or 0,
        "echo": echo,
    }
    requests = [
        Complete(tokens=tuple(encode(p) if isinstance(p, str) else p), **shared) for p in prompts
    ]
    if any(not request.tokens for request in requests):
        raise ApiError("prompt must not be empty", param="prompt")
    n, texts = body.get("n", 1), ()
    requests = _choices(requests, body)
    if echo:
        texts = tuple(p if isinstance(p, str) else decode(p) for p in prompts for _ in range(n))
    model = _required(body, "model")
    return Job("completion", model, requests, texts, len(prompts), **_streaming(body))


def _prompts(prompt: Any) -> list[str] | list[list[int]]:
    """Returns the prompts: a text, a list of texts, a list of tokens, or a list of such lists."""
    if isinstance(prompt, str):
        return [prompt]
    for kind in (list[str], _Tokens, list[_Tokens]):
        try:
            prompts: Any = msgspec.convert(prompt, kind)
        except msgspec.ValidationError:
            continue
        if not prompts:
            break
        if len(prompts) > MAX_CHOICES and kind is not _Tokens:
            raise ApiError(
                f"prompt has {len(prompts)} texts; at most {MAX_CHOICES}", param="prompt"
            )
        return [prompts] if kind is _Tokens else prompts
    message = "prompt must be a text, a list of texts, a list of tokens, or a list of such lists"
    raise ApiError(message, param="prompt")


@dataclasses.dataclass(frozen=True)
class EmbeddingJob:
    """A parsed request for embeddings; ``dimensions`` is None for all."""

    model: str
    texts: list[str]
    role: Role
    as_base64: bool
    dimensions: int | None


def parse_embedding(body: Mapping[str, Any]) -> EmbeddingJob:
    """Parses a request for embeddings."""
    _check_fields(body, _EMBEDDING)
    texts = _required(body, "input")
    texts = [texts] if isinstance(texts, str) else texts
    if not isinstance(texts, list) or not texts or not all(isinstance(t, str) for t in texts):
        raise ApiError("input must be a text or a list of texts", param="input")
    if len(texts) > _MAX_TEXTS:
        raise ApiError(f"input has {len(texts)} texts; at most {_MAX_TEXTS}", param="input")
    role = "query" if body.get("input_type") == "query" else "passage"
    as_base64 = body.get("encoding_format") == "base64"
    return EmbeddingJob(_required(body, "model"), texts, role, as_base64, body.get("dimensions"))


def embedding_body(job: EmbeddingJob, vectors_ND: np.ndarray, tokens: int) -> dict[str, Any]:
    """Returns the response to a request for embeddings."""
    if job.dimensions is not None:
        vectors_ND = vectors_ND[:, : job.dimensions]
        norm_N1 = np.linalg.norm(vectors_ND, axis=1, keepdims=True)
        vectors_ND = vectors_ND / np.maximum(norm_N1, np.finfo(np.float32).tiny)
    vectors_ND = vectors_ND.astype("<f4")

    def encode(vector_D: np.ndarray) -> Any:
        return base64.b64encode(vector_D.tobytes()).decode() if job.as_base64 else vector_D.tolist()

    return {
        "object": "list",
        "model": job.model,
        "data": [
            {"object": "embedding", "index": index, "embedding": encode(vector_D)}
            for index, vector_D in enumerate(vectors_ND)
        ],
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }


def models_body(names: Mapping[str, str | None], created: int) -> dict[str, Any]:
    """Returns the list of models; ``names`` maps each to the base model of an adapter, if any."""
    models = [
        {"id": name, "object": "model", "created": created, "owned_by": "cirag_jax", "parent": base}
        for name, base in names.items()
    ]
    return {"object": "list", "data": models}


def _head(job: Job, kind: str) -> dict[str, Any]:
    prefix = "chatcmpl" if job.kind == "chat" else "cmpl"
    return {
        "id": f"{prefix}-{job.id}",
        "object": kind,
        "created": job.created,
        "model": job.model,
    }


def job_body(job: Job, responses: Sequence[Generated]) -> dict[str, Any]:
    """Returns the complete response to a request for texts."""
    if job.kind == "chat":
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": response.text, "refusal": None},
                "finish_reason": response.finish_reason,
                "logprobs": _chat_logprobs(response.tokens),
            }
            for index, response in enumerate(responses)
        ]
        kind = "chat.completion"
    else:
        choices = [_choice(job, index, response) for index, response in enumerate(responses)]
        kind = "text_completion"
    return {**_head(job, kind), "choices": choices, "usage": _usage(job, responses)}


def _choice(job: Job, index: int, response: Generated) -> dict[str, Any]:
    text, tokens = response.text, response.tokens
    if isinstance(response, Completed):
        text = job.texts[index] + text
        tokens = None if tokens is None else (*response.prompt, *tokens)
    return {
        "index": index,
        "text": text,
        "finish_reason": response.finish_reason,
        "logprobs": _completion_logprobs(tokens, 0),
    }


def _usage(job: Job, responses: Sequence[Generated]) -> dict[str, Any]:
    usages = [response.usage for response in responses]
    firsts = usages[:: len(usages) // job.num_prompts]  # choices of a prompt are next to each other
    prompt = sum(usage.prompt_tokens for usage in firsts)
    generated = sum(usage.generated_tokens for usage in usages)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in firsts)},
    }


def _finite(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, _MIN_LOGPROB)


def _chat_logprobs(tokens: Sequence[Token] | None) -> dict[str, Any] | None:
    if tokens is None:
        return None

    def item(text: str, token_id: int, logprob: float | None) -> dict[str, Any]:
        # The bytes of an incomplete character are unknown.
        raw = None if "\ufffd" in text else list(text.encode("utf-8", "replace"))
        return {"token": text, "id": token_id, "logprob": _finite(logprob), "bytes": raw}

    content = [
        {
            **item(token.text, token.id, token.logprob),
            "top_logprobs": [item(*alternative) for alternative in token.top],
        }
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def _completion_logprobs(tokens: Sequence[Token] | None, offset: int) -> dict[str, Any] | None:
    """Returns the arrays of log-probabilities; ``offset`` is the position of the first token."""
    if tokens is None:
        return None
    offsets, top = [], []
    for token in tokens:
        offsets.append(offset)
        offset += len(token.text)
        if token.logprob is None:
            top.append(None)
            continue
        alternatives: dict[str, float | None] = {}
        # Tokens with equal texts have one entry, with the highest log-probability.
        for text, _, logprob in (*token.top, (token.text, token.id, token.logprob)):
            alternatives.setdefault(text, _finite(logprob))
        top.append(alternatives)
    return {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [_finite(token.logprob) for token in tokens],
        "top_logprobs": top,
        "text_offset": offsets,
    }


class Stream:
    """The events of a streamed response.

    Text is held back while it may be the beginning of a stop string or of a character, so that the
    parts join to the text of a response without a stream.
    """

    def __init__(self, job: Job):
        self._job = job
        count = len(job.requests)
        self._texts = [""] * count
        self._tokens: list[list[Token]] = [[] for _ in range(count)]  # held back
        self._offsets = [0] * count
        self._responses: list[Generated | None] = [None] * count

    def start(self) -> Iterator[dict[str, Any]]:
        """Yields the events before the first text."""
        if self._job.kind == "chat":
            for index in range(len(self._texts)):
                yield self._event(index, {"role": "assistant", "content": ""}, None, None)

    def update(self, index: int, response: Generated, is_final: bool) -> Iterator[dict[str, Any]]:
        """Yields the events for a choice's response so far; its tokens are those not given yet."""
        sent, tokens = self._texts[index], self._tokens[index]
        tokens.extend(response.tokens or ())
        text = response.text
        if not is_final:
            text = _certain(text, self._job.requests[index].stop)
        new = text[len(sent) :]
        self._texts[index] = sent + new
        count = len(tokens)
        if not is_final:
            end = len(self._texts[index])
            unsure = (i for i, token in enumerate(tokens) if token.offset + len(token.text) > end)
            count = next(unsure, count)
        ready, self._tokens[index] = tokens[:count], tokens[count:]
        if is_final:
            self._responses[index] = response
        if new or ready or (is_final and self._job.kind == "completion"):
            reason = response.finish_reason if is_final and self._job.kind != "chat" else None
            delta = {"content": new}
            yield self._event(index, delta, ready if response.tokens is not None else None, reason)
        if is_final and self._job.kind == "chat":
            yield self._event(index, {}, None, response.finish_reason)

    def end(self) -> Iterator[dict[str, Any]]:
        """Yields the usage, if it was requested."""
        if self._job.include_usage:
            responses = [response for response in self._responses if response is not None]
            usage = _usage(self._job, responses)
            yield {**_head(self._job, self._object), "choices": [], "usage": usage}

    @property
    def _object(self) -> str:
        return "chat.completion.chunk" if self._job.kind == "chat" else "text_completion"

    def _event(
        self, index: int, delta: dict[str, Any], tokens: Sequence[Token] | None, reason: str | None
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index, "finish_reason": reason}
        if self._job.kind == "chat":
            choice |= {"delta": delta, "logprobs": _chat_logprobs(tokens)}
        else:
            logprobs = _completion_logprobs(tokens, self._offsets[index])
            self._offsets[index] += sum(len(token.text) for token in tokens or ())
            choice |= {"text": delta["content"], "logprobs": logprobs}
        return {**_head(self._job, self._object), "choices": [choice]}


def _certain(text: str, stops: Sequence[str]) -> str:
    """Returns the part of an unfinished text that further tokens cannot change or remove."""
    text = text.rstrip("\ufffd")  # may be an incomplete character
    held = max(
        (n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0
    )
    return text[: len(text) - held]
