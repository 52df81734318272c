"""Requests, responses and results as JSON, the form in which the journal keeps them.

Passages are written as their ids (the journal has a table of them), ranked triples as their places
in the request, so that a journal grows with what happened and not with what was looked at.
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from cirag_jax.runtime.requests import (
    Extract,
    Extracted,
    Generate,
    Generated,
    Rank,
    Ranked,
    Request,
    RequestError,
    Response,
    Retrieve,
    Retrieved,
    Score,
    Scored,
)
from cirag_jax.types import Attempt, Passage, Prediction, Step, Text, Triple

KINDS: Mapping[type, str] = {
    Retrieve: "retrieve",
    Extract: "extract",
    Rank: "rank",
    Generate: "generate",
    Score: "score",
}


def dump(value: Any) -> str:
    """One line of JSON; equal values give equal text."""
    return json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"))


def digest(request_json: str) -> str:
    """128 bits of the SHA-256 of a request's JSON, in hexadecimal."""
    return hashlib.sha256(request_json.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def encode_request(request: Request) -> dict[str, Any]:
    """A request as JSON holds it; everything that decides its response, and nothing else."""
    match request:
        case Retrieve():
            fields: dict[str, Any] = {"query": request.query, "k": request.k}
            if request.feedback is not None:
                fields["feedback"] = dataclasses.asdict(request.feedback)
        case Extract():
            fields = {"passages": [passage.id for passage in request.passages]}
        case Rank():
            texts = [_encode_text(text) for text in request.texts]
            named = {"query": request.query, "n": request.n, "ranker": request.ranker}
            fields = {**named, "texts": texts}
        case Generate() | Score():
            fields = dataclasses.asdict(request)
        case _:
            raise TypeError(f"a method asked for {type(request).__name__}, which is no request")
    return {"kind": KINDS[type(request)], **fields}


def encode_response(request: Request, response: Response | RequestError) -> dict[str, Any]:
    """A response as JSON holds it.

    Raises:
      TypeError: it does not answer ``request``.
    """
    match request, response:
        case _, RequestError():
            return {"error": str(response)}
        case Retrieve(), Retrieved():
            ids = [passage.id for passage in response.passages]
            return {"passages": ids, "scores": list(response.scores)}
        case Extract(), Extracted():
            return {
                "triples": [
                    None if found is None else [encode_triple(triple) for triple in found]
                    for found in response.triples
                ]
            }
        case Rank(), Ranked():
            place = {text: index for index, text in enumerate(request.texts)}
            order = [place[text] for text in response.texts]
            return {"order": order, "scores": list(response.scores)}
        case (Generate(), Generated()) | (Score(), Scored()):
            return encode_said(response)
    names = type(response).__name__, type(request).__name__
    raise TypeError("a {} does not answer a {}".format(*names))


def decode_response(
    request: Request, data: Mapping[str, Any], passage: Callable[[str], Passage]
) -> Response | RequestError:
    """The response that `encode_response` wrote; ``passage`` finds a passage by its id."""
    if "error" in data:
        return RequestError(data["error"])
    match request:
        case Retrieve():
            return Retrieved(tuple(map(passage, data["passages"])), tuple(data["scores"]))
        case Extract():
            return Extracted(
                tuple(
                    None if found is None else tuple(map(decode_triple, found))
                    for found in data["triples"]
                )
            )
        case Rank():
            texts = tuple(request.texts[index] for index in data["order"])
            return Ranked(texts, tuple(data["scores"]))
        case Generate() | Score():
            return decode_said(request, data)


def _encode_text(text: Text) -> Any:
    match text:
        case Triple():
            return encode_triple(text)
        case Passage():
            return {"passage": text.id}
    return text


def encode_said(response: Generated | Scored) -> dict[str, Any]:
    """What a language model answered as JSON holds it; what was not asked for is left out."""
    return _without_none(dataclasses.asdict(response))


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_none(v) for k, v in value.items() if v is not None}
    if isinstance(value, list | tuple):
        return [_without_none(v) for v in value]
    return value


def decode_said(request: Generate | Score, data: Mapping[str, Any]) -> Generated | Scored:
    """The response to ``request`` that `encode_said` wrote."""
    kind: Any = Scored if isinstance(request, Score) else Generated
    return msgspec.convert(data, kind)


def encode_triple(triple: Triple) -> list[Any]:
    """``[head, relation, tail, passage id, sentence]``."""
    return [triple.head, triple.relation, triple.tail, triple.passage_id, triple.sentence]


def decode_triple(data: list[Any]) -> Triple:
    """The triple that `encode_triple` wrote."""
    return Triple(*data)


def encode_step(step: Step) -> dict[str, Any]:
    """A round as JSON holds it, field by field; triples as in `encode_triple`."""
    return {
        "query": step.query,
        "passages": list(step.passages),
        "candidates": [encode_triple(triple) for triple in step.candidates],
        "scores": list(step.scores),
        "thought": step.thought,
        "kept": [encode_triple(triple) for triple in step.kept],
        "next_query": step.next_query,
        "response": step.response,
    }


def decode_step(data: Mapping[str, Any]) -> Step:
    """The round that `encode_step` wrote."""
    return Step(
        query=data["query"],
        passages=tuple(data["passages"]),
        candidates=tuple(map(decode_triple, data["candidates"])),
        scores=tuple(data["scores"]),
        thought=data["thought"],
        kept=tuple(map(decode_triple, data["kept"])),
        next_query=data["next_query"],
        response=data["response"],
    )


def encode_prediction(prediction: Prediction) -> dict[str, Any]:
    """A prediction as JSON holds it, field by field; triples as in `encode_triple`."""
    return {
        "answer": prediction.answer,
        "granularity": prediction.granularity,
        "passages": list(prediction.passages),
        "sentences": [list(pair) for pair in prediction.sentences],
        "triples": [encode_triple(triple) for triple in prediction.triples],
        "steps": [encode_step(step) for step in prediction.steps],
        "attempts": [dataclasses.asdict(attempt) for attempt in prediction.attempts],
        "parse_errors": dict(prediction.parse_errors),
    }


def decode_prediction(data: Mapping[str, Any]) -> Prediction:
    """The prediction that `encode_prediction` wrote."""
    return Prediction(
        answer=data["answer"],
        granularity=data["granularity"],
        passages=tuple(data["passages"]),
        sentences=tuple((pair[0], pair[1]) for pair in data["sentences"]),
        triples=tuple(map(decode_triple, data["triples"])),
        steps=tuple(map(decode_step, data["steps"])),
        attempts=tuple(
            Attempt(**{**attempt, "evidence": tuple(attempt["evidence"])})
            for attempt in data["attempts"]
        ),
        parse_errors=data["parse_errors"],
    )
