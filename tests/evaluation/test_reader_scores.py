"""Scores of a reader, compared with hand-computed values; the command with a fake reader."""

import contextlib
import json
import math

import matplotlib.image
import pytest

from cirag_jax.commands import evaluate_reader, evaluation, series
from cirag_jax.commands.evaluate_reader import ReaderAnswer, score
from cirag_jax.datasets import jsonl
from cirag_jax.errors import UserError
from cirag_jax.evaluation.calibration import calibration
from cirag_jax.llm.types import Token, Usage
from cirag_jax.models.io import workdir
from cirag_jax.runtime.requests import Generated, RequestError
from cirag_jax.training.data.reading_examples import Reading
from cirag_jax.types import Dataset, Passage, Question
from configs import reader_eval


def reading(number, granularity, sufficient):
    question = Question(f"q{number}", "?", (f"answer {number}",))
    return Reading(question, granularity, ("x",), sufficient, True)


def test_scores_match_hand_computed_values():
    result = [
        *(reading(i, "sentence", True) for i in range(2)),
        reading(2, "triple", True),
        *(reading(i, "sentence", False) for i in range(2)),
        reading(2, "triple", False),
    ]
    said = [
        ReaderAnswer("answer 0", False),
        ReaderAnswer("answer", False),  # half of the tokens
        ReaderAnswer("answer 2", True),  # right, and refused
        ReaderAnswer("Unanswerable", True),
        ReaderAnswer("answer 1", False),
        ReaderAnswer("Unanswerable", True),
    ]
    values = {name: ratio.value for name, ratio in score(result, said, "musique").items()}
    assert values == {
        "all/em": pytest.approx(1 / 3),
        "all/f1": pytest.approx((1 + 2 / 3) / 3),
        "all/refuses_missing": pytest.approx(2 / 3),
        "all/refuses_whole": pytest.approx(1 / 3),
        "sentence/em": 1 / 2,
        "sentence/f1": pytest.approx((1 + 2 / 3) / 2),
        "sentence/refuses_missing": 1 / 2,
        "sentence/refuses_whole": 0,
        "triple/em": 0,
        "triple/f1": 0,
        "triple/refuses_missing": 1,
        "triple/refuses_whole": 1,
    }


def test_calibration_matches_hand_computed_values():
    result = calibration([0.95, 0.91, 1.0, 0.15, 0.55], [True, False, True, True, False], 10)
    assert result["bins"] == [
        {"confidence": 0.15, "right": 1.0, "count": 1},
        {"confidence": 0.55, "right": 0.0, "count": 1},
        {"confidence": pytest.approx(2.86 / 3), "right": pytest.approx(2 / 3), "count": 3},
    ]
    assert result["error"] == pytest.approx((0.85 + 0.55 + 3 * abs(2.86 / 3 - 2 / 3)) / 5)
    assert result["coverage"] == [
        {"answered": 0.5, "right": pytest.approx(3 / 5)},
        {"answered": 0.4, "right": 2 / 4},
        {"answered": 0.3, "right": pytest.approx(2 / 3)},
        {"answered": 0.2, "right": 1.0},
        {"answered": 0.1, "right": 1.0},
    ]
    equal = calibration([0.7, 0.2, 0.7, 0.2, 0.7], [True, True, False, False, False], 5)
    assert equal["coverage"] == [
        {"answered": 1.0, "right": pytest.approx(2 / 5)},
        {
            "answered": 0.6,
            "right": pytest.approx(1 / 3),
        },  # a threshold does not separate equal confidences
    ]
    many = calibration([i / 100 for i in range(100)], [True] * 100, 100)
    assert len(many["coverage"]) == 20 and many["coverage"][0]["answered"] == 1.0
    assert calibration([], [], 4) == {"bins": [], "error": None, "coverage": []}


def token(text, offset, probability):
    return Token(text, 0, math.log(probability), offset=offset)


class Canned:
    """Answers correctly if the evidence has "born" and "father"; the base always answers "x"."""

    is_slow, is_exhausted = True, False

    def __init__(self, good: bool):
        self.good = good

    def __call__(self, calls, done):
        for index, call in enumerate(calls):
            text = call.request.messages[-1].text
            whole = "was born" in text and "father was" in text
            answer = ("London" if whole else "Unanswerable") if self.good else "x"
            tokens = None
            if self.good:  # The server of the base model returns no probabilities.
                assert call.request.logprobs
                head, tail = token("Answer:", 0, 0.25), token(f" {answer}", 7, 0.5)
                tokens = (head, tail, token("", 8 + len(answer), 0.5))
            done(index, Generated(f"Answer: {answer}", "stop", Usage(5, 0, 2), None, tokens))


@pytest.mark.parametrize(
    ("text", "pieces", "expected"),
    [
        ("Answer: x", ("Answer:", " x"), 0.25),
        ("ANSWER **: x", ("ANSWER", " **:", " x"), 0.125),
        ("Answer: no\nAnswer: x", ("Answer: no\n", "Answer:", " x"), 0.125),
        ("in London", ("in", " London"), 0.125),  # without the label the whole text is the answer
    ],
)
def test_confidence_belongs_to_the_parsed_answer(data, text, pieces, expected):
    tokens, offset = [], 0
    for number, piece in enumerate(pieces, start=1):
        tokens.append(token(piece, offset, 0.5**number))
        offset += len(piece)
    (made, *_) = evaluate_reader._readings(config_of(data))
    program = evaluate_reader.job(made, "thought", True).start()
    next(program)
    with pytest.raises(StopIteration) as end:
        program.send(Generated(text, "stop", Usage(), None, tuple(tokens)))
    assert end.value.value["confidence"] == pytest.approx(expected)


