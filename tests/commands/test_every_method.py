"""All methods of the registry end to end, with tiny random models."""

import json
import pathlib
import runpy

import pytest

from cirag_jax import cli
from cirag_jax.commands import train_router
from cirag_jax.commands.pool import Pool
from cirag_jax.config_files import load_config
from cirag_jax.methods import registry
from cirag_jax.methods.cirag import routing
from cirag_jax.models.router import load_router
from tests import tiny, tiny_decoder
from tests.answering import lines

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_MAIN = runpy.run_path(str(_ROOT / "launch/answer.py"))["main"]
_TRAIN = runpy.run_path(str(_ROOT / "launch/train.py"))["main"]

# Settings that shorten runs; other methods run with their config.
SETTINGS = {
    "beam_retrieval": {"num_chains": 2, "num_passages": 2},
    "cirag": {"max_steps": 1, "prefilled_headers": True, "num_candidates": 4},
    "decomposition": {"max_queries": 2, "num_passages": 2, "num_read": 2},
    "dragin": {"max_rounds": 1, "num_passages": 2, "threshold": 0.0},
    "dualrag": {"max_steps": 1, "min_retrievals": 1, "min_score": -1.0, "num_documents": 2,
                "max_entities": 1, "max_keywords": 1, "few_shot": False, "max_retries": 0},
    "flare": {"max_rounds": 1, "num_passages": 2, "threshold": 1.0, "query": "sentence"},
    "genground": {"max_steps": 1, "min_score": -1.0, "num_passages": 2, "max_batches": 1},
    "hipporag2": {"num_passages": 2, "num_read": 2, "reader_format": "documents"},
    "ircot": {"max_thoughts": 1, "num_passages": 2},
    "iter_retgen": {"num_rounds": 2, "num_passages": 2, "num_read": 2},
    "metarag": {"max_rounds": 1, "num_passages": 2, "threshold": 1.0},
    "multi_step": {"num_passages": 2, "num_read": 2, "num_in_query": 1},
    "native_rag": {"num_passages": 2, "num_read": 2},
    "vector_prf": {"num_passages": 2, "num_read": 2},
    "trace": {"num_passages": 2, "max_length": 2, "branches": 2, "beam": 2},
    "search_r1": {"max_turns": 1, "prefill_answer": True},
}  # fmt: skip
UNITS = [
    ("native_rag", "sentence", {}),
    ("native_rag", "triple", {}),
    ("native_rag", "passage", {"rerank_from": 4, "min_score": -1.0}),
    ("oracle", "sentence", {}),
    ("oracle", "triple", {}),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("tiny")
    return {
        "data.dir": tiny.dataset_folder(root / "data"),
        "encoder.model": tiny.model_folder(root / "encoder"),
        "model": tiny_decoder.folder(root / "decoder", max_position_embeddings=8192),
    }


def run(capsys, folders, workdir, method, settings, more=None):
    config = load_config(str(_ROOT / f"configs/methods/{method}.py"))
    needs = registry.find_method(method).config().needs
    values = {k: v for k, v in folders.items() if k == "data.dir" or k.partition(".")[0] in config}
    values |= {"data.split": "dev", "data.limit": 2}
    values |= {f"{method}.{field}": value for field, value in settings.items()}
    for role in needs.roles:
        values |= {f"{role}.max_tokens": 8, f"{role}.prefix_tokens": 0, f"{role}.batch_size": 2}
    values |= more or {}
    overrides = [f"--config.{key}={value}" for key, value in values.items()]
    argv = [f"--config=configs/methods/{method}.py", *overrides, f"--workdir={workdir}"]
    with pytest.raises(SystemExit) as end:
        cli.run(_MAIN, "configs/methods/cirag.py", ["answer.py", *argv])
    captured = capsys.readouterr()
    assert end.value.code == 0, captured.err
    return json.loads(captured.out)


@pytest.mark.parametrize("method", registry.method_names())
def test_answer_every_method_answers_and_resumes(method, folders, tmp_path, capsys):
    settings = SETTINGS.get(method, {})
    first = run(capsys, folders, tmp_path, method, settings)
    assert (first["answered"], first["failures"], first["complete"]) == (2, 0, True)
    assert first["sees_gold"] == (method == "oracle")
    assert [row["id"] for row in lines(tmp_path / "predictions.jsonl")] == ["q8", "q9"]
    again = run(capsys, folders, tmp_path, method, settings)
    assert again["calls"] == first["calls"] and again["em"] == first["em"]


def test_answer_with_router_equals_its_evaluation(folders, tmp_path, capsys):
    levels, more = ("triple", "sentence", "passage"), {"data.limit": 4}
    settings = {"integrator": "top_k", "max_steps": 1, "num_candidates": 4}
    settings |= {"grounded_answers": True, "answer_logprobs": True}
    for level in levels:
        one = {**settings, "granularities": f"('{level}',)"}
        run(capsys, folders, tmp_path / level, "cirag", one, more)
    runs = ", ".join(f"'{tmp_path / level}'" for level in levels)
    overrides = [f"--config.runs=({runs})", f"--config.encoder.model={folders['encoder.model']}"]
    with pytest.raises(SystemExit) as end:
        argv = ["train.py", "--config=configs/router.py", *overrides, f"--workdir={tmp_path / 'w'}"]
        cli.run(_TRAIN, "configs/aligner.py", argv)
    captured = capsys.readouterr()
    assert end.value.code == 0, captured.err
    result = json.loads(captured.out)
    assert result["num_questions"] == 4 and "triple" in result["heads"]
    config = load_config(str(_ROOT / "configs/router.py"), overrides)
    examples = train_router.read_examples(config.runs, "runs")
    with Pool() as pool:
        encoder = pool.encoder(config.encoder)
        router = load_router(str(tmp_path / "w"), encoder.identity, routing.NUM_SCALARS)
        x_QD = encoder.encode([e.question.question for e in examples], "query")
        worths = [train_router._worth(router, e, x) for e, x in zip(examples, x_QD, strict=True)]
    for threshold in (0.0, 1.0):
        routed = {**settings, "router": tmp_path / "w", "router_skip": threshold}
        workdir = tmp_path / f"routed-{threshold}"
        answered = run(capsys, folders, workdir, "cirag", routed, more)
        expected = [
            train_router.run_cascade(e, w, threshold) for e, w in zip(examples, worths, strict=True)
        ]
        assert [row["answer"] for row in lines(workdir / "predictions.jsonl")] == [
            outcome.answer for outcome in expected
        ]
        assert answered["answer_calls"] * 4 == sum(outcome.calls for outcome in expected)
        assert answered["calls"]["route"] > 0


_READING = [
    method
    for method in registry.method_names()
    for needs in [registry.find_method(method).config().needs]
    if needs.corpus and "reader" in needs.roles
]


@pytest.mark.parametrize("method", _READING)
def test_answer_failed_reader_scores_0_and_keeps_recall(method, folders, tmp_path, capsys):
    """Prompts that do not fit the reader's context fail all questions."""
    settings = {
        **SETTINGS.get(method, {}),
        **({"num_rounds": 1} if method in ("iter_retgen", "multi_step") else {}),
    }
    first = run(capsys, folders, tmp_path / "first", method, settings)
    small = {"reader.context": 24, "reader.overflow": "error", "reader.max_tokens": 1}
    failed = run(capsys, folders, tmp_path / "failed", method, settings, small)
    assert (failed["answered"], failed["failures"]) == (0, 2)
    assert failed["em"] == failed["f1"] == failed["acc"] == 0
    assert failed["recall"] == first["recall"] and failed["recall"]["passage"] is not None
    rows = lines(tmp_path / "failed" / "predictions.jsonl")
    assert all("tokens but only" in row["error"] and row["passages"] for row in rows)


def test_answer_long_evidence_is_shortened_and_counted(folders, tmp_path, capsys):
    settings = SETTINGS["native_rag"]
    first = run(capsys, folders, tmp_path / "first", "native_rag", settings)
    more = {"reader.context": 210, "reader.overflow": "truncate", "reader.max_tokens": 8}
    argv = folders, tmp_path / "short", "native_rag", settings, more
    shortened = run(capsys, *argv)
    assert (first["truncated"], shortened["truncated"], shortened["answered"]) == (0, 2, 2)
    assert shortened["recall"] == first["recall"]
    room = 2 * (210 - 8)
    assert room - 40 < shortened["prompt_tokens"] <= room < first["prompt_tokens"]


@pytest.mark.parametrize(("method", "units", "settings"), UNITS)
def test_answer_units_setting_runs(method, units, settings, folders, tmp_path, capsys):
    values = {**SETTINGS.get(method, {}), "units": units, "reader_format": "brief", **settings}
    found = run(capsys, folders, tmp_path, method, values)
    assert (found["answered"], found["failures"]) == (2, 0)
    if method == "oracle":
        assert "retrieve" not in found["calls"]  # it only fetches gold passages


_SEARCHING = [
    method
    for method in registry.method_names()
    for needs in [registry.find_method(method).config().needs]
    if needs.index and not needs.gold and not needs.feedback and not needs.graph
]


@pytest.mark.parametrize("method", _SEARCHING)
def test_answer_every_method_without_passages_answers(method, folders, tmp_path, capsys):
    more = {"retriever.kind": "bm25", "question": "誰が？", "data.split": "", "data.limit": 0}
    found = run(capsys, folders, tmp_path, method, SETTINGS.get(method, {}), more)
    assert (found["answered"], found["failures"], found["complete"]) == (1, 0, True)
    (row,) = lines(tmp_path / "predictions.jsonl")
    assert row["passages"] == []


def test_answer_cirag_with_aligner_as_ranker(folders, tmp_path, capsys):
    ranker = {"kind": "aligner", "model": folders["encoder.model"]}
    more = {f"rankers.triples.{field}": value for field, value in ranker.items()}
    found = run(capsys, folders, tmp_path, "cirag", SETTINGS["cirag"], more)
    assert (found["answered"], found["calls"]["rank"]) == (2, 2)


def test_answer_kirag_with_cascade_as_reader(folders, tmp_path, capsys):
    settings = {"reader": "cascade", "reader_format": "thought", "max_steps": 1}
    settings |= {"append_best": True, "num_demonstrations": 0}
    found = run(capsys, folders, tmp_path, "kirag", settings)
    assert found["answered"] == 2
    # At most one call for each of three granularities, and one that must answer.
    assert 1 <= found["answer_calls"] <= 4
