"""Judging of answers: fake judges of small runs, and a tiny model end to end."""

import contextlib
import dataclasses
import json
import pathlib
import runpy

import numpy as np
import pytest

from cirag_jax import cli
from cirag_jax.commands import evaluation
from cirag_jax.commands import judge as command
from cirag_jax.errors import UserError
from cirag_jax.llm.types import Usage
from cirag_jax.runtime.requests import Generated
from cirag_jax.runtime.store import JOURNAL
from configs import judge as config_file
from tests import tiny_decoder
from tests.answering import lines
from tests.reports.made_up import PREDICTION, QUESTION, many, write_journal

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_MAIN = runpy.run_path(str(_ROOT / "launch/evaluate.py"))["main"]


class Canned:
    """A fake judge that accepts any county or, if ``strict``, only the first gold answer."""

    is_slow, is_exhausted = True, False

    def __init__(self, rubric, strict):
        self.verdict = {"dualrag": "implies", "grade": "correct"}[rubric]
        self.strict, self.asked = strict, []

    def __call__(self, calls, done):
        for index, call in enumerate(calls):
            self.asked.append(call.request)
            turn = call.request.messages[1].text
            shown = turn.split("\n")[1]
            right = "Orlin County" in shown if self.strict else "County" in shown
            text = json.dumps({self.verdict: right})
            if "mumble" in shown:
                text = "Hm." if len(call.request.messages) == 2 or "twice" in shown else "Yes."
            done(index, Generated(text, "stop", Usage(5, 0, 2)))


@pytest.fixture
def judges(monkeypatch):
    opened = {}

    @contextlib.contextmanager
    def open_model(config, model, roles, journal):
        assert roles == {"judge": config.max_tokens}
        name = journal.path.stem
        opened[name] = Canned(config[name].rubric, strict=name == "second")
        yield opened[name]

    monkeypatch.setattr(evaluation, "open_model", open_model)
    return opened


def workdir(root, name, pairs, **kwargs):
    (root / name).mkdir()
    write_journal(root / name / JOURNAL, pairs, **kwargs)
    return f"{name}={root / name}"


def says(answer):
    return dataclasses.replace(PREDICTION, answer=answer)


def evaluate(root, *runs, **fields):
    config = config_file.get_config()
    config.runs = runs
    config.update_from_flattened_dict({"bootstrap_samples": 50, **fields})
    (root / "j").mkdir(exist_ok=True)
    return command.evaluate(config.lock(), root / "j")


def two_runs(root):
    """Writes two runs over six questions (the last has no gold); the first run has four right."""
    pairs = many(6)
    questions = [question for question, _ in pairs]
    questions[5] = dataclasses.replace(questions[5], answers=())
    first = [says(a) for a in ("Orlin County", "Orlin", "County", "Orlin County", "County", "x")]
    second = [says(a) for a in ("Orlin County", "mumble", "", "mumble twice")] + [None, says("x")]
    return (
        workdir(root, "a", zip(questions, first, strict=True)),
        workdir(root, "b", zip(questions, second, strict=True), failed=[questions[4]]),
    )


def test_judge_scores_equal_hand_computed(tmp_path, judges, capsys):
    runs = two_runs(tmp_path)
    result = evaluate(tmp_path, *runs, **{"second.run": True, "second.rubric": "grade"})
    a, b = result["systems"]["a"], result["systems"]["b"]
    assert a["judge"]["value"] == pytest.approx(4 / 5)  # "Orlin" is not a county
    assert a["second"]["value"] == pytest.approx(2 / 5)
    assert (a["em"]["value"], a["acc"]["value"]) == (pytest.approx(3 / 5), pytest.approx(3 / 5))
    # "mumble twice" has no verdict and is ignored; empty and failed answers are wrong.
    assert b["judge"]["value"] == pytest.approx(2 / 4)
    judge = result["judges"]["judge"]
    assert (judge["verdicts"], judge["unjudged"], judge["failures"]) == (7, 1, 0)
    assert judge["parse_errors"] == {"verdict_missing": 3, "verdict_no_json": 4}
    assert (judge["rubric"], result["judges"]["second"]["rubric"]) == ("dualrag", "grade")
    assert (result["num_questions"], result["without_gold"], result["empty"]) == (6, 1, 2)
    # Equal answers of both runs are judged once, in one batch, with the schema.
    assert len(judges["judge"].asked) == 7 + 2
    assert {r.role for r in judges["judge"].asked} == {"judge"}
    assert list(judges["second"].asked[0].json_schema["properties"]) == ["correct"]
    both = result["agreement"]
    assert (both["num_answers"], both["both_right"], both["both_wrong"]) == (6, 3, 1)
    assert both["first_alone"] == 2 and both["kappa"] == pytest.approx((4 / 6 - 0.5) / 0.5)
    assert result["differences"]["a-b"]["judge"]["difference"] == pytest.approx(4 / 5 - 2 / 4)
    assert result["complete"]
    rows = lines(tmp_path / "j" / command.FILE)
    assert [row["judge"] for row in rows[:6]] == [True, False, True, True, True, None]
    assert rows[6 + 3]["judged"] == "mumble twice" and rows[6 + 3]["judge"] is None
    said = capsys.readouterr().err
    assert "agree on 66.7 % of 6 answers, Cohen's kappa 0.33" in said
    assert "rubric dualrag, 1 without a verdict" in said
    json.dumps(result)


