"""launch/compare.py: shared models, resuming after kills, and bad input, with tiny models."""

import dataclasses
import json
import shutil
import signal
import sqlite3

import matplotlib.image
import pytest

from cirag_jax import cli
from cirag_jax.commands import compare, comparison, latency, results, task
from cirag_jax.commands.pool import Pool
from cirag_jax.errors import UserError
from cirag_jax.llm.types import Message
from cirag_jax.reports import trace
from cirag_jax.runtime.records import read_records
from cirag_jax.runtime.requests import Generate, Needs
from cirag_jax.runtime.store import JOURNAL
from cirag_jax.types import Prediction
from configs import compare as compare_config
from configs import report as report_config
from tests import tiny
from tests.answering import lines, tiny_folders
from tests.own_method import own_method


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return tiny_folders(tmp_path_factory.mktemp("tiny"))


def settings(folders):
    """Settings of the methods for tiny models."""
    return (
        f"encoder.model={folders['encoder']}", f"reader.model={folders['decoder']}",
        "reader.prefix_tokens=0", "reader.batch_size=4", "reader.max_tokens=5",
        "native_rag.num_passages=3", "native_rag.num_read=2",
    )  # fmt: skip


def values(folders, **fields):
    """Fields of the comparison's config."""
    return {
        "methods": "direct,native_rag,narrow=native_rag", "preset": "", "data.dir": folders["data"],
        "data.split": "train", "data.limit": 3, "latency_questions": 0, "bootstrap_samples": 100,
        "set": (*settings(folders), "narrow:native_rag.num_read=1"), **fields,
    }  # fmt: skip


def configured(folders, **fields):
    config = compare_config.get_config()
    flat = values(folders, **fields)
    flat["data.dir"] = str(flat["data.dir"])
    config.update_from_flattened_dict(flat)
    return config.lock()


def run(folders, workdir, **fields):
    workdir.mkdir(exist_ok=True)
    return compare.compare(configured(folders, **fields), workdir)


def without_times(workdir):
    """Returns all tables except the last one, which contains seconds."""
    return (workdir / "table.md").read_text("utf-8").partition("Time: ")[0]


