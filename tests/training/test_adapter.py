"""Training of adapters: results, resumption, meshes and invalid input."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest

from cirag_jax import sharding
from cirag_jax.errors import TryAgain, UserError
from cirag_jax.llm.chat import ChatTokenizer
from cirag_jax.models import decoder_params, lora
from cirag_jax.models.decoder_config import DecoderConfig
from cirag_jax.models.embedder import EmbedderConfig
from cirag_jax.models.io.checkpoints import Checkpoints
from cirag_jax.models.io.pretrained_decoder import load_decoder
from cirag_jax.models.io.workdir import hash_arrays, open_adapter, trained_component
from cirag_jax.models.lora import LoraConfig
from cirag_jax.training import adapter, mfu, preemption
from cirag_jax.training.data import conversations
from cirag_jax.training.data.examples import Part
from cirag_jax.training.data.packing import MicroBatch
from cirag_jax.training.lora_step import Batch
from tests import tiny
from tests.training.students import SIDECAR, config_of, read_metrics, train

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("short_instruction")]


@pytest.fixture(scope="module")
def trained(folders, tmp_path_factory):
    """The workdir and result of a short run, and the base model's arrays before and after."""
    return train(folders, tmp_path_factory.mktemp("trained"))


def test_train_result_and_metrics_agree(trained):
    workdir, result, _, _ = trained
    json.dumps(result)
    assert result["complete"] and result["step"] == result["total_steps"] == 6
    assert (result["num_trajectories"], result["num_dev_trajectories"]) == (10, 2)
    assert (result["num_examples"], result["num_dev_examples"]) == (10, 2)
    assert result["num_dev_trained_on"] == 0
    assert result["left_out"] == {} and result["teachers"] == {"annotations": 10}
    lines = read_metrics(workdir)
    steps = [line for line in lines if "train/loss" in line]
    dev = [line for line in lines if "dev/loss" in line]
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in dev] == [0, 3, 6]
    assert steps[-1]["train/loss"] < 0.9 * steps[0]["train/loss"]
    best = min(dev[1:], key=lambda line: line["dev/loss"])
    assert result["best_step"] == best["step"] and result["dev/loss"] == best["dev/loss"]
    assert result["dev/loss"] < dev[0]["dev/loss"]
    for name in ("rationale", "facts", "question"):
        assert dev[0][f"dev/loss_{name}"] > 0
    assert sum(s["train/supervised_tokens"] for s in steps) == result["supervised_tokens"]
    assert 0 < result["supervised_tokens"] < result["tokens"]
    assert all(s["train/tokens_per_second"] > 0 for s in steps)
    assert 0.5 < result["packing_efficiency"] <= 1
    assert "train/mfu" not in steps[0]  # The peak performance of CPUs is unknown.


def test_train_base_is_unchanged_and_not_in_checkpoint(trained, folders):
    workdir, _, before, after = trained
    for a, b in zip(before, after, strict=True):
        np.testing.assert_array_equal(a, b)
    state, config, meta = open_adapter(str(workdir))
    moved = lora.to_adapter(state)["layers"]["q_proj"]["b"]
    assert np.abs(np.asarray(moved)).max() > 0
    adapter = sum(leaf.size for leaf in jax.tree.leaves(state))
    with Checkpoints(workdir, read_only=True) as checkpoints:
        saved = checkpoints._manager.item_metadata(6)["state"].tree
    total = sum(int(np.prod(leaf.shape)) for leaf in saved.values())
    assert 3 * adapter <= total <= 3 * adapter + 8  # Two moments, counters and a key.
    assert config == LoraConfig(4, 32.0, 0.05, decoder_params.PROJECTIONS)
    assert meta["component"] == trained_component(str(workdir)) == "integrator"
    assert meta["prompt"] == {
        "units": "triple",
        **{key: SIDECAR[key] for key in ("normalization", "prompt_format", "few_shot")},
    }
    assert meta["model"] == str(folders[0])


