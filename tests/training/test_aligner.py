"""Training of the aligner: expected values, resumption, several processes."""

import dataclasses
import json
import pathlib
import shutil
import signal

import jax
import numpy as np
import pytest

from cirag_jax import sharding
from cirag_jax.config_files import load_config
from cirag_jax.datasets import jsonl, load
from cirag_jax.datasets.chains import Chain, Unit
from cirag_jax.errors import TryAgain, UserError
from cirag_jax.evaluation import next_unit
from cirag_jax.models.io.checkpoints import Checkpoints
from cirag_jax.models.io.export import export_sentence_transformers
from cirag_jax.models.io.pretrained import load_encoder
from cirag_jax.models.io.workdir import open_encoder
from cirag_jax.retrieval.encoders import FlaxEncoder, count_truncated
from cirag_jax.retrieval.rankers import TripleText, open_ranker, triple_text_of
from cirag_jax.training import aligner, aligner_batches, aligner_step, optimizers
from cirag_jax.training.data import pools as pools_lib
from cirag_jax.training.data import splits
from cirag_jax.training.metrics import MetricWriter
from cirag_jax.training.preemption import PreemptionGuard
from cirag_jax.training.profile import StepProfile
from cirag_jax.training.state import make_state
from cirag_jax.types import Triple
from tests import tiny
from tests.training.aligners import config_of, overrides_of
from tests.training.students import read_losses, read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("standard_promotion")]

_ROOT = pathlib.Path(__file__).resolve().parents[2]


def _final_state(workdir, step=None):
    with Checkpoints(workdir, read_only=True) as checkpoints:
        step = checkpoints.latest_step() if step is None else step
    folder = workdir / "checkpoints" / str(step)
    return step, {
        str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()
    }


def _parameters(workdir):
    """Returns the parameters of the best checkpoint as NumPy arrays."""
    return tiny.arrays(open_encoder(str(workdir))[0].state)


def test_train_step_golden_values(model_and_data):
    """Compares the loss and norms of the second step on the tiny model with stored values.

    They depend only on the loss, the batch (sampling, negatives, seeds) and the optimizer. If you
    changed one of these on purpose, paste the new values. Otherwise you found a bug.
    """
    config = config_of(model_and_data)
    mesh = sharding.make_mesh(devices=jax.devices()[:1])
    encoder = load_encoder(config.model.spec, mesh=mesh)

    dataset = load.load_dataset(config.data)
    questions = splits.split_questions(dataset, config).train
    chains, pools = pools_lib.chains_and_pools(dataset, questions, "triple")
    batches = aligner_batches.make_batches(config, chains, pools, encoder, mesh)
    tx = optimizers.make_optimizer(config.optimizer, 6)
    state = make_state(encoder.state, tx, 0, mesh)
    with jax.set_mesh(mesh):
        state, _ = aligner_step.train_step(encoder.graphdef, tx, state, next(batches), config, mesh)
        state, metrics = aligner_step.train_step(
            encoder.graphdef, tx, state, next(batches), config, mesh
        )
    golden = {
        "loss": 2.089029,
        "accuracy": 0.0,
        "gradient_norm": 2.984934,
        "update_norm": 0.3533604,
        "parameter_norm": 20.21408,
    }
    for name, value in golden.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-4, err_msg=name)
    assert int(state.step) == 2


