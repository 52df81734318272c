"""Evaluates an extractor: compares triples and entities of passages with references."""

import collections
import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from cirag_jax.commands import evaluation
from cirag_jax.datasets.references import Reference, select_references
from cirag_jax.errors import check_at_least
from cirag_jax.evaluation.overlap import Ratio, overlap_ratios
from cirag_jax.evaluation.triples import entity_overlap, exact_overlap, soft_overlap
from cirag_jax.methods.common import extraction
from cirag_jax.methods.common import extraction_prompts as prompts
from cirag_jax.methods.common.extraction import ExtractionSettings
from cirag_jax.reports.tables import Column, captioned, percent_with_bounds, system_rows
from cirag_jax.runtime.records import Record
from cirag_jax.runtime.requests import Program
from cirag_jax.runtime.scheduler import Job
from cirag_jax.triples.normalization import Normalization
from cirag_jax.types import Config, Passage, Triple
from cirag_jax.validation import check_value

FILE = "extractions.jsonl"
COLUMNS = (
    Column("soft F1 [95 %]", "soft/f1", percent_with_bounds),
    Column("soft P", "soft/precision", compared=False),
    Column("soft R", "soft/recall", compared=False),
    Column("micro soft F1", "soft/micro_f1", compared=False),
    Column("exact F1", "exact/f1"),
    Column("exact P", "exact/precision", compared=False),
    Column("exact R", "exact/recall", compared=False),
    Column("entity F1", "entities/f1"),
    Column("failed", "outcomes/failed", str),
    Column("tokens", "generated_tokens", "{:,}".format),
)


@dataclasses.dataclass(frozen=True, slots=True)
class PassageExtraction:
    """The extraction of one passage.

    ``status`` is ``ok``, ``empty`` or ``failed``. A failed passage has a ``cause`` and no triples.
    """

    triples: tuple[Triple, ...] = ()
    entities: tuple[str, ...] = ()
    status: str = "failed"
    parse_errors: Mapping[str, int] = dataclasses.field(default_factory=dict)
    cause: str | None = None


def evaluate(config: Config, workdir: pathlib.Path) -> dict[str, Any]:
    """Extracts the passages of ``config.data`` with each model and scores the extractions.

    Writes ``extractions.jsonl``, ``table.md`` and a journal per model. ``config`` comes from
    configs/extractor_eval.py.

    Returns:
      The result of `evaluation.report`. Each system has ``exact``, ``soft`` and ``entities`` (the
      scores of `overlap.overlap_ratios`), outcomes and parse errors. ``selection``: see
      `select_references`.
    """
    check_at_least(1, config, "entity_tokens", "triple_tokens", "in_flight", "bootstrap_samples")
    check_at_least(0, config, "limit")
    check_value("config.normalization", config.normalization, Normalization)
    settings = ExtractionSettings(
        config.entity_tokens, config.triple_tokens, config.constrained, config.grounded
    )
    models = evaluation.models_of(config, "extractor")
    references, selection = select_references(config.data, limit=config.limit, seed=config.seed)
    ids = [reference.passage.id for reference in references]
    num_trained_on = evaluation.count_trained_on(config.checkpoint, ids, "passages")

    jobs = [job(reference.passage, settings) for reference in references]
    identity = {**settings.identity, **extraction.extractor_version()}
    roles = {"extractor": settings.triple_tokens}
    results = evaluation.ask_models(
        config, workdir, models, roles, lambda _: (jobs, identity), "passage"
    )
    systems: dict[str, evaluation.System] = {}
    for name, (records, usage) in results.items():
        if records is None:
            continue  # stopped by the time limit or a budget
        extractions = read(references, records)
        pairs = zip(references, extractions, strict=True)
        systems[name] = evaluation.System(
            score(references, extractions, normalization=config.normalization),
            {**_outcomes(extractions), **usage},
            [_row(name, *pair, config.normalization) for pair in pairs],
        )
    extra = {
        "num_passages": len(references),
        "num_trained_on": num_trained_on,
        "selection": selection,
        "settings": {
            "checkpoint": config.checkpoint,
            "data": config.data.dir,
            "split": config.data.split,
            "fold": config.data.fold,
            "normalization": config.normalization,
            **settings.identity,
        },
        "complete": len(systems) == len(models),
    }
    return evaluation.report(config, workdir, systems, extra, table_of, FILE)


# ------------------------------------------------------------------------------------- extraction


