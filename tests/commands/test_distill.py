"""launch/distill.py: teachers, resuming after kills, and bad input, with tiny models."""

import dataclasses
import json
import pathlib
import runpy
import shutil
import sqlite3

import pytest

from cirag_jax import cli
from cirag_jax.commands import backends, distill, identity
from cirag_jax.config_files import load_config
from cirag_jax.datasets import jsonl, triple_files
from cirag_jax.distill import trajectories
from cirag_jax.distill.oracle import gold_of
from cirag_jax.llm.types import Generated, Message, Usage, failed
from cirag_jax.methods.cirag import prompts
from cirag_jax.reports import trace
from cirag_jax.runtime.store import Journal
from cirag_jax.triples.store import Record, TripleStore, content_hash
from cirag_jax.types import Prediction, Step
from tests import tiny

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_MAIN = runpy.run_path(str(_ROOT / "launch/distill.py"))["main"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("tiny")
    return {
        "data": tiny.dataset_folder(root / "data"),
        "encoder": tiny.model_folder(root / "encoder"),
    }


def arguments(folders, workdir, *more, teacher="annotations"):
    values = {
        "data.dir": folders["data"], "encoder.model": folders["encoder"], "in_flight": 5,
        "cirag.num_passages": 4, "cirag.num_candidates": 6, "retriever.kind": "bm25",
    }  # fmt: skip
    overrides = [f"--config.{key}={value}" for key, value in values.items()]
    more = [f"--config.{override}" for override in more]
    config = f"--config=configs/trajectories.py:{teacher}"
    return [config, *overrides, *more, f"--workdir={workdir}"]


def execute(capsys, argv, status=0):
    """Runs the command; returns its result and standard error."""
    with pytest.raises(SystemExit) as end:
        cli.run(_MAIN, "configs/trajectories.py", ["distill.py", *argv])
    captured = capsys.readouterr()
    assert end.value.code == status, captured.err
    return (json.loads(captured.out) if status == 0 else {}), captured.err


def fails(capsys, argv):
    _, err = execute(capsys, argv, status=2)
    assert "Traceback" not in err
    return err.splitlines()[-1]


def requests_of(workdir):
    """Returns the journal's requests to the teacher and the responses, in order."""
    with sqlite3.connect(workdir / "journal.sqlite") as db:
        rows = db.execute("SELECT program, request, response FROM responses ORDER BY 1, ordinal")
        found = [(p, json.loads(q), json.loads(r)) for p, q, r in rows]
    db.close()
    return [row for row in found if row[1]["kind"] == "generate"]


@pytest.fixture(scope="module")
def whole(folders, tmp_path_factory):
    """An uninterrupted run of the annotation teacher: its workdir and its result."""
    workdir = tmp_path_factory.mktemp("runs") / "whole"
    with pytest.raises(SystemExit) as end:
        cli.run(_MAIN, "configs/trajectories.py", ["distill.py", *arguments(folders, workdir)])
    assert end.value.code == 0
    return workdir, json.loads((workdir / "result.json").read_text())


def test_distill_files_match_the_result(whole, folders):
    workdir, result = whole
    found = trajectories.read_trajectories(workdir)
    assert [t.question_id for t in found] == [f"q{i}" for i in range(8)]  # the split train
    assert {t.teacher for t in found} == {"annotations"} and not any(t.parse_errors for t in found)
    assert {t.end for t in found} <= {"stopped", "max_steps"}
    for name, value in trajectories.statistics(found).items():
        assert result[name] == value or value is None, name
    assert result["num_questions"] == result["trajectories"] == 8 and result["complete"] is True
    assert result["sees_gold"] is True
    assert result["dropped"] == {} and result["failures"] == result["unstated_questions"] == 0
    assert 0 < result["solved"] <= 1 and result["retrieval_misses"] is not None
    sidecar = trajectories.read_sidecar(workdir)
    assert sidecar["normalization"] == "ascii" and sidecar["prompt_format"] == "multi_turn"
    assert sidecar["few_shot"] is False and sidecar["num_candidates"] == 6
    assert sidecar["dataset"] == "data" and sidecar["teachers"] == ["annotations"]
    assert sidecar["held_out"] == {} and sidecar["trajectories"] == 8
    assert sidecar["encoder"] == str(folders["encoder"]) and sidecar["triples"] is None


def test_distill_missing_facts_are_inserted_only_in_training(folders, tmp_path, capsys):
    data = tmp_path / "data"
    shutil.copytree(folders["data"], data)
    (data / "openie.jsonl").write_text("")
    own = {**folders, "data": data}
    for line in (data / "corpus.jsonl").read_text().splitlines()[:1]:  # one passage without triples
        empty = {"passage_id": json.loads(line)["id"], "triples": []}
        (data / "openie.jsonl").write_text(json.dumps(empty) + "\n")
    train, _ = execute(capsys, arguments(own, tmp_path / "a"))
    assert train["inserted"] > 8 and train["solved"] > 0
    assert train["unstated_questions"] == 8
    dev, _ = execute(capsys, arguments(own, tmp_path / "c", "data.split=dev"))
    assert dev["inserted"] == 0 and dev["solved"] == 0


def test_distill_trajectory_has_requests_and_responses_of_the_loop(whole):
    """Each request has the prompt that inference would use after the earlier steps."""
    workdir, _ = whole
    rows = requests_of(workdir)
    found = [(t, i) for t in trajectories.read_trajectories(workdir) for i in range(len(t.steps))]
    assert len(rows) == len(found)
    for (program, request, response), (trajectory, i) in zip(rows, found, strict=True):
        step = trajectory.steps[i]
        messages = prompts.integration_messages(
            trajectory.question, trajectory.steps[:i], step.candidates
        )
        assert program == trajectory.question_id
        said = [Message(**m).text for m in request["messages"]]
        assert said == [message.text for message in messages]
        assert response["text"] == step.response == prompts.render_decision(step, "ascii")


def test_distill_facts_after_two_empty_rounds_do_not_count():
    """A fact that is kept after two empty rounds is cut; after one, it is not."""
    data = tiny.dataset()
    question, config = data.questions[0], load_config("configs/trajectories.py", [])
    gold = gold_of(question, data.corpus, data.triples, "ascii")
    born, patron = data.triples["p0"][0], data.triples["t0"][0]
    rounds = ((born,), "one"), ((), "two"), ((), "three"), ((patron,), None)
    steps = [
        Step("a query", candidates=(born, patron), scores=(1.0, 0.5), kept=kept, next_query=asked)
        for kept, asked in rounds
    ]

    def made(*steps):
        prediction = Prediction("", "default", steps=steps)
        return distill._trajectory(prediction, question, gold, config)

    cut = made(*steps)
    assert (len(cut.steps), cut.end, cut.solved) == (2, "in_vain", False)
    whole = made(steps[0], steps[1], steps[3])
    assert (len(whole.steps), whole.end, whole.solved) == (3, "stopped", True)


@pytest.mark.parametrize("name", ["store", "hippo.json"])
def test_distill_reads_triples_of_every_format(whole, folders, tmp_path, capsys, name):
    dataset = tiny.dataset()
    data = tmp_path / "data"
    jsonl.write_dataset(dataclasses.replace(dataset, triples={}), data)
    rows = [(dataset.corpus[i], triples) for i, triples in dataset.triples.items()]
    if name == "store":
        (tmp_path / name).mkdir()
        with TripleStore.create(tmp_path / name / "triples.sqlite") as store:
            store.commit([Record(p.id, content_hash(p), facts) for p, facts in rows], {})
    else:
        triple_files.write_hipporag(tmp_path / name, rows)
    argv = arguments({**folders, "data": data}, tmp_path / "w", f"data.triples={tmp_path / name}")
    execute(capsys, argv)
    found = (tmp_path / "w" / trajectories.FILE).read_bytes()
    assert found == (whole[0] / trajectories.FILE).read_bytes()


def test_trace_of_trajectories_has_unscored_answers(whole, tmp_path):
    counts = trace.write_trace(whole[0], tmp_path / "trace.html")
    assert counts["unscored"] == counts["num_questions"] == 8


def test_distill_killed_and_resumed_gives_the_same_bytes(
    whole, folders, tmp_path, capsys, monkeypatch
):
    workdir, _ = whole
    record, count = Journal.record, 0

    def record_or_kill(self, *args):
        nonlocal count
        count += 1
        if count % 7 == 0:
            raise KeyboardInterrupt
        record(self, *args)

    for _ in range(40):
        monkeypatch.setattr(Journal, "record", record_or_kill)
        with pytest.raises(SystemExit) as end:
            cli.run(_MAIN, "", ["distill.py", *arguments(folders, tmp_path)])
        capsys.readouterr()
        if end.value.code == 0:
            break
        assert end.value.code == 130 and not (tmp_path / trajectories.FILE).exists()
    assert end.value.code == 0 and count > 14
    for name in (trajectories.FILE, trajectories.SIDECAR):
        assert (tmp_path / name).read_bytes() == (workdir / name).read_bytes()
    # Each response is recorded once.
    assert len(requests_of(tmp_path)) == len(requests_of(workdir))


def test_distill_stopped_by_deadline_resumes(whole, folders, tmp_path, capsys):
    argv = arguments(folders, tmp_path)
    result, _ = execute(capsys, [*argv, "--config.stop_after_minutes=1e-9"])
    assert result["complete"] is False and result["trajectories"] == 0
    result, err = execute(capsys, argv)
    assert result["complete"] is True and "rounds per trajectory" in err
    path = tmp_path / trajectories.FILE
    assert path.read_bytes() == (whole[0] / trajectories.FILE).read_bytes()


def test_distill_held_out_questions_cause_a_warning(folders, tmp_path, capsys):
    argv = arguments(folders, tmp_path, "data.split=dev", "limit=2", "keep=correct_only", "seed=3")
    result, err = execute(capsys, argv)
    assert "WARNING: held-out questions become training data (4 of split=dev)" in err
    assert result["held_out"] == {"split=dev": 4} == trajectories.read_sidecar(tmp_path)["held_out"]
    assert result["trajectories"] <= 2
    dropped = result["dropped"]
    assert sum(dropped.values()) + result["trajectories"] == 4
    assert set(dropped) <= {"limit", "not_solved"}


def test_distill_min_steps_drops_short_trajectories(folders, tmp_path, capsys):
    every, _ = execute(capsys, arguments(folders, tmp_path))
    fewest = min(map(int, every["step_counts"]))
    short = every["step_counts"][str(fewest)]
    assert 0 < short < every["trajectories"]
    result, _ = execute(capsys, arguments(folders, tmp_path, f"min_steps={fewest + 1}"))
    assert result["dropped"] == {"short": short} and result["generated_tokens"] == 0
    assert result["trajectories"] == every["trajectories"] - short
    assert all(len(t.steps) > fewest for t in trajectories.read_trajectories(tmp_path))
    assert trajectories.read_sidecar(tmp_path)["min_steps"] == fewest + 1


def test_distill_counts_questions_without_annotations(folders, tmp_path, capsys):
    data = tmp_path / "data"
    data.mkdir()
    for path in folders["data"].iterdir():
        (data / path.name).write_bytes(path.read_bytes())
    rows = [json.loads(line) for line in (data / "questions.jsonl").read_text().splitlines()]
    for row in rows[1:]:
        row["evidences"] = row["supporting"] = row["supporting_sentences"] = None
    (data / "questions.jsonl").write_text("\n".join(map(json.dumps, rows)))
    argv = arguments({**folders, "data": data}, tmp_path / "w")
    result, _ = execute(capsys, argv)
    assert (result["num_questions"], result["without_annotations"]) == (1, 7)
    rows[0] |= {"evidences": None, "supporting": None, "supporting_sentences": None}
    (data / "questions.jsonl").write_text("\n".join(map(json.dumps, rows)))
    message = fails(capsys, arguments({**folders, "data": data}, tmp_path / "w2"))
    assert "none of the 8 questions of data has annotations for the teacher" in message


SENTENCES = ("cirag.units=sentence", "cirag.prompt_format=compact", "cirag.max_steps=4")


def test_distill_sentences_need_no_triples_and_resume(folders, tmp_path, capsys):
    data = tmp_path / "data"
    shutil.copytree(folders["data"], data)
    (data / "openie.jsonl").unlink()
    argv = arguments({**folders, "data": data}, tmp_path / "w", *SENTENCES)
    result, _ = execute(capsys, argv)
    found = trajectories.read_trajectories(tmp_path / "w")
    assert len(found) == 8 and result["solved"] > 0 and result["candidates"] == 6
    supporting = {q.id: q.supporting_sentences or () for q in tiny.dataset().questions}
    for trajectory in found:
        kept = [(s.passage_id, s.index) for step in trajectory.steps for s in step.kept]
        assert set(kept) <= set(supporting[trajectory.question_id]) and len(set(kept)) == len(kept)
        assert trajectory.solved == (set(kept) == set(supporting[trajectory.question_id]))
        assert trajectory.solved == (trajectory.end == "stopped")
    sidecar = trajectories.read_sidecar(tmp_path / "w")
    assert (sidecar["units"], sidecar["prompt_format"]) == ("sentence", "compact")
    rows, steps = requests_of(tmp_path / "w"), [s for t in found for s in t.steps]
    assert [row[2]["text"] for row in rows] == [s.response for s in steps]
    before = (tmp_path / "w" / trajectories.FILE).read_bytes()
    again, _ = execute(capsys, argv)  # from the journal only
    assert (tmp_path / "w" / trajectories.FILE).read_bytes() == before
    assert again["inserted"] == result["inserted"] and len(requests_of(tmp_path / "w")) == len(rows)


def test_distill_missed_passages_are_inserted_only_in_training(folders, tmp_path, capsys):
    few = ("cirag.num_passages=1", "cirag.num_candidates=4", "retriever.kind=exact")

    def run(name, *more):  # the random encoder retrieves few gold passages
        return execute(capsys, arguments(folders, tmp_path / name, *SENTENCES, *few, *more))[0]

    train = run("a")
    assert train["inserted"] > 0
    found = trajectories.read_trajectories(tmp_path / "a")
    given = [step for t in found for step in t.steps if len(step.passages) > 1]
    assert len(given) == train["inserted"] and {len(step.passages) for step in given} == {2}
    assert all(step.query != t.question for t in found for step in t.steps if step in given)
    dev = run("c", "data.split=dev")
    assert dev["inserted"] == 0 and dev["solved"] < train["solved"]


def test_distill_sentences_need_supporting_sentences(folders, tmp_path, capsys):
    data = tmp_path / "data"
    shutil.copytree(folders["data"], data)
    rows = [json.loads(line) for line in (data / "questions.jsonl").read_text().splitlines()]
    lines = [json.dumps({**row, "supporting_sentences": None}) for row in rows]
    (data / "questions.jsonl").write_text("\n".join(lines))
    message = fails(capsys, arguments({**folders, "data": data}, tmp_path / "w", *SENTENCES))
    assert message.endswith("has annotations for the teacher (supporting_sentences).")


class FakeTeacher:
    """A backend that always keeps the first candidate; its responses for q1 cannot be parsed."""

    usage = Usage()

    def __init__(self, budget):
        self.left, self.asked = budget, []

    @property
    def budget_exhausted(self):
        return self.left <= 0

    def with_options(self, options):
        return self

    def generate(self, requests, progress, done):
        del progress
        for index, request in enumerate(requests):
            done(index, self._answer(request))

    def _answer(self, request):
        if self.left <= 0:
            return failed("the budget is exhausted")
        self.left -= 1
        texts = "".join(message.text for message in request.messages)
        asks = [q.id for q in tiny.dataset().questions if q.question in texts]
        assert len(asks) == 1
        self.asked.append((asks[0], texts))
        last = request.messages[-1].text
        if "Query:" in last:  # the reader
            text = "Thought: so.\nAnswer: saint sailor"
        elif asks == ["q1"]:
            text = "I cannot do that."
        else:
            facts = json.loads(last.rpartition("##]]\n")[2])["fact"]
            text = prompts.render_decision(Step("", thought="So."), "ascii")
            text = text.replace('{"fact": []}', json.dumps({"fact": facts[:1]}))
        return Generated(text, "stop", Usage(prompt_tokens=7, generated_tokens=3))

    def close(self):
        pass


@pytest.fixture
def fake_teacher(monkeypatch):
    """Opens the same `FakeTeacher` for all roles. Tests can set its budget."""
    teacher = FakeTeacher(10**6)
    monkeypatch.setattr(backends, "open_backend", lambda config, spent: teacher)
    monkeypatch.setattr(
        identity, "model_identity", lambda name: {"name": str(name)}
    )  # there are no such weights
    return teacher


def test_distill_unparsable_trajectory_is_dropped(fake_teacher, folders, tmp_path, capsys):
    argv = arguments(folders, tmp_path, "teacher.llm.model=a/tutor", teacher="llm")
    result, _ = execute(capsys, argv)
    assert result["dropped"] == {"no_decision": 1} and result["trajectories"] == 7
    assert result["teachers"] == {"a/tutor": 7} and result["solved"] is None
    assert result["sees_gold"] is False
    assert result["generated_tokens"] == 3 * len(fake_teacher.asked)
    assert "q1" not in {t.question_id for t in trajectories.read_trajectories(tmp_path)}
    # Another filter makes no new requests.
    before = len(fake_teacher.asked)
    result, _ = execute(capsys, [*argv, "--config.keep=all"])
    assert result["trajectories"] == 7 and len(fake_teacher.asked) == before
    assert result["dropped"] == {"no_decision": 1}  # it has no decision at all


@pytest.mark.parametrize("teacher", ["llm", "annotations"])
def test_distill_llm_candidates_are_extracted_triples(
    fake_teacher, folders, tmp_path, capsys, teacher
):
    """Half of the annotated facts are not extracted. Only the annotation teacher gets these."""
    data = tmp_path / "data"
    shutil.copytree(folders["data"], data)
    lines = (data / "openie.jsonl").read_text().splitlines()
    lines = [line for line in lines if json.loads(line)["passage_id"].startswith("p")]
    (data / "openie.jsonl").write_text("\n".join(lines))
    extracted = {tuple(triple[:3]) for line in lines for triple in json.loads(line)["triples"]}
    own = {**folders, "data": data}
    sees_gold = teacher == "annotations"
    result, _ = execute(capsys, arguments(own, tmp_path / "w", "keep=all", teacher=teacher))
    found = trajectories.read_trajectories(tmp_path / "w")
    shown = {tuple(fact)[:3] for t in found for step in t.steps for fact in step.candidates}
    assert shown and bool(shown - extracted) == sees_gold
    assert (result["inserted"] > 0) == result["sees_gold"] == sees_gold


def test_distill_correct_only_keeps_right_answers(fake_teacher, folders, tmp_path, capsys):
    argv = arguments(folders, tmp_path, "answer=true", "keep=correct_only", teacher="llm")
    result, _ = execute(capsys, argv)
    found = trajectories.read_trajectories(tmp_path)
    golds = {q.id: q.answers for q in tiny.dataset().questions if q.split == "train"}
    right = [i for i, answers in golds.items() if answers == ("saint sailor",)]
    assert [t.question_id for t in found] == right and len(right) == 2
    assert result["dropped"] == {"not_solved": 5, "no_decision": 1} and result["solved"] == 1


def test_distill_exhausted_budget_resumes_to_the_same_bytes(
    fake_teacher, folders, tmp_path, capsys
):
    argv = arguments(folders, tmp_path / "cut", "keep=all", "in_flight=2", teacher="llm")
    fake_teacher.left = 5
    result, _ = execute(capsys, argv)
    assert result["complete"] is False and 0 < result["trajectories"] < 8
    assert result["failures"] == 0
    fake_teacher.left = 10**6
    result, _ = execute(capsys, argv)
    assert result["complete"] is True and result["trajectories"] == 7  # q1 has no decision
    assert len(set(fake_teacher.asked)) == len(fake_teacher.asked)
    uncut = arguments(folders, tmp_path / "uncut", "keep=all", "in_flight=2", teacher="llm")
    execute(capsys, uncut)
    paths = [tmp_path / name / trajectories.FILE for name in ("cut", "uncut")]
    assert paths[0].read_bytes() == paths[1].read_bytes()


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("teacher.kind=oracle", "config.teacher.kind='oracle' is not one of annotations, llm"),
        ("min_steps=0", "config.min_steps=0 must be at least 1"),
        ("keep=good", "config.keep='good' is not one of all, parsed, correct_only"),
        ("limit=-1", "config.limit=-1 must not be negative"),
        ("profile=squad", "config.profile='squad' is an unknown profile"),
        (
            "cirag.prefilled_headers=true",
            "config.cirag.prefilled_headers=true is not supported: teachers respond",
        ),
        (
            "cirag.integrator=top_k",
            "config.cirag.integrator=top_k is not supported; set config.teacher",
        ),
        ("cirag.max_steps=0", "config.cirag.max_steps=0 must be at least 1"),
        ("cirag.prompt_format=paper", "the annotation teacher needs multi_turn for triples"),
        (
            "cirag.units=sentence",
            "units=sentence needs integrator=aligner or top_k, or prompt_format=compact, not multi",
        ),
        ("triples=online", "extract them first (launch/extract.py)"),
        ("data.split=autumn", "config.data.split=autumn matches no question"),
        ("in_flight=0", "config.in_flight=0 must be at least 1"),
    ],
)
def test_distill_bad_setting_is_one_sentence(folders, tmp_path, capsys, override, words):
    assert words in fails(capsys, arguments(folders, tmp_path, override))
    assert not (tmp_path / trajectories.FILE).exists()


def test_distill_correct_only_of_llm_needs_answers(folders, tmp_path, capsys):
    message = fails(capsys, arguments(folders, tmp_path, "keep=correct_only", teacher="llm"))
    assert "config.keep=correct_only needs config.answer=true" in message
    argv = arguments(folders, tmp_path)
    argv[0] = "--config=configs/trajectories.py:oracle"
    assert "the presets are annotations, llm, paper" in fails(capsys, argv)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("answer=true", "was started with answer=false, not true"),
        ("cirag.num_candidates=5", "was started with cirag.num_candidates=6, not 5"),
    ],
)
def test_distill_changed_setting_in_same_workdir_is_refused(
    whole, folders, capsys, override, words
):
    workdir, _ = whole
    before = (workdir / trajectories.FILE).read_bytes()
    message = fails(capsys, arguments(folders, workdir, override))
    assert words in message and "use another --workdir" in message
    assert (workdir / trajectories.FILE).read_bytes() == before