@pytest.mark.parametrize(
    "kind",
    [
        "bert",
        "mpnet",
        "modernbert",
        *(
            pytest.param(kind, marks=pytest.mark.slow)
            for kind in ("nomic_bert", "gte", "jina_embeddings_v3")
        ),
    ],
)
def test_train_learns_tiny_chains(model_and_data, tmp_path, one_device, kind):
    if kind != "bert":
        model_and_data = tiny.model_folder(tmp_path / "model", kind=kind), model_and_data[1]
    config = config_of(model_and_data, **{"num_steps": 30, "eval_every": 15, "save_every": 0})
    result = aligner.train_and_evaluate(config, tmp_path)
    lines = read_metrics(tmp_path)
    dev = {line["step"]: line["dev/mrr"] for line in lines if "dev/mrr" in line}
    assert list(dev) == [0, 15, 30]
    assert result["complete"] and result["step"] == 30
    assert result["dev/mrr"] == max(dev[15], dev[30]) > dev[0] + 0.1
    steps = [line["step"] for line in lines if "train/loss" in line]
    assert steps == list(range(1, 31))
    norms = {"train/gradient_norm", "train/update_norm", "train/parameter_norm"}
    assert norms <= lines[1].keys()
    assert list(tmp_path.glob("tensorboard/*"))


def test_make_batches_long_queries_have_buckets_up_to_the_position_limit(tmp_path):
    encoder = load_encoder(str(tiny.model_folder(tmp_path, positions=1000)))
    steps = (Unit("saint", "p"), Unit("potter", "p"))
    chains = [
        Chain(f"q{i}", "who " * 200 * i, steps, ((), (0,)), comparison=False) for i in range(6)
    ]
    mesh = sharding.make_mesh(devices=jax.devices()[:1])
    limits = {"batch_size": 24, "query_max_length": 1000}
    config = config_of(("model", "data"), **limits)
    batches = aligner_batches.make_batches(config, chains, [steps] * 6, encoder, mesh)
    lengths = {chunk.tokens_BT.shape[1] for chunk in next(batches).chunks}
    assert {768, 1000} <= lengths and max(lengths) == 1000
    config = config_of(("model", "data"), query_max_length=1001)
    with pytest.raises(UserError, match="query_max_length=1001 exceeds the 1000 positions"):
        aligner_batches.make_batches(config, chains, [steps] * 6, encoder, mesh)


@pytest.mark.parametrize(("preset", "batch_size"), [("paper", 8), ("code", 16)])
def test_train_paper_presets(model_and_data, tmp_path, preset, batch_size):
    """Both presets train the tiny model, in bf16 on eight devices."""
    changes = {"num_steps": 2, "eval_every": 2, "batch_size": batch_size, "num_negatives": 10}
    if preset == "paper":
        changes["retrieved.model"] = model_and_data[0]
    config = load_config(
        str(_ROOT / f"configs/aligner.py:{preset}"), overrides_of(model_and_data, **changes)
    )
    result = aligner.train_and_evaluate(config, tmp_path)
    assert result["complete"] and config.best_metric in result


def test_presets_match_paper_and_code():
    """The presets have these shared values and exactly these differences."""
    paper, code = (
        load_config(str(_ROOT / f"configs/aligner.py:{name}")) for name in ("paper", "code")
    )
    shared = {
        "temperature": 0.01, "batch_size": 64, "chain_negatives": True,
        "mask_false_negatives": False, "query_max_length": 256, "dev.questions": 500,
        "optimizer.learning_rate": 2e-5, "optimizer.weight_decay": 0.01, "eval_every": 200,
        "model.spec": "intfloat/e5-large-v2", "num_epochs": 10.0,
    }  # fmt: skip
    for config in (paper, code):
        assert {name: _get(config, name) for name in shared} == shared
    differs = {
        name: (_get(paper, name), _get(code, name))
        for name in _leaves(paper)
        if _get(paper, name) != _get(code, name)
    }
    assert differs == {
        "prefixes_per_question": (1, 2), "order": ("printed", "annotation"),
        "num_negatives": (7, 10), "negatives": ("own", "cross_device"),
        "retrieved.model": ("intfloat/e5-large-v2", None),
        "accumulation": ("cached", "official"), "micro_batches": (1, 2),
        "unit_max_length": (128, 64), "epoch": ("prefixes", "questions"),
        "model.dropout": (0.0, 0.1),
        "optimizer.schedule": ("constant", "linear"), "optimizer.warmup_ratio": (0.0, 0.1),
        "optimizer.clip_norm": (0.0, 1.0), "best_metric": ("dev/recall@5", "dev/mrr"),
    }  # fmt: skip


