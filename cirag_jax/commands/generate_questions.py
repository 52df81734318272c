"""Generates a benchmark with controlled difficulty from documents (GRADE).

This is the command ``launch/generate_questions.py``. All steps run programs with one journal. The
id of a program is a hash of everything that determines its result. If the config changes, only
affected requests are sent again.
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
from cirag_jax.commands.question_files import GeneratedQuestion, Knowledge, total_counts
from cirag_jax.datasets.chunks import ChunkSettings
from cirag_jax.errors import UserError, check_at_least
from cirag_jax.grade import (
    claims,
    clusters,
    documents,
    equivalence,
    fact_filter,
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
from cirag_jax.retrieval.encoders import open_encoder_for, with_disk_cache
from cirag_jax.runtime import codec
from cirag_jax.runtime.handlers import GenerateHandler
from cirag_jax.runtime.records import Record, check_settings, damaged
from cirag_jax.runtime.requests import Program
from cirag_jax.runtime.run import Runner
from cirag_jax.runtime.scheduler import Handler, Job
from cirag_jax.runtime.store import JOURNAL, Journal, ResponseCache
from cirag_jax.types import Config, Count, Triple


class _Interrupted(Exception):
    """Raised if the time limit or a budget stops the run."""


class _Estimate(Exception):
    """Raised with the cost of the first step that needs the language model, to end an estimate."""

    def __init__(self, step: str, requests: int, tokens: int):
        super().__init__(step)
        self.cost = {"step": step, "requests": requests, "prompt_tokens": tokens}


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of all steps."""

    claims: claims.ClaimSettings
    triples: triples.TripleSettings
    clusters: clusters.ClusterSettings
    equivalence: equivalence.EquivalenceSettings
    paths: paths.PathSettings
    questions: questions.QuestionSettings
    chunks: ChunkSettings

    @classmethod
    def of(cls, config: Config) -> "Settings":
        """Reads and checks the settings of a config of configs/grade.py."""
        kinds: dict[str, Any] = {field.name: field.type for field in dataclasses.fields(cls)}
        return cls(**{name: kind(**task.plain(config[name])) for name, kind in kinds.items()})

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles of the language model in these steps."""
        steps = (self.claims, self.triples, self.equivalence, self.questions)
        return tuple(role for step in steps for role in step.roles)


def generate_questions(config: Config, workdir: pathlib.Path) -> dict[str, Any]:
    """Generates questions from documents, as a dataset folder; resumes interrupted runs.

    In addition to the dataset's files (docs/data.md), ``workdir`` has ``paths.jsonl`` (every path
    of facts and its outcome), ``groups.jsonl`` and ``review.jsonl`` (equivalence groups, and
    a sample of them for human review), ``sources.jsonl`` (the documents) and, during the run,
    ``journal.sqlite``. ``config`` comes from configs/grade.py.

    Returns:
      Counts of every step, reasons for dropping candidates, the share of questions that need an
      added link, by hops (GRADE's Table 2), the share of reviewed groups that are right (GRADE,
      A.6), tokens by role, ``seconds`` and ``complete``. With ``config.estimate_only``: the first
      ``step`` that needs the language model (None if no step does), an upper bound on its
      ``requests`` and ``prompt_tokens``, the number of ``documents``, and ``complete``, which is
      False; ``workdir`` is not changed.
    """
    started = time.monotonic()
    settings = Settings.of(config)
    check_at_least(1, config, "in_flight")
    check_at_least(0, config, "min_words", "max_words", "limit", "review", "context")
    until = task.deadline(config)
    all_documents, dropped = documents.select(
        documents.read(config.documents), config.min_words, config.max_words
    )
    all_documents = all_documents[: config.limit or None]
    if not all_documents:
        place = config.documents or "the built-in dataset"
        raise UserError(f"no document of {place} can be used{_reasons(dropped)}.")
    say(f"{len(all_documents):,} documents{_reasons(dropped)}")
    if config.estimate_only:
        return _estimate_only(config, settings, all_documents, workdir)
    with _Steps(config, settings, workdir / JOURNAL, until=until, started=started) as steps:
        result: dict[str, Any] = {"documents": len(all_documents), "dropped_documents": dropped}
        try:
            _generate(steps, all_documents, workdir, result)
            complete = True
        except _Interrupted:
            say("stopped before the end; run the same command to resume")
            complete = False
        totals = steps.journal.totals()
        return {
            **result,
            "failures": sum(steps.failed.values()),
            "failed_requests": dict(steps.failed),
            "calls": totals.calls,
            "tokens": {role: usage.counts for role, usage in sorted(totals.usage.items())},
            "seconds": steps.seconds(),
            "complete": complete,
        }


def _estimate_only(
    config: Config, settings: Settings, all_documents: Sequence[Document], workdir: pathlib.Path
) -> dict[str, Any]:
    """Runs steps on a copy of the journal until one needs the language model."""
    cost: dict[str, Any] = {"step": None, "requests": 0, "prompt_tokens": 0}
    file = workdir / JOURNAL
    check_settings(file, _identity(config, settings))
    with sqlite.copied(file) as copy, _Steps(config, settings, copy, copy_of=file) as steps:
        try:
            _generate(steps, all_documents, workdir, {})
            say("no requests are left")
        except _Estimate as estimate:
            cost = estimate.cost
            say("later steps cannot be estimated, because they depend on the results of this step")
    return {"documents": len(all_documents), **cost, "complete": False}


def _generate(
    steps: "_Steps", all_documents: Sequence[Document], workdir: pathlib.Path, result: dict
) -> None:
    """Runs all steps and adds their counts to ``result``."""
    settings = steps.settings
    # The next two lines may raise errors, so they precede all requests.
    question_files.read_review(workdir)
    database = Database(all_documents, settings.chunks, backends.size_of_text(settings.chunks))
    all_claims = _claims(steps, all_documents, result)
    facts = _facts(steps, all_claims, result)
    groups, clustered = _groups(steps, all_claims, facts, result)
    graph = equivalence.link(facts, clustered, groups, settings.equivalence.most_names)
    nodes = {node for edge in graph.own for node in (edge.head, edge.tail)}
    result |= {"nodes": len(nodes), "edges": len(graph.own), "added_edges": len(graph.added)}
    result["group_problems"] = dict(graph.problems)
    knowledge = Knowledge(all_documents, database, all_claims, graph, clustered, groups)
    templates = None
    if settings.questions.kind == "hops":
        templates = questions.WordedTemplates(_wordings(steps, graph, all_claims, result))
    elif settings.questions.kind == "rules":
        typed = any(fact.type for fact in facts)
        templates = questions.TypedTemplates() if typed else questions.RelationTemplates(graph)
    checks = None
    if settings.questions.validation in ("rules", "both"):
        checks = questions.Checks(graph, all_claims, all_documents, settings.questions.one_source)

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
            f"WARNING: {drawn.cut_sources:,} nodes start more than "
            f"{settings.paths.most_per_source:,} paths each; the excess paths were ignored "
            "(config.paths.most_per_source)"
        )
    result["candidates"] = {str(hops): count for hops, count in drawn.candidates.items()}
    result["passed_over"] = {str(hops): dict(why) for hops, why in drawn.reasons.items()}
    if not drawn.paths:
        raise UserError(
            f"no questions can be generated: {len(facts):,} facts of {len(all_claims):,} claims "
            f"have no usable path of {', '.join(map(str, settings.paths.hops))} hops"
            f"{_reasons(total_counts(drawn.reasons.values()))}."
        )
    generated = _generate_from_paths(steps, drawn.paths, knowledge, templates, checks)
    if steps.config.estimate_only:
        return
    result |= question_files.write(steps.config, knowledge, generated, workdir)
    if not result["questions"]:
        raise UserError(
            f"none of the {len(generated):,} paths became a question"
            f"{_reasons(result['dropped_questions'])}."
        )
    missing = [hops for hops in map(str, settings.paths.hops) if not result["hops"].get(hops)]
    for hops in missing:
        counts = {**drawn.reasons[int(hops)], **result["dropped_by_hops"].get(hops, {})}
        say(f"no questions of {hops} hops: {drawn.candidates[int(hops)]:,} paths{_reasons(counts)}")


# ---------------------------------------------------------------------------------------- programs


class _Steps(Closing):
    """The programs of all steps, which share a journal and a language model."""

    def __init__(self, config: Config, settings: Settings, file: pathlib.Path, **options: Any):
        """Opens the journal ``file``; see `Runner` for ``options``."""
        self.config, self.settings = config, settings
        options["in_flight"] = config.in_flight
        bound_to = _identity(config, settings)
        self._runner = Runner(file, bound_to, self._open_handlers, **options)
        self.journal, self.seconds = self._runner.journal, self._runner.seconds
        self.failed: collections.Counter[str] = collections.Counter()

    def close(self) -> None:
        """Closes the model and the journal."""
        self._runner.close()

    def records(self, step: str, jobs: Sequence[Job], asks: bool, kind: Any) -> dict[str, Record]:
        """Runs a step's programs; returns their records by id.

        Args:
          step: the name of the step.
          jobs: the programs of the step.
          asks: whether the programs call the language model.
          kind: the type of the programs' results.

        Raises:
          _Interrupted: some programs have not ended.
        """
        if not self._runner.run(jobs, asks=asks, unit="program", name=step):
            raise _Interrupted
        records = {
            name: dataclasses.replace(record, outcome=record.result(kind))
            for name, record in self._runner.records(jobs).items()
        }
        errors = collections.Counter(record.error for record in records.values() if record.error)
        if errors:
            error, count = errors.most_common(1)[0]
            say(f"{step}: {errors.total():,} requests failed, {count:,} of them with: {error}")
        self.failed[step] += errors.total()
        return records

    def pending(self, jobs: Iterable[Job]) -> set[str]:
        """Returns the ids of programs without a result."""
        return {job.id for job in self._runner.unfinished(jobs)}

    def check(self, job: Job, indices: Iterable[int], size: int) -> None:
        """Raises `UserError` if the result of ``job`` contains an index out of range."""
        for index in indices:
            if index >= size:
                raise damaged(self.journal.path, job.id, IndexError(f"{index} of {size}"))

    def _open_handlers(
        self, stack: contextlib.ExitStack, journal: Journal
    ) -> dict[type | str, Handler]:
        config = self.config
        spent = sum(journal.usage().values(), Usage())
        cache = stack.enter_context(ResponseCache(config.cache)) if config.cache else None
        backend: Any = backends.open_backend(config.llm, spent=spent)
        stack.enter_context(contextlib.closing(backend))
        model = identity.of_language_model(config.llm)
        handler = GenerateHandler(backend, {}, seed=config.seed, cache=cache, identity=model)
        return dict.fromkeys(self.settings.roles, handler)

    def estimate(self, step: str, messages: Iterable[tuple[int, Sequence[Message]]]) -> None:
        """Prints an upper bound on a step's requests; ``messages`` are pairs (count, example).

        There may be fewer requests, because items that one role rejects do not reach the next.

        Raises:
          _Estimate: with ``config.estimate_only``, if there are any requests.
        """
        sizes = [(count, count * estimate_tokens(tuple(turns))) for count, turns in messages]
        if sizes:
            requests, tokens = (sum(column) for column in zip(*sizes, strict=True))
            say(f"{step}: at most {requests:,} requests, about {tokens:,} prompt tokens")
            if self.config.estimate_only:
                raise _Estimate(step, requests, tokens)


def _job(step: str, content: Any, program: Any) -> Job:
    """Returns a job whose id is the step and a hash of the content that determines its result."""
    return Job(f"{step}-{codec.digest(codec.dump(content))}", {"step": step}, program)


def _identity(config: Config, settings: Settings) -> dict[str, Any]:
    """Returns the identity of all programs, without the content that is hashed in their ids."""
    fields: dict[str, Any] = {"code": of_code(__name__), "seed": config.seed}
    if settings.roles:
        fields["llm"] = identity.of_language_model(config.llm)
    if settings.claims.classifier is not None:
        fields["classifier"] = identity.of_classifier(
            settings.claims.classifier, settings.claims.label
        )
    if settings.equivalence.kind != "off":
        fields["encoder"] = identity.of_encoder(config.encoder)
    return fields


def _claims(
    steps: _Steps, all_documents: Sequence[Document], result: dict[str, Any]
) -> tuple[Claim, ...]:
    settings = steps.settings.claims
    sentences = [(d, i) for d in all_documents for i, s in enumerate(d.sentences) if s.strip()]
    num_sentences = len(sentences)
    if settings.classifier is not None:
        facts = _find_facts(steps, [d.sentences[i] for d, i in sentences])
        sentences = [sentences[row] for row in facts]
    encoded = codec.encode(settings)

    def program(document: Document, index: int) -> Any:
        return lambda: claims.claim(document, index, settings)

    digests = {d.id: codec.digest(codec.dump([d.title, d.sentences])) for d in all_documents}
    jobs = [_job("claim", [d.id, i, digests[d.id], encoded], program(d, i)) for d, i in sentences]
    pending = steps.pending(jobs)
    counts = collections.Counter(
        d.id for (d, _), job in zip(sentences, jobs, strict=True) if job.id in pending
    )
    messages = (
        (counts[d.id], turns)
        for d in all_documents
        if counts[d.id]
        for turns in claims.typical_messages(d, settings)
    )
    steps.estimate("claims", messages)
    records = steps.records("claims", jobs, bool(settings.roles), claims.ClaimResult)
    all_claims: list[Claim] = []
    dropped = collections.Counter({"opinion": num_sentences - len(sentences)})
    for (document, index), job in zip(sentences, jobs, strict=True):
        outcome = records[job.id].outcome or {"reason": "request_failed"}
        if "text" in outcome:
            all_claims.append(Claim(document.id, index, outcome["text"]))
        else:
            dropped[outcome["reason"]] += 1
    result |= {"sentences": num_sentences, "claims": len(all_claims)}
    result["dropped_sentences"] = dict(+dropped)
    if not all_claims:
        raise UserError(
            f"none of the {num_sentences:,} sentences of {steps.config.documents or 'the dataset'}"
            f" became a claim{_reasons(dropped)}."
        )
    say(f"{len(all_claims):,} claims of {num_sentences:,} sentences")
    return tuple(all_claims)


def _find_facts(steps: _Steps, sentences: Sequence[str]) -> list[int]:
    """Returns the indices of the sentences that the classifier calls facts."""
    settings = steps.settings.claims

    def program() -> Program[list[int]]:
        say(f"classifying {len(sentences):,} sentences")
        return fact_filter.find_facts(sentences, settings)
        yield  # makes this a generator without requests

    classifier = identity.of_classifier(str(settings.classifier), settings.label)
    job = _job("facts", [sentences, classifier], program)
    record = steps.records("facts", [job], False, list[Count])[job.id]
    if record.outcome is None:
        raise UserError(f"the sentences could not be classified: {record.error}.")
    steps.check(job, record.outcome, len(sentences))
    return record.outcome


def _facts(steps: _Steps, all_claims: Sequence[Claim], result: dict[str, Any]) -> tuple[Fact, ...]:
    settings, path = steps.settings.triples, steps.config.documents
    problems: collections.Counter[str] = collections.Counter()
    if settings.kind == "dataset":
        facts, problems["no_claim"] = triples.of_dataset(path, all_claims)
    else:
        batches = [
            all_claims[first : first + settings.claims]
            for first in range(0, len(all_claims), settings.claims)
        ]
        texts = [[claim.text for claim in batch] for batch in batches]

        def program(batch_texts: Sequence[str]) -> Any:
            return lambda: triples.extract(batch_texts, settings)

        encoded = codec.encode(settings)
        jobs = [  # numbered, because batches may be equal
            _job("triples", [number, batch_texts, encoded], program(batch_texts))
            for number, batch_texts in enumerate(texts)
        ]
        ids = steps.pending(jobs)
        pending = (batch for batch, job in zip(texts, jobs, strict=True) if job.id in ids)
        steps.estimate("triples", ((1, prompts.triple_messages(batch)) for batch in pending))
        records = steps.records("triples", jobs, True, triples.TripleResult)
        rows: list[tuple[Triple, int]] = []
        for number, job in enumerate(jobs):
            outcome = records[job.id].outcome or {"triples": [], "problems": ["request_failed"]}
            problems.update(outcome["problems"])
            steps.check(job, (index for *_, index in outcome["triples"]), len(batches[number]))
            for head, relation, tail, index in outcome["triples"]:
                rows.append((Triple(head, relation, tail), number * settings.claims + index))
        facts = triples.facts(rows)
    result |= {"facts": len(facts), "triple_problems": {k: n for k, n in problems.items() if n}}
    if not facts:
        raise UserError(
            f"none of the {len(all_claims):,} claims gave a triple{_reasons(problems)}."
        )
    return facts


def _groups(
    steps: _Steps, all_claims: Sequence[Claim], facts: Sequence[Fact], result: dict[str, Any]
) -> tuple[list[Group], clusters.Clusters]:
    """Returns equivalence groups, and the clusters in which they were found."""
    settings, cluster_settings = steps.settings.equivalence, steps.settings.clusters
    if settings.kind == "off" or all(fact.type for fact in facts):  # facts already have entity ids
        result |= {"clusters": 0, "groups": {}, "equivalence_problems": {}}
        return [], ()
    texts = [claim.text for claim in all_claims]

    def program() -> Program[list[list[int]]]:
        encoder = with_disk_cache(open_encoder_for(steps.config.encoder))
        say(f"embedding and clustering {len(texts):,} claims")
        vectors = encoder.encode(texts)
        return [list(rows) for rows in clusters.clusters(vectors, cluster_settings)]
        yield  # makes this a generator without requests

    encoder_identity = identity.of_encoder(steps.config.encoder)
    job = _job("clusters", [texts, codec.encode(cluster_settings), encoder_identity], program)
    record = steps.records("clusters", [job], False, list[list[Count]])[job.id]
    if record.outcome is None:
        raise UserError(f"the claims could not be clustered: {record.error}.")
    steps.check(job, (row for rows in record.outcome for row in rows), len(texts))
    clustered = tuple(tuple(rows) for rows in record.outcome)
    parts = list(equivalence.parts(clustered, facts, settings))

    def find(indices: Sequence[int]) -> Any:
        return lambda: equivalence.find([facts[i] for i in indices], all_claims, settings)

    jobs = []
    for number, (cluster, indices) in enumerate(parts):
        rows = [[*facts[i].parts, all_claims[facts[i].claim].text] for i in indices]
        content = [cluster, number, rows, codec.encode(settings)]
        jobs.append(_job("same", content, find(indices)))
    if settings.kind == "model":
        ids = steps.pending(jobs)
        pending = (p for (_, p), job in zip(parts, jobs, strict=True) if job.id in ids)
        facts_of = ([(facts[i].parts, all_claims[facts[i].claim].text) for i in p] for p in pending)
        steps.estimate("equivalence", ((1, prompts.same_messages(pairs)) for pairs in facts_of))
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
    steps: _Steps, graph: equivalence.Graph, all_claims: Sequence[Claim], result: dict[str, Any]
) -> dict[int, questions.Wording]:
    """Returns a language model's wordings of the facts that can be part of a path, by index."""
    settings, facts = steps.settings.questions, graph.facts

    def program(fact: Fact) -> Any:
        return lambda: questions.write_wording(fact, all_claims[fact.claim], settings)

    jobs = {}
    for i in sorted(questions.worth_wording(graph.edges)):
        fact = facts[i]
        content = [fact.parts, all_claims[fact.claim].text, settings.max_tokens]
        jobs[i] = _job("wording", content, program(fact))
    indices = {job.id: i for i, job in jobs.items()}  # equal facts share a job
    unique = [jobs[i] for i in indices.values()]
    ids = steps.pending(unique)
    pending = (facts[i] for name, i in indices.items() if name in ids)
    messages = (
        (1, turns)
        for fact in pending
        for turns in questions.typical_messages(fact, all_claims[fact.claim])
    )
    steps.estimate("wordings", messages)
    records = steps.records("wordings", unique, True, questions.Wording)
    failed: questions.Wording = {"reason": "request_failed"}
    wordings = {i: records[job.id].outcome or failed for i, job in jobs.items()}
    result["wordings"] = len(wordings)
    result["wording_problems"] = dict(
        collections.Counter(w["reason"] for w in wordings.values() if "reason" in w)
    )
    return wordings


