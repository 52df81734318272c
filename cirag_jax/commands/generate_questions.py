"""From documents to a benchmark of controlled difficulty: ``launch/generate_questions.py`` (GRADE).

Step by step, each a set of programs over one journal. A program is known by all that decides its
result, so that after a change of the config only what the change touches is asked again.
"""

import collections
import contextlib
import dataclasses
import pathlib
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from cirag_jax import sqlite
from cirag_jax.commands import backends, identity, question_files, task
from cirag_jax.commands.question_files import Asked, added
from cirag_jax.datasets.chunks import ChunkSettings
from cirag_jax.errors import UserError, check_at_least
from cirag_jax.grade import (
    claims,
    clusters,
    documents,
    equivalence,
    paths,
    prompts,
    questions,
    triples,
)
from cirag_jax.grade.database import Database
from cirag_jax.grade.records import Claim, Document, Fact, Group, Path
from cirag_jax.identity import of_code
from cirag_jax.io import Closing, say
from cirag_jax.llm.openai_format import estimate_tokens
from cirag_jax.llm.types import Message, Usage
from cirag_jax.retrieval.encoders import kept_on_disk, open_encoder_for
from cirag_jax.runtime import codec
from cirag_jax.runtime.handlers import GenerateHandler
from cirag_jax.runtime.records import Record, check_settings, damaged
from cirag_jax.runtime.requests import Program
from cirag_jax.runtime.run import Runner
from cirag_jax.runtime.scheduler import Handler, Job
from cirag_jax.runtime.store import JOURNAL, Journal, ResponseCache
from cirag_jax.types import Config, Count, Triple


class _Stopped(Exception):
    """The deadline or a budget ended the run before its end."""


class _Estimated(Exception):
    """Ends an estimate: what the step takes that is the first to ask."""

    def __init__(self, step: str, requests: int, tokens: int):
        super().__init__(step)
        self.told = {"step": step, "requests": requests, "prompt_tokens": tokens}