def _leaves(config, prefix=""):
    for name, value in config.items():
        if hasattr(value, "items"):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def _get(config, path):
    for name in path.split("."):
        config = config[name]
    return config


def test_train_several_folders_and_resume(model_and_data, tmp_path, one_device):
    """Trains on two folders; the second has two questions in folds for evaluation.

    The first has three times the weight, and the checkpoints are outside of the workdir.
    """
    model, data = model_and_data
    other = tmp_path / "other"
    dataset = tiny.dataset()
    fold = {2: "tune", 3: "test", 4: "train"}
    questions = tuple(
        dataclasses.replace(question, id=f"other{index}", fold=fold.get(index))
        for index, question in enumerate(dataset.questions[:8])
    )
    jsonl.write_dataset(dataclasses.replace(dataset, questions=questions), other)
    several = overrides_of(
        model_and_data,
        **{"data.dir": (str(data), str(other)), "dev.split": "null", "dev.questions": 2},
        **{"data.weights": (3, 1), "checkpoints.dir": tmp_path / "elsewhere"},
    )
    config = load_config(str(_ROOT / "configs/aligner.py"), [*several, "--config.num_steps=2"])
    config.eval_every = 1
    result = aligner.train_and_evaluate(config, tmp_path / "w")
    assert (result["num_chains"], result["num_dev_questions"]) == (6 + 4, 4)
    assert result["drawn"] == {str(data): 3, str(other): 1}
    assert result["num_dev_chains"] == 4 and 1 <= result["mean_dev_chain_length"] <= 4
    with Checkpoints(tmp_path / "w", read_only=True) as checkpoints:
        train_ids = set(checkpoints.meta()["trained_on"])
    assert len(train_ids) == 10 and not train_ids & {"other2", "other3"}
    assert {name[0] for name in train_ids} == {"q", "o"}
    repeated = aligner.train_and_evaluate(config, tmp_path / "w")  # The same run, already finished.
    assert repeated["step"] == 2
    with pytest.raises(UserError, match=r"config\.data\.split=valid matches no question of data"):
        config.data.split = "valid"
        aligner.train_and_evaluate(config, tmp_path / "w2")


def test_train_in_batch_negatives_resumed_on_other_devices_has_the_same_losses(
    model_and_data, tmp_path, monkeypatch
):
    """The config, not the devices, sets the groups that share negatives."""
    make_mesh = sharding.make_mesh
    changes = {"negatives": "in_batch", "negative_groups": 2, "num_steps": 4, "eval_every": 0}
    config = config_of(model_and_data, **changes)

    def train(name, devices, stop_at=0):
        monkeypatch.setattr(
            sharding,
            "make_mesh",
            lambda *sizes: make_mesh(*sizes, devices=jax.devices()[:devices]),
        )
        monkeypatch.setattr(PreemptionGuard, "should_stop", lambda _, step: step == stop_at)
        aligner.train_and_evaluate(config, tmp_path / name)
        return read_losses(tmp_path / name)

    expected = train("one", 1)
    assert len(expected) == 4
    np.testing.assert_allclose(train("four", 4), expected, rtol=1e-5)
    train("two, then one", 2, stop_at=2)
    np.testing.assert_allclose(train("two, then one", 1), expected, rtol=1e-5)
    config.negative_groups = 1
    with pytest.raises(UserError, match="was started with negative_groups=2, not 1"):
        aligner.train_and_evaluate(config, tmp_path / "one")


