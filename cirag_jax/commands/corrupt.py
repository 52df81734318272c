"""Corrupts the facts of single questions in a triple store: the command ``launch/corrupt.py``."""

import contextlib
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

from cirag_jax.commands import backends, identity, task
from cirag_jax.datasets import corruption, load, triple_files
from cirag_jax.datasets.corruption import CriticalFact, Edits
from cirag_jax.errors import UserError, check_at_least, check_choice
from cirag_jax.io import one_line, say, write_json, write_lines
from cirag_jax.llm.types import Message, Usage
from cirag_jax.methods.common.prompt_parts import object_schema
from cirag_jax.methods.common.tolerant_json import find_json
from cirag_jax.runtime.handlers import GenerateHandler
from cirag_jax.runtime.requests import Generate, Generated, Program
from cirag_jax.runtime.run import run_jobs
from cirag_jax.runtime.scheduler import Handler, Job
from cirag_jax.runtime.store import Journal
from cirag_jax.triples import store as stores
from cirag_jax.triples.store import Record, TripleStore, content_hash
from cirag_jax.types import Config, Dataset, Question, Triple

KINDS = ("noise", "deletion")
_FACT_SCHEMA = object_schema(
    {"fact": {"type": "array", "items": {"type": "string"}, "minItems": 3, "maxItems": 3}}
)
_REMOVE_SCHEMA = object_schema({"remove": {"type": "array", "items": {"type": "integer"}}})
_NOISE = (
    "You edit a graph of facts, to test programs that read it. Given a fact, write a false one "
    "that sounds plausible: {pattern}. Write one JSON object and nothing else: "
    '{{"fact": [head, relation, tail]}}'
)
_DELETION = (
    "You edit a graph of facts, to test programs that read it. Choose {count} of the numbered "
    "facts without which the question is hardest to answer: bridges between two entities of its "
    "reasoning, or qualifiers such as dates. Write one JSON object and nothing else: "
    '{{"remove": [numbers]}}'
)


def corrupt(config: Config, workdir: pathlib.Path) -> dict[str, Any]:
    """Writes a copy of a triple store, and the changed facts of each question next to it.

    The facts of a question are those of the passages of its context. ``config`` comes from
    configs/corrupt.py. Writes ``triples.sqlite`` (equal to the source), ``corrupted.jsonl``,
    ``corruption.json`` (kind and ratio) and, with a language model as editor, ``journal.sqlite``.

    Returns:
      ``num_questions``, ``without_facts`` (questions without critical facts), ``facts`` and
      ``critical_facts`` of all questions, ``requested`` and made ``edits``, ``passages`` (changed
      passages), ``failures``, tokens, ``seconds`` and ``complete``.
    """
    started = time.monotonic()
    _check(config)
    dataset = load.load_dataset(config.data)
    questions = load.select_questions(dataset, config.data)
    triples = {q.id: _triples_of(q, dataset) for q in questions}
    facts = {
        q.id: corruption.critical_facts(q, dataset.corpus, _flat(triples[q.id])) for q in questions
    }
    if not any(facts.values()):
        raise UserError(
            f"none of the {len(questions)} questions of {dataset.name} has a fact about an entity "
            "of its text or annotations; check config.data.triples."
        )
    report: dict[str, Any] = {"failures": 0, **Usage().counts, "complete": True}
    if config.editor.kind == "rules":
        edits = {q.id: _by_rules(config, q, facts[q.id], triples[q.id]) for q in questions}
    else:
        edits, report = _by_model(config, workdir, questions, facts, started)
    _copy_store(config, dataset, workdir / stores.FILE)
    changed = {q.id: corruption.edited(triples[q.id], facts[q.id], edits[q.id]) for q in questions}
    lines = (line for name, own in changed.items() for line in corruption.lines_of(name, own))
    write_lines(workdir / corruption.FILE, lines)
    write_json(workdir / corruption.SETTINGS, {"kind": _kind(config), "ratio": config.ratio})
    return {
        "num_questions": len(questions),
        "without_facts": sum(not f for f in facts.values()),
        "facts": sum(len(_flat(t)) for t in triples.values()),
        "critical_facts": sum(map(len, facts.values())),
        "requested": sum(corruption.num_edits(len(f), config.ratio) for f in facts.values()),
        "edits": sum(own.count for own in edits.values()),
        "passages": sum(map(len, changed.values())),
        **report,
        "seconds": time.monotonic() - started,
    }


def _check(config: Config) -> None:
    check_choice("config.kind", config.kind, KINDS)
    check_choice("config.editor.kind", config.editor.kind, ("rules", "llm"))
    check_at_least(1, config, "max_tokens", "in_flight")
    if not 0 <= config.ratio <= 1:
        raise UserError(f"config.ratio={config.ratio} must lie between 0 and 1.")
    if not config.patterns:
        raise UserError("config.patterns must name at least one noise pattern.")
    for pattern in config.patterns:
        check_choice("config.patterns", pattern, corruption.PATTERNS)


def _kind(config: Config) -> str:
    """Returns the kind of the changes; runs with the same kind are one curve in comparisons."""
    kind = config.kind
    if kind == "noise" and set(config.patterns) != set(corruption.PATTERNS):
        kind += f" ({', '.join(config.patterns)})"
    return kind if config.editor.kind == "rules" else f"{kind} by a language model"


def _triples_of(question: Question, dataset: Dataset) -> dict[str, tuple[Triple, ...]]:
    """Returns the triples of the passages of the question's context, by passage id."""
    if question.context is None:
        raise UserError(
            f"question {question.id!r} of {dataset.name} has no context, so it has no facts of its "
            "own to corrupt."
        )
    ids = dict.fromkeys(question.context)
    return {i: tuple(dataset.triples[i]) for i in ids if i in dataset.triples}


