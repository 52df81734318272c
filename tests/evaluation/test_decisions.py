"""Evaluation of an integrator at a teacher's steps: prompts, scores and the command."""

import contextlib
import dataclasses
import json
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from cirag_jax.commands import evaluate_integrator, evaluation, series
from cirag_jax.datasets import chains, jsonl
from cirag_jax.distill.trajectories import write_trajectories
from cirag_jax.errors import UserError
from cirag_jax.evaluation import decisions
from cirag_jax.evaluation.decisions import StepDecision, aligner, score, top_k
from cirag_jax.llm.types import Usage
from cirag_jax.methods.cirag import compact
from cirag_jax.methods.cirag.prompts import integration_messages, render_decision
from cirag_jax.methods.cirag.settings import CiragConfig
from cirag_jax.models import lora
from cirag_jax.models.io import peft_format, workdir
from cirag_jax.models.io.pretrained_decoder import load_decoder
from cirag_jax.models.lora import LoraConfig
from cirag_jax.runtime.requests import Generated, RequestError
from cirag_jax.runtime.run import Runner
from cirag_jax.types import Sentence, Step, Trajectory, Triple
from configs import integrator_eval
from tests import tiny, tiny_decoder
from tests.distill import by_hand

A, B, C, D = (Triple(name, "lies in", f"{name}land", name, 0) for name in "abcd")
FIRST = Step("Where?", ("a", "b"), (A, B, C, D), (0.9, 0.8, 0.7, 0.6), "One.", (A, C), "And then?")
LAST = Step("And then?", ("d",), (D, B), (0.5, 0.4), "Enough.", (D,), None)
MISS = Step("Who?", ("b",), (B,), (0.5,), "Nothing.", (), "Who else?")
LONG = Trajectory("q1", "Where?", "annotations", (FIRST, LAST), "stopped", True)
SHORT = Trajectory("q2", "Who?", "annotations", (MISS,), "max_steps", False)
BOTH = (LONG, SHORT)


def reply(kept, next_query, thought="Hm."):
    return render_decision(Step("", kept=kept, thought=thought, next_query=next_query), "ascii")


def reply_of(step):
    return render_decision(step, "ascii", "compact")


def step_of(call):
    """Returns the question and the step that a program's id names, without the input's digest."""
    return call.key.program.rpartition("@")[0]


class Canned:
    """A model with a fixed response, or a function of the request, for each program."""

    is_slow, is_exhausted = True, False

    def __init__(self, texts: dict[str, Any]):
        self.texts = texts
        self.batches: list[list[Any]] = []

    def __call__(self, calls, done):
        self.batches.append(list(calls))
        for index, call in enumerate(calls):
            text = self.texts[step_of(call)]
            if isinstance(text, Callable):
                text = text(call.request)
            usage = Usage(prompt_tokens=7, generated_tokens=3)
            good = not isinstance(text, RequestError)
            done(index, Generated(text, "stop", usage) if good else text)


def run(model, trajectories=BOTH, path=":memory:", **settings):
    jobs = decisions.jobs(trajectories, CiragConfig(**settings))
    steps = [job for row in jobs for job in row]
    with Runner(path, {}, lambda *_: {"integrator": model}) as runner:
        assert runner.run(steps)
        records = runner.records(steps)
    return decisions.read(jobs, records)


# ---------------------------------------------------------------------------------------- decoding


def test_jobs_ask_all_steps_with_teacher_history():
    texts = {"q1#1": reply((B,), "Why?"), "q1#2": reply((D,), None), "q2#1": "garbage"}
    model = Canned(texts)
    result = run(model)
    (batch,) = model.batches
    assert {step_of(call) for call in batch} == texts.keys()
    requests = {step_of(call): call.request for call in batch}
    assert requests["q1#1"].messages == integration_messages("Where?", (), FIRST.candidates)
    # The history is the teacher's, not the model's own response at step 1.
    assert requests["q1#2"].messages == integration_messages("Where?", (FIRST,), LAST.candidates)
    assert requests["q2#1"].messages == integration_messages("Who?", (), MISS.candidates)
    assert all(r.role == "integrator" and r.temperature == 0 for r in requests.values())
    assert result == [
        [
            StepDecision("Hm.", (B,), "Why?", response=texts["q1#1"]),
            StepDecision("Hm.", (D,), None, response=texts["q1#2"]),
        ],
        [
            StepDecision(
                "",
                (),
                has_question=False,
                parse_errors=result[1][0].parse_errors,
                response="garbage",
            )
        ],
    ]
    assert {"no_header", "no_question"} <= set(result[1][0].parse_errors)
    assert [one.stops for row in result for one in row] == [False, True, False]


