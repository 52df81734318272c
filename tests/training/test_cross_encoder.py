"""Training of the cross-encoder: comparison with torch, resumption, evaluation and export."""

import dataclasses
import json
import pathlib
import runpy
import shutil
import signal

import jax
import numpy as np
import pytest

from cirag_jax import sharding
from cirag_jax.config_files import load_config
from cirag_jax.datasets import jsonl, load
from cirag_jax.errors import UserError
from cirag_jax.evaluation import reranking
from cirag_jax.models.cross_encoder import load_cross_encoder
from cirag_jax.models.io.checkpoints import Checkpoints
from cirag_jax.models.io.export import export_cross_encoder
from cirag_jax.models.io.workdir import open_cross_encoder, open_encoder, trained_component
from cirag_jax.retrieval.encoders import open_encoder_for
from cirag_jax.retrieval.pairs import PairTokens, score_pairs
from cirag_jax.retrieval.rankers import CrossEncoderRanker
from cirag_jax.training import cross_encoder, optimizers, preemption
from cirag_jax.training.data import pairs as data_lib
from cirag_jax.training.state import make_state
from tests import tiny
from tests.training.students import read_losses, read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("standard_promotion")]

_ROOT = pathlib.Path(__file__).resolve().parents[2]


def _overrides(model_and_data, **changes):
    model, data = model_and_data
    values = {
        "model.spec": model, "encoder.model": model, "data.dir": data, "dev.questions": 2,
        "targets_per_step": 6, "num_steps": 6, "eval_every": 3, "buckets": "(32, 64)",
        "max_length": 64, "chunk_rows": 16, "optimizer.learning_rate": 0.003,
        "evaluate.retrieved": 3, "evaluate.bootstrap_samples": 200, "mesh.data": 1, **changes,
    }  # fmt: skip
    return [f"--config.{key}={value}" for key, value in values.items()]


def _config(model_and_data, **changes):
    return load_config(
        str(_ROOT / "configs/cross_encoder.py"), _overrides(model_and_data, **changes)
    )


def _step(model_and_data, mesh, repeats=1, dtype="float32", **changes):
    config = _config(model_and_data, **changes)
    dataset = load.load_dataset(config.data)
    questions = data_lib.training_questions(dataset, config.data)
    target_sets = cross_encoder.load_targets(config, dataset, questions)
    targets = cross_encoder.mine_targets(config, target_sets, open_encoder_for(config.encoder))
    model = load_cross_encoder(config.model.spec, mesh=mesh, new_head=0, max_length=64, dtype=dtype)
    sampling = data_lib.Sampling(6, 2, 1, 2, 0)
    pairs = data_lib.pairs_of_step(targets, 0, sampling)
    batch = cross_encoder.make_batch(config, model, pairs, mesh)
    tx = optimizers.make_optimizer(config.optimizer, max(repeats, 6))
    state, metrics = make_state(model.state, tx, 0, mesh), {}
    with jax.set_mesh(mesh):
        for _ in range(repeats):
            state, metrics = cross_encoder.train_step(
                model.graphdef, tx, state, batch, config, mesh
            )
    return model, pairs, {name: float(value) for name, value in metrics.items()}


@pytest.fixture(scope="module")
def one_device_step(model_and_data):
    """A step on one device; the reference for torch and for meshes."""
    with jax.numpy_dtype_promotion("standard"):
        return _step(model_and_data, sharding.make_mesh(devices=jax.devices()[:1]))


def test_train_step_equals_torch(one_device_step, tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model, pairs, metrics = one_device_step
    folder = export_cross_encoder(model, tmp_path / "start")
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), pad_token="[PAD]"
    )
    rows = tokenizer(
        [query for query, _, _ in pairs], [text for _, text, _ in pairs],
        padding=True, truncation="longest_first", max_length=64, return_tensors="pt",
        return_token_type_ids=True,
    )  # fmt: skip
    label = torch.tensor([float(relevant) for _, _, relevant in pairs])
    loss = torch.nn.functional.binary_cross_entropy_with_logits(theirs(**rows).logits[:, 0], label)
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in theirs.parameters() if p.grad is not None]).norm()
    np.testing.assert_allclose(metrics["loss"], loss.item(), rtol=1e-5)
    np.testing.assert_allclose(metrics["gradient_norm"], norm.item(), rtol=1e-4)


