"""The extraction of one passage: two generations, then triples with their sentences."""

import collections
import dataclasses
import re
import unicodedata
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cirag_jax.datasets.sentences import sentences_of, source_sentence
from cirag_jax.errors import UserError
from cirag_jax.identity import of_packages
from cirag_jax.io import is_training_workdir
from cirag_jax.methods.common import dialects
from cirag_jax.methods.common import extraction_prompts as prompts
from cirag_jax.runtime.requests import Generate, Generated, Program
from cirag_jax.triples.store import Record, Status, content_hash
from cirag_jax.types import Count, Passage, Triple
from cirag_jax.validation import check_fields

# Raise it with every change after which an answer that was given before yields other triples: in
# `extract`, in the parsing of extraction_prompts.py and tolerant_json.py, in the choice of a
# triple's sentence (provenance.py, datasets/sentences.py). The prompts have a hash of their own.
PARSER = 1

_WORD = re.compile(r"\w+")
UNREADABLE = "answer: "  # begins the cause of a failure that asking again would repeat

ONLINE = "online"  # Of `config.triples`: extracted when asked for.


@dataclasses.dataclass(frozen=True, slots=True)
class ExtractionSettings:
    """How a passage is extracted.

    Attributes:
        entity_tokens: Most new tokens of the entities' list.
        triple_tokens: Most new tokens of the triples' list.
        constrained: Force the answers into the JSON asked for (backends that can).
        grounded: Drop triples with a word in head or tail that the passage does not have.
        dialect: openie (CIRAG's two calls), or in one call with angle brackets kirag or trace.
    """

    entity_tokens: int = 192
    triple_tokens: int = 512
    constrained: bool = False
    grounded: bool = False
    dialect: dialects.Dialect = dialects.OPENIE

    def __post_init__(self):
        check_fields(self)
        if self.constrained and self.dialect != dialects.OPENIE:
            raise UserError(f"dialect={self.dialect} is no JSON that constrained could enforce.")

    @property
    def identity(self) -> dict[str, Any]:
        """The settings as JSON; the default dialect goes without saying, as it always did."""
        said = dataclasses.asdict(self)
        return {k: v for k, v in said.items() if (k, v) != ("dialect", dialects.OPENIE)}


@dataclasses.dataclass(frozen=True, slots=True)
class Extraction:
    """What became of a passage.

    Attributes:
        status: ``ok``, ``empty`` (the model says that there is nothing) or ``failed``.
        triples: With passage and sentence.
        cause: Why it failed.
        parse_errors: Malformed answers of each kind, rescued or not.
        answer: What the model wrote where there is no triple; its beginning.
    """

    status: Status
    triples: tuple[Triple, ...] = ()
    cause: str | None = None
    parse_errors: Mapping[str, int] = dataclasses.field(default_factory=dict)
    answer: str = ""


def extract(passage: Passage, settings: ExtractionSettings) -> Program[Extraction]:
    """Asks for the entities of a passage, then for its triples (CIRAG, offline construction).

    In another dialect it asks for the triples alone.

    An entity list that cannot be read costs its help, not the passage. A list of triples that
    cannot be read is a failure with a cause: never an empty result. Asking with a `Generate` of
    role ``extractor``, it fails as its requests fail (`RequestError`).
    """
    parse_errors: collections.Counter[str] = collections.Counter()
    ask = _two_calls if settings.dialect == dialects.OPENIE else _one_call
    parts, problem, answer = yield from ask(passage, settings, parse_errors)
    parse_errors.update(_kinds("triples", problem))
    own = [triple for triple in parts if not prompts.is_example(triple, passage)]
    if len(own) < len(parts):  # small models repeat the worked example
        parse_errors["triples: example"] += 1
    kept = [t for t in own if is_grounded(t, passage)] if settings.grounded else own
    if len(kept) < len(own):
        parse_errors["triples: ungrounded"] += 1
    if kept:
        return Extraction("ok", _placed(kept, passage), parse_errors=parse_errors)
    if problem == "empty":
        return Extraction("empty", parse_errors=parse_errors, answer=answer[:200])
    cause = UNREADABLE + (problem or ("ungrounded" if own else "example"))
    return Extraction("failed", (), cause, parse_errors, answer[:200])


_Told = tuple[tuple[prompts.Parts, ...], prompts.Problem | dialects.Problem | None, str]


def _two_calls(
    passage: Passage, settings: ExtractionSettings, parse_errors: collections.Counter[str]
) -> Program[_Told]:
    """The entities first, which the triples shall hold; the last answer, read and as it came."""
    schema = prompts.ENTITIES_SCHEMA if settings.constrained else None
    listed: Generated = yield Generate(
        prompts.entity_messages(passage), "extractor", settings.entity_tokens, json_schema=schema
    )
    entities, problem = prompts.parse_entities(listed.text, listed.finish_reason)
    parse_errors.update(_kinds("entities", problem))
    schema = prompts.TRIPLES_SCHEMA if settings.constrained else None
    told: Generated = yield Generate(
        prompts.triple_messages(passage, entities),
        "extractor",
        settings.triple_tokens,
        json_schema=schema,
    )
    return *prompts.parse_triples(told.text, told.finish_reason), told.text


