"""Triples extracted when they are asked for, once a passage (the paper's online setting)."""

import dataclasses
import json
from collections.abc import Sequence

from cirag_jax.methods.common import extraction
from cirag_jax.runtime import codec
from cirag_jax.runtime.handlers import GenerateHandler
from cirag_jax.runtime.requests import Extract, Extracted, RequestError
from cirag_jax.runtime.run import Runner
from cirag_jax.runtime.scheduler import Call, Done, Job
from cirag_jax.types import Passage, Triple

NAME = "extractions"  # of a journal beside the run's, named as that one is


class OnlineExtractHandler:
    """Extracts the passages that no question asked for before, all together.

    ``generate`` is the language model of role ``extractor``, which answers in ``runner``. The
    journal is of extractions: a run that was killed repeats none, and questions share them.
    """

    is_slow = True

    def __init__(
        self,
        generate: GenerateHandler,
        runner: Runner,
        settings: extraction.ExtractionSettings,
    ):
        self._generate = generate
        self._runner = runner
        self._settings = settings
        self._known: dict[str, tuple[Triple, ...] | None] = {}

    @property
    def is_exhausted(self) -> bool:
        """Whether the model's budget has ended."""
        return self._generate.is_exhausted

    def __call__(self, calls: Sequence[Call], done: Done) -> None:
        """See `Handler`; a passage whose extraction failed has None."""
        passages: dict[str, Passage] = {}
        for call in calls:
            request: Extract = call.request
            passages.update((p.id, p) for p in request.passages if p.id not in self._known)
        complete = self._extract(list(passages.values())) if passages else True
        for index, call in enumerate(calls):
            if complete or all(p.id in self._known for p in call.request.passages):
                found = tuple(self._known.get(p.id) for p in call.request.passages)
                done(index, Extracted(found))
            else:
                done(index, RequestError("the extractor's budget is exhausted"))

    def _extract(self, passages: Sequence[Passage]) -> bool:
        jobs = [self._job(passage) for passage in passages]
        complete = self._runner.run(jobs)
        records = self._runner.records(jobs)
        for job, passage in zip(jobs, passages, strict=True):
            record = records.get(job.id)
            if record is not None and record.outcome is not None:
                outcome = record.result(extraction.Outcome)
                self._known[passage.id] = extraction.stored(passage, outcome, None).triples
            elif complete:
                self._known[passage.id] = None
        return complete

    def _job(self, passage: Passage) -> Job:
        return Job(
            extraction.program_of(passage),
            json.loads(codec.dump(dataclasses.asdict(passage))),
            lambda: extraction.extract(passage, self._settings),
        )
