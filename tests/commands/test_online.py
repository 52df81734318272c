"""Online extraction: once per passage, resuming, failures, budgets."""

import contextlib

import pytest

from cirag_jax.commands import latency
from cirag_jax.commands.answer import PlannedRun
from cirag_jax.commands.online import OnlineExtractHandler
from cirag_jax.commands.pool import Pool
from cirag_jax.commands.task import Task
from cirag_jax.config_files import load_config
from cirag_jax.datasets.corpus import Corpus
from cirag_jax.llm import types as llm
from cirag_jax.methods.common.extraction import ExtractionSettings, encode_extraction
from cirag_jax.runtime.handlers import GenerateHandler
from cirag_jax.runtime.records import RequestKey, read_records
from cirag_jax.runtime.requests import Extract, Extracted, Needs, RequestError
from cirag_jax.runtime.run import Runner
from cirag_jax.runtime.scheduler import Call, Job, Scheduler
from cirag_jax.runtime.store import Journal
from cirag_jax.types import Dataset, Passage, Triple
from tests.commands.model_server import rules

SETTINGS = {"extractor": "test"}
TEXTS = {
    "a": "Ule feeds Tarn. Tarn governs Osk.",
    "b": "Brum borders Osk.",
    "c": "It says nothing.",
    "d": "Osk prose here.",
    "e": "Fenn refused Osk.",
}
PASSAGES = {name: Passage(name, name, text) for name, text in TEXTS.items()}
BRUM = Triple("Brum", "borders", "Osk", "b", 0)


class Model:
    """A model that extracts by `rules`.

    ``asked`` lists the answered requests as pairs (passage, whether triples were requested).

    Args:
      dies: number of answers after which it raises KeyboardInterrupt.
      budget: number of answers before the budget is spent.
    """

    def __init__(self, dies: int | None = None, budget: int | None = None):
        self.asked: list[tuple[str, bool]] = []
        self.batches: list[int] = []
        self.budget_exhausted = False
        self._dies, self._budget = dies, budget

    def generate(self, requests, progress, done):
        self.batches.append(len(requests))
        for index, request in enumerate(requests):
            done(index, self._respond(request))

    def _respond(self, request: llm.Generate) -> llm.Generated:
        if self._budget is not None and len(self.asked) >= self._budget:
            self.budget_exhausted = True
            return llm.failed("not sent")
        text = request.messages[-1].text
        if len(self.asked) == self._dies:
            raise KeyboardInterrupt
        wants_triples = "Named entities:" in text
        self.asked.append((text.split("\n")[0].removeprefix("Title: "), wants_triples))
        answer = rules(text, wants_triples)
        if isinstance(answer, int):
            return llm.failed(f"status {answer}")
        usage = llm.Usage(prompt_tokens=10, generated_tokens=3)
        return llm.Generated(answer[0], answer[1], usage)  # pyright: ignore


@contextlib.contextmanager
def online(folder, model):
    """Opens a handler with the journal of extractions in ``folder``."""
    generate = GenerateHandler(model, {"extractor": 50})
    with Runner(
        folder / "extractions.sqlite",
        SETTINGS,
        lambda *_: {"extractor": generate},
        encode=encode_extraction,
    ) as runner:
        yield OnlineExtractHandler(generate, runner, ExtractionSettings(triple_tokens=50))


def ask(handler, *wanted):
    """Returns the responses to one request per name; each letter of a name is a passage."""
    answers = {}
    calls = [
        Call(RequestKey(f"q{index}", 0), Extract(tuple(PASSAGES[name] for name in names)))
        for index, names in enumerate(wanted)
    ]
    handler(calls, lambda index, response: answers.setdefault(index, response))
    assert set(answers) == set(range(len(calls)))
    return [answers[index] for index in range(len(calls))]


def question(names):
    """A program that requests the passages one by one and counts their triples."""

    def program():
        total = 0
        for name in names:
            extracted = yield Extract((PASSAGES[name],))
            total += len(extracted.triples[0] or ())
        return total

    return Job(f"q-{names}", {}, program)


# --------------------------------------------------------------------------------------------------


def test_online_passage_is_extracted_once(tmp_path):
    model = Model()
    with online(tmp_path, model) as handler:
        first, second = ask(handler, "ab", "bc")
        assert first.triples[1] == second.triples[0] == (BRUM,)
        assert sorted(model.asked) == [(n, t) for n in "abc" for t in (False, True)]
        assert model.batches == [3, 3]  # one batch for entities, one for triples
        assert ask(handler, "b", "bb") == [Extracted(((BRUM,),)), Extracted(((BRUM,),) * 2)]
        ask(handler, "ad")
        assert sorted(model.asked)[-2:] == [("d", False), ("d", True)]
        assert len(model.asked) == 8 and handler.is_slow and not handler.is_exhausted


