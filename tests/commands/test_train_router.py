"""Training of the router from journals, and its evaluation without a language model."""

import collections
import dataclasses
import itertools

import numpy as np
import pytest

from cirag_jax.commands import jobs, train_router
from cirag_jax.commands.train_router import Example, run_cascade
from cirag_jax.errors import UserError
from cirag_jax.methods.cirag import routing
from cirag_jax.models import router as router_model
from cirag_jax.models.io.workdir import training_ids
from cirag_jax.models.router import Head, Router
from cirag_jax.runtime.handlers import RouteHandler
from cirag_jax.runtime.records import RequestKey
from cirag_jax.runtime.requests import Route
from cirag_jax.runtime.scheduler import Call
from cirag_jax.types import Attempt, Prediction, Question, Step, Triple
from configs import router as config_file
from tests.reports.made_up import write_journal

LEVELS = ("triple", "sentence", "passage")
FACT = Triple("a", "b", "c", "p", 0)
STEPS = (Step("q", ("p",), (FACT,), (0.5,), kept=(FACT,)),)


class FakeEncoder:
    """Embeds a question as (1, 0) if it contains "easy", else as (0, 1)."""

    identity = {"model": "fake"}
    dim = 2
    truncated = collections.Counter()

    def encode(self, texts, kind="passage", progress=None):
        assert kind == "query"
        return np.array([[1.0, 0.0] if "easy" in text else [0.0, 1.0] for text in texts])


@pytest.fixture(autouse=True)
def _encoder(monkeypatch):
    monkeypatch.setattr(train_router.Pool, "encoder", lambda *_: FakeEncoder())


def attempt(level, text, evidence=("x",), logprobs=(-0.1, -0.3)):
    refuses = not text
    return Attempt(level, evidence, "...", text, not refuses, None, logprobs)


def example(answers, name="q", **changes):
    """Returns a question with one answer per granularity ("" is a refusal); gold is "Marn"."""
    question = Question(name, name, ("Marn",))
    predictions = {
        level: Prediction(text, level, steps=STEPS, attempts=(attempt(level, text, **changes),))
        for level, text in zip(LEVELS, answers, strict=True)
    }
    return Example(question, predictions)


def write_runs(root, examples, levels=LEVELS, **settings):
    """Writes a run per granularity; returns the folders."""
    folders = []
    for level in levels:
        folder = root / level
        folder.mkdir(parents=True)
        pairs = [(e.question, e.predictions[level]) for e in examples]
        fields = {"cirag.granularities": [level], **settings}
        write_journal(folder / "journal.sqlite", pairs, **fields)
        folders.append(str(folder))
    return tuple(folders)


def questions(count, prefix=""):
    """Easy questions are answered from triples, the others only from passages."""
    return [
        example(("Marn", "Marn", "Marn") if i % 2 else ("", "", "Marn"),
                f"{prefix}{'easy' if i % 2 else 'hard'} {i}")
        for i in range(count)
    ]  # fmt: skip


def train(tmp_path, runs, eval_runs=None, **fields):
    config = config_file.get_config()
    config.runs, config.eval_runs = runs, eval_runs
    config.update_from_flattened_dict({"bootstrap_samples": 200, "precision": 0.1, **fields})
    (tmp_path / "w").mkdir(exist_ok=True)
    return jobs.train(config.lock(), tmp_path / "w")


def test_train_router_skips_calls_without_losing_f1(tmp_path):
    runs = write_runs(tmp_path / "t", questions(20))
    eval_runs = write_runs(tmp_path / "e", questions(10, "other "))
    result = train(tmp_path, runs, eval_runs, thresholds=(0.0, 0.5))
    # Half of the questions are refused at triples and sentences. All of these stay refused.
    assert result["heads"] == {
        "triple": {"examples": 20, "worthwhile": 0.5},
        "sentence": {"examples": 20, "worthwhile": 0.5},
        "refused/sentence": {"examples": 10, "worthwhile": 0.0},
    }
    systems = result["systems"]
    assert list(systems) == ["cascade", "first", "router@0", "router@0.5"]
    assert systems["cascade"]["f1"]["value"] == 1 and systems["cascade"]["calls"]["value"] == 2
    assert systems["first"]["f1"]["value"] == 0.5 and systems["first"]["calls"]["value"] == 1
    assert systems["router@0"]["calls"] == systems["cascade"]["calls"]
    best = systems["router@0.5"]
    assert best["f1"]["value"] == 1 and best["calls"]["value"] == 1
    saved, lost = best["calls_saved/cascade"], best["f1_lost/cascade"]
    assert saved["difference"] == 1 and saved["low"] < 1 < saved["high"]
    assert lost["difference"] == 0 == lost["low"]
    assert best["f1_lost/first"]["difference"] == -0.5
    assert best["calls_saved/first"]["difference"] == 0
    table = (tmp_path / "w/table.md").read_text()
    assert "| router@0.5     |" in table and "always triples" in table
    assert (tmp_path / "w/router.png").is_file()
    assert training_ids(str(tmp_path / "w")) == {e.question.id for e in questions(20)}


