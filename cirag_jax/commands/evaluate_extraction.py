"""Evaluates an extractor: triples and entities of passages against reference ones."""

import collections
import dataclasses
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from cirag_jax.commands import side_by_side
from cirag_jax.datasets.references import Reference, select_references
from cirag_jax.errors import check_at_least, check_choice
from cirag_jax.evaluation.overlap import Ratio, overlap_ratios
from cirag_jax.evaluation.triples import entity_overlap, exact_overlap, soft_overlap
from cirag_jax.io import write_lines
from cirag_jax.methods.common import extraction
from cirag_jax.methods.common import extraction_prompts as prompts
from cirag_jax.methods.common.extraction import ExtractionSettings
from cirag_jax.reports.tables import captioned, figure, lead, write_table
from cirag_jax.runtime import codec
from cirag_jax.runtime.records import Record
from cirag_jax.runtime.requests import Program
from cirag_jax.runtime.scheduler import Job
from cirag_jax.triples.normalization import Normalization
from cirag_jax.types import Config, Passage, Triple

FILE = "extractions.jsonl"


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """An extraction from one passage; ``triples`` are as `extraction.extract` leaves them.

    ``status`` is ``ok``, ``empty`` or ``failed``; a passage that failed has no triples, and a
    ``cause``.
    """

    triples: tuple[Triple, ...] = ()
    entities: tuple[str, ...] = ()
    status: str = "failed"
    parse_errors: Mapping[str, int] = dataclasses.field(default_factory=dict)
    cause: str | None = None


def evaluate(config: Config, workdir: pathlib.Path) -> dict[str, Any]:
    """Extracts the passages of ``config.data`` with every model and scores what they find.

    Leaves ``extractions.jsonl``, ``table.md`` and a journal a model in ``workdir``; a run that was
    stopped goes on from there. ``config`` is of configs/extractor_eval.py.

    Returns:
      ``systems``: of each model ``exact``, ``soft`` and ``entities`` (the scores of
      `overlap.overlap_ratios` with their intervals, passages resampled), outcomes, parse errors,
      tokens and seconds; ``differences``: student less base; ``num_trained_on``: passages that the
      student was trained on, None: not known; ``selection``, ``settings``, ``complete``.
    """
    settings = _settings(config)
    models = side_by_side.models_of(config, "extractor")
    references, selection = select_references(config.data, limit=config.limit, seed=config.seed)
    names = [reference.passage.id for reference in references]
    num_trained_on = side_by_side.count_seen(side_by_side.student_learnt(models), names, "passages")

    jobs = [job(reference.passage, settings) for reference in references]
    bound = {**settings.identity, **extraction.version()}
    asked = ("extractor", settings.triple_tokens)
    told = side_by_side.ask_all(config, workdir, models, bound, asked, jobs, "passage")

    scores: dict[str, dict[str, Ratio]] = {}
    systems: dict[str, Any] = {}
    rows: list[dict[str, Any]] = []
    for name, (records, usage) in told.items():
        found = read(references, records)
        scores[name] = score(references, found, normalization=config.normalization)
        systems[name] = {
            **side_by_side.bounded(config, scores[name]),
            **_outcomes(found),
            **usage,
        }
        rows += [
            _row(name, r, f, config.normalization) for r, f in zip(references, found, strict=True)
        ]
    result = {
        "systems": systems,
        "differences": side_by_side.leads(config, scores),
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
        "complete": len(scores) == len(models),
    }
    write_lines(workdir / FILE, rows)
    write_table(table_of(result), workdir)
    return result


def _settings(config: Config) -> ExtractionSettings:
    check_at_least(1, config, "entity_tokens", "triple_tokens", "in_flight", "bootstrap_samples")
    check_at_least(0, config, "limit")
    check_choice("config.normalization", config.normalization, get_args(Normalization))
    return ExtractionSettings(
        config.entity_tokens, config.triple_tokens, config.constrained, config.grounded
    )


# ------------------------------------------------------------------------------------- extracting


def job(passage: Passage, settings: ExtractionSettings) -> Job:
    """The program of launch/extract.py for a passage, which asks role ``extractor``."""
    described = json.loads(codec.dump(dataclasses.asdict(passage)))
    return Job(extraction.program_of(passage), described, lambda: _extract(passage, settings))


@dataclasses.dataclass(frozen=True)
class _Outcome(extraction.Outcome):
    """What `_extract` gives."""

    entities: list[str]


def read(references: Sequence[Reference], records: Mapping[str, Record]) -> list[Found]:
    """What was extracted from every passage, as the journal has it."""
    asked = [(r.passage, records[extraction.program_of(r.passage)]) for r in references]
    return [_found(passage, record) for passage, record in asked]