def _flat(triples: Mapping[str, Sequence[Triple]]) -> list[Triple]:
    return [triple for own in triples.values() for triple in own]


def _by_rules(
    config: Config,
    question: Question,
    facts: Sequence[CriticalFact],
    triples: Mapping[str, Sequence[Triple]],
) -> Edits:
    if config.kind == "deletion":
        return corruption.delete(question.id, facts, config.ratio, config.seed)
    return corruption.add_noise(
        question.id, facts, _flat(triples), config.ratio, tuple(config.patterns), config.seed
    )


def _copy_store(config: Config, dataset: Dataset, target: pathlib.Path) -> None:
    """Copies the triples of ``config.data`` to a new store, without changes."""
    source = config.data.triples
    if triple_files.is_store(source):
        with TripleStore.open(source) as store:
            path = store.path
        if path.resolve() == target.resolve():
            raise UserError("config.data.triples is in --workdir; use another --workdir.")
        stores.merge([path], target)
        return
    target.unlink(missing_ok=True)
    with TripleStore.create(target) as store:
        store.commit(
            (
                Record(i, content_hash(dataset.corpus[i]), tuple(triples))
                for i, triples in dataset.triples.items()
            ),
            {"import": pathlib.Path(source or config.data.dir or "openie.jsonl").name},
        )


# ------------------------------------------------------------------------ edits by a language model


def _by_model(
    config: Config,
    workdir: pathlib.Path,
    questions: Sequence[Question],
    facts: Mapping[str, Sequence[CriticalFact]],
    started: float,
) -> tuple[dict[str, Edits], dict[str, Any]]:
    """Lets the editor write the changes; unreadable responses change nothing."""
    block = config.editor.copy_and_resolve_references()
    with block.unlocked():
        del block.kind, block.constrained
    jobs = [
        Job(q.id, {"question": q.question}, lambda q=q: edit(q, facts[q.id], config))
        for q in questions
    ]
    model = identity.of_language_model(block, config.editor.constrained)

    def open_handlers(stack: contextlib.ExitStack, journal: Journal) -> dict[type | str, Handler]:
        backend = backends.open_for_run(block, stack, journal)
        tokens = {"editor": config.max_tokens}
        return {"editor": GenerateHandler(backend, tokens, seed=config.seed, identity=model)}

    names = ("kind", "ratio", "seed", "max_tokens")
    settings = {**model, **{name: config[name] for name in names}}
    settings["patterns"] = list(config.patterns)
    until = task.deadline(config)
    run = run_jobs(jobs, open_handlers, workdir, settings, config.in_flight, started, until)
    records = run.records if run else {}
    failures = [record.error for record in records.values() if record.error]
    if failures:
        say(f"{len(failures)} questions failed and stay unchanged; the first: {failures[0]}")
    edits = {
        q.id: (records[q.id].result(Edits) if q.id in records else None) or Edits()
        for q in questions
    }
    return edits, {
        "failures": len(failures),
        **sum((record.usage for record in records.values()), start=Usage()).counts,
        "complete": run is None or run.complete,
    }


def edit(question: Question, facts: Sequence[CriticalFact], config: Config) -> Program[Edits]:
    """Returns the editor's changes to the facts of a question."""
    count = corruption.num_edits(len(facts), config.ratio)
    if not count:
        return Edits()
    if config.kind == "deletion":
        lines = (f"{i}. {_text(fact.triple)}" for i, fact in enumerate(facts, start=1))
        response: Generated = yield _request(
            config,
            _DELETION.format(count=count),
            question.question,
            "Facts:\n" + "\n".join(lines),
            _REMOVE_SCHEMA,
        )
        return Edits(removed=parse_numbers(response.text, len(facts))[:count])
    chosen = corruption.drawn(question.id, facts, config.seed, first=False)[:count]
    responses: list[Generated] = yield [
        _request(
            config,
            _NOISE.format(
                pattern=corruption.PATTERNS[
                    corruption.pattern_of(question.id, i, tuple(config.patterns), config.seed)
                ]
            ),
            question.question,
            f"Fact: {_text(facts[i].triple)}",
            _FACT_SCHEMA,
        )
        for i in chosen
    ]
    variants = [parse_fact(response.text) for response in responses]
    return Edits(
        added=tuple(
            (i, variant)
            for i, variant in zip(chosen, variants, strict=True)
            if variant and variant != facts[i].triple[:3]
        )
    )


def _request(
    config: Config, system: str, question: str, facts: str, schema: Mapping[str, Any]
) -> Generate:
    user = Message("user", f"Question: {one_line(question)}\n", facts)
    schema_or_none = schema if config.editor.constrained else None
    return Generate((Message("system", system), user), "editor", json_schema=schema_or_none)


def _text(triple: Triple) -> str:
    return " | ".join(one_line(part) for part in triple[:3])


def parse_fact(text: str) -> tuple[str, str, str] | None:
    """Parses the editor's fact; None if it is not three texts."""
    value, _ = find_json(text, "fact")
    parts = value.get("fact") if isinstance(value, dict) else None
    if not isinstance(parts, list) or len(parts) != 3:
        return None
    head, relation, tail = (one_line(p) if isinstance(p, str) else "" for p in parts)
    return (head, relation, tail) if head and relation and tail else None


def parse_numbers(text: str, most: int) -> tuple[int, ...]:
    """Parses the editor's list of numbers from 1 to ``most``; returns indices from 0."""
    value, _ = find_json(text, "remove")
    items = value.get("remove") if isinstance(value, dict) else None
    texts = [str(item).strip() for item in items] if isinstance(items, list) else []
    numbers = dict.fromkeys(int(text[:9]) for text in texts if text.isdecimal())
    return tuple(number - 1 for number in numbers if 1 <= number <= most)