def test_load_data_kept_weight_and_stop_weight_are_applied(folders):
    tokenizer = ChatTokenizer.load(folders[0])
    config = config_of(folders, kept_weight=3.0, stop_weight=5.0)
    data = conversations.load_data(config, tokenizer, config.length)
    weights = {Part.NONE: 0.0, Part.FACTS: 3.0, Part.STOP: 5.0}
    for example in data.train:
        expected = [weights.get(Part(part), 1.0) for part in example.part_T.tolist()]
        assert example.weight_T.tolist() == expected
    assert any(Part.STOP in example.part_T for example in data.train)
    assert {w for example in data.dev for w in example.weight_T.tolist()} == {0.0, 1.0}


def test_open_adapter_opens_best_checkpoint(trained, monkeypatch):
    workdir, result, *_ = trained
    with Checkpoints(workdir, read_only=True) as checkpoints:
        assert checkpoints.all_steps() == [3, 6]
    assert open_adapter(str(workdir))[2]["step"] == result["best_step"]
    rank = Checkpoints.best_step
    for worse in (3, 6):
        monkeypatch.setattr(
            Checkpoints, "best_step", lambda self, worse=worse: rank(self) and 9 - worse
        )
        assert open_adapter(str(workdir))[2]["step"] == 9 - worse


def test_open_adapter_number_not_finite_names_parameter(trained, monkeypatch):
    restore = Checkpoints.restore

    def damaged(*args, **options):
        restored = restore(*args, **options)
        params = restored.state["params"]
        params["layers"]["k_proj"]["b"] = jax.tree.map(
            lambda x: x * np.inf, params["layers"]["k_proj"]["b"]
        )
        return restored

    monkeypatch.setattr(Checkpoints, "restore", damaged)
    expected = r"tensor layers\.k_proj\.b has numbers that are not finite"
    with pytest.raises(UserError, match=expected):
        open_adapter(str(trained[0]))


def test_train_resumed_run_equals_uninterrupted_run(folders, tmp_path, one_device, monkeypatch):
    twice = f"('{folders[1]}', '{folders[1]}/trajectories.jsonl')"
    changed = {"lora.dropout": 0.2, "trajectories": twice, "weights": "(1, 3)"}
    config = config_of(folders, **changed)
    whole = adapter.train_and_evaluate(config, tmp_path / "whole")
    drawn = whole["drawn"][str(folders[1])], whole["drawn"][f"{folders[1]}/trajectories.jsonl"]
    assert sum(drawn) == round(20 * whole["epochs"]) and drawn[1] > 2 * drawn[0] > 0
    calls = iter([False, False, True])
    monkeypatch.setattr(preemption, "out_of_time", lambda *_: next(calls))
    stopped = adapter.train_and_evaluate(config, tmp_path / "cut")
    assert stopped["complete"] is False and stopped["step"] == 3
    monkeypatch.setattr(preemption, "out_of_time", lambda *_: False)
    resumed = adapter.train_and_evaluate(config, tmp_path / "cut")
    assert resumed["complete"] and resumed["step"] == 4
    adapters = [open_adapter(str(tmp_path / name))[0] for name in ("cut", "whole")]
    for a, b in zip(*map(tiny.arrays, adapters), strict=True):
        np.testing.assert_array_equal(a, b)

    def losses(workdir):
        names = ("train/loss", "dev/loss")
        return [(r["step"], n, r[n]) for r in read_metrics(workdir) for n in names if n in r]

    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    for name, value in (("lora.rank", 2), ("num_trajectories", 12), ("weights", "(2, 3)")):
        other = config_of(folders, **{**changed, name: value})
        with pytest.raises(UserError, match=rf"was started with {name.split('.')[0]}"):
            adapter.train_and_evaluate(other, tmp_path / "cut")