def test_train_steps_that_are_not_finite_stop_with_the_first_weights(
    model_and_data, tmp_path, one_device
):
    changes = {"temperature": 1e-40, "eval_every": 0, "max_skipped_steps": 2}
    config = config_of(model_and_data, **changes)
    with pytest.raises(TryAgain, match=r"the last 3 steps up to step 3 .* raise config"):
        aligner.train_and_evaluate(config, tmp_path)
    with Checkpoints(tmp_path, read_only=True) as checkpoints:
        assert checkpoints.all_steps() == [3]
    initial = tiny.arrays(load_encoder(config.model.spec).state)
    for a, b in zip(_parameters(tmp_path), initial, strict=True):
        np.testing.assert_array_equal(a, b)
    with pytest.raises(TryAgain, match="up to step 6 were skipped"):
        aligner.train_and_evaluate(config, tmp_path)
    with pytest.raises(UserError, match="6 of 6 steps were skipped"):
        aligner.train_and_evaluate(config, tmp_path)


def test_train_one_step_that_is_not_finite_is_skipped(
    model_and_data, tmp_path, one_device, monkeypatch, capsys
):
    place_batch, placed = aligner_step.place_batch, []

    def place(batch, mesh):
        placed.append(batch)
        bad = np.nan if len(placed) in (2, 4) else 1.0
        return place_batch(batch._replace(weight_B=batch.weight_B * np.float32(bad)), mesh)

    monkeypatch.setattr(aligner_step, "place_batch", place)
    result = aligner.train_and_evaluate(config_of(model_and_data), tmp_path)
    assert result["complete"] and "step 2 was skipped: gradient_norm" in capsys.readouterr().err
    lines = [line for line in read_metrics(tmp_path) if "train/loss" in line]
    assert [line["train/skipped_steps"] for line in lines] == [0, 1, 1, 2, 2, 2]
    assert [line["step"] for line in lines if line["train/gradient_norm"] is None] == [2, 4]
    assert all(np.isfinite(x).all() for x in _parameters(tmp_path))


def test_train_profile_covers_requested_steps(model_and_data, tmp_path, monkeypatch, one_device):
    """The trace starts before the first requested step is sent, and ends with the last one."""
    start, stop = jax.profiler.start_trace, jax.profiler.stop_trace
    ended, traced = [], []
    monkeypatch.setattr(MetricWriter, "progress", lambda _, step, loss: ended.append(step))
    monkeypatch.setattr(
        jax.profiler, "start_trace", lambda *a, **k: (traced.append(len(ended)), start(*a, **k))
    )
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: (traced.append(len(ended)), stop()))
    config = config_of(model_and_data, profile_steps="3:4", eval_every=0)
    aligner.train_and_evaluate(config, tmp_path)
    assert traced == [1, 3] and ended == [1, 2, 3, 4, 5, 6]
    assert list((tmp_path / "profile").rglob("*.xplane.pb"))
    assert list((tmp_path / "profile").rglob("perfetto_trace.json.gz"))
    # profile_steps is not part of the identity of a run.
    aligner.train_and_evaluate(config_of(model_and_data, eval_every=0), tmp_path)


@pytest.mark.parametrize("steps", ["10", "1:3", "5:4", "a:b", "2:"])
def test_profile_invalid_steps_are_refused(tmp_path, steps):
    with pytest.raises(UserError, match=r"profile_steps='.*' must be FIRST:LAST with 2 <= FIRST"):
        StepProfile(steps, tmp_path)


def test_train_instructions_and_dimensions_are_used_and_recorded(
    model_and_data, tmp_path, one_device, capsys
):
    """Evaluating the checkpoint without any settings gives the metrics of the training."""
    changes = {
        "model.instructions.query": "ask: ", "model.instructions.triple": "fact: ",
        "model.dimensions": 6, "query_max_length": 20, "unit_max_length": 16,
    }  # fmt: skip
    config = config_of(model_and_data, **changes)
    result = aligner.train_and_evaluate(config, tmp_path / "w")
    assert "dev texts are longer than config.query_max_length=20" in capsys.readouterr().err
    encoder, meta = open_encoder(str(tmp_path / "w"))
    assert [encoder.prefix(role) for role in ("query", "passage", "triple")] == [
        "ask: ", "", "fact: "
    ]  # fmt: skip
    assert encoder.dim == meta["dimensions"] == 6
    opened = FlaxEncoder(encoder, query_max_length=20, passage_max_length=16)

    def embed(texts, role):
        return opened.encode(texts, "query" if role == "query" else "triple")

    dataset = load.load_dataset(config.data)
    sets = [splits.split_questions(dataset, config)]
    problems = next_unit.next_units(*aligner_batches.dev_data(sets, "triple"), "triple")
    mrr = next_unit.evaluate_next_unit(problems, embed)["mrr"]
    assert mrr == pytest.approx(result["dev/mrr"], abs=1e-6)
    assert result["truncated_texts"] == count_truncated(opened) and opened.truncated["query"]
    folder = export_sentence_transformers(encoder, tmp_path / "exported", "triple")
    again = load_encoder(str(folder))
    assert (again.dim, again.prefix("query"), again.prefix("triple")) == (6, "ask: ", "fact: ")


