"""launch/distill.py with a method's config: a scripted teacher, filters, resuming and bad input."""

import json
import pathlib
import re
import runpy

import pytest

from cirag_jax import cli
from cirag_jax.commands import backends, identity
from cirag_jax.distill import examples
from cirag_jax.llm.types import Generated, Usage
from tests import tiny
from tests.answering import lines

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_COMMAND = runpy.run_path(str(_ROOT / "launch/distill.py"))
DATASET = tiny.dataset()
PEOPLE = {q.id: q.question.split()[-3] for q in DATASET.questions}
# Questions that the teacher answers wrongly, begins with prose, or summarizes up to the limit.
WRONG, AGAIN, LONG = "q1", "q2", "q3"


class Teacher:
    """A teacher in all roles of DualRAG, which searches the person, then the town, then stops."""

    usage = Usage()
    budget_exhausted = False

    def __init__(self):
        self.asked = []

    def with_options(self, options):
        return self

    def close(self):
        pass

    def generate(self, requests, progress, done):
        for index, request in enumerate(requests):
            self.asked.append(request)
            done(index, Generated(*self.answer(request.messages), Usage(generated_tokens=3)))

    def answer(self, messages):
        is_again = "not the JSON object" in messages[-1].text
        messages = messages[:-2] if is_again else messages
        task, last = messages[0].text, messages[-1].text
        (name,) = (i for i, person in PEOPLE.items() if f"where {person} was" in last)
        town = re.search(rf"{PEOPLE[name]} born in (\w+)", last)
        patron = re.search(r"patron (saint \w+)", last)
        if "Documents were retrieved" in task:
            about = town[1] if town and f"Entity: {town[1]}" in last else PEOPLE[name]
            found = re.search(rf"{about} (?:born in|patron) [\w ]+", last)
            return (found[0] if found else "None"), "length" if name == LONG else "stop"
        if "Name the entities" in task:
            entity = town[1] if town else PEOPLE[name]
            return json.dumps({"entities": [{"entity": entity, "keywords": [entity]}]}), "stop"
        if "Answer the question from the knowledge" in task:
            return f"Answer: {patron[1] if patron and name != WRONG else 'nobody'}", "stop"
        if name == AGAIN and not town and not is_again:
            return "I cannot do that.", "stop"
        known = "patron" if patron else town[1] if town else "nothing"
        thought = {"thought": f"This is known: {known}.", "need_retrieve": patron is None}
        return json.dumps(thought), "stop"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("tiny")
    return tiny.dataset_folder(root / "data"), tiny.model_folder(root / "encoder")


@pytest.fixture(scope="module", autouse=True)
def teacher():
    teacher = Teacher()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backends, "open_backend", lambda config, spent: teacher)
        patch.setattr(identity, "model_identity", lambda name: {"name": str(name)})
        yield teacher


def arguments(folders, workdir, *more, method="dualrag"):
    values = [f"data.dir={folders[0]}", f"encoder.model={folders[1]}", "model=a/tutor"]
    values += ["retriever.kind=bm25", "data.corpus=ircot_full", "in_flight=3"]
    if method == "dualrag":
        values += ["dualrag.min_score=-1", "dualrag.num_retrieved=4", "dualrag.constrained=false"]
    flags = [f"--config.{value}" for value in (*values, *more)]
    return [f"--config=configs/methods/{method}.py", *flags, f"--workdir={workdir}"]


def execute(capsys, argv, status=0):
    with pytest.raises(SystemExit) as end:
        cli.run(_COMMAND["main"], "", ["distill.py", *argv], extend=_COMMAND["extend"])
    captured = capsys.readouterr()
    assert end.value.code == status, captured.err
    return json.loads(captured.out) if status == 0 else captured.err.splitlines()[-1]


@pytest.fixture(scope="module")
def whole(folders, tmp_path_factory, teacher):
    """The workdir of a finished run with ``keep=all``, and its result."""
    workdir = tmp_path_factory.mktemp("runs")
    argv = ["distill.py", *arguments(folders, workdir, "examples.keep=all")]
    with pytest.raises(SystemExit) as end:
        cli.run(_COMMAND["main"], "", argv, extend=_COMMAND["extend"])
    assert end.value.code == 0
    return workdir, json.loads((workdir / "result.json").read_text())