@dataclasses.dataclass(frozen=True)
class Settings:
    """Those of every step."""

    claims: claims.ClaimSettings
    triples: triples.TripleSettings
    clusters: clusters.ClusterSettings
    equivalence: equivalence.EquivalenceSettings
    paths: paths.PathSettings
    questions: questions.QuestionSettings
    chunks: ChunkSettings

    @classmethod
    def of(cls, config: Config) -> "Settings":
        """Of configs/grade.py; raises `UserError` where a value cannot be used."""
        kinds: dict[str, Any] = {field.name: field.type for field in dataclasses.fields(cls)}
        return cls(**{name: kind(**task.plain(config[name])) for name, kind in kinds.items()})

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles of the language model that are asked."""
        steps = (self.claims, self.triples, self.equivalence, self.questions)
        return tuple(role for step in steps for role in step.roles)


def generate_questions(config: Config, workdir: pathlib.Path) -> dict[str, Any]:
    """Makes ``workdir`` a dataset folder of questions over documents; resumes what it holds.

    Beside the files of docs/data.md it writes ``paths.jsonl`` (every path that was asked, with what
    became of it), ``groups.jsonl`` and ``review.jsonl`` (equivalence groups, and a sample
    of them to judge), ``sources.jsonl`` (what the documents are) and, while it runs,
    ``journal.sqlite``. ``config`` is of configs/grade.py.

    Returns:
      Counts of every step, why things were dropped, the share of questions by hops that need an
      added link (Table 2), of groups that a person judged how many are right (A.6), tokens by role,
      ``seconds`` and ``complete``. With ``config.estimate_only`` the ``step`` that is the first to
      ask, None where none has anything to ask, its ``requests`` and ``prompt_tokens`` at most and
      ``complete``: False; ``workdir`` stays as it is.
    """
    started = time.monotonic()
    settings = Settings.of(config)
    check_at_least(1, config, "in_flight")
    check_at_least(0, config, "min_words", "max_words", "limit", "review", "context")
    until = task.deadline(config)
    found, dropped = documents.select(
        documents.read(config.documents), config.min_words, config.max_words
    )
    found = found[: config.limit or None]
    if not found:
        place = config.documents or "the built-in dataset"
        raise UserError(f"no document of {place} is left{_because(dropped)}.")
    say(f"{len(found):,} documents" + (f"; {_told(dropped)}" if dropped else ""))
    if config.estimate_only:
        return _estimate_only(config, settings, found, workdir)
    with _Steps(config, settings, workdir / JOURNAL, until=until, started=started) as steps:
        result: dict[str, Any] = {"documents": len(found), "dropped_documents": dropped}
        try:
            _generate(steps, found, workdir, result)
            complete = True
        except _Stopped:
            say("stopped before the end; the same command goes on from here")
            complete = False
        totals = steps.book.totals()
        return {
            **result,
            "failures": sum(steps.failed.values()),
            "failed_requests": dict(steps.failed),
            "calls": totals.calls,
            "tokens": {role: usage.tokens for role, usage in sorted(totals.usage.items())},
            "seconds": steps.seconds(),
            "complete": complete,
        }


def _estimate_only(
    config: Config, settings: Settings, found: Sequence[Document], workdir: pathlib.Path
) -> dict[str, Any]:
    """Runs the steps that have nothing to ask, in a copy of the journal, up to one that has."""
    told: dict[str, Any] = {"step": None, "requests": 0, "prompt_tokens": 0}
    file = workdir / JOURNAL
    check_settings(file, _bound(config, settings))
    with (
        sqlite.copied(file) as copy,
        _Steps(config, settings, copy, copy_of=file) as steps,
    ):
        try:
            _generate(steps, found, workdir, {})
            say("nothing is left to ask")
        except _Estimated as estimate:
            told = estimate.told
            say("the steps after it ask about its results, so that no estimate of them is possible")
    return {"documents": len(found), **told, "complete": False}


def _generate(
    steps: "_Steps", found: Sequence[Document], workdir: pathlib.Path, result: dict[str, Any]
) -> None:
    """All steps, one after the other; ``result`` is filled as they end."""
    settings = steps.settings
    # What is wrong with either is said before anything is asked.
    question_files.read_review(workdir)
    database = Database(found, settings.chunks)
    stated = _claims(steps, found, result)
    facts = _facts(steps, stated, result)
    groups, clustered = _groups(steps, stated, facts, result)
    graph = equivalence.link(facts, clustered, groups, settings.equivalence.most_names)
    nodes = {node for edge in graph.own for node in (edge.head, edge.tail)}
    result |= {"nodes": len(nodes), "edges": len(graph.own), "added_edges": len(graph.added)}
    result["group_problems"] = dict(graph.problems)
    by_id = {document.id: document for document in found}
    templates = None
    if settings.questions.kind == "hops":
        templates = questions.WordedTemplates(_wordings(steps, graph, stated, result))
    elif settings.questions.kind == "rules":
        typed = any(fact.type for fact in facts)
        templates = questions.TypedTemplates() if typed else questions.RelationTemplates(graph)
    checks = None
    if settings.questions.validation in ("rules", "both"):
        checks = questions.Checks(graph, stated, found, settings.questions.one_source)

    def usable(path: Path) -> str | None:
        reason = None if graph.is_stated(path) else "end_added"
        if not reason and templates is not None:
            question, reason = templates.ask(path, graph.facts)
            names = questions.answer_names(path, graph)
            if not reason and checks is not None:
                reason = checks.question(path, question, templates.answers(names)[0])
        return reason or (checks.path(path) if checks is not None else None)

    drawn = paths.draw(graph.edges, settings.paths, usable)
    result["cut_sources"] = drawn.cut_sources
    if drawn.cut_sources:
        say(
            f"WARNING: from {drawn.cut_sources:,} nodes more than "
            f"{settings.paths.most_per_source:,} paths lead, and only so many of each were looked "
            "at (config.paths.most_per_source)"
        )
    result["candidates"] = {str(hops): count for hops, count in drawn.candidates.items()}
    result["passed_over"] = {str(hops): dict(why) for hops, why in drawn.reasons.items()}
    if not drawn.paths:
        raise UserError(
            f"no question can be asked: {len(facts):,} facts of {len(stated):,} claims have no "
            f"path of {_lengths(settings)} hops that can be used"
            f"{_because(added(drawn.reasons.values()))}."
        )
    asked = _ask(steps, drawn.paths, graph, stated, by_id, templates, checks)
    if steps.config.estimate_only:
        return
    result |= question_files.write(
        steps.config, found, database, stated, graph, clustered, groups, asked, workdir
    )
    if not result["questions"]:
        raise UserError(
            f"none of the {len(asked):,} paths became a question"
            f"{_because(result['dropped_questions'])}."
        )
    lacking = [hops for hops in map(str, settings.paths.hops) if not result["hops"].get(hops)]
    for hops in lacking:
        why = _because({**drawn.reasons[int(hops)], **result["dropped_by_hops"].get(hops, {})})
        say(f"no question of {hops} hops: {drawn.candidates[int(hops)]:,} paths{why}")


# ------------------------------------------------------------------------------------ the programs


class _Steps(Closing):
    """The programs of all steps over one journal, and what failed."""

    def __init__(self, config: Config, settings: Settings, file: pathlib.Path, **options: Any):
        """``file`` is the journal's; ``options`` are those of `Runner`."""
        self.config, self.settings = config, settings
        bound = _bound(config, settings)
        options["in_flight"] = config.in_flight
        self._runner = Runner(file, bound, self._open_handlers, **options)
        self.book, self.seconds = self._runner.book, self._runner.seconds
        self.failed: collections.Counter[str] = collections.Counter()

    def close(self) -> None:
        """Closes the model and the journal."""
        self._runner.close()

    def records(self, step: str, jobs: Sequence[Job], asks: bool, kind: Any) -> dict[str, Record]:
        """Runs a step's programs; the record of each by its id.

        Args:
          step: which.
          jobs: its programs.
          asks: whether they ask the language model.
          kind: of their results.

        Raises:
          _Stopped: not all have ended.
        """
        if not self._runner.run(jobs, asks=asks, unit="program", name=step):
            raise _Stopped
        records = self._runner.records(jobs)
        found = {name: self._typed(record, kind) for name, record in records.items()}
        errors = collections.Counter(record.error for record in found.values() if record.error)
        if errors:
            error, count = errors.most_common(1)[0]
            say(f"{step}: {errors.total():,} requests failed, {count:,} of them: {error}")
        self.failed[step] += errors.total()
        return found

    def waiting(self, jobs: Iterable[Job]) -> set[str]:
        """Ids of the programs that have no result yet."""
        return {job.id for job in self._runner.left(jobs)}

    def _typed(self, record: Record, kind: Any) -> Record:
        return dataclasses.replace(record, outcome=record.result(kind))

    def check(self, job: Job, places: Iterable[int], size: int) -> None:
        """Raises `UserError` where the result of ``job`` names a place that there is not."""
        beyond = [place for place in places if place >= size]
        if beyond:
            error = IndexError(f"{beyond[0]} of {size}")
            raise damaged(self.book.path, job.id, error)

    def _open_handlers(
        self, stack: contextlib.ExitStack, book: Journal
    ) -> dict[type | str, Handler]:
        config = self.config
        spent = sum(book.usage().values(), Usage())
        cache = stack.enter_context(ResponseCache(config.cache)) if config.cache else None
        backend: Any = backends.open_backend(config.llm, spent=spent)
        stack.enter_context(contextlib.closing(backend))
        made_by = identity.of_language_model(config.llm)
        handler = GenerateHandler(backend, {}, seed=config.seed, cache=cache, identity=made_by)
        return dict.fromkeys(self.settings.roles, handler)

    def estimate(self, step: str, messages: Iterable[tuple[int, Sequence[Message]]]) -> None:
        """Says what a step's requests take, of each of which so many are alike.

        It is the most: what one role rejects is no more shown to the next.

        Raises:
          _Estimated: there are any, and no more than this is wanted.
        """
        sizes = [(count, count * estimate_tokens(tuple(turns))) for count, turns in messages]
        if sizes:
            requests, tokens = (sum(column) for column in zip(*sizes, strict=True))
            say(f"{step}: at most {requests:,} requests, about {tokens:,} prompt tokens")
            if self.config.estimate_only:
                raise _Estimated(step, requests, tokens)