@pytest.mark.parametrize(("units", "form"), [("triple", "angle"), ("sentence", "tuple")])
def test_open_ranker_aligner_scores_triples_as_in_training(
    model_and_data, tmp_path, one_device, units, form
):
    changes = {"num_steps": 1, "eval_every": 0, "dev.questions": 0, "data.units": units}
    aligner.train_and_evaluate(config_of(model_and_data, **changes), tmp_path)
    overrides = [f"--config.rankers.triples.model={tmp_path}"]
    config = load_config(str(_ROOT / "configs/methods/cirag.py"), overrides)
    assert triple_text_of(config, "triples") == (TripleText(form), False)
    text = {"angle": "<ÅS; IS; ost>", "tuple": "('s', 'is', 'ost')"}[form]
    (scores,) = open_ranker(config, "triples").score(["q"], [[Triple("ÅS", "IS", "ost"), text]])
    assert scores[0] == scores[1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"batch_size": 12, "negatives": "in_batch", "negative_groups": 2},
            r"config\.batch_size=12 with .* 3 questions .* cannot be divided into 2 groups .* 8$",
        ),
        (
            {"batch_size": 12, "accumulation": "official", "micro_batches": 2},
            r"config\.batch_size=12 with .* cannot be divided into 2 groups",
        ),
        ({"negative_groups": 0}, r"config\.negative_groups=0 must be at least 1"),
        ({"negative_groups": 2}, r"config\.negative_groups=2 needs config\.negatives=in_batch"),
        ({"data.units": "word"}, r"config\.data\.units='word' is not one of triple, sentence, p"),
        ({"data.limit": -1}, r"config\.data\.limit=-1 must not be negative"),
        ({"head.rounds": 1, "head.steps": 0}, r"config\.head\.steps=0 must be at least 1"),
        ({"temperature": -0.05}, r"config\.temperature=-0\.05 must be above 0"),
        ({"prefixes_per_question": 0}, r"config\.prefixes_per_question=0 must be at least 1"),
        ({"batch_size": -5}, r"config\.batch_size=-5 must be at least 1"),
        ({"chunk_tokens": 0}, r"config\.chunk_tokens=0 must be at least 1"),
        ({"accumulation": "official", "micro_batches": 0}, r"config\.micro_batches=0"),
        ({"accumulation": "some"}, r"config\.accumulation='some' is not one of cached, official"),
        ({"model.dimensions": 0}, r"config\.model\.dimensions=0 must be at least 1"),
        ({"num_negatives": -1}, r"config\.num_negatives=-1 must not be negative"),
        ({"num_negatives": 0, "negatives": "own"}, r"config\.num_negatives=0 must be at least 1"),
        ({"negatives": "all"}, r"config\.negatives='all' is not one of own, in_batch, cross_d"),
        ({"order": "any"}, r"config\.order='any' is not one of dependency, printed, annotation"),
        ({"query_max_length": 0}, r"config\.query_max_length=0 must be at least 3"),
        ({"data.weights": (1, 2)}, r"data\.weights=\(1, 2\) must have one number above 0 for each"),
        ({"dev.questions": -1}, r"config\.dev\.questions=-1 must not be negative"),
        ({"model.unroll": 0}, r"config\.model\.unroll=0 must be at least 1"),
        ({"activations_gib": -1.0}, r"config\.activations_gib=-1\.0 must not be negative"),
        # These are settings of all trainers.
        ({"keep_checkpoints": 0}, r"config\.keep_checkpoints=0 must be at least 1"),
        ({"eval_every": -1}, r"config\.eval_every=-1 must not be negative"),
        ({"save_every": -1}, r"config\.save_every=-1 must not be negative"),
        ({"stop_after_minutes": -1.0}, r"config\.stop_after_minutes=-1\.0 must not be negative"),
        ({"epoch": "days"}, r"config\.epoch='days' is not one of questions, prefixes"),
        ({"epoch": "prefixes"}, r"epoch=prefixes needs config\.prefixes_per_question=1, not 4"),
        ({"num_epochs": -1.0}, r"config\.num_epochs=-1\.0 must not be negative"),
        ({"num_steps": 0, "num_epochs": 0.0}, "num_epochs or config.num_steps must be above 0"),
        ({"profile_steps": "9"}, r"config\.profile_steps='9' must be FIRST:LAST"),
        (
            {"optimizer.learning_rate": 0.0},
            r"config\.optimizer\.learning_rate=0\.0 must be above 0",
        ),
        ({"optimizer.warmup_ratio": 2.0}, r"optimizer\.warmup_ratio=2\.0 must lie between 0 and 1"),
        ({"optimizer.weight_decay": -1.0}, r"optimizer\.weight_decay=-1\.0 must not be negative"),
        ({"optimizer.schedule": "step"}, r"config\.optimizer\.schedule='step' is not one of lin"),
    ],
)
def test_train_invalid_config_is_refused_before_data(tmp_path, changes, message):
    config = config_of(("nowhere", "nowhere"), **changes)
    with pytest.raises(UserError, match=message):
        aligner.train_and_evaluate(config, tmp_path)