def test_settings_reach_prompt_and_parser_without_retry():
    model = Canned({name: "[[## question ##]] Why?" for name in ("q1#1", "q1#2", "q2#1")})
    run(model, prompt_format="paper", few_shot=True, decision_tokens=9)
    request = model.batches[0][1].request
    assert request.messages == integration_messages(
        "Where?", (FIRST,), LAST.candidates, prompt_format="paper", few_shot=True
    )
    assert request.max_tokens == 9
    silent = Canned({"q1#1": "no question", "q1#2": "", "q2#1": "x"})
    run(silent)  # with retry, the loop would ask again
    assert len(silent.batches) == 1


def test_prefilled_headers_guide_the_model():
    def answer(request):
        written = request.messages[-1].text
        if written.endswith("[[## thought ##]]\n"):
            return "I see."
        return '["a", "lies in", "aland"' if written.endswith('{"fact": [') else "Why?"

    model = Canned(dict.fromkeys(("q1#1", "q1#2", "q2#1"), answer))
    result = run(model, prefilled_headers=True)
    assert [len(batch) for batch in model.batches] == [3, 3, 3]
    assert all(r.request.continue_final for batch in model.batches for r in batch)
    assert result[0][0].thought == "I see." and result[0][0].next_query == "Why?"
    assert result[0][0].kept == (A,) and not result[0][0].parse_errors


def test_failed_request_is_isolated_and_retried_on_rerun(tmp_path):
    texts = {"q1#1": reply((A,), "Why?"), "q1#2": RequestError("too long"), "q2#1": reply((), None)}
    path = tmp_path / "j.sqlite"
    result = run(Canned(texts), path=path)
    assert (
        result[0][1] == StepDecision("", (), has_question=False, error="too long")
        and not result[0][1].stops
    )
    assert result[0][0].kept == (A,) and result[1][0].stops
    again = Canned({"q1#2": reply((D,), None)})
    second = run(again, path=path)
    assert [step_of(call) for call in again.batches[0]] == ["q1#2"] and len(again.batches) == 1
    assert second[0][1].kept == (D,) and second[0][0] == result[0][0]
    # A step with different candidates is a different program, even for the same question id.
    other = Trajectory("q2", "Who?", "t", (Step("Who?", candidates=(C,), scores=(1.0,)),), "repeat")
    third = Canned({"q2#1": reply((C,), None)})
    assert run(third, (LONG, other), path)[1][0].kept == (C,) and len(third.batches[0]) == 1


# ----------------------------------------------------------------------------------------- scoring


def test_score_matches_hand_computed_values():
    result = [
        [
            # Precision 1/2, recall 1/2; the query has "and then" of 2 and 4 tokens.
            StepDecision("", (A, B), "And then what now?"),
            StepDecision("", ()),  # keeps nothing although D is gold; stops correctly
        ],
        [
            StepDecision("", (), None, parse_errors=("no_facts", "no_facts"))
        ],  # correctly keeps nothing; stops too early
    ]
    actual = {name: ratio.value for name, ratio in score(BOTH, result).items()}
    assert actual["teacher/precision"] == pytest.approx((0.5 + 0 + 1) / 3)
    assert actual["teacher/recall"] == pytest.approx((0.5 + 0 + 1) / 3)
    assert actual["teacher/f1"] == pytest.approx((0.5 + 0 + 1) / 3)
    assert actual["teacher/nonempty_f1"] == pytest.approx((0.5 + 0) / 2)
    assert actual["teacher/micro_precision"] == pytest.approx(1 / 2)
    assert actual["teacher/micro_recall"] == pytest.approx(1 / 3)
    assert actual["teacher/micro_f1"] == pytest.approx(2 / (2 + 3))
    # The teacher has two queries; the model stops at the second.
    assert actual["query_f1"] == pytest.approx((2 * 2 / (2 + 4) + 0) / 2)
    assert actual["stop_accuracy"] == pytest.approx(2 / 3)
    assert (actual["stop_precision"], actual["stop_recall"]) == (0.5, 1.0)
    assert actual["parse_rate"] == pytest.approx(2 / 3)
    assert "query_cosine" not in actual and "gold/f1" not in actual
    np.testing.assert_allclose(score(BOTH, result)["teacher/f1"].top_Q, [0.5, 1.0])
    assert decisions.parse_errors(result) == {"no_facts": 1}