@pytest.fixture(autouse=True, scope="module")
def ranked_runs():
    """Ranks all runs, because the tiny model's responses are random text."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comparison, "MIN_PARSE_RATE", -1.0)
        yield


@pytest.fixture(scope="module")
def whole(folders, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("whole")
    return workdir, run(folders, workdir, latency_questions=2)


def test_compare_releases_caches_after_each_method(folders, tmp_path, monkeypatch):
    events = []
    answer, release = compare._answer, Pool.release
    monkeypatch.setattr(compare, "_answer", lambda *a: (events.append("answer"), answer(*a))[1])
    monkeypatch.setattr(Pool, "release", lambda pool: (events.append("release"), release(pool))[1])
    run(folders, tmp_path / "w", methods="direct,native_rag", set=settings(folders))
    assert events == ["answer", "release"] * 2


def test_compare_opens_models_and_embeds_texts_once(whole):
    _, result = whole
    # The methods share one engine, because the batch size is set.
    assert result["opened"] == {
        "language models": 1, "engines": 1, "encoders": 1, "indexes": 1,
    }  # fmt: skip
    questions = len(result["methods"]["native_rag"]["errors"]) + 3
    passages = result["texts"]["embedded"] - questions
    assert 8 <= passages <= 24  # from the contexts of three questions
    assert result["texts"]["requested"] == passages + 2 * questions


def test_compare_folder_is_a_workdir_of_answer(whole, folders, tmp_path):
    workdir, result = whole
    for name in ("direct", "native_rag", "narrow"):
        folder = workdir / name
        kept = json.loads((folder / "result.json").read_text("utf-8"))
        assert kept == result["methods"][name] and kept["complete"] and kept["answered"] == 3
        assert json.loads((folder / "config.json").read_text())["data"]["limit"] == 3
        assert (folder / "environment.json").is_file()
        assert [row["id"] for row in lines(folder / "predictions.jsonl")] == ["q0", "q1", "q2"]
    read = [json.loads((workdir / n / "config.json").read_text()) for n in ("native_rag", "narrow")]
    assert [config["native_rag"]["num_read"] for config in read] == [2, 1]
    page = report_config.get_config()
    page.run = str(workdir / "narrow")
    assert trace.report(page, tmp_path)["num_questions"] == 3
    page.run = str(workdir)  # all runs, in the order of the command's config
    (workdir / "config.json").write_text(configured(folders).to_json())
    page.bootstrap_samples = 50
    assert list(results.report(page, tmp_path)["systems"]) == ["direct", "native_rag", "narrow"]
    assert '<figure><img alt="latency"' in (tmp_path / "index.html").read_text("utf-8")
    # launch/answer.py finds the run in the folder complete.
    own = task.method_config("native_rag", "", settings(folders))
    with own.unlocked():
        own.data.dir, own.data.split, own.data.limit = str(folders["data"]), "train", 3
    from cirag_jax.commands import answer

    again = answer.answer(own, workdir / "native_rag")
    assert again["calls"] == result["methods"]["native_rag"]["calls"] and again["load_seconds"] == 0


def test_compare_writes_tables(whole):
    workdir, result = whole
    assert result["complete"] and result["num_questions"] == 3
    assert list(result["systems"]) == ["direct", "native_rag", "narrow"]
    pairs = ["direct-native_rag", "direct-narrow", "native_rag-narrow"]
    assert list(result["differences"]) == pairs
    # direct retrieves nothing
    assert set(result["differences"]["direct-narrow"]) == {"em", "f1", "acc"}
    assert result["differences"]["native_rag-narrow"]["recall@3"]["difference"] == 0
    reader = result["systems"]["native_rag"]["roles"]["reader"]
    assert reader["stage"] == "answering" and reader["calls"] == 1
    assert result["systems"]["direct"]["stages"].keys() == {"answering"}
    text = (workdir / "table.md").read_text("utf-8")
    header, _, direct, *_ = [line for line in text.splitlines() if line.startswith("|")]
    cells = [cell.strip() for cell in header.split("|")]
    assert cells[1:8] == ["run", "F1 [95 %]", "EM", "Acc", "R@3", "R@5 [95 %]", "all@5"]
    # Recall and complete evidence; no method ranks sentences or triples, so these have no columns.
    assert direct.count("n/a") == 3
    assert "sentence R@" not in header and "triple R@" not in header
    assert "p=1.000" in text and "| native_rag-narrow" in text
    page = (workdir / "table.html").read_text("utf-8")
    assert page.count("<table>") == 6 and page.count("data:image/svg+xml;base64,") == 4
    assert "http:" not in page.replace("http-equiv", "") and "<script" not in page


def test_compare_latency_questions_are_the_same_for_all_methods(whole, folders):
    workdir, result = whole
    asked = [
        {record.id for record in read_records(workdir / name / "alone" / JOURNAL)}
        for name in result["systems"]
    ]
    assert len(asked[0]) == 2 and asked[0] == asked[1] == asked[2] < {"q0", "q1", "q2"}
    for system in result["systems"].values():
        timed = system["seconds_alone"]
        assert timed["num_questions"] == 2 and 0 < timed["low"] <= timed["value"] <= timed["high"]
    for name in ("latency", "granularities", "tokens"):
        assert matplotlib.image.imread(workdir / f"{name}.png").shape[1] == 1050
        assert "<svg" in (workdir / f"{name}.svg").read_text("utf-8")


def test_compare_interrupted_latency_question_restarts(whole, folders, tmp_path):
    workdir = shutil.copytree(whole[0], tmp_path / "w")
    file = workdir / "narrow" / "alone" / JOURNAL
    with sqlite3.connect(file) as db:
        db.execute("UPDATE programs SET outcome = NULL, seconds = 1000")
    db.close()
    result = run(folders, workdir, latency_questions=2)
    timed = result["systems"]["narrow"]["seconds_alone"]
    assert timed["num_questions"] == 2 and timed["value"] < 1000
    kept, before = (r["systems"]["direct"]["seconds_alone"] for r in (result, whole[1]))
    assert kept["value"] == before["value"]


def test_compare_same_command_makes_no_requests(whole, folders, tmp_path):
    workdir = shutil.copytree(whole[0], tmp_path / "w")
    result = run(folders, workdir, latency_questions=2)
    assert result["opened"] == {} and result["texts"] == {"requested": 0, "embedded": 0}
    assert without_times(workdir) == without_times(whole[0])
    for name, system in result["systems"].items():
        before = whole[1]["systems"][name]
        assert system["f1"] == before["f1"] and system["seconds_alone"] == before["seconds_alone"]


def test_compare_stopped_and_resumed_gives_the_same_table(whole, folders, tmp_path, capsys):
    workdir = tmp_path / "w"
    result = run(folders, workdir, stop_after_minutes=1e-9)
    assert result["complete"] is False and "systems" not in result
    assert {r["complete"] for r in result["methods"].values()} == {False}
    assert "run the same command to resume" in capsys.readouterr().err
    assert not (workdir / "table.md").exists()
    run(folders, workdir)
    assert without_times(workdir) == without_times(whole[0])


@pytest.mark.slow
def test_compare_killed_and_resumed_gives_the_same_table(whole, folders, tmp_path, command):
    """The run is killed during the second of three methods."""
    workdir = tmp_path / "w"
    arguments = [f"--config.{key}={value}" for key, value in values(folders).items()]
    killed = command(
        "compare.py", *arguments, f"--workdir={workdir}",
        hooks=[["signal_at_write", 9, "after", signal.SIGKILL]],
    )  # fmt: skip
    assert killed.returncode == -signal.SIGKILL
    assert (workdir / "direct" / "result.json").is_file()
    assert not (workdir / "native_rag" / "result.json").is_file()
    resumed = command("compare.py", *arguments, f"--workdir={workdir}")
    assert resumed.returncode == 0, resumed.stderr
    assert json.loads(resumed.stdout)["complete"] is True
    run(folders, workdir)  # Writes the tables with all runs ranked; see `ranked_runs`.
    assert without_times(workdir) == without_times(whole[0])


def test_compare_set_applies_to_methods_with_the_key(folders):
    methods = compare.read_methods("direct, a=native_rag , cirag:small", "")
    assert [tuple(method) for method in methods] == [
        ("direct", "direct", ""), ("a", "native_rag", ""), ("cirag", "cirag", "small"),
    ]  # fmt: skip
    overrides = (
        "reader.max_tokens=7",
        "a:reader.max_tokens=8",
        "cirag.max_steps=2",
        "a:encoder.model=x:y",
    )
    config = configured(folders, set=overrides, model="m", in_flight=3, seed=5)
    configs = compare._configs(config, methods)
    assert [c.reader.max_tokens for c in configs.values()] == [7, 8, 7]
    assert configs["cirag"].cirag.max_steps == 2 and configs["cirag"].cirag.units == "sentence"
    assert configs["a"].encoder.model == "x:y" != configs["cirag"].encoder.model
    for c in configs.values():
        assert (c.reader.model, c.in_flight, c.seed, c.data.limit) == ("m", 3, 5, 3)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"methods": None}, "config.methods is required"),
        ({"methods": 5}, "method='5' is unknown"),
        ({"methods": 0}, "method='0' is unknown"),
        ({"set": 5}, "config.set: '5' must be KEY=VALUE"),
        ({"methods": "direct,direct"}, "config.methods has 'direct' twice"),
        ({"methods": "direct,../x"}, "'../x' is not a method; expected METHOD"),
        (
            {"methods": "direct,blocks"},
            "method='blocks' is unknown; choose one of beam_retrieval",
        ),
        ({"methods": "direct:huge"}, "the presets are small, medium, paper"),
        ({"set": "reader.max_tokens"}, "'reader.max_tokens' must be KEY=VALUE"),
        (
            {"set": "unknown:reader.max_tokens=3"},
            "does not name one of config.methods: direct, native_rag",
        ),
        ({"set": "cirag.max_steps=3"}, "none of config.methods has a key 'cirag.max_steps'"),
        ({"set": "narrow:reader.max_token=3"}, "did you mean reader.max_tokens?"),
        ({"set": "reader.max_tokens=x"}, "expected an integer"),
        ({"set": "data.limit=3"}, "set --config.data.limit="),
        ({"baseline": "x"}, "config.baseline='x' is not one of null, direct, native_rag, narrow"),
        ({"repeats": 0}, "config.repeats=0 must be at least 1"),
        ({"latency_questions": -1}, "config.latency_questions=-1 must not be negative"),
        ({"stop_after_minutes": -1.0}, "stop_after_minutes=-1.0 must not be negative"),
        ({"metrics": ("bleu",)}, "config.metrics=('bleu',) must be one or more of"),
        ({"recall_at": (0,)}, "config.recall_at=(0,) must be distinct numbers"),
        ({"profile": "squad"}, "config.profile='squad' is an unknown profile"),
        ({"data.limit": -1}, "data.limit=-1 must not be negative"),
        ({"set": "narrow:native_rag.num_read=0"}, "config.native_rag: num_read=0 must be at least"),
    ],
)
def test_compare_bad_setting_is_refused_before_any_run(folders, tmp_path, fields, words):
    with pytest.raises(UserError) as refused:
        run(folders, tmp_path / "w", **fields)
    assert words in str(refused.value)
    assert list((tmp_path / "w").iterdir()) == []


def test_compare_method_without_triples_is_refused_before_any_run(folders, tmp_path):
    data = tiny.dataset_folder(tmp_path / "data")
    (data / "openie.jsonl").unlink()
    with pytest.raises(UserError, match="cirag: no passage of .* has triples; extract them"):
        run({**folders, "data": data}, tmp_path / "w", methods="direct,cirag",
            set=settings(folders)[:5])  # fmt: skip
    assert list((tmp_path / "w").iterdir()) == []


def test_compare_questions_without_passages_need_direct(folders, tmp_path):
    data = tiny.dataset_folder(tmp_path / "data")
    for name in ("openie.jsonl", "corpus.jsonl"):
        (data / name).unlink()
    bare = {**folders, "data": data}
    with pytest.raises(
        UserError, match=r"corpus\.jsonl does not exist; .* direct, which needs none"
    ):
        run(bare, tmp_path / "w", methods="direct,native_rag", set=settings(folders))
    assert list((tmp_path / "w").iterdir()) == []
    result = run(bare, tmp_path / "w", methods="direct", set=settings(folders)[1:5])
    assert (list(result["systems"]), result["methods"]["direct"]["answered"]) == (["direct"], 3)


def test_compare_changed_setting_in_same_workdir_is_refused(whole, folders, tmp_path):
    workdir = shutil.copytree(whole[0], tmp_path / "w")
    with pytest.raises(UserError, match="narrow/journal.* was started with native_rag.num_read=1"):
        run(folders, workdir, set=(*settings(folders), "narrow:native_rag.num_read=3"))


def test_compare_locked_folder_is_refused(folders, tmp_path):
    (tmp_path / "direct").mkdir()
    with cli._lock(tmp_path / "direct", "answer.py"), pytest.raises(UserError, match="in use by"):
        run(folders, tmp_path, methods="direct", set=settings(folders)[1:5])


@dataclasses.dataclass(frozen=True)
class SamplingConfig:
    needs = Needs(roles=("reader",), corpus=False)


def sampling(question, config):
    messages = (Message("user", question.question),)
    response = yield Generate(messages, "reader", temperature=2.0)
    return Prediction(response.text, "default")


def test_compare_repeats_only_methods_that_sample(folders, tmp_path, capsys, monkeypatch):
    own = own_method(monkeypatch, "sampling", sampling, SamplingConfig)
    configs = tmp_path / "configs"
    configs.mkdir()
    for name, method in (("sampling", own), ("direct", "direct")):
        (configs / f"{name}.py").write_text(
            "from configs.methods import blocks\n\n"
            f"def get_config(preset=''): return blocks.method('{method}', reader=9)\n"
        )
    monkeypatch.setattr(task, "_CONFIGS", configs)
    workdir = tmp_path / "w"
    fields = {"methods": "sampling,direct", "set": settings(folders)[1:5], "repeats": 3}
    result = run(folders, workdir, **fields)
    assert (
        "direct decodes greedily and runs only once, because repeats would be identical"
        in capsys.readouterr().err
    )
    assert not list((workdir / "direct").glob("repeat-*"))
    texts = {
        tuple(row["answer"] for row in lines(folder / "predictions.jsonl"))
        for folder in (workdir / "sampling", *sorted((workdir / "sampling").glob("repeat-*")))
    }
    assert len(texts) == 3
    seeds = [json.loads((workdir / "sampling" / f"repeat-{n}" / "config.json").read_text())["seed"]
             for n in (2, 3)]  # fmt: skip
    assert seeds == [1, 2]
    assert result["systems"]["sampling"]["repeats"]["count"] == 3
    assert set(result["systems"]["sampling"]["repeats"]["std"]) == {"em", "f1", "acc"}
    assert result["systems"]["direct"]["repeats"]["count"] == 1
    assert result["systems"]["sampling"]["roles"]["reader"]["calls"] == 1  # per question
    assert "sampling F1 ± " in (workdir / "table.md").read_text("utf-8")


def test_sample_is_nested_and_in_order():
    questions = tiny.dataset().questions
    small, large = (latency.sample(questions, n, seed=3) for n in (4, 7))
    assert set(small) < set(large) and len(small) == 4
    ids = [question.id for question in questions]
    assert small == sorted(small, key=ids.index)
    assert latency.sample(questions, 99, seed=0) == ids


def test_pool_shares_resources_with_equal_keys():
    closed = []

    class Thing:
        def close(self):
            closed.append(self)

    with Pool() as pool:
        first = pool.get("things", {"a": 1, "b": (2,)}, Thing)
        assert pool.get("things", {"b": [2], "a": 1}, Thing) is first
        other = pool.get("things", {"a": 2}, Thing)
        assert other is not first and pool.get("toys", {"a": 2}, Thing) is not other
        assert pool.opened == {"things": 2, "toys": 1} and not closed
    assert first in closed and len(closed) == 3


def test_pool_model_with_budget_is_not_shared(monkeypatch):
    opened = []
    monkeypatch.setattr(
        "cirag_jax.commands.backends.open_backend",
        lambda config, spent: opened.append(spent) or type("B", (), {"close": lambda self: None})(),
    )
    block = task.method_config("direct", "", ["reader.backend=openai", "reader.model=m"]).reader
    unlimited, limited = (block.copy_and_resolve_references() for _ in range(2))
    limited.update({"budget_tokens": 100})
    with Pool() as pool:
        assert pool.language_model(unlimited, 1) is pool.language_model(unlimited, 2)
        assert pool.language_model(limited, 3) is not pool.language_model(limited, 4)
    assert opened == [1, 3, 4]


def test_comparison_page_escapes_names(folders, tmp_path, whole):
    hostile = tmp_path / "<img src=x onerror=alert(1)> $x_1"
    shutil.copytree(whole[0] / "direct", hostile)
    from configs import comparison as comparison_config

    config = comparison_config.get_config()
    config.runs, config.bootstrap_samples = (str(hostile), str(whole[0] / "narrow")), 50
    config.allow_different = True
    result = comparison.compare(config.lock(), tmp_path)
    page = (tmp_path / "table.html").read_text("utf-8")
    assert "<img src=x" not in page and "&lt;img src=x onerror=alert(1)&gt;" in page
    assert "<img src=x" not in (tmp_path / "latency.svg").read_text("utf-8")
    assert result["systems"]["narrow"]["seconds_alone"]["num_questions"] == 2


def test_configs_overwritten_fields_of_a_preset_are_named(capsys):
    config = compare_config.get_config()
    config.data.triples = "STORE"
    methods = compare.read_methods("c2rag:paper,cirag:small,own=cirag:medium", None)
    config.set = ("own:triples=OTHER",)
    configs = compare._configs(config, methods)
    err = capsys.readouterr().err
    assert "WARNING: c2rag: the comparison's values, in brackets, replace those of the" in err
    for change in (
        "data.split=dev (None)", "data.limit=1000 (0)", "recall_at=(2, 5) ((3, 5))",
        "data.corpus=per_question (selected_questions)",
    ):  # fmt: skip
        assert change in err
    assert err.count("WARNING") == 1  # small and medium have the same values
    assert [configs[n].triples for n in ("c2rag", "cirag", "own")] == ["STORE", "STORE", "OTHER"]
    assert configs["own"].data.triples == "OTHER" and config.data.triples == "STORE"
    config.data.split = "dev"
    compare._configs(config, methods)
    err = capsys.readouterr().err
    assert "data.limit=1000" in err and "data.split" not in err  # The values are equal.