def job(passage: Passage, settings: ExtractionSettings) -> Job:
    """Returns the job that extracts a passage; it calls the role ``extractor``."""
    record = dataclasses.asdict(passage)
    return Job(extraction.program_name(passage), record, lambda: _extract(passage, settings))


@dataclasses.dataclass(frozen=True)
class _Outcome(extraction.EncodedExtraction):
    """The outcome of `_extract`."""

    entities: list[str]


def read(references: Sequence[Reference], records: Mapping[str, Record]) -> list[PassageExtraction]:
    """Returns the extraction of each passage from the journal's records."""
    passages = [reference.passage for reference in references]
    return [_read(passage, records[extraction.program_name(passage)]) for passage in passages]


def _extract(passage: Passage, settings: ExtractionSettings) -> Program[dict[str, Any]]:
    """Runs `methods.common.extraction.extract`; keeps the entities of the first response."""
    program = extraction.extract(passage, settings)
    response = yield next(program)
    entities, _ = prompts.parse_entities(response.text, response.finish_reason)
    request = program.send(response)
    while True:
        response = yield request
        try:
            request = program.send(response)
        except StopIteration as end:
            return {**extraction.encode_extraction(end.value), "entities": list(entities)}


def _read(passage: Passage, record: Record) -> PassageExtraction:
    outcome = record.result(_Outcome)
    if outcome is None:
        return PassageExtraction(cause=f"request: {record.error}")
    kept = extraction.store_record(passage, outcome, None)
    return PassageExtraction(
        kept.triples or (), tuple(outcome.entities), outcome.status, kept.parse_errors, kept.cause
    )


# ---------------------------------------------------------------------------------------- scoring


def score(
    references: Sequence[Reference],
    extractions: Sequence[PassageExtraction],
    *,
    normalization: Normalization = "ascii",
) -> dict[str, Ratio]:
    """Returns ``exact/...``, ``soft/...`` and ``entities/...``, the scores of `overlap_ratios`.

    Macro scores are means over passages; ``soft/f1`` is the main score. Micro scores pool the
    triples of all passages. A failed passage has no triples.
    """
    pairs = list(zip(references, extractions, strict=True))
    groups = range(len(pairs))  # the bootstrap resamples passages
    kinds = {
        "exact": [exact_overlap(e.triples, r.triples, normalization) for r, e in pairs],
        "soft": [soft_overlap(e.triples, r.triples, normalization) for r, e in pairs],
        "entities": [entity_overlap(e.entities, r.entities, normalization) for r, e in pairs],
    }
    return {
        f"{kind}/{name}": ratio
        for kind, overlaps in kinds.items()
        for name, ratio in overlap_ratios(overlaps, groups, len(pairs)).items()
        if name != "nonempty_f1"  # no reference is empty
    }


def _outcomes(extractions: Sequence[PassageExtraction]) -> dict[str, Any]:
    parse_errors: collections.Counter[str] = collections.Counter()
    for extracted in extractions:
        parse_errors.update(extracted.parse_errors)
    causes = collections.Counter(e.cause for e in extractions if e.cause is not None)
    outcomes = collections.Counter(e.status for e in extractions)
    return {
        "outcomes": {name: outcomes[name] for name in ("ok", "empty", "failed")},
        "failures": dict(causes.most_common(5)),
        "parse_errors": dict(sorted(parse_errors.items())),
        "triples_per_passage": sum(len(e.triples) for e in extractions) / len(extractions),
    }


def _row(
    name: str, reference: Reference, extracted: PassageExtraction, normalization: Normalization
) -> dict[str, Any]:
    return {
        "passage": reference.passage.id,
        "system": name,
        "status": extracted.status,
        "cause": extracted.cause,
        "triples": [[t.head, t.relation, t.tail] for t in extracted.triples],
        "entities": extracted.entities,
        "exact_f1": exact_overlap(extracted.triples, reference.triples, normalization).f1,
        "soft_f1": soft_overlap(extracted.triples, reference.triples, normalization).f1,
        "entity_f1": entity_overlap(extracted.entities, reference.entities, normalization).f1,
        "parse_errors": extracted.parse_errors,
    }


def table_of(result: Mapping[str, Any]) -> str:
    """Returns a table of scores in per cent, one row per model."""
    rows = system_rows("extractor", COLUMNS, result)
    data = result["settings"]["data"] or "the built-in dataset"
    caption = f"{result['num_passages']} passages of {data}"
    return captioned(caption, rows, result["complete"])