def test_score_failed_and_missing_questions_score_zero():
    failed = StepDecision("", (), has_question=False, error="too long")
    mute = StepDecision("", (D,), None, has_question=False, parse_errors=("no_question",))
    actual = {name: ratio.value for name, ratio in score(BOTH, [[failed, mute], [failed]]).items()}
    assert actual["teacher/f1"] == pytest.approx(
        (0 + 1 + 0) / 3
    )  # a missing decision differs from keeping nothing
    assert actual["teacher/precision"] == actual["teacher/recall"] == pytest.approx(1 / 3)
    # The teacher keeps nothing at the last step, which nonempty_f1 ignores.
    assert actual["teacher/nonempty_f1"] == pytest.approx((0 + 1) / 2)
    assert actual["teacher/micro_recall"] == pytest.approx(1 / 3)
    assert actual["stop_accuracy"] == 0 and actual["query_f1"] == 0 and actual["parse_rate"] == 0
    assert decisions.parse_errors([[failed, mute]]) == {"failed": 1, "no_question": 1}


def test_score_normalizes_facts_and_skips_missing_gold():
    predicted = Triple("A.", "Lies  in", "ALAND", "elsewhere", 3)
    result = [
        [StepDecision("", (predicted,), "x"), StepDecision("", (D,), None)],
        [StepDecision("", (B,), "y")],
    ]
    assert score((LONG,), result[:1])["teacher/f1"].value == pytest.approx((2 / 3 + 1) / 2)
    gold = [[(A,), None], [()]]
    actual = score(BOTH, result, gold=gold)
    assert actual["gold/f1"].value == pytest.approx((1 + 0) / 2)
    assert "gold/f1" not in score(BOTH, result, gold=[[None, None], [None]])


def test_score_teacher_is_perfect_and_top_k_matches_hand_computed():
    teachers = [[StepDecision(s.thought, s.kept, s.next_query) for s in t.steps] for t in BOTH]
    perfect = score(BOTH, teachers, similarity=lambda pairs: np.ones(len(pairs)))
    wrong = {"false_keeps", "stop_unsolved"}
    assert {name: ratio.value for name, ratio in perfect.items()} == {
        name: float(name not in wrong) for name in perfect
    }
    ruled = top_k(BOTH)
    assert [one.kept for row in ruled for one in row] == [(A, B, C), (D, B), (B,)]
    assert {one.next_query for one in ruled[0]} == {"Where?"}
    actual = {name: ratio.value for name, ratio in score(BOTH, ruled).items()}
    assert actual["teacher/f1"] == pytest.approx((2 * 2 / 5 + 2 * 1 / 3 + 0) / 3)
    assert actual["stop_accuracy"] == pytest.approx(2 / 3) and actual["stop_recall"] == 0
    assert np.isnan(actual["stop_precision"])
    assert (
        actual["false_keeps"] == 1 and actual["stop_unsolved"] == 0
    )  # it keeps a fact where the teacher keeps none
    nothing = score(BOTH, [[StepDecision("", ()) for _ in t.steps] for t in BOTH])
    assert nothing["false_keeps"].value == 0 and nothing["stop_unsolved"].value == 1
    chained = top_k(BOTH, chain=True)
    assert [one.kept for row in chained for one in row] == [(A, B, C), (D, B), (B,)]
    first, second = (one.next_query or "" for one in chained[0])
    assert first.startswith("Where?") and len(second) > len(first) > len("Where?")


def test_aligner_keeps_best_new_candidate_and_stops_below_threshold():
    kept = [[one.kept for one in row] for row in aligner(BOTH, CiragConfig())]
    best = [[t.candidates[0] for t in row.steps] for row in BOTH]
    assert kept[0][0] == (best[0][0],) and all(len(one) == 1 for row in kept for one in row)
    # Facts kept in earlier steps are not kept again.
    again = dataclasses.replace(BOTH[0], steps=(BOTH[0].steps[0], BOTH[0].steps[0]))
    (row,) = aligner([again], CiragConfig())
    assert row[0].kept == (A,) and row[1].kept == (B,)
    assert A.head in (row[0].next_query or "") and B.head in (row[1].next_query or "")
    high = max(max(step.scores) for t in BOTH for step in t.steps) + 0.1
    stopped = aligner(BOTH, CiragConfig(stop_below=high))
    assert all(one == StepDecision("", ()) and one.stops for row in stopped for one in row)