def test_train_unpacked_on_mesh_equals_packed_on_one_device(folders, tmp_path):
    changes = {"num_steps": 1, "eval_every": 1, "lora.dropout": 0.0, "batch_size": 16}
    runs = []
    make_mesh = sharding.make_mesh
    for name, packing, sizes, rows in (("a", True, (1, 1, 1), 4), ("b", False, (2, 2, 2), 2)):
        with pytest.MonkeyPatch.context() as patch:
            count = int(np.prod(sizes))
            patch.setattr(
                sharding, "make_mesh", lambda *s, n=count: make_mesh(*s, devices=jax.devices()[:n])
            )
            mesh = dict(zip(("mesh.data", "mesh.fsdp", "mesh.tensor"), sizes, strict=True))
            config = config_of(
                folders, packing=packing, rows_per_device=rows, buckets=(256,), **mesh, **changes
            )
            adapter.train_and_evaluate(config, tmp_path / name)
        runs.append(read_metrics(tmp_path / name))
    # Both have all ten examples in one step.
    compared = ("train/loss", "train/gradient_norm", "dev/loss", "dev/loss_facts")
    for one, other in zip(*runs, strict=True):
        assert any(key in one for key in compared)
        for key in compared:
            assert (key in one) == (key in other)
            assert one.get(key, 0.0) == pytest.approx(other.get(key, 0.0), rel=2e-5), key


def test_train_bfloat16_lowers_the_loss(folders, tmp_path, one_device):
    config = config_of(folders, **{"model.dtype": "bfloat16", "eval_every": 0})
    result = adapter.train_and_evaluate(config, tmp_path)
    losses = [line["train/loss"] for line in read_metrics(tmp_path) if "train/loss" in line]
    assert losses[-1] < losses[0] and result["complete"]
    state, _, _ = open_adapter(str(tmp_path))
    assert {leaf.dtype for leaf in jax.tree.leaves(state)} == {np.dtype("float32")}


def test_initial_adapter_is_loaded_from_start(trained, folders, tmp_path):
    spec = str(trained[0])
    config = config_of(folders, **{"lora.start": spec})
    base = load_decoder(str(folders[0]))
    mesh = sharding.make_mesh(1, 1, 1, devices=jax.devices()[:1])
    state_from_start, earlier_ids = adapter.initial_adapter(
        config, base.config, adapter.make_lora(config, base.config), mesh
    )
    state, _, meta = open_adapter(spec)
    assert hash_arrays(state_from_start) == hash_arrays(state) and earlier_ids == meta["trained_on"]
    config.lora.rank = 2
    with pytest.raises(UserError, match="has rank 4, scale"):
        adapter.initial_adapter(config, base.config, adapter.make_lora(config, base.config), mesh)
    config.lora.rank, config.component = 4, "reader"  # Any component may be the start.
    state_from_start, earlier_ids = adapter.initial_adapter(
        config, base.config, adapter.make_lora(config, base.config), mesh
    )
    assert hash_arrays(state_from_start) == hash_arrays(state) and earlier_ids == meta["trained_on"]


def test_count_dev_trained_on_warns_if_not_held_out(folders, capsys):
    config = config_of(folders, **{"lora.start": "W"})
    data = conversations.load_data(config, ChatTokenizer.load(str(folders[0])), 448)
    assert adapter.count_dev_trained_on(config, data.trained_on, data) == 0
    assert adapter.count_dev_trained_on(config_of(folders), (), data) == 0
    assert "lora.start" not in capsys.readouterr().err
    assert adapter.count_dev_trained_on(config, ["another", data.measured_on[0]], data) == 1
    stderr = capsys.readouterr().err
    assert "WARNING: config.lora.start=W was trained on 1 of the 2 questions or passages" in stderr
    assert adapter.count_dev_trained_on(config, None, data) is None
    assert "config.lora.start=W does not record its training questions" in capsys.readouterr().err