def test_train_unknown_metric_is_refused(model_and_data, tmp_path):
    expected = r"best_metric=dev/ndcg is not measured; choose one of dev/mrr, dev/recall@1, "
    with pytest.raises(UserError, match=expected):
        aligner.train_and_evaluate(config_of(model_and_data, best_metric="dev/ndcg"), tmp_path)
    assert not (tmp_path / "checkpoints").exists()
    # Without dev questions, any metric is accepted.
    changes = {"best_metric": "dev/ndcg", "dev.split": "null", "dev.questions": 0, "num_steps": 1}
    assert (
        aligner.train_and_evaluate(config_of(model_and_data, **changes), tmp_path)["best_step"]
        is None
    )


@pytest.mark.parametrize("index", [0, -1])  # A training and a dev question.
def test_train_same_workdir_other_data_is_refused(model_and_data, tmp_path, one_device, index):
    data, dataset = tmp_path / "data", tiny.dataset()
    config = config_of((model_and_data[0], tiny.dataset_folder(data)), num_steps=1, eval_every=0)
    aligner.train_and_evaluate(config, tmp_path / "w")
    questions = list(dataset.questions)
    questions[index] = dataclasses.replace(questions[index], question="another question")
    shutil.rmtree(data)
    jsonl.write_dataset(dataclasses.replace(dataset, questions=tuple(questions)), data)
    with pytest.raises(UserError, match="was started with other training examples"):
        aligner.train_and_evaluate(config, tmp_path / "w")


def test_train_same_workdir_other_config_is_refused(
    model_and_data, tmp_path, one_device, monkeypatch
):
    # A killed process leaves this folder, which is not a step of another run.
    (tmp_path / "checkpoints/3.orbax-checkpoint-tmp").mkdir(parents=True)
    aligner.train_and_evaluate(config_of(model_and_data, num_steps=1, eval_every=0), tmp_path)
    monkeypatch.setattr(aligner, "training_chains", None)  # Fails if it is called.
    with pytest.raises(UserError, match=r"was started with temperature=0\.\d+, not "):
        aligner.train_and_evaluate(
            config_of(model_and_data, num_steps=1, eval_every=0, temperature=0.5), tmp_path
        )