@pytest.mark.parametrize("shape", [(8, 1, 1), (2, 2, 2)])
def test_train_step_on_mesh_equals_one_device(model_and_data, one_device_step, shape):
    *_, expected = one_device_step
    *_, sharded = _step(model_and_data, sharding.make_mesh(*shape))
    for name in ("loss", "accuracy", "gradient_norm"):
        np.testing.assert_allclose(sharded[name], expected[name], rtol=1e-5, err_msg=name)


def test_train_step_rounded_weights_equal_fp32_weights(model_and_data):
    """Weights rounded once per step give the same result as weights rounded at every use."""
    mesh = sharding.make_mesh(devices=jax.devices()[:1])
    _, _, expected = _step(model_and_data, mesh, dtype="bfloat16")
    _, _, rounded = _step(model_and_data, mesh, dtype="bfloat16", **{"model.dtype": "bfloat16"})
    assert rounded == expected


def test_train_step_not_finite_is_skipped(model_and_data):
    mesh = sharding.make_mesh(devices=jax.devices()[:1])
    model, pairs, _ = _step(model_and_data, mesh)
    config = _config(model_and_data)
    batch = cross_encoder.make_batch(config, model, pairs, mesh)
    *arrays, weight_B = batch.chunks[-1]
    bad = batch._replace(chunks=(*batch.chunks[:-1], (*arrays, np.nan * weight_B)))
    tx = optimizers.make_optimizer(config.optimizer, 6)
    state = make_state(model.state, tx, 0, mesh)
    before = tiny.arrays((state.params, state.opt_state))
    with jax.set_mesh(mesh):
        state, metrics = cross_encoder.train_step(model.graphdef, tx, state, bad, config, mesh)
        assert np.isnan(metrics["loss"]) and int(metrics["skipped_steps"]) == 1
        for a, b in zip(before, tiny.arrays((state.params, state.opt_state)), strict=True):
            np.testing.assert_array_equal(a, b)
        state, metrics = cross_encoder.train_step(model.graphdef, tx, state, batch, config, mesh)
    assert np.isfinite(metrics["loss"]) and int(metrics["skipped_steps"]) == 1
    assert int(state.step) == 2


def test_train_step_overfits_a_batch(model_and_data):
    mesh = sharding.make_mesh(devices=jax.devices()[:1])
    _, pairs, metrics = _step(model_and_data, mesh, repeats=150)
    share = np.mean([relevant for _, _, relevant in pairs])
    assert 0.15 < share < 0.25  # Predicting only the share of positives costs at least 0.42.
    assert metrics["loss"] < 0.25 and metrics["accuracy"] > 0.85, metrics


def test_train_result_has_gains_over_bi_encoder(model_and_data, tmp_path, one_device):
    result = cross_encoder.train_and_evaluate(_config(model_and_data, eval_every=0), tmp_path)
    lines = read_metrics(tmp_path)
    assert [line["step"] for line in lines if "train/loss" in line] == [1, 2, 3, 4, 5, 6]
    assert result["complete"] and result["step"] == 6
    assert result["positives"] == {"passage": 12, "triple": 12}
    for kind in ("passages", "triples"):
        gain = result[kind]
        assert gain["num_questions"] == 4
        for name in ("mrr", "recall@2"):
            difference = gain["cross_encoder"][name] - gain["bi_encoder"][name]
            np.testing.assert_allclose(gain["difference"][name]["difference"], difference)
    json.dumps(result)


def test_train_resumed_run_equals_uninterrupted_run(
    model_and_data, tmp_path, one_device, monkeypatch
):
    config = _config(model_and_data, **{"model.dropout": 0.1, "eval_every": 3})
    cross_encoder.train_and_evaluate(config, tmp_path / "whole")
    calls = iter([False] * 3 + [True] * 9)
    monkeypatch.setattr(preemption, "out_of_time", lambda *_: next(calls))
    stopped = cross_encoder.train_and_evaluate(config, tmp_path / "cut")
    assert stopped["complete"] is False and stopped["step"] == 4 and "passages" not in stopped
    monkeypatch.setattr(preemption, "out_of_time", lambda *_: False)
    resumed = cross_encoder.train_and_evaluate(config, tmp_path / "cut")
    assert resumed["complete"] and resumed["step"] == 6
    for a, b in zip(
        tiny.arrays(open_cross_encoder(str(tmp_path / "cut"))[0].state),
        tiny.arrays(open_cross_encoder(str(tmp_path / "whole"))[0].state),
        strict=True,
    ):
        np.testing.assert_array_equal(a, b)

    assert read_losses(tmp_path / "cut") == read_losses(tmp_path / "whole")
    with pytest.raises(UserError, match=r"was started with max_length=\d+, not "):
        cross_encoder.train_and_evaluate(
            _config(model_and_data, **{"model.dropout": 0.1, "max_length": 32}), tmp_path / "cut"
        )