def test_describe_supervised_tokens_ignore_weights(folders, monkeypatch):
    model, config = load_decoder(str(folders[0])).config, config_of(folders)
    ids = np.ones((1, 4), np.int32)
    batch = Batch(ids, ids, mask_BT=np.array([[0.0, 0.5, 4.0, 0.0]], np.float32))
    piece = MicroBatch(batch, np.zeros((1, 4), np.uint8), tokens=4, attended=16)
    monkeypatch.setattr(mfu, "peak_flops", lambda kind: 1e6)
    values = {"loss": 1.0, "tokens": 4.5}
    lora_config = adapter.make_lora(config, model)
    assert lora_config is not None
    adapter.make_describe(model, lora_config)(values, [piece, piece], 2.0)
    assert values["supervised_tokens"] == 4 and "tokens" not in values
    flops = mfu.lora_flops(
        model, lora_config.rank, lora_config.names, tokens=8, supervised=4, attended=32
    )
    assert values["mfu"] == flops / 2.0 / (1e6 * jax.device_count())


# ---------------------------------------------------------------------------------- invalid input


def test_train_without_dev_examples_saves_checkpoints(folders, tmp_path, one_device):
    config = config_of(folders, dev_fraction=0.0, keep_checkpoints=9)
    adapter.train_and_evaluate(config, tmp_path)
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2, 3, 4]
    with Checkpoints(tmp_path, read_only=True) as checkpoints:
        assert checkpoints.all_steps() == [2, 4]
        assert checkpoints.best_step() is None and checkpoints.metrics(2) is None


def test_train_unknown_metric_is_refused(folders, tmp_path, one_device):
    config = config_of(folders, best_metric="dev/core_f1", eval_every=0)
    expected = (
        "best_metric=dev/core_f1 is not measured; choose one of dev/loss, dev/loss_rationale, "
        "dev/loss_facts, dev/loss_question, dev/loss_stop$"
    )
    with pytest.raises(UserError, match=expected):
        adapter.train_and_evaluate(config, tmp_path)
    assert not (tmp_path / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"trajectories": "nowhere"}, "nowhere does not exist"),
        ({"trajectories": "null"}, r"config\.trajectories is required"),
        ({"keep": "best"}, r"keep='best'"),
        ({"num_trajectories": -5}, r"config\.num_trajectories=-5 must not be negative"),
        ({"num_trajectories": 11}, r"num_trajectories=11 exceeds the 10"),
        ({"dev_fraction": 1.0}, r"dev_fraction=1\.0"),
        ({"length": 600}, r"config\.length=600 exceeds the 512 positions"),
        ({"length": 30}, "no supervised tokens in"),
        ({"batch_size": 3, "rows_per_device": 2}, r"batch_size=3 must be a multiple of 2"),
        ({"model.remat": "some"}, r"remat='some' is not one of"),
        ({"model.quantization": "nf3"}, r"quantization='nf3' is not one of null, nf4"),
        (
            {"model.quantization": "nf4", "full_parameters": "true"},
            "trains the weights, which cannot be quantized",
        ),
        ({"buckets": "(9, 5)"}, r"buckets=\(9, 5\)"),
        ({"num_steps": 0, "num_epochs": 0}, "num_epochs or config.num_steps must be above 0"),
        ({"chunk": 0}, r"config\.chunk=0"),
        ({"max_tokens": -1}, r"max_tokens=-1"),
        ({"kept_weight": -1.0}, r"config\.kept_weight=-1\.0 must not be negative"),
        ({"stop_weight": -1.0}, r"config\.stop_weight=-1\.0 must not be negative"),
        ({"keep_checkpoints": 0}, r"config\.keep_checkpoints=0 must be at least 1"),
        ({"lora.targets": "('lm_head',)"}, "lm_head"),
    ],
)
def test_train_invalid_config_is_refused(folders, tmp_path, one_device, changes, message):
    with pytest.raises(UserError, match=message):
        adapter.train_and_evaluate(config_of(folders, **changes), tmp_path)
    assert not (tmp_path / "metrics.jsonl").exists()


def test_train_tokens_beyond_table_are_refused(folders, tmp_path, one_device):
    shutil.copytree(folders[0], tmp_path / "base")
    tiny.add_words(tmp_path / "base", "zyx")
    config = config_of((tmp_path / "base", *folders[1:]))
    with pytest.raises(UserError, match="tokens without a row in the embedding table.*'zyx'"):
        adapter.train_and_evaluate(config, tmp_path)