def test_train_router_without_log_probabilities_or_evaluation(tmp_path, capsys):
    examples = [
        Example(e.question, {level: dataclasses.replace(
            p, attempts=tuple(dataclasses.replace(a, logprobs=None) for a in p.attempts))
            for level, p in e.predictions.items()})
        for e in questions(4)
    ]  # fmt: skip
    result = train(tmp_path, write_runs(tmp_path / "t", examples))
    assert list(result["heads"]) == ["triple", "sentence"] and "systems" not in result
    assert "no head refused/sentence" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("answers", "level", "expected"),
    [
        (("Marn", "", ""), "triple", True),
        (("", "Marn", ""), "triple", False),
        (("Oslo", "Marn", ""), "triple", False),  # Later granularities are better.
        (("Oslo", "", "Bergen"), "triple", True),  # They are not.
        (("Marn", "Oslo", "Marn"), "sentence", False),
    ],
)
def test_is_worthwhile(answers, level, expected):
    assert train_router._is_worthwhile(example(answers), level, "musique") == expected


def test_run_cascade_equals_the_cascade():
    never, always = (lambda *_: 0.0), (lambda *_: 1.0)
    late = example(("", "", "Marn"))
    assert run_cascade(late, None) == ("Marn", 3) == run_cascade(late, always, 0.5)
    assert run_cascade(late, never, 0.5) == ("Marn", 1)
    asked = []
    run_cascade(late, lambda level, refusal: asked.append((level, refusal)) or 1.0, 0.5)
    assert asked == [("triple", None), ("sentence", late.predictions["triple"].attempts[0])]
    assert run_cascade(example(("", "", "")), None) == ("", 3)
    assert run_cascade(example(("", "", ""), evidence=()), None) == ("", 0)
    last = late.predictions["passage"]
    forced = dataclasses.replace(
        last, attempts=(attempt("passage", ""), attempt("passage", "Oslo"))
    )
    forced_example = Example(late.question, {**late.predictions, "passage": forced})
    assert run_cascade(forced_example, None) == ("Oslo", 4)
    assert run_cascade(forced_example, never, 0.5) == ("Oslo", 2)


def test_route_handler_equals_evaluation():
    """The handler that answers the method's requests gives the evaluation's probabilities."""
    encoder = FakeEncoder()
    router, _ = train_router.train(questions(20), encoder, "musique", 0.1)
    case = example(("", "Marn", "Marn"), "hard question")
    (x_D,) = encoder.encode(["hard question"], "query")
    refusal = case.predictions["triple"].attempts[0]
    bare = dataclasses.replace(refusal, logprobs=None)
    worth = train_router._worth(router, case, x_D)
    for level, found in itertools.product(("triple", "sentence", "passage"), (None, refusal, bare)):
        with_logprobs = bool(found and found.logprobs)
        route = Route("hard question", level, routing.scalars(STEPS, found), with_logprobs)
        responses = {}
        calls = [Call(RequestKey("q", 0), route)]
        RouteHandler(router, encoder)(calls, responses.__setitem__)
        assert responses[0].probability == worth(level, found)
    assert worth("passage", None) == 1.0 and worth("sentence", None) < 0.5
    assert worth("sentence", refusal) != worth("sentence", bare) == worth("sentence", None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: {"levels": ("triple",)}, "at least two granularities"),
        (lambda r: {"cirag.granularities": ["triple", "passage"]}, "one granularity"),
        (lambda r: {"cirag.granularities": ["triple"]}, "a different one for each"),
        (lambda r: {"cirag.router": "W"}, "without a router"),
    ],
)
def test_train_router_other_runs_are_refused(tmp_path, change, message):
    runs = write_runs(tmp_path / "t", questions(2), **change(tmp_path))
    with pytest.raises(UserError, match=message):
        train(tmp_path, runs)


def test_train_router_bad_input_is_refused(tmp_path):
    runs = write_runs(tmp_path / "t", questions(4))
    with pytest.raises(UserError, match=r"4 questions of config.eval_runs are in config.runs"):
        train(tmp_path, runs, write_runs(tmp_path / "same", questions(4)))
    with pytest.raises(UserError, match="config.runs is required"):
        train(tmp_path, None)
    with pytest.raises(UserError, match=r"config.thresholds=\(1.5,\) must lie between"):
        train(tmp_path, runs, thresholds=(1.5,))
    with pytest.raises(UserError, match="config.precision"):
        train(tmp_path, runs, precision=0.0)
    other = questions(4)
    moved = dataclasses.replace(other[1].predictions["passage"], steps=())
    other[1] = Example(other[1].question, {**other[1].predictions, "passage": moved})
    with pytest.raises(UserError, match="has other rounds for question easy 1"):
        train(tmp_path, write_runs(tmp_path / "moved", other))
    bare = [
        Example(dataclasses.replace(e.question, answers=()), e.predictions) for e in questions(2)
    ]
    with pytest.raises(UserError, match="no question has a gold answer"):
        train(tmp_path, write_runs(tmp_path / "bare", bare))


def test_load_router_checks_encoder_and_weights(tmp_path):
    sizes = routing.NUM_SCALARS
    head = Head((0.5,) * (2 + sizes[False]), 0.1)
    router = Router({"model": "fake"}, 2, {"triple": head})
    router.save(tmp_path)
    assert router_model.load_router(str(tmp_path), {"model": "fake"}, sizes) == router
    with pytest.raises(UserError, match=r"another encoder \(different: model\)"):
        router_model.load_router(str(tmp_path), {"model": "other"}, sizes)
    with pytest.raises(UserError, match="the head triple must have 9 finite weights"):
        router_model.load_router(str(tmp_path), {"model": "fake"}, {**sizes, False: 7})
    (tmp_path / router_model.FILE).write_text("{")
    with pytest.raises(UserError, match="is damaged"):
        router_model.load_router(str(tmp_path), {"model": "fake"}, sizes)
    with pytest.raises(UserError, match=r"has no router.json; train a router"):
        router_model.load_router(str(tmp_path / "none"), {"model": "fake"}, sizes)