def test_query_scores_compare_steps_with_queries():
    seen = []

    def similarity(pairs):
        seen.extend(pairs)
        return np.array([0.25])

    result = [
        [StepDecision("", (), "Mine?"), StepDecision("", (), "Late?")],
        [StepDecision("", ())],
    ]
    actual = score(BOTH, result, similarity=similarity)
    assert seen == [("Mine?", "And then?")]
    assert actual["query_cosine"].value == pytest.approx(0.25 / 2)


def test_query_recall_counts_missing_passages():
    result = {"And then?": ["d", "x"], "Mine?": ["a", "c", "d"], "Who else?": ["z"]}
    requests = []

    def search(queries):
        requests.extend(queries)
        return [result[query] for query in queries]

    def recall(rows, supporting, trajectories=BOTH):
        scores = score(trajectories, rows, search=search, supporting=supporting)
        return scores["query_recall"].value if "query_recall" in scores else None

    gold = {"q1": ("a", "c", "d"), "q2": ("b", "e")}  # "a" and "b" are already retrieved
    predicted = [
        [StepDecision("", (), "Mine?"), StepDecision("", (), "Late?")],
        [StepDecision("", ())],
    ]
    assert recall(predicted, gold) == pytest.approx((2 / 2 + 0) / 2)
    assert requests == ["Mine?"]  # the teacher stops at the other step
    own = decisions.teacher(BOTH)
    assert recall(own, gold) == pytest.approx((1 / 2 + 0 / 1) / 2)
    assert recall(own, {"q1": ("a", "d")}) == pytest.approx(1)  # q2 has no gold passages
    assert recall(own, {"q1": ("a",)}) is None  # every gold passage is already retrieved
    seen = dataclasses.replace(LAST, query="And then?", next_query="Mine?")
    three = dataclasses.replace(LONG, steps=(FIRST, seen))
    assert recall(decisions.teacher([three]), {"q1": ("d", "c")}, [three]) == pytest.approx(
        (1 / 2 + 1) / 2
    )  # "d" is retrieved in the second round, "c" is still missing


def test_decisions_over_sentences():
    made = by_hand.of_sentences(by_hand.trajectory())
    first, second, third = (step.candidates for step in made.steps)
    model = Canned({"q0#1": "Keep: 1 3\nNext: x", "q0#2": "Keep: 2\nNext: x", "q0#3": "garbage"})
    settings = {"units": "sentence", "prompt_format": "compact"}
    result = run(model, [made], **settings)
    assert [one.kept for one in result[0]] == [(first[0], first[2]), (second[1],), ()]
    requests = {step_of(call): call.request.messages for call in model.batches[0]}
    assert requests["q0#2"] == integration_messages(
        made.question, made.steps[:1], second, **settings
    )
    actual = {name: ratio.value for name, ratio in score([made], result).items()}
    assert actual["teacher/f1"] == pytest.approx((2 / 3 + 0 + 0) / 3) and actual["false_keeps"] == 1
    assert actual["parse_rate"] == pytest.approx(2 / 3)
    chained = top_k([made], chain=True, units="sentence")
    assert [one.kept for one in chained[0]] == [first, second, third]
    texts = list(map(compact.line, first))
    assert chained[0][0].next_query == chains.query_text(made.question, texts, "sentence")
    best = CiragConfig(units="sentence", integrator="aligner")
    (row,) = aligner([made], best)
    assert [one.kept for one in row] == [first[:1], second[:1], third[:1]]
    assert "knowledge sentences: Edda Brandt: Its born in: Hafenstadt" in (row[0].next_query or "")


# ------------------------------------------------------------------------------------- the command


@pytest.fixture
def trajectories(tmp_path):
    folder = tmp_path / "t"
    folder.mkdir()
    write_trajectories(folder / "trajectories.jsonl", BOTH)
    sidecar = {"normalization": "ascii", "prompt_format": "multi_turn", "few_shot": False}
    (folder / "trajectories.json").write_text(json.dumps(sidecar))
    return folder