def test_judge_second_run_sends_no_requests(tmp_path, judges):
    runs = two_runs(tmp_path)
    first = evaluate(tmp_path, *runs)
    num_requests = len(judges["judge"].asked)
    judges.clear()
    again = evaluate(tmp_path, *runs)
    assert not judges and num_requests == 9
    assert again["systems"] == first["systems"] and again["agreement"] is None
    with pytest.raises(UserError, match=r"retries"):
        evaluate(tmp_path, *runs, retries=0)


def test_judge_stopped_run_resumes(tmp_path, judges):
    runs = two_runs(tmp_path)
    stopped = evaluate(tmp_path, *runs, stop_after_minutes=1e-9)
    assert not stopped["complete"] and "judge" not in stopped["systems"]["a"]
    assert "incomplete" in (tmp_path / "j" / "table.md").read_text()
    assert evaluate(tmp_path, *runs)["systems"]["a"]["judge"]["value"] == pytest.approx(4 / 5)


def test_judge_response_without_schema(tmp_path, judges):
    run = workdir(tmp_path, "a", [(QUESTION, PREDICTION)])
    evaluate(tmp_path, run, text="response", **{"judge.constrained": False})
    (request,) = judges["judge"].asked
    assert "the seat lies in its county" in request.messages[1].text
    assert request.json_schema is None
    (row,) = lines(tmp_path / "j" / command.FILE)
    assert row["judged"].startswith("Thought: ") and row["answer"] == "Orlin County"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"text": "thought"}, "config.text='thought' is not one of answer, response"),
        ({"judge.rubric": "mine"}, "config.judge.rubric='mine' is not one of dualrag, grade"),
        ({"second.run": True}, "config.second has the same model and rubric"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"retries": -1}, "retries"),
        ({"profile": "squad"}, "profile='squad' is an unknown profile"),
        (
            {"judge.backend": "openai", "judge.server": "transformers"},
            r"does not support json_schema, which config\.judge\.constrained=true needs",
        ),
    ],
)
def test_judge_bad_settings_are_refused(tmp_path, judges, fields, words):
    run = workdir(tmp_path, "a", [(QUESTION, PREDICTION)])
    with pytest.raises(UserError, match=words):
        evaluate(tmp_path, run, **fields)
    assert not judges


def test_judge_tiny_model_follows_schema(tmp_path, capsys):
    model = tiny_decoder.folder(tmp_path / "model", max_position_embeddings=2048)
    run = workdir(tmp_path, "a", [(QUESTION, PREDICTION)])
    values = {
        "runs": run, "judge.model": model, "judge.batch_size": 1, "judge.prefix_tokens": 0,
        "bootstrap_samples": 10,
    }  # fmt: skip
    flags = [f"--config.{key}={value}" for key, value in values.items()]
    argv = ["evaluate.py", "--config=configs/judge.py", *flags, f"--workdir={tmp_path / 'j'}"]
    with pytest.raises(SystemExit) as end:
        cli.run(_MAIN, "configs/retrieval.py", argv)
    captured = capsys.readouterr()
    assert end.value.code == 0, captured.err
    result = json.loads(captured.out)
    judge = result["judges"]["judge"]
    assert (judge["verdicts"], judge["unjudged"], judge["parse_errors"]) == (1, 0, {})
    assert result["systems"]["a"]["judge"]["value"] in (0, 1)


class Grounding:
    """A fake judge of faithfulness and relevancy that replies as scripted, in turn."""

    is_slow, is_exhausted = True, False

    def __init__(self, replies):
        self.replies, self.asked = iter(replies), []

    def __call__(self, calls, done):
        for index, call in enumerate(calls):
            self.asked.append(call.request)
            done(index, Generated(next(self.replies), "stop", Usage(5, 0, 2)))


def grounded(root, monkeypatch, rubric, replies, *pairs):
    """Judges one run with scripted replies; returns its judge, scores, counts and rows."""
    fake = Grounding(replies)
    monkeypatch.setattr(evaluation, "open_model", lambda *_: contextlib.nullcontext(fake))
    fields = {"judge.rubric": rubric, "in_flight": 1}
    result = evaluate(root, workdir(root, "a", pairs), **fields)
    rows = [row["judge"] for row in lines(root / "j" / command.FILE)]
    return fake, result["systems"]["a"]["judge"]["value"], result["judges"]["judge"], rows