def test_export_cross_encoder_scores_equal_workdir(model_and_data, tmp_path, one_device, command):
    pytest.importorskip("sentence_transformers")
    from sentence_transformers import CrossEncoder

    cross_encoder.train_and_evaluate(_config(model_and_data, num_steps=2), tmp_path / "w")
    assert trained_component(str(tmp_path / "w")) == "cross_encoder"
    assert trained_component(str(model_and_data[0])) is None
    with pytest.raises(UserError, match="component cross_encoder; expected aligner"):
        open_encoder(str(tmp_path / "w"))
    model, meta = open_cross_encoder(str(tmp_path / "w"))
    assert meta["max_length"] == model.max_length == 64
    assert meta["triple_text"] == {"form": "tuple", "normalization": "ascii"}
    export = runpy.run_path(str(_ROOT / "launch/export.py"))["main"]
    for setting in ("dtype=bfloat16", "share=0.5", "merge=true"):
        overrides = [f"--config.checkpoint={tmp_path / 'w'}", f"--config.{setting}"]
        field = setting.partition("=")[0]
        with pytest.raises(UserError, match=rf"config\.{field} needs an adapter; .* is not one"):
            export(load_config(str(_ROOT / "configs/export.py"), overrides), tmp_path / "e")
    pairs = [("who is the patron of corum", "corum patron saint weaver"), ("a", "b " * 90)]
    done = command(
        "export.py", f"--workdir={tmp_path / 'e'}", f"--config.checkpoint={tmp_path / 'w'}"
    )
    assert done.returncode == 0, done.stderr
    folder = json.loads(done.stdout)["folder"]
    theirs = CrossEncoder(folder, device="cpu").predict(pairs, show_progress_bar=False)
    for spec in (str(tmp_path / "w"), folder):
        ranker = CrossEncoderRanker(open_cross_encoder(spec)[0])
        (scores,) = ranker.score([pairs[0][0]], [[pairs[0][1]]])
        np.testing.assert_allclose(1 / (1 + np.exp(-scores[0])), theirs[0], atol=1e-5)
    np.testing.assert_allclose(
        1 / (1 + np.exp(-score_pairs(model, None, pairs))), theirs, atol=1e-5
    )


def test_train_comparison_excludes_training_questions(model_and_data, one_device, tmp_path):
    config = _config(model_and_data, num_steps=1, **{"evaluate.split": "train"})
    result = cross_encoder.train_and_evaluate(config, tmp_path)
    assert "passages" not in result and "triples" not in result


def test_train_without_questions_to_compare_on_ends(model_and_data, one_device, tmp_path, capsys):
    config = _config(model_and_data, num_steps=1, **{"evaluate.split": "test"})
    result = cross_encoder.train_and_evaluate(config, tmp_path)
    assert result["complete"] and "passages" not in result and "triples" not in result
    assert "no question is of config.evaluate.split=test: no comparison" in capsys.readouterr().err


def test_reranking_metrics_ties_are_ranked_last():
    problem = reranking.Reranking("q", ("a", "b", "c", "d"), (1, 3))
    assert list(reranking.ranks(problem, np.array([0.5, 0.9, 0.5, 0.5]))) == [1, 4]
    assert list(reranking.ranks(problem, np.zeros(4))) == [3, 4]
    values = reranking.metrics([problem], [np.array([0.5, 0.9, 0.4, 0.45])])
    assert values["mrr"] == [1.0]
    assert values["recall@1"] == [0.5] and values["recall@2"] == [0.5] and values["recall@3"] == [1]