def evaluate(source, workdir, **fields):
    config = integrator_eval.get_config()
    config.update_from_flattened_dict(
        {
            "trajectories": str(source),
            "query_cosine": False,
            "bootstrap_samples": 50,
            **fields,
        }
    )
    workdir.mkdir(exist_ok=True)
    return evaluate_integrator.evaluate(config.lock(), workdir)


def read_rows(tmp_path):
    lines = (tmp_path / "e" / "decisions.jsonl").read_text("utf-8").splitlines()
    return [json.loads(line) for line in lines]


def test_command_compares_student_base_and_rule(trajectories, tmp_path, monkeypatch, capsys):
    models = {
        "student": Canned(
            {"q1#1": reply((A, C), "And then?"), "q1#2": reply((D,), None), "q2#1": reply((), "x")}
        ),
        "base": Canned(dict.fromkeys(("q1#1", "q1#2", "q2#1"), "what?")),
    }
    requests = []

    @contextlib.contextmanager
    def opened(config, model, roles, journal):
        requests.append((model.block.adapter, roles))
        yield models["student" if model.block.adapter else "base"]

    monkeypatch.setattr(evaluation, "open_model", opened)
    (tmp_path / "peft").mkdir()
    (tmp_path / "peft" / "adapter_config.json").write_text("{}")
    settings = {"checkpoint": str(tmp_path / "peft"), "base.prefilled_headers": False}
    # Like a workdir with a record of its training.
    monkeypatch.setattr(workdir, "training_ids", {settings["checkpoint"]: {"q2", "z"}}.get)
    result = evaluate(trajectories, tmp_path / "e", **settings)
    assert result["num_trained_on"] == 1
    assert requests == [(settings["checkpoint"], {"integrator": 384}), (None, {"integrator": 384})]
    student, base = result["systems"]["student"], result["systems"]["base"]
    assert student["teacher"]["f1"]["value"] == student["gold"]["f1"]["value"] == 1
    assert student["stop_accuracy"]["value"] == student["parse_rate"]["value"] == 1
    assert student["query_f1"]["value"] == pytest.approx(0.5)
    assert (student["prompt_tokens"], student["generated_tokens"]) == (21, 9)
    assert base["parse_rate"]["value"] == 0 and base["parse_errors"]["no_header"] == 3
    assert base["teacher"]["f1"]["value"] == pytest.approx(1 / 3)
    difference = result["differences"]["student-base"]["teacher"]["f1"]
    assert difference["difference"] == pytest.approx(2 / 3)
    assert difference["low"] <= difference["difference"] <= difference["high"]
    assert "student-top_k" in result["differences"] and result["complete"]
    main = series.figures(result, series.metric_of(integrator_eval.get_config()))
    assert next(iter(main.items())) == ("f1", 1) and "nonempty_f1" in main
    # It agrees at one of three steps, where the teacher keeps nothing.
    nothing = result["systems"]["nothing"]["teacher"]
    assert nothing["f1"]["value"] == pytest.approx(1 / 3) and nothing["nonempty_f1"]["value"] == 0
    assert "parse_rate" not in result["systems"]["nothing"]
    assert result["num_questions"] == 2 and result["num_steps"] == 3
    assert result["teacher"] == {
        "teachers": {"annotations": 2}, "empty_core": 1 / 3, "stops": 1 / 3, "query_recall": None
    }  # fmt: skip
    assert result["settings"]["base"]["few_shot"] and not result["settings"]["student"]["few_shot"]
    json.dumps(result)
    said = capsys.readouterr()
    assert said.out == "" and "student-base" in said.err and "100.0" in said.err
    assert "WARNING: the checkpoint was trained on 1 of these 2 questions" in said.err
    rows = read_rows(tmp_path)
    assert len(rows) == 6 and rows[1]["question"] == "q1" and rows[1]["step"] == 2
    assert rows[1]["parsed"]["kept"] == [["d", "lies in", "dland", "d", 0]]
    assert rows[3]["response"] == "what?" and "no_header" in rows[3]["parse_errors"]
    # A rerun reads the journals and opens no model.
    before = (tmp_path / "e" / "decisions.jsonl").read_bytes()
    evaluate(trajectories, tmp_path / "e", **settings)
    assert len(requests) == 2 and (tmp_path / "e" / "decisions.jsonl").read_bytes() == before
    # Changed settings make a new run.
    for field, value in (("match_cutoff", 0.5), ("integrator.max_tokens", 9)):
        with pytest.raises(UserError, match=field.rpartition(".")[2]):
            evaluate(trajectories, tmp_path / "e", **settings, **{field: value})