def _job(step: str, decided_by: Any, program: Any) -> Job:
    """A program that is known by its step and by what decides its result."""
    return Job(f"{step}-{codec.digest(codec.dump(decided_by))}", {"step": step}, program)


def _bound(config: Config, settings: Settings) -> dict[str, Any]:
    """What decides every program beside what it is known by."""
    found: dict[str, Any] = {"code": of_code(__name__), "seed": config.seed}
    if settings.roles:
        found["llm"] = identity.of_language_model(config.llm)
    if settings.equivalence.kind != "off":
        found["encoder"] = identity.of_encoder(config.encoder)
    return found


def _claims(steps: _Steps, found: Sequence[Document], result: dict[str, Any]) -> tuple[Claim, ...]:
    settings = steps.settings.claims
    places = [(d, i) for d in found for i, s in enumerate(d.sentences) if s.strip()]
    how = codec.encode(settings)

    def program(document: Document, index: int) -> Any:
        return lambda: claims.claim(document, index, settings)

    # An article is hashed once, and not once a sentence.
    whole = {d.id: codec.digest(codec.dump([d.title, d.sentences])) for d in found}
    jobs = [_job("claim", [d.id, i, whole[d.id], how], program(d, i)) for d, i in places]
    waiting = steps.waiting(jobs)
    left = collections.Counter(
        d.id for (d, _), job in zip(places, jobs, strict=True) if job.id in waiting
    )
    shown = (
        (left[d.id], turns)
        for d in found
        if left[d.id]
        for turns in claims.typical_messages(d, settings)
    )
    steps.estimate("claims", shown)
    records = steps.records("claims", jobs, bool(settings.roles), claims.ClaimResult)
    stated: list[Claim] = []
    why: collections.Counter[str] = collections.Counter()
    for (document, index), job in zip(places, jobs, strict=True):
        outcome = records[job.id].outcome or {"reason": "request_failed"}
        if "text" in outcome:
            stated.append(Claim(document.id, index, outcome["text"]))
        else:
            why[outcome["reason"]] += 1
    result |= {"sentences": len(places), "claims": len(stated), "dropped_sentences": dict(why)}
    if not stated:
        raise UserError(
            f"none of the {len(places):,} sentences of {steps.config.documents or 'the dataset'} "
            f"became a claim{_because(why)}."
        )
    say(f"{len(stated):,} claims of {len(places):,} sentences")
    return tuple(stated)


