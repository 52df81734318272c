"""Extraction of the triples of a passage (CIRAG, section 3.3; KiRAG, section 3.2)."""

import collections
import dataclasses
import re
import unicodedata
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cirag_jax.datasets import load
from cirag_jax.datasets.sentences import sentences_of, source_sentence
from cirag_jax.errors import UserError
from cirag_jax.identity import of_packages
from cirag_jax.io import is_training_workdir
from cirag_jax.methods.common import dialects, own_prompts
from cirag_jax.methods.common import extraction_prompts as prompts
from cirag_jax.runtime import codec
from cirag_jax.runtime.requests import Generate, Generated, Program
from cirag_jax.triples.store import Record, Status, content_hash
from cirag_jax.types import Count, Passage, Triple
from cirag_jax.validation import check_fields

# Increase this version if a change makes the same responses yield different triples. Such changes
# may be in `extract`, in the parsers of extraction_prompts.py and tolerant_json.py, or in the
# choice of a triple's sentence (datasets/sentences.py). The prompts have their own hash.
PARSER = 1

_WORD = re.compile(r"\w+")
UNREADABLE = "answer: "  # Prefix of failure causes that a repeated request would reproduce.

ONLINE = load.ONLINE


@dataclasses.dataclass(frozen=True, slots=True)
class ExtractionSettings:
    """Settings of triple extraction.

    Attributes:
      entity_tokens: maximum number of new tokens for the list of entities.
      triple_tokens: maximum number of new tokens for the list of triples.
      constrained: force responses into their JSON schema (not supported by every backend).
      grounded: drop triples whose head or tail has a word that is not in the passage.
      dialect: response format: openie (CIRAG: two calls, JSON), or kirag or trace (one call, angle
        brackets).
    """

    entity_tokens: int = 192
    triple_tokens: int = 512
    constrained: bool = False
    grounded: bool = False
    dialect: dialects.Dialect = dialects.OPENIE

    def __post_init__(self):
        check_fields(self)
        if self.constrained and self.dialect != dialects.OPENIE:
            raise UserError(
                f"constrained=true needs dialect={dialects.OPENIE}, not {self.dialect}."
            )

    @property
    def identity(self) -> dict[str, Any]:
        """The settings as JSON. The default dialect is left out, because older records lack it."""
        settings = dataclasses.asdict(self)
        return {k: v for k, v in settings.items() if (k, v) != ("dialect", dialects.OPENIE)}


@dataclasses.dataclass(frozen=True, slots=True)
class Extraction:
    """The triples of a passage, or the reason why there are none.

    Attributes:
      status: ``ok``, ``empty`` (the model lists no triples) or ``failed``.
      triples: triples with passage and sentence.
      cause: reason of a failure.
      parse_errors: number of malformed responses of each kind, including partly usable ones.
      answer: beginning of the response if there are no triples.
    """

    status: Status
    triples: tuple[Triple, ...] = ()
    cause: str | None = None
    parse_errors: Mapping[str, int] = dataclasses.field(default_factory=dict)
    answer: str = ""


def extract(passage: Passage, settings: ExtractionSettings) -> Program[Extraction]:
    """Extracts the triples of a passage; with dialect=openie, requests the entities first.

    Unreadable entities are ignored. Unreadable triples give a failure with a cause, not an empty
    result. The requests have the role ``extractor``. Their `RequestError` is not caught.
    """
    parse_errors = collections.Counter[str]()
    if settings.dialect == dialects.OPENIE:
        entities = yield from _extract_entities(passage, settings, parse_errors)
        messages = prompts.triple_messages(passage, entities)
    else:
        messages = dialects.messages(passage, settings.dialect)
    schema = prompts.TRIPLES.schema(prompts.TRIPLES_SCHEMA) if settings.constrained else None
    response: Generated = yield Generate(
        messages, "extractor", settings.triple_tokens, json_schema=schema
    )
    text, finish_reason = response.text, response.finish_reason
    if settings.dialect == dialects.OPENIE:
        parsed, problem = prompts.parse_triples(text, finish_reason)
    else:
        parsed, problem = dialects.parse(text, finish_reason, settings.dialect, passage)
    parse_errors.update(_kinds("triples", problem))
    triples = [triple for triple in parsed if not prompts.is_example(triple, passage)]
    if len(triples) < len(parsed):
        parse_errors["triples: example"] += 1
    kept = [t for t in triples if is_grounded(t, passage)] if settings.grounded else triples
    if len(kept) < len(triples):
        parse_errors["triples: ungrounded"] += 1
    if kept:
        sentences = sentences_of(passage)
        sourced = (Triple(*t, passage.id, source_sentence(*t, sentences)) for t in kept)
        return Extraction("ok", tuple(sourced), parse_errors=parse_errors)
    if problem == "empty":
        return Extraction("empty", parse_errors=parse_errors, answer=text[:200])
    cause = UNREADABLE + (problem or ("ungrounded" if triples else "example"))
    return Extraction("failed", (), cause, parse_errors, text[:200])