def test_train_same_workdir_other_data_or_encoder_is_refused(model_and_data, tmp_path, one_device):
    data, dataset = tmp_path / "data", tiny.dataset()
    encoder = shutil.copytree(model_and_data[0], tmp_path / "encoder")
    changes = {"num_steps": 1, "eval_every": 0, "encoder.model": encoder}
    config = _config((model_and_data[0], tiny.dataset_folder(data)), **changes)
    cross_encoder.train_and_evaluate(config, tmp_path / "w")
    with Checkpoints(tmp_path / "w", read_only=True) as checkpoints:
        train_ids = checkpoints.meta()["trained_on"]
    assert len(train_ids) == 6
    held_out = ({f"q{index}" for index in range(8)} - set(train_ids)).pop()
    for name in (train_ids[0], held_out):
        questions = tuple(
            dataclasses.replace(q, question="another") if q.id == name else q
            for q in dataset.questions
        )
        shutil.rmtree(data)
        jsonl.write_dataset(dataclasses.replace(dataset, questions=questions), data)
        with pytest.raises(UserError, match="was started with other training examples"):
            cross_encoder.train_and_evaluate(config, tmp_path / "w")
    shutil.rmtree(data)
    tiny.dataset_folder(data)
    cross_encoder.train_and_evaluate(config, tmp_path / "w")  # The same run.
    shutil.rmtree(encoder)
    shutil.copytree(tiny.model_folder(tmp_path / "other", d_model=16), encoder)
    with pytest.raises(UserError, match=r"other content of encoder\.weights"):
        cross_encoder.train_and_evaluate(config, tmp_path / "w")


def test_pack_bucket_beyond_max_length_is_not_used(model_and_data):
    config = _config(model_and_data, buckets="(32, 160)", max_length=128)
    row = PairTokens(np.ones(100, np.int32), np.zeros(100, np.int32))
    batch = cross_encoder.pack(config, [row], [True], 0, sharding.make_mesh())
    assert batch.chunks[0][0].shape == (16, 128)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kinds": "('sentence',)"}, r"config\.kinds=\('sentence',\)"),
        ({"buckets": "(64, 32)"}, r"config\.buckets=\(64, 32\)"),
        ({"dev.questions": 8}, "at least 9 questions, 8 to hold out .* there are 8; .* at most 7"),
        ({"max_length": 4}, r"config\.max_length=4 must be at least 5"),
        ({"max_length": 129}, r"config\.max_length=129 exceeds the 128 positions of the model"),
        ({"targets_per_step": 0}, r"config\.targets_per_step=0"),
        ({"negatives.own": -1}, r"config\.negatives\.own=-1 must not be negative"),
        ({"keep_checkpoints": 0}, r"config\.keep_checkpoints=0 must be at least 1"),
        (
            {"best_metric": "dev/map"},
            r"best_metric=dev/map is not measured; choose one of .*dev/mrr, dev/",
        ),
        ({"optimizer.learning_rate": 1e38}, "5 of 6 steps were skipped, because .* not finite"),
    ],
)
def test_train_invalid_config_is_refused(model_and_data, tmp_path, one_device, changes, message):
    with pytest.raises(UserError, match=message):
        cross_encoder.train_and_evaluate(_config(model_and_data, **changes), tmp_path)


def test_train_sigterm_saves_and_run_resumes(model_and_data, tmp_path, command):
    arguments = [
        "--config=configs/cross_encoder.py:quick", f"--workdir={tmp_path}",
        *_overrides(model_and_data, eval_every=0, num_steps=4),
    ]  # fmt: skip
    stopped = command("train.py", *arguments, hooks=[["signal_at_step", 2, signal.SIGTERM]])
    assert stopped.returncode == 0, stopped.stderr
    result = json.loads(stopped.stdout)
    assert result["complete"] is False and 2 <= result["step"] < 4
    resumed = command("train.py", *arguments)
    assert resumed.returncode == 0, resumed.stderr
    assert json.loads(resumed.stdout)["complete"] is True


def test_pack_adds_a_bucket_for_the_longest_pairs(model_and_data):
    config = _config(model_and_data, buckets="(16,)", max_length=24)
    tokens = PairTokens(np.arange(20, dtype=np.int32), np.zeros(20, np.int32))
    mesh = sharding.make_mesh(devices=jax.devices()[:1])
    batch = cross_encoder.pack(config, [tokens], [True], 0, mesh)
    assert {chunk.shape[-1] for chunk in jax.tree.leaves(batch) if np.ndim(chunk) >= 2} == {24}


def test_load_targets_without_pairs_is_refused(model_and_data):
    config = _config(model_and_data)
    dataset = load.load_dataset(config.data)
    with pytest.raises(UserError, match="has no training pairs"):
        cross_encoder.load_targets(config, dataset, [])