def test_split_questions_train_and_dev_are_disjoint(model_and_data):
    config = config_of(model_and_data, **{"dev.split": "null", "dev.questions": 3})

    _, train, dev = splits.split_questions(load.load_dataset(config.data), config)
    assert (len(train), len(dev)) == (5, 3)
    assert not {q.id for q in train} & {q.id for q in dev}
    with pytest.raises(UserError, match="8 of the training questions"):
        splits.split_questions(
            load.load_dataset(config.data),
            config_of(model_and_data, **{"dev.split": "train", "dev.questions": 0}),
        )


# ------------------------------------------------------------------------------- subprocesses


def _train(command, workdir, overrides, **fields):
    return command("train.py", f"--workdir={workdir}", *overrides, **fields)


def test_train_killed_and_resumed_equals_uninterrupted(model_and_data, tmp_path, command):
    overrides = overrides_of(model_and_data, save_every=1, **{"model.dropout": 0.1})
    whole = _train(command, tmp_path / "whole", overrides)
    assert whole.returncode == 0, whole.stderr
    killed = _train(
        command, tmp_path / "cut", overrides, hooks=[["signal_at_step", 4, signal.SIGKILL]]
    )
    assert killed.returncode == -signal.SIGKILL
    assert not (tmp_path / "cut" / "result.json").exists()
    resumed = _train(command, tmp_path / "cut", overrides)
    assert resumed.returncode == 0, resumed.stderr

    assert read_losses(tmp_path / "cut") == read_losses(tmp_path / "whole")
    for a, b in zip(_parameters(tmp_path / "cut"), _parameters(tmp_path / "whole"), strict=True):
        np.testing.assert_array_equal(a, b)


def test_train_killed_in_evaluation_repeats_only_the_evaluation(model_and_data, tmp_path, command):
    overrides = overrides_of(model_and_data)
    whole = _train(command, tmp_path / "whole", overrides)
    hooks = [["signal_in_evaluation", 3, signal.SIGKILL]]
    killed = _train(command, tmp_path / "cut", overrides, hooks=hooks)
    assert killed.returncode == -signal.SIGKILL
    with Checkpoints(tmp_path / "cut", read_only=True) as checkpoints:
        assert checkpoints.all_steps() == [3] and checkpoints.metrics(3) is None
    resumed = _train(command, tmp_path / "cut", overrides)
    assert "resuming from step 3 of 6" in resumed.stderr

    def without_seconds(line):
        return {k: v for k, v in line.items() if "seconds" not in k and "per_second" not in k}

    lines = [[without_seconds(x) for x in read_metrics(tmp_path / n)] for n in ("whole", "cut")]
    assert lines[0] == lines[1]
    results = [without_seconds(json.loads(done.stdout)) for done in (whole, resumed)]
    assert results[0] == results[1] and results[0]["best_step"] in (3, 6)


def test_train_sigterm_saves_and_run_resumes(model_and_data, tmp_path, command):
    overrides = overrides_of(model_and_data, save_every=0, eval_every=0)
    stopped = _train(command, tmp_path, overrides, hooks=[["signal_at_step", 2, signal.SIGTERM]])
    assert stopped.returncode == 0, stopped.stderr
    result = json.loads(stopped.stdout)
    assert result["complete"] is False and 2 <= result["step"] < 6
    resumed = json.loads(_train(command, tmp_path, overrides).stdout)
    assert resumed["complete"] is True and resumed["step"] == 6


