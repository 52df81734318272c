"""The Python API: loads a method and the user's documents once and answers many questions."""

import contextlib
import dataclasses
import functools
import os
from collections.abc import Iterable, Mapping, Set
from typing import Any

from cirag_jax.commands import opening, task
from cirag_jax.datasets import documents as documents_lib
from cirag_jax.datasets.corpus import WHOLE, build_corpus
from cirag_jax.errors import UserError
from cirag_jax.io import Closing, is_utf8
from cirag_jax.methods.registry import find_method
from cirag_jax.runtime import codec
from cirag_jax.runtime.records import Record
from cirag_jax.runtime.run import Runner
from cirag_jax.sqlite import MEMORY
from cirag_jax.types import Passage, Prediction, Question, Step

_process: int | None = None  # the process that has opened models


@dataclasses.dataclass(frozen=True)
class Answer:
    """The answer to a question.

    Attributes:
      text: the short answer; empty if there is none.
      granularity: the kind of evidence that gave the answer: triple, sentence or passage;
        ``default`` if all evidence was insufficient or there was none.
      evidence: the lines of evidence in the reader's prompt.
      passages: the retrieved passages, best first.
      steps: the rounds of retrieval.
      prediction: the full output of the method.
    """

    text: str
    granularity: str
    evidence: tuple[str, ...]
    passages: tuple[Passage, ...]
    steps: tuple[Step, ...]
    prediction: Prediction


class Cirag(Closing):
    """A method with its models and an index of documents.

    Use it in a ``with`` block, or call `close` to free the models.
    """

    def __init__(self, config: Any, documents: str | os.PathLike[str] | Iterable[str]):
        """Use `open` instead, unless you have a locked config of configs/methods."""
        check_process()
        self._program = find_method(config.method).program
        task.fill_in(config, own_documents=True)
        self._settings = task.method_settings(config)
        needs = self._settings.needs
        if needs.gold:
            raise UserError(f"{config.method} needs annotated questions.")
        opening.check(config, needs)
        if isinstance(documents, (str, os.PathLike)):
            dataset = documents_lib.read_documents(os.fsdecode(documents))
        else:
            dataset = documents_lib.from_texts(listed(documents, "documents", "a path or a list"))
        corpus = build_corpus(dataset, (), WHOLE)
        self._passages = dataset.corpus
        self._own_prompts = task.read_prompts(config, self._settings)
        empty_task = task.Task(needs, dataset, (), corpus, self._own_prompts)
        opening.warn_of_own_prompts(config, empty_task)
        rows = config.in_flight
        open_all = functools.partial(opening.open_handlers, config, empty_task, rows=rows)
        enter_process()
        with contextlib.ExitStack() as stack:
            runner = Runner(MEMORY, {}, open_all, in_flight=rows)
            self._runner = stack.enter_context(runner)
            runner.open()
            stack.pop_all()
        self._is_closed = False

    @classmethod
    def open(
        cls,
        preset: str = "small",
        *,
        documents: str | os.PathLike[str] | Iterable[str],
        method: str = "cirag",
        settings: Mapping[str, Any] | None = None,
    ) -> "Cirag":
        """Loads the models of a method and indexes the documents.

        Args:
          preset: a preset of configs/methods/``method``.py; "" is the paper's setting. CIRAG and
            KiRAG work without triples only with ``small``.
          documents: texts, or the path of a document (.txt, .md and others, see
            docs/documents.md), of a folder of documents, or of a dataset folder.
          method: a file in configs/methods, such as cirag, kirag, native_rag, ircot or direct.
          settings: config values by dotted key, such as ``{"reader.adapter": "runs/reader"}``.
        """
        for name, value in (("preset", preset), ("method", method)):
            if not isinstance(value, str):
                raise UserError(f"{name} must be a string, not {value!r}.")
        if not isinstance(settings, Mapping | None):
            raise UserError(f"settings must be a dictionary, not {settings!r}.")
        values = [f"{key}={value}" for key, value in (settings or {}).items()]
        return cls(task.method_config(method, preset, values), documents)

    def answer(self, question: str) -> Answer:
        """Answers one question."""
        return self.answers([question])[0]

    def answers(self, questions: Iterable[str]) -> list[Answer]:
        """Answers questions concurrently, which is faster than one by one."""
        if self._is_closed:
            raise UserError("the models are closed; open them again with Cirag.open.")
        check_process()
        parsed = [own_question(text) for text in listed(questions, "questions", "a list")]
        settings = self._settings, self._own_prompts
        jobs = {q.id: task.job(q, self._program, *settings) for q in parsed}
        if not self._runner.run(jobs.values()):
            raise UserError("the budget of a model is spent.")
        records = self._runner.records(jobs.values())
        return [self._answer(question, records[question.id]) for question in parsed]

    def _answer(self, question: Question, record: Record) -> Answer:
        prediction = record.result(Prediction)
        if prediction is None:
            raise UserError(f"{question.question!r} could not be answered: {record.error}.")
        attempts = [attempt for attempt in prediction.attempts if attempt.evidence]
        return Answer(
            prediction.answer,
            prediction.granularity,
            attempts[-1].evidence if attempts else (),
            tuple(self._passages[i] for i in prediction.passages if i in self._passages),
            prediction.steps,
            prediction,
        )

    def close(self) -> None:
        """Frees the models."""
        if not self._is_closed and is_own_process():  # elsewhere, it would hang
            self._runner.close()
        self._is_closed = True


def check_process() -> None:
    """Raises UserError in a process that was forked after models were opened."""
    if _process not in (None, os.getpid()):
        raise UserError(
            "the models were opened before os.fork(), and JAX hangs in the new process; start it "
            "with multiprocessing.get_context('spawn') and open the models there."
        )


def enter_process() -> None:
    """Records that this process opens models."""
    global _process
    _process = os.getpid()


def is_own_process() -> bool:
    """Returns whether this process has opened models."""
    return os.getpid() == _process


def listed(values: Iterable[str], name: str, expected: str) -> list[str]:
    """Returns the items of a list; a set has no order, and a string would be cut into letters."""
    if isinstance(values, str | bytes | bytearray | Mapping | Set) or not isinstance(
        values, Iterable
    ):
        raise UserError(f"{name} must be {expected} of strings, not {ascii(values)[:80]}.")
    return list(values)


def own_question(text: str) -> Question:
    """Returns a question without annotations."""
    if not isinstance(text, str):
        raise UserError(f"a question must be a string, not {ascii(text)[:80]}.")
    text = " ".join(text.split())
    if not text:
        raise UserError("config.question is empty.")
    if not is_utf8(text):
        raise UserError("config.question is not valid UTF-8.")
    return Question(f"question-{codec.digest(text)[:12]}", text, ())
