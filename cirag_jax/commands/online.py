"""Extraction of triples from retrieved passages during a run, once per passage."""

import dataclasses
from collections.abc import Sequence

from cirag_jax.methods.common import extraction
from cirag_jax.methods.common.own_prompts import NONE, OwnPrompts, run_with
from cirag_jax.runtime.handlers import GenerateHandler
from cirag_jax.runtime.requests import Extract, Extracted, RequestError
from cirag_jax.runtime.run import Runner
from cirag_jax.runtime.scheduler import Call, Job, Respond
from cirag_jax.types import Passage, Triple

NAME = "extractions"  # replaces "journal" in the name of the run's journal


class OnlineExtractHandler:
    """Extracts triples of all requested passages together; reuses earlier extractions.

    ``generate`` calls the language model of the role ``extractor``. The journal of ``runner``
    stores extractions, so that questions share them and a resumed run does not repeat them.
    ``prompts`` replace those of the extractor.
    """

    is_slow = True

    def __init__(
        self,
        generate: GenerateHandler,
        runner: Runner,
        settings: extraction.ExtractionSettings,
        prompts: OwnPrompts = NONE,
    ):
        self._generate = generate
        self._runner = runner
        self._settings = settings
        self._prompts = prompts
        self._triples: dict[str, tuple[Triple, ...] | None] = {}  # by passage id

    @property
    def is_exhausted(self) -> bool:
        """Whether the model's budget is spent."""
        return self._generate.is_exhausted

    def forget(self) -> None:
        """Drops all extractions, so that the next request extracts its passages again."""
        self._triples.clear()
        journal = self._runner.journal
        journal.forget([record.id for record in journal.records()])

    def __call__(self, calls: Sequence[Call], respond: Respond) -> None:
        """Answers the calls; see `Handler`. The triples of a failed extraction are None."""
        passages: dict[str, Passage] = {}
        for call in calls:
            request: Extract = call.request
            passages.update((p.id, p) for p in request.passages if p.id not in self._triples)
        complete = self._extract(list(passages.values())) if passages else True
        for index, call in enumerate(calls):
            if complete or all(p.id in self._triples for p in call.request.passages):
                triples = tuple(self._triples.get(p.id) for p in call.request.passages)
                respond(index, Extracted(triples))
            else:
                respond(index, RequestError("the extractor's budget is exhausted"))

    def _extract(self, passages: Sequence[Passage]) -> bool:
        jobs = [self._job(passage) for passage in passages]
        complete = self._runner.run(jobs)
        records = self._runner.records(jobs)
        for job, passage in zip(jobs, passages, strict=True):
            record = records.get(job.id)
            if record is not None and record.has_succeeded:
                outcome = record.result(extraction.EncodedExtraction)
                self._triples[passage.id] = extraction.store_record(passage, outcome, None).triples
            elif complete:
                self._triples[passage.id] = None
        return complete

    def _job(self, passage: Passage) -> Job:
        return Job(
            extraction.program_name(passage),
            dataclasses.asdict(passage),
            lambda: run_with(self._prompts, extraction.extract(passage, self._settings)),
        )