def _generate_from_paths(
    steps: _Steps,
    drawn: Sequence[Path],
    knowledge: Knowledge,
    templates: questions.Templates | None,
    checks: questions.Checks | None,
) -> list[GeneratedQuestion]:
    settings, graph, all_claims = steps.settings.questions, knowledge.graph, knowledge.claims
    by_id = {document.id: document for document in knowledge.documents}

    def program(path: Path) -> Any:
        return lambda: questions.ask(path, graph, all_claims, by_id, settings, templates, checks)

    jobs, messages = [], []
    for path in drawn:
        turns = questions.path_messages(path, graph, all_claims, by_id, settings)
        messages.append(turns)
        surfaces = [graph.surfaces[node] for node in (path[0].head, *(e.tail for e in path))]
        content = [[turn.text for turn in turns], surfaces, codec.encode(settings)]
        jobs.append(_job("question", [codec.encode(path), content], program(path)))
    pending, requests = steps.pending(jobs), []
    roles = [role for role in settings.roles if role != "asker" or templates is None]
    for path, turns, job in zip(drawn, messages, jobs, strict=True):
        last = graph.facts[path[-1].fact]
        # The claim stands in for the question, which has about the same length.
        validation = prompts.validation_messages(all_claims[last.claim].text, last.tail)
        if job.id in pending:
            requests += [(1, {"asker": turns, "validator": validation}[role]) for role in roles]
    steps.estimate("questions", requests)
    records = steps.records("questions", jobs, bool(roles), questions.QuestionResult)
    failed = {"question": "", "answers": [], "reason": "request_failed"}
    return [
        GeneratedQuestion(path, records[job.id].outcome or failed)
        for path, job in zip(drawn, jobs, strict=True)
    ]


def _reasons(counts: Mapping[str, int]) -> str:
    """Returns the counts in parentheses, or an empty string without counts."""
    text = ", ".join(f"{count:,} {name}" for name, count in sorted(counts.items()) if count)
    return f" ({text})" if text else ""
