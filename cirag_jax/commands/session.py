"""The Python API: a method over one's own documents, opened once and asked many questions."""

import contextlib
import dataclasses
import os
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from cirag_jax.commands import opening, task
from cirag_jax.datasets import documents as documents_lib
from cirag_jax.datasets.corpus import WHOLE, build_corpus
from cirag_jax.errors import UserError
from cirag_jax.io import Closing
from cirag_jax.methods.registry import find_method
from cirag_jax.runtime import codec
from cirag_jax.runtime.records import Record
from cirag_jax.runtime.run import Runner
from cirag_jax.runtime.scheduler import Handler
from cirag_jax.runtime.store import Journal
from cirag_jax.sqlite import MEMORY
from cirag_jax.types import Passage, Prediction, Question, Step


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a question was answered with.

    Attributes:
      text: the short answer; empty where nothing was answered.
      granularity: of the evidence that gave it: triple, sentence or passage; ``default``: all
        refused, or nothing was read.
      evidence: what the reader saw, line by line.
      passages: the passages found, best first.
      steps: the rounds of retrieval.
      prediction: everything that the method returned.
    """

    text: str
    granularity: str
    evidence: tuple[str, ...]
    passages: tuple[Passage, ...]
    steps: tuple[Step, ...]
    prediction: Prediction


class Cirag(Closing):
    """A method with its models and the index of its documents, all open.

    A context; `close` frees the models.
    """

    def __init__(self, config: Any, documents: str | os.PathLike[str] | Sequence[str]):
        """Use `open`. ``config``: of configs/methods, locked."""
        self._program = find_method(config.method).program
        self._settings = task.method_settings(config)
        needs = self._settings.needs
        if needs.gold:
            raise UserError(f"{config.method} needs annotated questions.")
        opening.check(config, needs)
        if isinstance(documents, (str, os.PathLike)):
            dataset = documents_lib.read_documents(pathlib.Path(documents))
        elif not isinstance(documents, Iterable):
            raise UserError(f"documents must be a path or texts, not {documents!r}.")
        else:
            dataset = documents_lib.from_texts(documents)
        corpus = build_corpus(dataset, (), WHOLE)
        self._passages = dataset.corpus
        asked = task.Task(needs, dataset, (), corpus)

        def open_handlers(stack: contextlib.ExitStack, book: Journal) -> dict[type | str, Handler]:
            return opening.open_handlers(config, asked, book, stack, rows=config.in_flight)

        with contextlib.ExitStack() as stack:
            runner = Runner(MEMORY, {}, open_handlers, in_flight=config.in_flight)
            self._runner = stack.enter_context(runner)
            runner.open()
            stack.pop_all()
        self._is_closed = False

    @classmethod
    def open(
        cls,
        preset: str = "small",
        *,
        documents: str | os.PathLike[str] | Sequence[str],
        method: str = "cirag",
        settings: Mapping[str, Any] | None = None,
    ) -> "Cirag":
        """Opens a method over documents.

        Args:
          preset: of configs/methods/``method``.py; "": the paper's setting. ``small`` of
            CIRAG and KiRAG needs no triples; their others do.
          documents: texts, or the path of a folder of .txt and .md files, of one such file, or of a
            dataset folder.
          method: cirag, kirag, native_rag, ircot, direct.
          settings: values of the config by dotted key, as ``--config.KEY=VALUE`` on the command
            line: ``{"reader.adapter": "runs/reader"}``.
        """
        values = [f"{key}={value}" for key, value in (settings or {}).items()]
        return cls(task.method_config(method, preset, values), documents)

    def answer(self, question: str) -> Answer:
        """Answers one question."""
        return self.answers([question])[0]

    def answers(self, questions: Iterable[str]) -> list[Answer]:
        """Answers questions together, which is faster than one after the other."""
        if self._is_closed:
            raise UserError("the models are closed; open them again, with Cirag.open.")
        asked = [own_question(text) for text in questions]
        jobs = {q.id: task.job(q, self._program, self._settings) for q in asked}
        if not self._runner.run(jobs.values()):
            raise UserError("the budget of a model is spent.")
        records = self._runner.records(jobs.values())
        return [self._answer(question, records[question.id]) for question in asked]

    def _answer(self, question: Question, record: Record) -> Answer:
        found = record.result(Prediction)
        if found is None:
            raise UserError(f"{question.question!r} could not be answered: {record.error}.")
        read = [attempt for attempt in found.attempts if attempt.evidence]
        return Answer(
            found.answer,
            found.granularity,
            read[-1].evidence if read else (),
            tuple(self._passages[i] for i in found.passages if i in self._passages),
            found.steps,
            found,
        )

    def close(self) -> None:
        """Frees the models."""
        self._is_closed = True
        self._runner.close()


def own_question(text: str) -> Question:
    """A question of one's own."""
    if not isinstance(text, str):
        raise UserError(f"a question is a text, not {text!r}.")
    text = " ".join(text.split())
    if not text:
        raise UserError("config.question is empty.")
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise UserError("config.question is not valid UTF-8.")
    return Question(f"question-{codec.digest(text)[:12]}", text, ())
