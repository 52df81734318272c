"""The commands end to end on the tiny dataset: train, evaluate, export, bad input."""

import json
import pathlib
import runpy

import matplotlib.image
import numpy as np
import pytest

from cirag_jax.config_files import load_config
from cirag_jax.training import aligner
from tests import tiny


@pytest.fixture(scope="module")
def trained(tmp_path_factory, command):
    """The folder and the finished process of a short training run."""
    root = tmp_path_factory.mktemp("commands")
    model, data = tiny.model_folder(root / "model"), tiny.dataset_folder(root / "data")
    questions = [json.loads(line) for line in (data / "questions.jsonl").read_text().splitlines()]
    for index, question in enumerate(questions):
        question["fold"] = ("seen", "unseen", "unseen", "unseen")[index % 4]
    (data / "questions.jsonl").write_text("".join(json.dumps(q) + "\n" for q in questions))
    done = command(
        "train.py", f"--workdir={root / 'w'}", f"--config.model.spec={model}",
        f"--config.data.dir={data}", "--config.dev.questions=2", "--config.num_steps=4",
        "--config.eval_every=2", "--config.batch_size=4", "--config.num_negatives=2",
        "--config.prefixes_per_question=2", "--config.query_max_length=128",
        "--config.chunk_tokens=256", "--config.head.rounds=1", "--config.head.epochs=2",
        "--config.head.steps=2",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return root, done


@pytest.mark.slow
def test_train_prints_and_saves_one_object(trained):
    root, done = trained
    result = json.loads(done.stdout)
    assert result["complete"] and result["step"] == 4 and "dev/mrr" in result
    assert 0 <= result["dev/linked_recall@2"] <= 1 and (root / "w/link_head.safetensors").is_file()
    assert json.loads((root / "w" / "result.json").read_text()) == result


def test_evaluate_result_has_documented_keys(trained, tmp_path, command):
    root, _ = trained
    done = command(
        "evaluate.py", f"--workdir={tmp_path}", f"--config.checkpoint={root / 'w'}",
        f"--config.data.dir={root / 'data'}", "--config.data.split=dev",
        "--config.bootstrap_samples=100",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    systems = (
        "trained", "frozen", "one_shot_trained", "one_shot_frozen", "bm25", "linked",
        "links", "links_one_shot_frozen", "links_trained", "graph_frozen",
    )  # fmt: skip
    assert set(rankings_of(tmp_path)[0]["ranked"]) == set(systems)
    for system in systems:
        recalls = [result[system][f"recall@{k}"] for k in (2, 3, 5, 10)]
        assert recalls == sorted(recalls) and recalls[0] >= 0 and recalls[-1] <= 1
    pairs = [("trained", name) for name in systems[1:] if name != "linked"]
    for first, system in [*pairs, ("linked", "trained"), ("linked", "bm25")]:
        interval = result["differences"][f"{first}-{system}"]["recall@5"]
        assert interval["low"] <= interval["difference"] <= interval["high"]
        expected = result[first]["recall@5"] - result[system]["recall@5"]
        assert interval["difference"] == pytest.approx(expected)
    stops = result["stops"]
    assert [one["stop"] for one in stops] == [0.1, 0.2, 0.3, 0.5, 0.7]
    for name in ("read", "recall"):
        values = [one[name] for one in stops]
        assert values == sorted(values, reverse=True) and values[0] > 0
    assert "| threshold | passages |" in (tmp_path / "table.md").read_text()
    assert {"steps", "k", "units"} <= result["settings"].keys()
    assert result["num_questions"] == 4 and result["num_passages"] == 24
    assert result["per_hop"]["2"]["num_questions"] == 4
    folds = [result["per_fold"][fold] for fold in ("seen", "unseen")]
    assert [fold["num_questions"] for fold in folds] == [1, 3]
    of_folds = [fold["trained"]["recall@5"] for fold in folds]
    assert np.average(of_folds, weights=[1, 3]) == pytest.approx(result["trained"]["recall@5"])
    assert "lead of linked in R@5" in (tmp_path / "table.md").read_text()
    assert "| R@5, 1 seen | R@5, 3 unseen |" in (tmp_path / "table.md").read_text()
    assert "trained" in done.stderr and (tmp_path / "table.md").exists()
    assert matplotlib.image.imread(tmp_path / "recall.png").shape[:2] == (600, 1125)
    rankings = rankings_of(tmp_path)
    assert [r["id"] for r in rankings] == ["q8", "q9", "q10", "q11"]
    first = rankings[0]
    share = np.mean([p in first["ranked"]["bm25"][:5] for p in first["supporting"]])
    assert share in (0, 0.5, 1)


def test_follow_command_evaluates_every_checkpoint(trained, tmp_path, command):
    root, _ = trained
    shared = [
        f"--config.data.dir={root / 'data'}", "--config.data.split=dev",
        "--config.bootstrap_samples=10", "--config.systems=('trained',)",
    ]  # fmt: skip
    flags = [f"--config.checkpoint={root / 'w'}", "--config.follow=true", *shared]
    done = command("evaluate.py", f"--workdir={tmp_path / 'e'}", *flags)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["complete"] and result["metric"] == "trained.recall@5"
    assert [row["step"] for row in result["checkpoints"]] == [2, 4]
    assert done.stderr.count("best so far") == 2
    best = result["best_checkpoint"]
    alone = command(
        "evaluate.py", f"--workdir={tmp_path / 'a'}", f"--config.checkpoint={best}", *shared
    )
    assert json.loads(alone.stdout)["settings"]["step"] == result["best_step"]
    assert json.loads(alone.stdout)["trained"]["recall@5"] == result["best"]


@pytest.mark.parametrize("retriever", ["aligner", "frozen"])
@pytest.mark.parametrize("corpus", ["per_question", "selected_questions"])
def test_evaluate_with_other_retrievers_and_corpora(trained, tmp_path, command, retriever, corpus):
    root, _ = trained
    done = command(
        "evaluate.py", f"--workdir={tmp_path}", f"--config.checkpoint={root / 'w'}",
        f"--config.data.dir={root / 'data'}", "--config.data.split=dev",
        f"--config.retriever={retriever}", f"--config.data.corpus={corpus}",
        "--config.data.units=sentence", "--config.bootstrap_samples=10", "--config.k=3",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for record in rankings_of(tmp_path):
        if corpus == "per_question":
            assert all(len(rows) <= 8 for rows in record["ranked"].values())


def test_export_link_head_retrieves_in_method(trained, tmp_path, command):
    root, _ = trained
    done = command("export.py", f"--workdir={tmp_path}", f"--config.checkpoint={root / 'w'}")
    assert json.loads(done.stdout)["link_head"]
    done = command(
        "answer.py", "--config=configs/methods/kirag.py", f"--workdir={tmp_path / 'a'}",
        "--config.kirag.use_constructor=false", "--config.kirag.reader=nothing",
        "--config.kirag.num_passages=2", "--config.kirag.max_steps=1",
        f"--config.encoder.model={tmp_path / 'model'}", "--config.retriever.kind=linked",
        f"--config.data.dir={root / 'data'}", "--config.data.split=dev",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["failures"] == 0 and "bm25s" not in done.stderr
    done = command(
        "evaluate.py", f"--workdir={tmp_path / 'e'}", f"--config.checkpoint={root / 'w'}",
        f"--config.data.dir={root / 'data'}", "--config.data.split=dev",
        "--config.bootstrap_samples=10", "--config.systems=('linked',)",
    )  # fmt: skip
    ranked = {row["id"]: row["ranked"]["linked"] for row in rankings_of(tmp_path / "e")}
    for line in (tmp_path / "a" / "predictions.jsonl").read_text().splitlines():
        record = json.loads(line)
        assert set(record["passages"]) == set(ranked[record["id"]][:2])


def rankings_of(workdir):
    return [json.loads(line) for line in (workdir / "rankings.jsonl").read_text().splitlines()]


def test_export_loads_in_sentence_transformers(trained, tmp_path, command):
    sentence_transformers = pytest.importorskip("sentence_transformers")
    root, _ = trained
    done = command("export.py", f"--workdir={tmp_path}", f"--config.checkpoint={root / 'w'}")
    assert done.returncode == 0, done.stderr
    assert "model-index:" in (tmp_path / "model" / "README.md").read_text()
    from cirag_jax.models.io.workdir import open_encoder
    from cirag_jax.retrieval.encode import encode

    encoder, _ = open_encoder(str(root / "w"))
    texts = ["who is the patron of balia?", "<balor; born in; fenum>"]
    theirs = sentence_transformers.SentenceTransformer(
        str(tmp_path / "model"), device="cpu"
    ).encode(texts)
    np.testing.assert_allclose(theirs, encode(encoder, None, texts), atol=1e-5)
    assert open_encoder(str(tmp_path / "model"))[0].dim == 32  # and in this package


@pytest.mark.parametrize(
    ("script", "arguments", "message"),
    [
        ("evaluate.py", [], "config.checkpoint is required"),
        ("evaluate.py", ["--config.systems=('one_shot_frozen',)"], "config.frozen is required"),
        ("evaluate.py", ["--config.systems=('bm52',)"], "config.systems='bm52' is not one of"),
        ("evaluate.py", ["--config.retriever=bm25"], "config.retriever='bm25' is not one of"),
        ("evaluate.py", ["--config.checkpoint={root}/data"], "neither a training workdir"),
        ("evaluate.py", ["--config.checkpoint={root}/nowhere"], "nowhere"),
        ("export.py", [], "config.checkpoint is required"),
        ("answer.py", ["--config=configs/methods/kirag.py", "--config.retriever.kind=linked",
                       "--config.data.dir={root}/data"], "has no link_head.safetensors"),
        ("train.py", ["--config.data.dir={root}/nowhere"], "nowhere"),
        ("train.py", ["--config.data.unit=triple"], "did you mean data.units?"),
        ("train.py", ["--config=configs/aligner.py:fast"], "quick"),
        ("train.py", ["--config.data.dir={root}/data", "--config.data.units=word",
                      "--config.dev.questions=2"], "units='word' is not one of triple"),
        ("train.py", ["--config.model.spec={root}/data", "--config.data.dir={root}/data",
                      "--config.dev.questions=2", "--config.batch_size=8"], "config.json"),
    ],
)  # fmt: skip
def test_commands_bad_input_exit_code_2(trained, tmp_path, command, script, arguments, message):
    root, _ = trained
    filled = [argument.format(root=root) for argument in arguments]
    done = command(script, f"--workdir={tmp_path / 'w'}", *filled)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr and "Traceback" not in done.stderr
    assert done.stdout == "" and not (tmp_path / "w" / "result.json").exists()


def test_quickstart_stopped_says_how_to_resume(tmp_path, monkeypatch):
    root = pathlib.Path(__file__).resolve().parents[2]
    main = runpy.run_path(str(root / "launch/quickstart.py"))["main"]
    monkeypatch.setattr(aligner, "train_and_evaluate", lambda *_: {"complete": False, "step": 3})
    config = load_config(str(root / "configs/quickstart.py"))
    assert main(config, tmp_path) == {"training": {"complete": False, "step": 3}, "complete": False}
    assert [path.name for path in tmp_path.iterdir()] == ["aligner"]