def _facts(steps: _Steps, stated: Sequence[Claim], result: dict[str, Any]) -> tuple[Fact, ...]:
    settings, path = steps.settings.triples, steps.config.documents
    problems: collections.Counter[str] = collections.Counter()
    if settings.kind == "dataset":
        found, problems["no_claim"] = triples.of_dataset(path, stated)
    else:
        batches = [
            stated[first : first + settings.claims]
            for first in range(0, len(stated), settings.claims)
        ]
        texts = [[claim.text for claim in batch] for batch in batches]

        def program(some: Sequence[str]) -> Any:
            return lambda: triples.extract(some, settings)

        how = codec.encode(settings)
        jobs = [
            # Two batches may say the same.
            _job("triples", [first, some, how], program(some))
            for first, some in enumerate(texts)
        ]
        waiting = steps.waiting(jobs)
        left = (some for some, job in zip(texts, jobs, strict=True) if job.id in waiting)
        steps.estimate("triples", ((1, prompts.triple_messages(some)) for some in left))
        records = steps.records("triples", jobs, True, triples.TripleResult)
        rows: list[tuple[Triple, int]] = []
        for number, job in enumerate(jobs):
            outcome = records[job.id].outcome or {"triples": [], "problems": ["request_failed"]}
            problems.update(outcome["problems"])
            steps.check(job, (place for *_, place in outcome["triples"]), len(batches[number]))
            for head, relation, tail, place in outcome["triples"]:
                rows.append((Triple(head, relation, tail), number * settings.claims + place))
        found = triples.facts(rows)
    result |= {"facts": len(found), "triple_problems": {k: n for k, n in problems.items() if n}}
    if not found:
        raise UserError(f"none of the {len(stated):,} claims gave a triple{_because(problems)}.")
    return found


def _groups(
    steps: _Steps, stated: Sequence[Claim], facts: Sequence[Fact], result: dict[str, Any]
) -> tuple[list[Group], clusters.Clusters]:
    """Equivalence groups, and the clusters in which they were found."""
    settings, how = steps.settings.equivalence, steps.settings.clusters
    if settings.kind == "off" or all(fact.type for fact in facts):  # they point to things already
        result |= {"clusters": 0, "groups": {}, "equivalence_problems": {}}
        return [], ()
    texts = [claim.text for claim in stated]

    def program() -> Program[list[list[int]]]:
        encoder = kept_on_disk(open_encoder_for(steps.config.encoder))
        say(f"embedding and clustering {len(texts):,} claims")
        return [list(rows) for rows in clusters.clusters(encoder.encode(texts), how)]
        yield  # a program, which has nothing to ask

    encoded_by = identity.of_encoder(steps.config.encoder)
    job = _job("clusters", [texts, codec.encode(how), encoded_by], program)
    record = steps.records("clusters", [job], False, list[list[Count]])[job.id]
    if record.outcome is None:
        raise UserError(f"the claims could not be clustered: {record.error}.")
    steps.check(job, (row for rows in record.outcome for row in rows), len(texts))
    clustered = tuple(tuple(rows) for rows in record.outcome)
    parts = list(equivalence.parts(clustered, facts, settings))

    def find(places: Sequence[int]) -> Any:
        return lambda: equivalence.find([facts[at] for at in places], stated, settings)

    jobs = []
    for number, (cluster, places) in enumerate(parts):
        shown = [[*facts[at].parts, stated[facts[at].claim].text] for at in places]
        decided_by = [cluster, number, shown, codec.encode(settings)]
        jobs.append(_job("same", decided_by, find(places)))
    if settings.kind == "model":
        waiting = steps.waiting(jobs)
        left = (p for (_, p), job in zip(parts, jobs, strict=True) if job.id in waiting)
        shown = ([(facts[at].parts, stated[facts[at].claim].text) for at in p] for p in left)
        steps.estimate("equivalence", ((1, prompts.same_messages(some)) for some in shown))
    records = steps.records("equivalence", jobs, bool(settings.roles), equivalence.GroupResult)
    groups: list[Group] = []
    problems: collections.Counter[str] = collections.Counter()
    for (cluster, _), job in zip(parts, jobs, strict=True):
        outcome = records[job.id].outcome or {"groups": [], "problems": ["request_failed"]}
        groups += [Group(cluster, tuple(nodes), kind) for nodes, kind in outcome["groups"]]
        problems.update(outcome["problems"])
    in_several = collections.Counter(row for rows in clustered for row in rows)
    result |= {
        "clusters": len(clustered),
        "claims_in_several_clusters": sum(count > 1 for count in in_several.values()),
        "groups": dict(collections.Counter(group.kind for group in groups)),
        "equivalence_problems": dict(problems),
    }
    return groups, clustered