def test_judge_faithfulness_is_the_share_of_supported_statements(tmp_path, monkeypatch):
    questions = [dataclasses.replace(q, answers=()) for q, _ in many(5)]  # needs no gold answer
    memory = dataclasses.replace(PREDICTION.attempts[-1], evidence=())
    pairs = [(q, says(f"No. {n}")) for n, q in enumerate(questions[:3])]
    pairs += [(questions[3], dataclasses.replace(PREDICTION, attempts=(memory,)))]
    pairs += [(questions[4], says(""))]
    replies = [
        '{"statements": ["It is a county.", "It has a port.", " ", 3]}',
        '{"supported": [true, false]}',
        '{"statements": []}', '{"statements": ["It is one."]}',
        '{"supported": [true, true]}', '{"supported": ["yes"]}',
        "I cannot say.", '["', # no statements at all
    ]  # fmt: skip
    fake, value, counts, rows = grounded(tmp_path, monkeypatch, "faithfulness", replies, *pairs)
    assert rows == [0.5, None, None, None, None] and value == 0.5
    assert (counts["verdicts"], counts["unjudged"], counts["without_evidence"]) == (3, 2, 1)
    assert counts["parse_errors"] == {
        "statements_missing": 3, "statements_no_json": 1, "statements_broken_json": 1,
        "support_count": 1, "support_missing": 1,
    }  # fmt: skip
    support = fake.asked[1].messages[1].text.split("\n")
    assert support[-1] == 'Statements: ["It is a county.", "It has a port."]'
    assert support[0].startswith('Evidence: "Tarnow Bay: It is the seat')
    assert fake.asked[1].json_schema["properties"]["supported"]["minItems"] == 2
    assert "1 answers without evidence" in (tmp_path / "j" / "table.md").read_text()


def test_judge_relevancy_is_the_mean_cosine_of_questions(tmp_path, monkeypatch):
    vectors = {"a": [1.0, 0.0], "b": [0.6, 0.8]}

    class Encoder:
        def encode(self, texts, kind):
            return np.array([vectors.get(text, [0.8, -0.6]) for text in texts], np.float32)

    monkeypatch.setattr(evaluation, "open_encoder_for", lambda block: Encoder())
    pairs = [(q, says(f"No. {n}")) for n, (q, _) in enumerate(many(4))] + [
        (many(5)[4][0], says(""))
    ]
    replies = [
        '{"questions": ["a", "b", "a", "b"], "noncommittal": false}',
        '{"questions": ["a"], "noncommittal": true}',
        '{"questions": ["a"], "noncommittal": "no"}', '{"questions": ["b"], "noncommittal": false}',
        "Who?", "{}",
    ]  # fmt: skip
    _, value, counts, rows = grounded(tmp_path, monkeypatch, "relevancy", replies, *pairs)
    a, b = 0.8 * 1, 0.8 * 0.6 - 0.6 * 0.8  # cosines with the question's vector
    assert rows == [pytest.approx((a + b + a) / 3), 0, pytest.approx(b), None, 0]
    assert value == pytest.approx((2 * a / 3) / 4) and counts["unjudged"] == 1
    assert counts["parse_errors"]["questions_missing"] == 3


OWN = """[judge.dualrag]
system = "Compare."
fields = {question = "Q:", prediction = "P:", reference = "R:", implies = "same"}
"""


def test_judge_prompt_file_reaches_the_model_and_the_identity(tmp_path, judges):
    runs = two_runs(tmp_path)
    file = tmp_path / "own.toml"
    file.write_text(OWN)
    result = evaluate(tmp_path, *runs, prompt_file=str(file))
    system, turn = judges["judge"].asked[0].messages[:2]
    assert system.text == "Compare." and turn.text.startswith("Q: ") and "\nR: " in turn.text
    assert list(judges["judge"].asked[0].json_schema["properties"]) == ["same"]
    assert result["judges"]["judge"]["verdicts"] == 7
    with pytest.raises(UserError, match="was started with prompt_file, which is missing now"):
        evaluate(tmp_path, *runs)
    file.write_text(OWN.replace('"P:"', '"A:"'))
    with pytest.raises(UserError, match="other prompts"):
        evaluate(tmp_path, *runs, prompt_file=str(file))
    file.write_text(OWN.replace("dualrag", "grade").replace("implies", "correct"))
    with pytest.raises(UserError, match=r"\[judge.grade\] is not the rubric of a judge"):
        evaluate(tmp_path, *runs, prompt_file=str(file))