@pytest.fixture
def again(whole, folders, capsys, teacher):
    """Runs the command again in the same workdir with other fields, without any new call."""

    def run(*more, status=0):
        before = len(teacher.asked)
        result = execute(capsys, arguments(folders, whole[0], *more), status)
        assert len(teacher.asked) == before
        return result, lines(whole[0] / examples.FILE)

    return run


def questions(rows):
    return list(dict.fromkeys(row["question_id"] for row in rows))


def test_examples_of_every_role_are_calls_of_the_journal(whole, again, teacher):
    result, rows = again("examples.keep=all")
    assert result["examples"] == whole[1]["examples"]
    roles = {"reasoner": 24, "entity_identifier": 16, "summarizer": 14, "reader": 8}
    assert result["examples"] == roles and result["kept_questions"] == 8
    assert {role: sum(r["role"] == role for r in rows) for role in roles} == roles
    assert result["dropped_calls"] == {
        "reasoner": {"asked_again": 1}, "entity_identifier": {},
        "summarizer": {"truncated": 2}, "reader": {},
    }  # fmt: skip
    assert questions(rows) == [q.id for q in DATASET.questions if q.split == "train"]
    asked = {tuple((m.role, m.text) for m in request.messages) for request in teacher.asked}
    for row in rows:
        assert tuple((m["role"], m["content"]) for m in row["messages"]) in asked
        assert row["source"]["method"] == "dualrag" and row["source"]["teacher"] == "a/tutor"
    first = [row for row in rows if row["question_id"] == "q0"]
    assert [row["role"] for row in first[:3]] == ["reasoner", "entity_identifier", "summarizer"]
    assert first[0]["target"] == '{"thought": "This is known: nothing.", "need_retrieve": true}'
    assert first[0]["source"]["call"] == "0.0" and first[-1]["role"] == "reader"
    sidecar = examples.read_sidecar(whole[0])
    assert sidecar["settings"]["few_shot"] is True and sidecar["settings"]["num_retrieved"] == 4
    assert sidecar["split"] == "train" and sidecar["held_out"] == {}
    assert sidecar["examples"] == roles


def test_examples_response_requested_again_has_the_original_prompt(again):
    _, rows = again("examples.keep=all", "examples.roles=('reasoner',)")
    assert {row["role"] for row in rows} == {"reasoner"}
    by_question = {name: [r for r in rows if r["question_id"] == name] for name in ("q0", AGAIN)}
    normal, repeated = (found[0] for found in by_question.values())
    assert [len(found) for found in by_question.values()] == [3, 3]
    assert repeated["target"] == normal["target"]
    assert len(repeated["messages"]) == len(normal["messages"])
    assert PEOPLE[AGAIN] in repeated["messages"][-1]["content"]


def test_examples_without_few_shot_have_only_instruction_and_turn(again, whole):
    _, rows = again("examples.keep=all", "examples.few_shot=false")
    assert {tuple(m["role"] for m in row["messages"]) for row in rows} == {("system", "user")}
    assert examples.read_sidecar(whole[0])["settings"]["few_shot"] is False


def test_examples_of_wrong_answers_are_dropped(again):
    result, rows = again()
    assert WRONG not in questions(rows) and len(questions(rows)) == 7
    assert result["dropped_questions"] == {"wrong": 1} and result["kept_questions"] == 7


def test_examples_keep_found_needs_all_gold_passages(again, whole):
    found = {}
    for count in (0, 1):
        result, rows = again("examples.keep=found", f"examples.found_at={count}")
        found[count] = questions(rows)
        assert result["dropped_questions"].get("not_found", 0) == 8 - len(found[count])
    assert len(found[0]) == 8 and found[1] == []  # Each question has two gold passages.


