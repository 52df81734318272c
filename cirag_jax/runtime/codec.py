"""Encoding of requests, responses and results as JSON, for the journal.

To keep journals small, passages are encoded as ids (the journal has a table of passages), and
ranked texts as indices in the request.
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from cirag_jax.runtime import requests
from cirag_jax.runtime.requests import (
    Fetch,
    Follow,
    Request,
    RequestError,
    Response,
    Retrieve,
    Walk,
)
from cirag_jax.types import Passage

_ANSWERS: Mapping[type, type] = {
    requests.Retrieve: requests.Retrieved,
    requests.Fetch: requests.Retrieved,
    requests.Follow: requests.Retrieved,
    requests.Extract: requests.Extracted,
    requests.Anchor: requests.Anchored,
    requests.Link: requests.Linked,
    requests.Walk: requests.Retrieved,
    requests.Rank: requests.Ranked,
    requests.Route: requests.Routed,
    requests.Demonstrate: requests.Demonstrated,
    requests.Generate: requests.Generated,
    requests.Score: requests.Scored,
}
KINDS = {request: request.__name__.lower() for request in _ANSWERS}


def dump(value: Any) -> str:
    """Returns one line of JSON with sorted keys; raises ValueError if a number is not finite."""
    return json.dumps(
        value, ensure_ascii=False, sort_keys=True, separators=(",", ":"), allow_nan=False
    )


def digest(request_json: str) -> str:
    """Returns the first 128 bits of the SHA-256 of a request's JSON, in hexadecimal."""
    return hashlib.sha256(request_json.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def encode(value: Any) -> Any:
    """Encodes dataclasses, mappings and sequences as JSON values; omits fields of None.

    A passage becomes an object with the passage's id, so it cannot be confused with a string.
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
    """Encodes exactly the fields that determine a request's response."""
    if type(request) not in KINDS:
        raise TypeError(f"a method yielded {type(request).__name__}, which is not a request")
    return {"kind": KINDS[type(request)], **encode(request)}


def encode_response(request: Request, response: Response | RequestError) -> dict[str, Any]:
    """Encodes a response; raises TypeError if it does not answer ``request``."""
    if isinstance(response, RequestError):
        return {"error": str(response)}
    if type(response) is not _ANSWERS[type(request)]:
        raise TypeError(f"a {type(response).__name__} does not answer a {type(request).__name__}")
    match request, response:
        case Retrieve() | Fetch() | Follow() | Walk(), requests.Retrieved():
            ids = [passage.id for passage in response.passages]
            return {"passages": ids, "scores": list(response.scores)}
        case requests.Rank(), requests.Ranked():
            indices = {text: index for index, text in enumerate(request.texts)}
            order = [indices[text] for text in response.texts]
            return {"order": order, "scores": list(response.scores)}
    return encode(response)


def decode_response(
    request: Request, data: Mapping[str, Any], passage: Callable[[str], Passage] | None = None
) -> Any:
    """Decodes a response to ``request``, or a `RequestError`.

    ``passage`` returns a passage by its id; it is required if the response contains passages.
    """
    if "error" in data:
        return RequestError(data["error"])
    match request:
        case Retrieve() | Fetch() | Follow() | Walk():
            assert passage is not None
            return requests.Retrieved(tuple(map(passage, data["passages"])), tuple(data["scores"]))
        case requests.Rank():
            texts = tuple(request.texts[index] for index in data["order"])
            return requests.Ranked(texts, tuple(data["scores"]))
    return msgspec.convert(data, _ANSWERS[type(request)])