def test_command_real_model_with_and_without_adapter(tmp_path, capsys):
    spec = str(tiny_decoder.folder(tmp_path / "m", max_position_embeddings=4096))
    write_trajectories(tmp_path / "one.jsonl", (SHORT,))
    settings = LoraConfig(rank=2, alpha=64.0)
    state = lora.init_adapter(load_decoder(spec).config, settings, 0)
    state = jax.tree.map(lambda x: x + 0.3, state)  # LoRA's B starts at 0, without effect
    peft_format.save_adapter(state, settings, tmp_path / "peft", spec)
    result = evaluate(
        tmp_path / "one.jsonl",
        tmp_path / "e",
        **{
            "checkpoint": str(tmp_path / "peft"),
            "integrator.model": spec,
            "integrator.max_tokens": 4,
            "integrator.batch_size": 1,
            "integrator.prefix_tokens": 0,
            "base.prefilled_headers": False,
            "base.few_shot": False,
        },
    )
    assert result["num_trained_on"] is None  # a PEFT folder has no record
    assert "does not record whether it was trained on these" in capsys.readouterr().err
    student, base = read_rows(tmp_path)
    assert (student["system"], base["system"]) == ("student", "base")
    assert student["error"] is None is base["error"]
    assert student["response"] != base["response"]
    for name in ("student", "base"):
        assert 0 < result["systems"][name]["generated_tokens"] <= 4
        assert result["systems"][name]["parse_errors"]["truncated"] == 1


def test_command_searches_next_queries(tmp_path, monkeypatch, capsys):
    dataset = tiny.dataset()
    jsonl.write_dataset(dataset, tmp_path / "data")
    question = dataset.questions[0]
    assert question.supporting is not None
    first, second = question.supporting
    steps = (
        Step(question.question, (first,), next_query=dataset.corpus[second].text),
        Step("x", (second,), next_query=None),
    )
    found = [Trajectory(question.id, question.question, "some-llm", steps, "stopped")]
    write_trajectories(tmp_path / "t.jsonl", found)
    texts = {f"{question.id}#1": reply((), dataset.corpus[first].text), f"{question.id}#2": ""}

    @contextlib.contextmanager
    def opened(*_):
        yield Canned(texts)

    monkeypatch.setattr(evaluation, "open_model", opened)
    fields = {"data.dir": str(tmp_path / "data"), "retriever.kind": "bm25", "query_recall": 1}
    fields["base.prefilled_headers"] = False
    result = evaluate(tmp_path / "t.jsonl", tmp_path / "e", **fields)
    assert result["teacher"]["query_recall"] == 1.0
    assert result["systems"]["base"]["query_recall"]["value"] == 0.0
    assert "the teacher's queries have a recall of 100.0" in capsys.readouterr().err


def test_gold_of_language_model_steps_is_annotated():
    """For another teacher's steps, gold facts come from annotations, not from the kept facts."""
    dataset = tiny.dataset()
    question = dataset.questions[0]
    born, worked = dataset.triples["p0"]
    patron, known = dataset.triples["t0"]
    steps = (
        Step(question.question, candidates=(worked, born), scores=(1.0, 0.5), kept=(worked, born)),
        Step("x", candidates=(known, patron), scores=(1.0, 0.5), kept=(known,), next_query=None),
    )
    predicted = Trajectory(question.id, question.question, "some-llm", steps, "stopped")
    theirs = Trajectory("q9", "?", "annotations", (FIRST,), "stopped")
    nobody = Trajectory("unknown", "?", "some-llm", (FIRST,), "stopped")
    gold = evaluate_integrator._gold(dataset, (predicted, theirs, nobody), "ascii")
    assert gold == [[(born,), (patron,)], [(A, C)], [None]]
    assert evaluate_integrator._gold(None, (predicted, theirs), "ascii") == [[None, None], [(A, C)]]