def _one_call(
    passage: Passage, settings: ExtractionSettings, parse_errors: collections.Counter[str]
) -> Program[_Told]:
    """The triples at once, in angle brackets."""
    asked = dialects.messages(passage, settings.dialect)
    told: Generated = yield Generate(asked, "extractor", settings.triple_tokens)
    found = dialects.parse(told.text, told.finish_reason, settings.dialect, passage)
    return *found, told.text


def is_grounded(triple: prompts.Parts, passage: Passage) -> bool:
    """Whether the passage, its title included, has every word of the triple's head and tail.

    Small models go on with names of their own.
    """
    head, _, tail = triple
    return _words(f"{head} {tail}") <= _words(f"{passage.title} {passage.text}")


def _words(text: str) -> set[str]:
    return set(_WORD.findall(unicodedata.normalize("NFKC", text).casefold()))


def _kinds(call: str, problem: str | None) -> list[str]:
    return [] if problem in (None, "empty") else [f"{call}: {problem}"]


def _placed(parts: list[prompts.Parts], passage: Passage) -> tuple[Triple, ...]:
    sentences = sentences_of(passage)
    return tuple(
        Triple(*triple, passage.id, source_sentence(*triple, sentences)) for triple in parts
    )


# -------------------------------------------------------------------------- as the journal holds it


def encode_extraction(found: Extraction) -> dict[str, Any]:
    """An extraction as JSON."""
    return {
        "status": found.status,
        "triples": [[t.head, t.relation, t.tail, t.sentence] for t in found.triples],
        "cause": found.cause,
        "parse_errors": dict(found.parse_errors),
        "answer": found.answer,
    }


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What `encode_extraction` gave; raises ValueError where it contradicts itself."""

    status: Status
    triples: list[tuple[str, str, str, Count | None]]
    cause: str | None
    parse_errors: dict[str, Count]
    answer: str

    def __post_init__(self):
        if (self.status == "failed") != bool(self.cause):
            raise ValueError(f"status {self.status!r} with cause {self.cause!r}")


def stored(passage: Passage, outcome: Outcome | None, error: str | None) -> Record:
    """The store's record of a passage, from what the journal knows of it."""
    digest = content_hash(passage)
    if outcome is None:
        return Record(passage.id, digest, None, f"request: {error}")
    triples = tuple(Triple(h, r, t, passage.id, place) for h, r, t, place in outcome.triples)
    kept = None if outcome.status == "failed" else triples
    return Record(passage.id, digest, kept, outcome.cause, outcome.parse_errors)


def program_of(passage: Passage) -> str:
    """The journal's name of a passage's extraction; a passage that changed is another program."""
    return f"{passage.id}@{content_hash(passage).hex()[:16]}"


# ------------------------------------------------------------------------------------ the extractor


def version(dialect: str = dialects.OPENIE) -> dict[str, Any]:
    """What decides, beside the model, which triples a passage gets: JSON that changes with it."""
    own = prompts.prompt_hash() if dialect == dialects.OPENIE else dialects.prompt_hash(dialect)
    return {"prompt": own, "parser": PARSER, **of_packages("sentencex")}


def extractor_identity(made_by: Mapping[str, Any], settings: ExtractionSettings) -> dict[str, Any]:
    """Who extracts, as JSON: what makes the triples of a passage others than they were.

    Args:
        made_by: The identity of the language model; the place of its adapter does not count.
        settings: How.
    """
    apart = ("model", "adapter")
    return {
        "model": made_by["model"],
        **version(settings.dialect),
        **settings.identity,
        "extractor": {name: value for name, value in made_by.items() if name not in apart},
    }


def check_adapter(config: Any, settings: ExtractionSettings) -> None:
    """Raises `UserError` where the adapter of ``config`` (`configs.common.language_model`) was
    trained for another role, or in another dialect.
    """
    if config.backend == "openai" or not is_training_workdir(config.adapter):
        return
    from cirag_jax.models.io import workdir

    workdir.check_role(config.adapter, "extractor")
    if settings.dialect != dialects.OPENIE:
        raise UserError(
            f"{config.adapter} was trained in the dialect openie, not {settings.dialect}."
        )


def weight_files(model: str) -> list[Path]:
    """The files with a local model's weights; raises `UserError` where there is no such model."""
    from cirag_jax.models.io.pretrained_decoder import resolve_decoder

    place = resolve_decoder(model)
    if place.is_file():
        return [place]
    return sorted([*place.glob("*.safetensors"), *place.glob("*.gguf")])