def test_train_full_disk_is_reported_in_one_sentence(model_and_data, tmp_path, command):
    overrides = overrides_of(model_and_data, num_steps=2, eval_every=0, save_every=1)
    # Fills the compilation cache first, because JAX could not write to it on a full disk.
    assert _train(command, tmp_path / "whole", overrides).returncode == 0
    for size in (15_000, 30_000):  # A checkpoint has 240,000 bytes.
        workdir = tmp_path / str(size)
        done = _train(command, workdir, overrides, hooks=[["limit_files", size]])
        assert done.returncode == 2 and "Traceback" not in done.stderr
        _, message_line = done.stderr.splitlines()  # The first line describes the data.
        expected = f"train.py: checkpoint {workdir}/checkpoints/1 cannot be written (OSError: "
        assert message_line == expected + "File too large)"


def test_train_two_processes_equal_one(model_and_data, tmp_path, command):
    # `save_minutes` makes the processes agree on a save after every step.
    overrides = overrides_of(model_and_data, num_steps=2, eval_every=2, save_minutes=1e-6)
    # Cross-device negatives do not depend on the number of processes.
    single = _train(command, tmp_path / "alone", overrides)
    assert single.returncode == 0, single.stderr
    pair = command.together("train.py", f"--workdir={tmp_path / 'pair'}", *overrides)
    assert [done.returncode for done in pair] == [0, 0], pair
    assert not pair[1].stdout.strip()  # Only the first process prints the result.

    one, two = read_metrics(tmp_path / "alone"), read_metrics(tmp_path / "pair")
    assert len(one) == len(two)
    for a, b in zip(one, two, strict=True):
        for key in ("train/loss", "train/gradient_norm", "dev/mrr"):
            if key in a:
                np.testing.assert_allclose(a[key], b[key], rtol=1e-5, err_msg=key)


@pytest.mark.parametrize("changed", ["corpus.jsonl", "openie.jsonl", "questions.jsonl"])
def test_train_two_processes_other_data_is_refused_by_name(
    model_and_data, tmp_path, command, changed
):
    other = shutil.copytree(model_and_data[1], tmp_path / "other")
    with (other / changed).open() as lines:
        first, *rest = lines
    old, new = ("potter", "mason") if changed != "questions.jsonl" else ("patron", "saint")
    assert old in first
    (other / changed).write_text(first.replace(old, new) + "".join(rest))
    done = command.together(
        "train.py", f"--workdir={tmp_path / 'w'}", *overrides_of(model_and_data, num_steps=2),
        hooks=[["read_instead", str(model_and_data[1]), str(other)]],
    )  # fmt: skip
    assert [each.returncode for each in done] == [2, 2], done
    words = f"process 1 of 2 was started with other content of {changed}; start all processes with"
    assert all(words in each.stderr for each in done)
    assert not (tmp_path / "w" / "checkpoints").exists()


def test_train_two_processes_other_config_or_missing_data_is_refused(
    model_and_data, tmp_path, command
):
    arguments = [f"--workdir={tmp_path / 'w'}", *overrides_of(model_and_data, num_steps=2)]
    done = command.together("train.py", *arguments, last=["--config.eval_every=1"])
    words = "process 1 of 2 was started with config.eval_every=1, not 3; start all processes"
    assert all(each.returncode == 2 and words in each.stderr for each in done), done
    hooks = [["read_instead", str(model_and_data[1]), str(tmp_path / "nowhere")]]
    done = command.together("train.py", *arguments, hooks=hooks)
    assert [each.returncode for each in done] == [2, 2], done
    assert "process 1 of 2 failed: " in done[0].stderr and "nowhere" in done[0].stderr


@pytest.mark.parametrize(("train", "trained"), [("base", "kernel"), ("tasks", "qkv_task_a")])
def test_make_optimizer_keeps_other_parameters(train, trained):
    config = config_of(("model", "data"), **{"model.train": train})
    tx = aligner_step.make_optimizer(config, 10)
    params = {name: np.ones(3, np.float32) for name in ("kernel", "qkv_task_a")}
    state = tx.init(params)
    for _ in range(2):  # the rate of the first step is 0
        updates, state = tx.update(params, state, params)
    changed = jax.tree.map(np.any, updates)
    assert [name for name in params if changed[name]] == [trained]