@pytest.fixture
def data(tmp_path):
    corpus = {
        "a": Passage("a", "Ada", "", ("Ada is a poet.", "Her father was Byron.")),
        "b": Passage("b", "Byron", "", ("Byron was born in London.", "He wrote poems.")),
    }
    question = Question(
        "q1", "Where was the father of Ada born?", ("London",), split="dev", fold="dev_report",
        supporting=("a", "b"), supporting_sentences=(("a", 1), ("b", 0)), context=("a", "b"),
    )  # fmt: skip
    jsonl.write_dataset(Dataset("d", (question,), corpus, {}), tmp_path / "data")
    return tmp_path / "data"


def config_of(data, **fields):
    config = reader_eval.get_config()
    config.update_from_flattened_dict({"folders": str(data), "bootstrap_samples": 50, **fields})
    return config.lock()


def evaluate(data, workdir, **fields):
    workdir.mkdir(exist_ok=True)
    return evaluate_reader.evaluate(config_of(data, **fields), workdir)


def test_command_compares_student_and_base(data, tmp_path, monkeypatch, capsys):
    @contextlib.contextmanager
    def open_model(config, model, roles, journal):
        assert list(roles) == ["reader"]
        yield Canned(model.block.adapter is not None)

    monkeypatch.setattr(evaluation, "open_model", open_model)
    peft = tmp_path / "peft"
    peft.mkdir()
    (peft / "adapter_config.json").write_text("{}")
    result = evaluate(data, tmp_path / "e", checkpoint=str(peft))
    student, base = (result["systems"][name]["all"] for name in ("student", "base"))
    one, none = {"value": 1, "low": 1, "high": 1}, {"value": 0, "low": 0, "high": 0}
    assert student["em"] == student["f1"] == student["refuses_missing"] == one
    assert student["refuses_whole"] == none
    assert base["f1"] == base["refuses_missing"] == none
    assert result["differences"]["student-base"]["all"]["f1"]["difference"] == 1
    assert result["complete"] and result["num_questions"] == 1
    main = series.figures(result, series.metric_of(reader_eval.get_config()))
    assert main == {"f1": 1, "em": 1, "refuses_missing": 1, "refuses_whole": 0}
    assert next(iter(main)) == "f1"
    text = (tmp_path / "e" / "readings.jsonl").read_text()
    rows = [json.loads(line) for line in text.splitlines()]
    assert [(r["system"], r["sufficient"], r["refused"]) for r in rows] == [
        ("student", True, False), ("student", False, True),
        ("base", True, False), ("base", False, False),
    ]  # fmt: skip
    assert "refuses, part missing" in capsys.readouterr().err
    assert [r["confidence"] for r in rows] == [pytest.approx(0.25), pytest.approx(0.25), None, None]
    output = result["systems"]["student"]["calibration"]  # the refusal is not an answer
    assert output["bins"] == [{"confidence": pytest.approx(0.25), "right": 1.0, "count": 1}]
    assert output["coverage"] == [{"answered": 0.5, "right": 1.0}]
    assert result["systems"]["base"]["calibration"]["bins"] == []
    assert matplotlib.image.imread(tmp_path / "e" / "calibration.png").shape[:2] == (600, 1350)
    json.dumps(result)


def test_exported_reader_warns_about_training_questions():
    config = reader_eval.get_config()
    config.checkpoint = "shipped:reader"
    student = evaluation.models_of(config, "reader")["student"]
    assert student.prompt_settings == {"reader_format": "chain"}
    assert len(workdir.training_ids("shipped:reader") or ()) > 1000
    config.component = "extractor"
    config.extractor = config.reader
    with pytest.raises(UserError, match="reader"):
        evaluation.models_of(config, "extractor")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"data.fold": "tune"}, "fold=tune"),
        ({"profile": "squad"}, "profile='squad' is an unknown profile"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"evidence.granularities": ("page",)}, "granularities"),
    ],
)
def test_command_rejects_bad_input(data, tmp_path, fields, words):
    with pytest.raises(UserError, match=words):
        evaluate(data, tmp_path / "e", **fields)


def test_command_out_of_time_has_no_scores_and_can_resume(data, tmp_path, monkeypatch):
    monkeypatch.setattr(evaluation, "open_model", lambda *_: contextlib.nullcontext(Canned(False)))
    result = evaluate(data, tmp_path / "e", stop_after_minutes=1e-9)
    assert not result["complete"] and result["systems"] == {}
    result = evaluate(data, tmp_path / "e")
    assert result["complete"] and list(result["systems"]) == ["base"]


def test_command_failed_request_is_a_wrong_answer_and_no_refusal(data, tmp_path, monkeypatch):
    class Failing(Canned):
        def __call__(self, calls, respond):
            for index in range(len(calls)):
                respond(index, RequestError("the server is down"))

    monkeypatch.setattr(evaluation, "open_model", lambda *_: contextlib.nullcontext(Failing(True)))
    base = evaluate(data, tmp_path / "e")["systems"]["base"]["all"]
    assert base["em"]["value"] == base["refuses_missing"]["value"] == 0