def test_train_invalid_trajectory_is_refused_with_its_line(folders, tmp_path, one_device):
    file = tmp_path / "t.jsonl"
    file.write_text('{"question_id": "q", "question": "?"}\n')
    with pytest.raises(UserError, match=r"t\.jsonl.*1.*(steps|teacher)"):
        adapter.train_and_evaluate(config_of((folders[0], file)), tmp_path)


def test_train_steps_that_are_not_finite_stop_with_the_first_weights(folders, tmp_path, one_device):
    # The sums of the loss and of the weights overflow in float32.
    changes = {
        "kept_weight": 3e38,
        "stop_weight": 3e38,
        "num_steps": 3,
        "save_every": 1,
        "eval_every": 0,
    }
    config = config_of(folders, **changes, max_skipped_steps=1)
    with pytest.raises(TryAgain, match="the last 2 steps up to step 2 were skipped"):
        adapter.train_and_evaluate(config, tmp_path)
    with Checkpoints(tmp_path, read_only=True) as checkpoints:
        assert checkpoints.all_steps() == [1, 2]
    base, mesh = load_decoder(str(folders[0])), sharding.make_mesh(1, 1, 1)
    first, _ = adapter.initial_adapter(
        config, base.config, adapter.make_lora(config, base.config), mesh
    )
    assert hash_arrays(open_adapter(str(tmp_path))[0]) == hash_arrays(first)


def test_lora_flops_equal_hand_computed_value():
    config = DecoderConfig(
        vocab_size=100, d_model=8, num_layers=3, num_heads=2, num_kv_heads=1, head_dim=4, d_ff=16
    )
    linear = 3 * (8 * 8 + 8 * 4 + 8 * 4 + 8 * 8 + 3 * 8 * 16)
    adapter = 3 * 2 * ((8 + 8) + (8 + 4))
    actual = mfu.lora_flops(config, 2, ("q_proj", "v_proj"), tokens=10, supervised=4, attended=60)
    assert actual == (4 * linear + 6 * adapter) * 10 + 4 * 8 * 100 * 4 + 6 * 3 * 2 * 4 * 60
    assert mfu.peak_flops("NVIDIA H100 80GB HBM3") == 989e12
    assert mfu.peak_flops("NVIDIA H100 PCIe") == 756e12
    assert mfu.peak_flops("cpu") is None


def test_lora_flops_of_experts_equal_hand_computed_value():
    """A token uses 2 of 4 experts and the shared one; the first layer is dense."""
    config = DecoderConfig(
        *(100, 8, 3, 2, 1, 4, 16),
        num_experts=4,
        experts_per_token=2,
        d_expert=5,
        d_shared=6,
        dense_layers=(0,),
    )
    experts = 8 * 4 + 2 * 3 * 8 * 5 + 3 * 8 * 6 + 8
    linear = 3 * (8 * 8 + 8 * 4 + 8 * 4 + 8 * 8) + 3 * 8 * 16 + 2 * experts
    sizes = {"tokens": 10, "attended": 60}
    attended = 6 * 3 * 2 * 4 * 60
    assert mfu.lora_flops(config, 2, (), supervised=0, **sizes) == 4 * linear * 10 + attended
    adapter = 3 * 2 * (8 + 8 + 4 + 4)
    fused = mfu.lora_flops(config, 2, ("qkv_proj",), supervised=0, **sizes)
    assert fused == (4 * linear + 6 * adapter) * 10 + attended
    embedder = EmbedderConfig(config, 0)
    whole = mfu.embedder_flops(embedder, **sizes)
    assert whole == 6 * linear * 10 + attended
    lora = dataclasses.replace(embedder, lora=LoraConfig(2, targets=("qkv_proj",)))
    assert mfu.embedder_flops(lora, **sizes) == fused