def _extract(passage: Passage, settings: ExtractionSettings) -> Program[dict[str, Any]]:
    """`methods.common.extraction.extract`, and the entities of its first answer."""
    program = extraction.extract(passage, settings)
    listed = yield next(program)
    entities, _ = prompts.parse_entities(listed.text, listed.finish_reason)
    request = program.send(listed)
    while True:
        response = yield request
        try:
            request = program.send(response)
        except StopIteration as end:
            return {**extraction.encode_extraction(end.value), "entities": list(entities)}


def _found(passage: Passage, record: Record) -> Found:
    outcome = record.result(_Outcome)
    if outcome is None:
        return Found(cause=f"request: {record.error}")
    kept, entities = extraction.stored(passage, outcome, None), tuple(outcome.entities)
    return Found(kept.triples or (), entities, outcome.status, kept.parse_errors, kept.cause)


# ---------------------------------------------------------------------------------------- scoring


def score(
    references: Sequence[Reference],
    found: Sequence[Found],
    *,
    normalization: Normalization = "ascii",
) -> dict[str, Ratio]:
    """``exact/...``, ``soft/...`` and ``entities/...``: the scores of `overlap_ratios`.

    Macro scores are means over passages (``soft/f1`` is the main figure), micro ones count all
    passages' triples together; a passage that failed found nothing.
    """
    pairs = list(zip(references, found, strict=True))
    groups = range(len(pairs))  # the bootstrap draws passages
    exact = [exact_overlap(f.triples, r.triples, normalization) for r, f in pairs]
    soft = [soft_overlap(f.triples, r.triples, normalization) for r, f in pairs]
    named = [entity_overlap(f.entities, r.entities, normalization) for r, f in pairs]
    kinds = {"exact": exact, "soft": soft, "entities": named}
    return {
        f"{kind}/{name}": ratio
        for kind, overlaps in kinds.items()
        for name, ratio in overlap_ratios(overlaps, groups, len(pairs)).items()
        if name != "nonempty_f1"  # no reference is empty
    }


def _outcomes(found: Sequence[Found]) -> dict[str, Any]:
    parse_errors: collections.Counter[str] = collections.Counter()
    for one in found:
        parse_errors.update(one.parse_errors)
    causes = collections.Counter(one.cause for one in found if one.cause is not None)
    outcomes = collections.Counter(one.status for one in found)
    return {
        "outcomes": {name: outcomes[name] for name in ("ok", "empty", "failed")},
        "failures": dict(causes.most_common(5)),
        "parse_errors": dict(sorted(parse_errors.items())),
        "triples_per_passage": sum(len(one.triples) for one in found) / len(found),
    }


def _row(
    name: str, reference: Reference, found: Found, normalization: Normalization
) -> dict[str, Any]:
    return {
        "passage": reference.passage.id,
        "system": name,
        "status": found.status,
        "cause": found.cause,
        "triples": [[t.head, t.relation, t.tail] for t in found.triples],
        "entities": found.entities,
        "exact_f1": exact_overlap(found.triples, reference.triples, normalization).f1,
        "soft_f1": soft_overlap(found.triples, reference.triples, normalization).f1,
        "entity_f1": entity_overlap(found.entities, reference.entities, normalization).f1,
        "parse_errors": found.parse_errors,
    }


def table_of(result: Mapping[str, Any]) -> str:
    """The figures in per cent, one row a model; macro scores but for the column that says so."""
    header = ["extractor", "soft F1 [95 %]", "soft P", "soft R", "micro soft F1", "exact F1"]
    header += ["exact P", "exact R", "entity F1", "failed", "tokens"]
    rows = []
    for name, system in result["systems"].items():
        soft, exact = system["soft"], system["exact"]
        row = [name, figure(soft["f1"], bounds=True)]
        row += [figure(soft[s]) for s in ("precision", "recall", "micro_f1")]
        row += [figure(exact[s]) for s in ("f1", "precision", "recall")]
        row += [figure(system["entities"]["f1"])]
        rows.append([*row, str(system["outcomes"]["failed"]), f"{system['generated_tokens']:,}"])
    for name, kinds in result["differences"].items():
        row = [name, lead(kinds["soft"]["f1"]), "", "", ""]
        row += [lead(kinds["exact"]["f1"]), "", ""]
        rows.append([*row, lead(kinds["entities"]["f1"]), "", ""])
    data = result["settings"]["data"] or "the built-in dataset"
    caption = f"{result['num_passages']} passages of {data}"
    return captioned(caption, [header, *rows], result["complete"])