def test_examples_of_dualrag_ft_have_labels_of_three_roles(again, whole):
    result, rows = again("examples.keep=all", "examples.labels=dualrag_ft")
    assert {row["role"] for row in rows} == {"reasoner", "entity_identifier", "summarizer"}
    assert result["examples"]["reasoner"] == 24 and result["examples"]["summarizer"] == 16
    for role, count in result["examples"].items():
        labels = [row["source"]["label"] for row in rows if row["role"] == role]
        assert len(labels) == sum(result["labels"][role].values()) == count
        assert {label: labels.count(label) for label in labels} == result["labels"][role]
    assert {tuple(m["role"] for m in row["messages"]) for row in rows} == {("system", "user")}
    assert examples.read_sidecar(whole[0])["settings"]["few_shot"] is False
    # Cut summaries are labels, too, because the student gets the teacher's parsed fragment.
    assert LONG in {row["question_id"] for row in rows if row["role"] == "summarizer"}


def judgements(path, predictions, **changes):
    rows = [
        {"id": row["id"], "system": "w", "answer": row["answer"], "judge": row["id"] != "q5"}
        for row in predictions
    ]
    rows[0] |= {"judge": None}
    rows[1] |= changes
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_examples_keep_judge_reads_verdicts(again, whole, tmp_path):
    predictions = lines(whole[0] / "predictions.jsonl")
    file = judgements(tmp_path / "judgements.jsonl", predictions)
    for path in (file, tmp_path):
        result, rows = again("examples.keep=judge", f"examples.judgements={path}")
        assert questions(rows) == ["q1", "q2", "q3", "q4", "q6", "q7"]
        assert result["dropped_questions"] == {"unknown": 1, "wrong": 1}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"answer": "x"}, "judgements.jsonl:2: the answer to 'q1' is not the one in this workdir"),
        ({"system": "other"}, "has verdicts on 2 runs; judge only this workdir"),
        ({"judge": 3}, "judgements.jsonl:2: field 'judge' must be a boolean"),
    ],
)
def test_examples_bad_verdicts_are_refused(again, whole, tmp_path, changes, words):
    predictions = lines(whole[0] / "predictions.jsonl")
    file = judgements(tmp_path / "judgements.jsonl", predictions, **changes)
    more = "examples.keep=judge", f"examples.judgements={file}"
    assert words in again(*more, status=2)[0]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("examples.roles=('planner',)", "dualrag has no role 'planner' with the present settings; "
         "choose from reasoner, entity_identifier, summarizer, reader."),
        ("examples.keep=good", "config.examples.keep='good' is not one of all, correct, found"),
        ("examples.keep=judge", "config.examples.keep=judge and config.examples.judgements need"),
        ("examples.judgements=here", "config.examples.judgements need each other"),
        ("examples.labels=gold", "config.examples.labels='gold' is not one of teacher, dualrag_ft"),
        ("examples.found_at=-1", "config.examples.found_at=-1 must not be negative"),
        ("question=who", "config.question is not supported: examples need a dataset's questions"),
    ],
)  # fmt: skip
def test_examples_bad_setting_is_one_sentence(again, override, words):
    assert words in again(override, status=2)[0]


def test_examples_roles_without_examples_are_refused(folders, tmp_path, capsys):
    for method, override, words in (
        ("cirag", "examples.roles=('integrator',)", "use --config=configs/trajectories.py"),
        ("native_rag", "examples.labels=dualrag_ft", "needs a config of dualrag"),
        ("native_rag", "examples.few_shot=false", "native_rag has no setting few_shot"),
    ):
        argv = arguments(folders, tmp_path / method, override, method=method)
        assert words in execute(capsys, argv, status=2)


def test_examples_held_out_questions_cause_a_warning(folders, tmp_path, capsys):
    argv = arguments(folders, tmp_path, "data.split=dev", "data.limit=1")
    with pytest.raises(SystemExit) as end:
        cli.run(_COMMAND["main"], "", ["distill.py", *argv], extend=_COMMAND["extend"])
    assert end.value.code == 0
    assert "WARNING: held-out questions become training data (1 of spl" in capsys.readouterr().err
    assert examples.read_sidecar(tmp_path)["held_out"] == {"split=dev": 1}