def _wordings(
    steps: _Steps, graph: equivalence.Graph, stated: Sequence[Claim], result: dict[str, Any]
) -> dict[int, questions.Wording]:
    """The facts that can be part of a path in a language model's words, by their places."""
    settings, facts = steps.settings.questions, graph.facts

    def program(fact: Fact) -> Any:
        return lambda: questions.write_wording(fact, stated[fact.claim], settings)

    jobs = {
        at: _job(
            "wording",
            [facts[at].parts, stated[facts[at].claim].text, settings.max_tokens],
            program(facts[at]),
        )
        for at in sorted(questions.worth_wording(graph.edges))
    }
    once = {job.id: at for at, job in jobs.items()}  # a fact may be stated twice
    unique = [jobs[at] for at in once.values()]
    waiting = steps.waiting(unique)
    left = (facts[at] for name, at in once.items() if name in waiting)
    shown = (
        turns for fact in left for turns in questions.typical_messages(fact, stated[fact.claim])
    )
    steps.estimate("wordings", ((1, turns) for turns in shown))
    records = steps.records("wordings", unique, True, questions.Wording)
    failed: questions.Wording = {"reason": "request_failed"}
    found = {at: records[job.id].outcome or failed for at, job in jobs.items()}
    result["wordings"] = len(found)
    result["wording_problems"] = dict(
        collections.Counter(worded["reason"] for worded in found.values() if "reason" in worded)
    )
    return found


def _ask(
    steps: _Steps,
    drawn: Sequence[Path],
    graph: equivalence.Graph,
    stated: Sequence[Claim],
    by_id: Mapping[str, Document],
    templates: questions.Templates | None,
    checks: questions.Checks | None,
) -> list[Asked]:
    settings = steps.settings.questions

    def program(path: Path) -> Any:
        return lambda: questions.ask(path, graph, stated, by_id, settings, templates, checks)

    jobs, messages = [], []
    for path in drawn:
        shown = questions.path_messages(path, graph, stated, by_id, settings)
        messages.append(shown)
        surfaces = [graph.surfaces[node] for node in (path[0].head, *(e.tail for e in path))]
        decided_by = [[turn.text for turn in shown], surfaces, codec.encode(settings)]
        jobs.append(_job("question", [codec.encode(path), decided_by], program(path)))
    waiting, asking = steps.waiting(jobs), []
    roles = [role for role in settings.roles if role != "asker" or templates is None]
    for path, turns, job in zip(drawn, messages, jobs, strict=True):
        last = graph.facts[path[-1].fact]
        # A claim is about as long as a question.
        told = prompts.validation_messages(stated[last.claim].text, last.tail)
        if job.id in waiting:
            asking += [(1, {"asker": turns, "validator": told}[role]) for role in roles]
    steps.estimate("questions", asking)
    records = steps.records("questions", jobs, bool(roles), questions.QuestionResult)
    failed = {"question": "", "answers": [], "reason": "request_failed"}
    return [
        Asked(path, records[job.id].outcome or failed)
        for path, job in zip(drawn, jobs, strict=True)
    ]


# ---------------------------------------------------------------------------------------- in words


def _lengths(settings: Settings) -> str:
    return ", ".join(map(str, settings.paths.hops))


def _told(why: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in sorted(why.items()) if count)


def _because(why: Mapping[str, int]) -> str:
    told = _told(why)
    return f" ({told})" if told else ""
