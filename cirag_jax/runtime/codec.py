"""Requests, responses and results as JSON, the form in which the journal keeps them.

Passages are written as their ids (the journal has a table of them), ranked texts as their places in
the request, so that a journal grows with what happened and not with what was looked at.
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from cirag_jax.runtime import requests
from cirag_jax.runtime.requests import Fetch, Follow, Request, RequestError, Response, Retrieve
from cirag_jax.types import Passage

_ANSWERS: Mapping[type, type] = {
    requests.Retrieve: requests.Retrieved,
    requests.Fetch: requests.Retrieved,
    requests.Follow: requests.Retrieved,
    requests.Extract: requests.Extracted,
    requests.Anchor: requests.Anchored,
    requests.Rank: requests.Ranked,
    requests.Demonstrate: requests.Demonstrated,
    requests.Generate: requests.Generated,
    requests.Score: requests.Scored,
}
KINDS = {request: request.__name__.lower() for request in _ANSWERS}


def dump(value: Any) -> str:
    """One line of JSON; equal values give equal text.

    Raises:
      ValueError: a number is not finite.
    """
    return json.dumps(
        value, ensure_ascii=False, sort_keys=True, separators=(",", ":"), allow_nan=False
    )


def digest(request_json: str) -> str:
    """128 bits of the SHA-256 of a request's JSON, in hexadecimal."""
    return hashlib.sha256(request_json.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def encode(value: Any) -> Any:
    """Records of any kind as JSON holds them: fields that are None are left out, triples are lists.

    A passage is its id alone, as an object, for a text beside it is a string.
    """
    if isinstance(value, Passage):
        return {"passage": value.id}
    if dataclasses.is_dataclass(value):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        return {name: encode(item) for name, item in fields.items() if item is not None}
    if isinstance(value, Mapping):
        return {name: encode(item) for name, item in value.items()}
    return [encode(item) for item in value] if isinstance(value, list | tuple) else value


def encode_request(request: Request) -> dict[str, Any]:
    """A request as JSON holds it; everything that decides its response, and nothing else."""
    if type(request) not in KINDS:
        raise TypeError(f"a method asked for {type(request).__name__}, which is no request")
    return {"kind": KINDS[type(request)], **encode(request)}


def encode_response(request: Request, response: Response | RequestError) -> dict[str, Any]:
    """A response as JSON holds it.

    Raises:
      TypeError: it does not answer ``request``.
    """
    if isinstance(response, RequestError):
        return {"error": str(response)}
    if type(response) is not _ANSWERS[type(request)]:
        names = type(response).__name__, type(request).__name__
        raise TypeError("a {} does not answer a {}".format(*names))
    match request, response:
        case Retrieve() | Fetch() | Follow(), requests.Retrieved():
            ids = [passage.id for passage in response.passages]
            return {"passages": ids, "scores": list(response.scores)}
        case requests.Rank(), requests.Ranked():
            place = {text: index for index, text in enumerate(request.texts)}
            order = [place[text] for text in response.texts]
            return {"order": order, "scores": list(response.scores)}
    return encode(response)


def decode_response(
    request: Request,
    data: Mapping[str, Any],
    passage: Callable[[str], Passage] | None = None,
) -> Any:
    """The response that `encode_response` wrote: one to ``request``, or a `RequestError`.

    ``passage`` finds a passage by its id, where passages are what was asked for.
    """
    if "error" in data:
        return RequestError(data["error"])
    match request:
        case Retrieve() | Fetch() | Follow():
            assert passage is not None
            return requests.Retrieved(tuple(map(passage, data["passages"])), tuple(data["scores"]))
        case requests.Rank():
            texts = tuple(request.texts[index] for index in data["order"])
            return requests.Ranked(texts, tuple(data["scores"]))
    return msgspec.convert(data, _ANSWERS[type(request)])