def test_online_forgotten_passages_are_extracted_again(tmp_path):
    model = Model()
    with online(tmp_path, model) as handler:
        first = ask(handler, "ab")
        handler.forget()
        assert ask(handler, "ab") == first
    assert sorted(model.asked) == sorted([(n, t) for n in "ab" for t in (False, True)] * 2)
    with online(tmp_path, model) as handler:  # A resumed measurement forgets earlier answers, too.
        handler.forget()
        assert ask(handler, "b") == [Extracted(first[0].triples[1:2])]
    assert len(model.asked) == 10


def test_latency_every_question_extracts_its_passages(tmp_path, monkeypatch):
    config = load_config("configs/methods/kirag.py", [])
    task = Task(Needs(), Dataset("x", (), {}, {}), (), Corpus("ircot_full", ()))
    run = PlannedRun(config, task, (question("ab"), question("b")), {})
    model = Model()
    with online(tmp_path, model) as handler, Pool() as pool:
        monkeypatch.setattr(
            latency.opening, "open_handlers", lambda *args, **options: {Extract: handler}
        )
        assert latency.measure(run, ["q-ab", "q-b"], tmp_path / "alone", pool, None)
    assert model.asked.count(("b", True)) == 2


def test_online_failure_is_none_and_no_triples_is_empty(tmp_path):
    with online(tmp_path, Model()) as handler:
        (extracted,) = ask(handler, "bcde")
        assert extracted == Extracted(((BRUM,), (), None, None))
        assert ask(handler, "e") == [Extracted((None,))]
    records = {r.input["id"]: r for r in read_records(tmp_path / "extractions.sqlite")}
    assert records["d"].outcome["cause"] == "answer: no_json" and records["d"].error is None
    assert records["e"].outcome is None and records["e"].error == "status 400"
    # Another run repeats failed requests, but not unreadable answers.
    model = Model()
    with online(tmp_path, model) as handler:
        assert ask(handler, "bcde") == [extracted]
    assert model.asked == [("e", False)]


@pytest.mark.parametrize("dies", range(6))
def test_online_killed_run_repeats_no_extraction(tmp_path, dies):
    first, second = Model(dies=dies), Model()
    with pytest.raises(KeyboardInterrupt), online(tmp_path, first) as handler:
        ask(handler, "abc")
    with online(tmp_path, second) as handler:
        (extracted,) = ask(handler, "abc")
    assert len(first.asked) == dies
    assert sorted(first.asked + second.asked) == [(n, t) for n in "abc" for t in (False, True)]
    assert [len(triples) for triples in extracted.triples] == [2, 1, 0]


def test_online_spent_budget_is_not_a_failure(tmp_path):
    """Passages that the budget does not cover raise errors, but are not recorded as failed."""
    with online(tmp_path, Model(budget=3)) as handler:
        extracted, refused, both = ask(handler, "b", "c", "bc")
        assert extracted == Extracted(((BRUM,),)) and handler.is_exhausted
        assert isinstance(refused, RequestError) and isinstance(both, RequestError)
        assert str(refused) == "the extractor's budget is exhausted"


def test_online_run_stops_at_budget_and_resumes(tmp_path):
    jobs = [question("ab"), question("bd"), question("ca")]

    def run(model):
        with Journal(tmp_path / "journal.sqlite", {}) as book, online(tmp_path, model) as handler:
            complete = Scheduler({Extract: handler}, book).run(jobs)
            return complete, book.outcomes(), list(book.records())

    complete, outcomes, records = run(first := Model(budget=5))
    assert not complete and outcomes == {}
    assert all(record.error is None for record in records)  # nothing counts as failed
    complete, outcomes, _ = run(second := Model())
    assert complete and outcomes == {"q-ab": 3, "q-bd": 1, "q-ca": 2}
    assert sorted(first.asked + second.asked) == [(n, t) for n in "abcd" for t in (False, True)]


def test_online_changed_passage_is_extracted_again(tmp_path, monkeypatch):
    with online(tmp_path, Model()) as handler:
        ask(handler, "a")
    monkeypatch.setitem(PASSAGES, "a", Passage("a", "a", "Osk feeds Ule."))
    with online(tmp_path, Model()) as handler:
        assert ask(handler, "a") == [Extracted(((Triple("Osk", "feeds", "Ule", "a", 0),),))]