def test_gold_sentences_of_language_model_steps_are_annotated():
    dataset = tiny.dataset()
    question = dataset.questions[0]
    said = {
        pid: [Sentence(pid, i, chains.sentence_text(dataset.corpus[pid], i)) for i in (0, 1)]
        for pid in ("p0", "t0")
    }
    steps = (
        Step(question.question, candidates=(*said["p0"], *said["t0"][1:]), kept=said["p0"][1:]),
        Step("x", candidates=tuple(said["t0"]), kept=(), next_query=None),
    )
    predicted = Trajectory(question.id, question.question, "some-llm", steps, "stopped")
    gold = evaluate_integrator._gold(dataset, (predicted,), "ascii", "sentence")
    assert gold == [[(said["p0"][0],), ()]]  # the hop of the patron's town is not reached
    kept = dataclasses.replace(steps[0], kept=said["p0"][:1])
    predicted = dataclasses.replace(predicted, steps=(kept, steps[1]))
    gold = evaluate_integrator._gold(dataset, (predicted,), "ascii", "sentence")
    assert gold == [[(said["p0"][0],), (said["t0"][0],)]]


def test_command_scores_sentences_and_rejects_triple_student(tmp_path, monkeypatch):
    folder = tmp_path / "t"
    folder.mkdir()
    made = by_hand.of_sentences(by_hand.trajectory())
    write_trajectories(folder / "trajectories.jsonl", [made])
    sidecar = {"normalization": "ascii", "prompt_format": "compact", "few_shot": False}
    (folder / "trajectories.json").write_text(
        json.dumps(sidecar)
    )  # the units are read from the steps
    result = evaluate(folder, tmp_path / "a", **{"base.run": False})
    systems = result["systems"]
    assert set(systems) == {"top_k", "top_k_chain", "aligner", "nothing"}
    assert systems["top_k"]["teacher"]["micro_recall"]["value"] == 1
    model = Canned({f"q0#{n}": reply_of(made.steps[n - 1]) for n in (1, 2, 3)})

    @contextlib.contextmanager
    def opened(*_):
        yield model

    monkeypatch.setattr(evaluation, "open_model", opened)
    result = evaluate(folder, tmp_path / "b", **{"base.prefilled_headers": False})
    assert result["systems"]["base"]["teacher"]["f1"]["value"] == 1
    assert result["settings"]["base"]["units"] == "sentence"
    assert "each of them a sentence" in model.batches[0][0].request.messages[0].text
    rows = [json.loads(line) for line in (tmp_path / "b/decisions.jsonl").read_text().splitlines()]
    assert rows[0]["parsed"]["kept"][0]["text"] == compact.line(made.steps[0].kept[0])
    # The units of training are checked before a model is opened.
    monkeypatch.setattr(evaluation, "open_model", None)
    for prompt, trained_on in (({}, "triple"), ({"units": "triple"}, "triple")):
        prompt |= {"normalization": "ascii", "prompt_format": "compact", "few_shot": False}
        output = {"component": "integrator", "model": "m", "prompt": prompt}
        peft = tmp_path / "peft"
        peft.mkdir(exist_ok=True)
        (peft / "adapter_config.json").write_text("{}")
        (peft / "training.json").write_text(json.dumps(output))
        with pytest.raises(
            UserError, match=f"peft was trained on units={trained_on}, but .*/t has"
        ):
            evaluate(folder, tmp_path / "c", checkpoint=str(peft))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"trajectories": None}, "config.trajectories is required"),
        ({"trajectories": "nowhere"}, "nowhere does not exist"),
        ({"keep": "good"}, "config.keep"),
        ({"integrator.max_tokens": 0}, "max_tokens"),
        ({"in_flight": 0}, "in_flight"),
        ({"query_recall": -1}, "query_recall"),
        ({"integrator.adapter": "x"}, "config.checkpoint"),
        ({"checkpoint": "nowhere"}, "nowhere is neither a training workdir"),
        ({"prompt_format": "prose"}, "prompt_format"),
        ({"match_cutoff": 80.0}, "match_cutoff=80.0 must lie between 0 and 1"),
        ({"stop_after_minutes": -1.0}, "stop_after_minutes"),
    ],
)
def test_command_rejects_bad_input(trajectories, tmp_path, fields, message, monkeypatch):
    monkeypatch.setattr(evaluation, "open_model", None)  # input is rejected before opening a model
    with pytest.raises(UserError, match=message):
        evaluate(trajectories, tmp_path / "e", **fields)


def test_command_out_of_time_model_has_no_scores(trajectories, tmp_path):
    result = evaluate(trajectories, tmp_path / "e", stop_after_minutes=1e-9)
    assert not result["complete"] and "base" not in result["systems"]