def render(dialect: str) -> None:
    """Builds the conversations of `extract`, for `own_prompts.read`."""
    passage = Passage("", "", "")
    if dialect == dialects.OPENIE:
        prompts.entity_messages(passage)
        prompts.triple_messages(passage, ())
    else:
        dialects.messages(passage, dialect)


def _extract_entities(
    passage: Passage, settings: ExtractionSettings, parse_errors: collections.Counter[str]
) -> Program[tuple[str, ...]]:
    schema = prompts.ENTITIES.schema(prompts.ENTITIES_SCHEMA) if settings.constrained else None
    response: Generated = yield Generate(
        prompts.entity_messages(passage), "extractor", settings.entity_tokens, json_schema=schema
    )
    entities, problem = prompts.parse_entities(response.text, response.finish_reason)
    parse_errors.update(_kinds("entities", problem))
    return entities


def is_grounded(triple: prompts.Parts, passage: Passage) -> bool:
    """Returns whether all words of a triple's head and tail occur in the passage or its title."""
    head, _, tail = triple
    return _words(f"{head} {tail}") <= _words(f"{passage.title} {passage.text}")


def _words(text: str) -> set[str]:
    return set(_WORD.findall(unicodedata.normalize("NFKC", text).casefold()))


def _kinds(call: str, problem: str | None) -> list[str]:
    return [] if problem in (None, "empty") else [f"{call}: {problem}"]


# ----------------------------------------------------------------------------- journal and store


def encode_extraction(extraction: Extraction) -> dict[str, Any]:
    """Returns an extraction as JSON, for the journal."""
    return {
        "status": extraction.status,
        "triples": [[t.head, t.relation, t.tail, t.sentence] for t in extraction.triples],
        "cause": extraction.cause,
        "parse_errors": dict(extraction.parse_errors),
        "answer": extraction.answer,
    }


@dataclasses.dataclass(frozen=True)
class EncodedExtraction:
    """An extraction in the format of `encode_extraction`; raises ValueError if inconsistent."""

    status: Status
    triples: list[tuple[str, str, str, Count | None]]
    cause: str | None
    parse_errors: dict[str, Count]
    answer: str

    def __post_init__(self):
        if (self.status == "failed") != bool(self.cause):
            raise ValueError(f"status {self.status!r} does not fit cause {self.cause!r}")


def store_record(
    passage: Passage, extraction: EncodedExtraction | None, error: str | None
) -> Record:
    """Converts a passage's entry in the journal to a record of the triple store."""
    digest = content_hash(passage)
    if extraction is None:
        return Record(passage.id, digest, None, f"request: {error}")
    triples = tuple(Triple(h, r, t, passage.id, index) for h, r, t, index in extraction.triples)
    kept = None if extraction.status == "failed" else triples
    return Record(passage.id, digest, kept, extraction.cause, extraction.parse_errors)


def program_name(passage: Passage) -> str:
    """Returns the journal key of a passage's extraction, which depends on the passage's content."""
    return f"{passage.id}@{content_hash(passage).hex()[:16]}"


def extractor_version(dialect: str = dialects.OPENIE) -> dict[str, Any]:
    """Returns JSON that identifies the versions of prompts, parsers and the sentence splitter."""
    digest = prompts.prompt_hash() if dialect == dialects.OPENIE else dialects.prompt_hash(dialect)
    if own := own_prompts.of_role(own_prompts.current(), "extractor"):
        digest = codec.digest(digest + own)  # Conversations lack the names in responses.
    return {"prompt": digest, "parser": PARSER, **of_packages("sentencex")}


def extractor_identity(
    model_identity: Mapping[str, Any], settings: ExtractionSettings
) -> dict[str, Any]:
    """Returns JSON with everything that determines the triples of a passage.

    It includes the identity of the language model, but not the path of the adapter.
    """
    rest = {k: value for k, value in model_identity.items() if k not in ("model", "adapter")}
    return {
        "model": model_identity["model"],
        **extractor_version(settings.dialect),
        **settings.identity,
        "extractor": rest,
    }


def check_adapter(config: Any, settings: ExtractionSettings) -> None:
    """Raises `UserError` if the adapter was trained for another role or dialect.

    ``config`` is a block of `configs.common.language_model`.
    """
    if config.backend == "openai" or not is_training_workdir(config.adapter):
        return
    from cirag_jax.models.io import workdir

    workdir.check_role(config.adapter, "extractor")
    if settings.dialect != dialects.OPENIE:
        raise UserError(
            f"{config.adapter} was trained with dialect=openie, not {settings.dialect}."
        )


def weight_files(model: str) -> list[Path]:
    """Returns the weight files of a local model."""
    from cirag_jax.models.io.pretrained_decoder import resolve_decoder
    from cirag_jax.models.io.tensor_files import gguf_parts

    path = resolve_decoder(model)
    if path.is_file():
        return gguf_parts(path)
    return sorted([*path.glob("*.safetensors"), *path.glob("*.gguf")])
