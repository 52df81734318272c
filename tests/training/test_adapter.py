"""Training of the student: what it leaves alone, resumption, meshes, export, what is refused."""

import contextlib
import dataclasses
import json
import pathlib
import runpy
import shutil

import jax
import numpy as np
import pytest
import safetensors

from cirag_jax import sharding
from cirag_jax.commands import backends, opening, side_by_side
from cirag_jax.config_files import load_config
from cirag_jax.errors import UserError
from cirag_jax.evaluation import decisions
from cirag_jax.llm.chat import ChatTokenizer
from cirag_jax.llm.engine.engine import Engine
from cirag_jax.llm.types import Generate, Message
from cirag_jax.methods import extraction
from cirag_jax.methods.cirag_config import CiragConfig
from cirag_jax.models import decoder, decoder_params, lora
from cirag_jax.models.io.checkpoints import Checkpoints
from cirag_jax.models.io.peft_format import load_adapter, save_adapter
from cirag_jax.models.io.pretrained_decoder import load_decoder
from cirag_jax.models.io.workdir import (
    check_role,
    component_of,
    export_adapter,
    hash_arrays,
    open_adapter,
)
from cirag_jax.models.lora import LoraConfig
from cirag_jax.prompts import cirag as prompts
from cirag_jax.runtime.handlers import GenerateHandler
from cirag_jax.runtime.journal import Journal
from cirag_jax.runtime.scheduler import Scheduler
from cirag_jax.training import adapter, decision_quality, mfu, preemption
from cirag_jax.training.data import conversations
from cirag_jax.training.data.examples import Part
from cirag_jax.training.data.packing import MicroBatch
from cirag_jax.training.lora_step import Batch
from configs import common
from tests import tiny
from tests.distill import by_hand
from tests.training.students import (
    SIDECAR,
    base_and_trajectories,
    config_of,
    short_prompts,
    write,
)

_ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def short(monkeypatch):
    yield from short_prompts(monkeypatch)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return base_and_trajectories(tmp_path_factory.mktemp("integrator"))


def lines_of(workdir):
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def trained(folders, tmp_path_factory):
    """The workdir and result of a short training by the command's own code, and the base's
    arrays from before and after.
    """
    workdir = tmp_path_factory.mktemp("trained")
    patch = pytest.MonkeyPatch()
    kept, before = [], []

    def load(*args, **kwargs):
        kept.append(load_decoder(*args, **kwargs))
        before.append(tiny.arrays(jax.tree.map(np.array, kept[-1].state)))
        return kept[-1]

    make_mesh = sharding.make_mesh
    patch.setattr(sharding, "make_mesh", lambda *s: make_mesh(*s, devices=jax.devices()[:1]))
    patch.setattr(adapter, "load_decoder", load)
    patch.setattr(prompts, "_INSTRUCTION", "Collect facts.")
    command = runpy.run_path(str(_ROOT / "launch/train.py"))["main"]
    with jax.numpy_dtype_promotion("standard"):
        changes = {"decode.num_trajectories": 8}
        result = command(config_of(folders, num_steps=6, eval_every=3, **changes), workdir)
    patch.undo()
    return workdir, result, before[0], tiny.arrays(kept[0].state)


def test_the_result_and_the_metrics(trained):
    workdir, result, _, _ = trained
    json.dumps(result)
    assert result["complete"] and result["step"] == result["total_steps"] == 6
    assert (result["num_trajectories"], result["num_dev_trajectories"]) == (10, 2)
    assert (result["num_examples"], result["num_dev_examples"]) == (10, 2)
    assert result["num_dev_trained_on"] == 0
    assert result["left_out"] == {} and result["teachers"] == {"annotations": 10}
    lines = lines_of(workdir)
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
    assert "train/mfu" not in steps[0]  # nobody knows what a CPU could do


def test_the_base_is_bitwise_unchanged_and_not_in_the_checkpoint(trained, folders):
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
    assert 3 * adapter <= total <= 3 * adapter + 8  # and its two moments, counters, a key
    assert config == LoraConfig(4, 32.0, 0.05, decoder.PROJECTIONS)
    assert meta["component"] == component_of(str(workdir)) == "integrator"
    assert meta["prompt"] == {
        "units": "triple",
        **{key: SIDECAR[key] for key in ("normalization", "prompt_format", "few_shot")},
    }
    assert meta["model"] == str(folders[0])


def test_dev_decisions_are_those_of_the_checkpoint(trained, folders, tmp_path):
    """Decoded in training, beside the optimiser, and from the best checkpoint afterwards."""
    workdir, result, *_ = trained
    config = config_of(folders)
    data = conversations.load_data(config, ChatTokenizer.load(folders[0]), config.length)
    assert len(data.dev_trajectories) == 2
    block = common.language_model()
    block.adapter, block.model = str(workdir), None
    backend = backends.open_backend(block)
    handler = GenerateHandler(backend, {"integrator": 24})
    settings = CiragConfig(**data.described)
    with Journal(tmp_path / "journal.sqlite", {}) as journal:
        jobs = decisions.jobs(data.dev_trajectories, settings)
        steps = [job for row in jobs for job in row]
        records = Scheduler({"integrator": handler}, journal).records_of(steps)
    backend.close()
    assert records is not None
    found = decisions.read(jobs, records)
    assert any(decided.response for row in found for decided in row)
    scores = decisions.score(data.dev_trajectories, found, normalization=settings.normalization)
    for metric, name in decision_quality.SCORES.items():
        assert result[metric] == scores[name].value
    first = next(line for line in lines_of(workdir) if line["step"] == 0)
    assert set(decision_quality.SCORES) <= set(first)


def test_what_is_kept_and_stops_weigh_as_the_config_says(folders):
    tokenizer = ChatTokenizer.load(folders[0])
    config = config_of(folders, kept_weight=3.0, stop_weight=5.0)
    data = conversations.load_data(config, tokenizer, config.length)
    weights = {Part.NONE: 0.0, Part.FACTS: 3.0, Part.STOP: 5.0}
    for example in data.train:
        wanted = [weights.get(Part(part), 1.0) for part in example.part_T.tolist()]
        assert example.weight_T.tolist() == wanted
    assert any(Part.STOP in example.part_T for example in data.train)
    assert {w for example in data.dev for w in example.weight_T.tolist()} == {0.0, 1.0}


def test_dev_decisions_follow_the_adapter(folders, one_device, monkeypatch):
    """Another adapter writes other texts, and none is left in the engine afterwards."""
    config = config_of(folders)
    loaded = load_decoder(str(folders[0]))
    tokenizer = ChatTokenizer.load(loaded.folder)
    data = conversations.load_data(config, tokenizer, config.length)
    engine = Engine(loaded.config, decoder_params.to_params(loaded.state), tokenizer)
    texts, read = [], decisions.read

    def recorded(*args):
        found = read(*args)
        texts.append([decided.response for row in found for decided in row])
        return found

    monkeypatch.setattr(decisions, "read", recorded)
    lora_config = adapter.make_lora(config)
    quality = decision_quality.DecisionQuality(
        engine, lora_config, data.dev_trajectories, data.described, 8
    )
    state = lora.init_adapter(loaded.config, lora_config)
    for scale in (0.0, 0.0, 0.5):
        rng = np.random.default_rng(0)
        moved = jax.tree.map(
            lambda x, rng=rng, scale=scale: x + scale * rng.normal(size=x.shape).astype(x.dtype),
            state,
        )
        quality(moved)
        assert engine._weights.adapter is None
    assert texts[0] == texts[1] != texts[2]


def test_the_best_checkpoint_is_opened_not_the_last(trained, monkeypatch):
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


def test_resumed_equals_uninterrupted_bit_for_bit(folders, tmp_path, one_device, monkeypatch):
    config = config_of(folders, **{"lora.dropout": 0.2})
    adapter.train_and_evaluate(config, tmp_path / "whole")
    calls = iter([False, False, True])
    monkeypatch.setattr(preemption, "out_of_time", lambda *_: next(calls))
    stopped = adapter.train_and_evaluate(config, tmp_path / "cut")
    assert stopped["complete"] is False and stopped["step"] == 3
    monkeypatch.setattr(preemption, "out_of_time", lambda *_: False)
    resumed = adapter.train_and_evaluate(config, tmp_path / "cut")
    assert resumed["complete"] and resumed["step"] == 4
    found = [open_adapter(str(tmp_path / name))[0] for name in ("cut", "whole")]
    for a, b in zip(*map(tiny.arrays, found), strict=True):
        np.testing.assert_array_equal(a, b)

    def losses(workdir):
        names = ("train/loss", "dev/loss")
        return [(r["step"], n, r[n]) for r in lines_of(workdir) for n in names if n in r]

    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    for changes, field in (({"lora.rank": 2}, "lora"), ({"num_trajectories": 3}, "num_traj")):
        with pytest.raises(UserError, match=rf"was started with {field}"):
            adapter.train_and_evaluate(
                config_of(folders, **{"lora.dropout": 0.2, **changes}), tmp_path / "cut"
            )


def test_unpacked_on_a_mesh_equals_packed_on_one_device(folders, tmp_path):
    changes = {"num_steps": 1, "eval_every": 1, "lora.dropout": 0.0, "batch_size": 16}
    found = []
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
        found.append(lines_of(tmp_path / name))
    # All ten examples are in the one step of either.
    compared = ("train/loss", "train/gradient_norm", "dev/loss", "dev/loss_facts")
    for one, other in zip(*found, strict=True):
        assert any(key in one for key in compared)
        for key in compared:
            assert (key in one) == (key in other)
            assert one.get(key, 0.0) == pytest.approx(other.get(key, 0.0), rel=2e-5), key


def test_bf16_learns_as_well(folders, tmp_path, one_device):
    config = config_of(folders, **{"model.dtype": "bfloat16", "eval_every": 0})
    result = adapter.train_and_evaluate(config, tmp_path)
    losses = [line["train/loss"] for line in lines_of(tmp_path) if "train/loss" in line]
    assert losses[-1] < losses[0] and result["complete"]
    state, _, _ = open_adapter(str(tmp_path))
    assert {leaf.dtype for leaf in jax.tree.leaves(state)} == {np.dtype("float32")}


# ----------------------------------------------------------------------------------------- export


def language_model(**changes):
    config = common.language_model()
    config.update({"context": 512, "prefix_tokens": 0, "batch_size": 2, **changes})
    return config


def texts(**changes):
    """Greedy answers of a backend to two prompts, some forty tokens each."""
    backend = backends.open_backend(language_model(**changes))
    requests = [
        Generate((Message("user", text),), max_tokens=40)
        for text in ("who is the patron of the town?", "where was the sailor born?")
    ]
    return [response.text for response in backend.generate(requests)]


def test_adapter_merged_and_peft_decode_the_same(trained, folders, tmp_path):
    pytest.importorskip("peft")
    workdir, base = str(trained[0]), str(folders[0])
    meta = export_adapter(workdir, tmp_path / "peft")
    export_adapter(workdir, tmp_path / "whole", merge=True)
    state, config, _ = open_adapter(workdir)
    again, config_again = load_adapter(tmp_path / "peft", load_decoder(base).config)
    for a, b in zip(tiny.arrays(state), tiny.arrays(again), strict=True):
        np.testing.assert_array_equal(a, b)
    assert config_again == config and meta["step"] == trained[1]["best_step"]
    wanted = texts(adapter=workdir)  # which also says what the base is
    assert wanted == texts(adapter=workdir, model=base)
    assert wanted != texts(model=base)
    assert wanted == texts(adapter=workdir, merge_adapter=True)
    assert wanted == texts(adapter=str(tmp_path / "peft"), model=base)
    assert wanted == texts(model=str(tmp_path / "whole"))
    from tests.tiny_adapter import quiet_peft

    with quiet_peft():
        assert wanted == texts(adapter=workdir, backend="transformers")
    assert not list(tmp_path.parent.glob("cirag_adapter*"))


def test_a_run_knows_which_adapter_it_used(trained, folders, tmp_path):
    settings = backends.fingerprint(language_model(adapter=str(trained[0])))
    assert settings["model"] == str(folders[0])
    assert set(settings["adapter_weights"]) == {"checkpoint", "base"}
    assert settings["adapter_weights"]["base"] == settings["weights"]
    with pytest.raises(UserError, match="no complete checkpoint"):
        (tmp_path / "checkpoints").mkdir()
        backends.model_name(language_model(adapter=str(tmp_path)))


def test_a_student_of_other_prompts_is_refused(trained):
    config = load_config(
        str(_ROOT / "configs/methods/cirag.py"), [f"--config.integrator.adapter={trained[0]}"]
    )
    opening.check_adapters(config, ("integrator",))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompts, "render_decision", lambda *_: "worded anew")
        with pytest.raises(UserError, match="no longer writes; train it again"):
            opening.check_adapters(config, ("integrator",))
    # Before it was recorded, one format changed.
    for prompt_format, refused in (("multi_turn", False), ("paper", True)):
        prompt = {"normalization": "ascii", "prompt_format": prompt_format, "few_shot": False}
        with pytest.raises(UserError) if refused else contextlib.nullcontext():
            opening.check_prompts("student", {"prompt": prompt})


def test_an_adapter_plays_its_own_role_as_it_was_trained(trained, folders, capsys, tmp_path):
    workdir = str(trained[0])

    def check(role, **changes):
        values = {f"{role}.adapter": workdir, "cirag.num_candidates": 2, **changes}
        overrides = [f"--config.{key}={value}" for key, value in values.items()]
        config = load_config(str(_ROOT / "configs/methods/cirag.py"), overrides)
        opening.check_adapters(config, (role,))

    check("integrator")
    for role in ("extractor", "reader"):
        with pytest.raises(UserError, match=f"component integrator, where {role} is needed"):
            check(role)
    assert "WARNING" not in capsys.readouterr().err
    check("integrator", **{"cirag.num_candidates": 15})
    assert "cirag.num_candidates=15, but" in capsys.readouterr().err
    wanted = (
        r"other settings of normalization, few_shot: give --config\.cirag\.normalization=ascii "
        r"--config\.cirag\.few_shot=False\.$"
    )
    with pytest.raises(UserError, match=wanted):
        check("integrator", **{"cirag.few_shot": True, "cirag.normalization": "unicode"})
    check("integrator", **{"cirag.few_shot": True, "integrator.backend": "openai"})
    sentences = {"cirag.units": "sentence", "cirag.prompt_format": "compact"}
    with pytest.raises(UserError, match=r"settings of units, .*--config\.cirag\.units=triple"):
        check("integrator", **sentences)
    export_adapter(workdir, tmp_path / "peft")  # an older one says nothing of units
    told = json.loads((tmp_path / "peft/training.json").read_text("utf-8"))
    assert told["prompt"].pop("units") == "triple"
    (tmp_path / "peft/training.json").write_text(json.dumps(told))
    check("integrator", **{"integrator.adapter": tmp_path / "peft"})
    with pytest.raises(UserError, match=r"other settings of units, .*cirag\.units=triple"):
        check("integrator", **{"integrator.adapter": tmp_path / "peft", **sentences})
    old = shutil.copytree(workdir, tmp_path / "old")
    for file in old.glob("checkpoints/*/meta/*"):
        file.write_text(file.read_text("utf-8").replace('"prompt":', '"rendering":'))
    with pytest.raises(UserError, match="old was trained by an earlier version"):
        check("integrator", **{"integrator.adapter": old})
    block = language_model(adapter=workdir)
    with pytest.raises(UserError, match="where extractor is needed"):
        extraction.check_adapter(block, extraction.ExtractionSettings())


@pytest.mark.parametrize(
    ("script", "config", "message"),
    [
        ("train", "integrator_eval", "--config is not one to train by"),
        ("evaluate", "integrator", "--config is not one to evaluate by"),
        ("train", "integrator", "config.component is 'critic'; it must be aligner, "),
        ("evaluate", "integrator_eval", "config.component is 'critic'; it must be integrator, "),
    ],
)
def test_commands_refuse_what_is_not_theirs(tmp_path, script, config, message):
    command = runpy.run_path(str(_ROOT / f"launch/{script}.py"))["main"]
    loaded = load_config(str(_ROOT / f"configs/{config}.py"), ["--config.component=critic"])
    with pytest.raises(UserError, match=message):
        command(loaded, tmp_path)


def test_a_workdir_says_what_it_was_trained_on(trained):
    config = load_config(str(_ROOT / "configs/integrator_eval.py"), [])
    config.checkpoint = str(trained[0])
    seen = side_by_side.models_of(config, "integrator")["student"].trained_on
    assert seen is not None and len(seen) == 10
    assert seen < {by_hand.trajectory(n).question_id for n in range(12)}


def test_the_export_command(trained, tmp_path):
    command = runpy.run_path(str(_ROOT / "launch/export.py"))["main"]
    overrides = [f"--config.checkpoint={trained[0]}"]
    result = command(load_config(str(_ROOT / "configs/export.py"), overrides), tmp_path)
    files = {path.name for path in (tmp_path / "model").iterdir()}
    own = {"README.md", "training.json"}
    assert files == {"adapter_config.json", "adapter_model.safetensors", *own}
    assert result["rank"] == 4 and result["folder"] == str(tmp_path / "model")
    json.dumps(result)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "float16"}, r"config\.dtype='float16' must be one of null, float32, bfloat16"),
        ({"dtype": "int8", "merge": True}, r"config\.dtype='int8' must be one of"),
        ({"share": 0.3}, r"config\.share=0\.3 needs config\.average_with"),
    ],
)
def test_what_cannot_be_exported_is_said_and_nothing_written(trained, tmp_path, changes, message):
    command = runpy.run_path(str(_ROOT / "launch/export.py"))["main"]
    overrides = [f"--config.{name}={value}" for name, value in changes.items()]
    overrides.append(f"--config.checkpoint={trained[0]}")
    with pytest.raises(UserError, match=message):
        command(load_config(str(_ROOT / "configs/export.py"), overrides), tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("base", "asked", "written"),
    [
        ("bfloat16", None, "bfloat16"),
        ("float16", None, "float32"),
        ("bfloat16", "float32", "float32"),
    ],
)
def test_a_merged_model_has_the_precision_of_its_base(trained, tmp_path, base, asked, written):
    """Whatever this machine would compute in."""
    file = pathlib.Path(open_adapter(str(trained[0]))[2]["model"]) / "config.json"
    before = file.read_text()
    try:
        file.write_text(json.dumps({**json.loads(before), "dtype": base}))
        export_adapter(str(trained[0]), tmp_path / "whole", merge=True, dtype=asked)
    finally:
        file.write_text(before)
    with safetensors.safe_open(str(tmp_path / "whole/model.safetensors"), "np") as tensors:
        assert {str(tensors.get_tensor(key).dtype) for key in list(tensors.keys())} == {written}
    assert json.loads((tmp_path / "whole/config.json").read_text())["dtype"] == written


def test_an_exported_adapter_says_what_its_workdir_says(trained, folders, tmp_path):
    folder = str(tmp_path / "model")
    told = export_adapter(str(trained[0]), pathlib.Path(folder), dtype="bfloat16")
    found = check_role(folder, "integrator")
    for name in ("prompt", "prompt_digest", "trained_on", "num_candidates", "model"):
        assert found[name] == told[name]
    with pytest.raises(UserError, match="component integrator, where reader is needed"):
        check_role(folder, "reader")
    with safetensors.safe_open(f"{folder}/adapter_model.safetensors", "np") as file:
        assert file.get_tensor(next(iter(file.keys()))).dtype == "bfloat16"
    (tmp_path / "model/training.json").write_text("{")
    with pytest.raises(UserError, match=r"training\.json cannot be read"):
        check_role(folder, "integrator")


def test_an_adapter_is_averaged_with_the_one_it_went_on_from(trained, folders, tmp_path):
    state, config, meta = open_adapter(str(trained[0]))
    model = load_decoder(str(folders[0])).config
    zeros = jax.tree.map(np.zeros_like, state)
    told = {"component": "integrator", "trained_on": ["another"]}
    before = str(save_adapter(zeros, config, tmp_path / "before", meta["model"], training=told))
    folder = tmp_path / "mean"
    export_adapter(str(trained[0]), folder, average_with=before, share=0.25)
    mean, _ = load_adapter(folder, model)
    for got, new in zip(tiny.arrays(mean), tiny.arrays(state), strict=True):
        np.testing.assert_array_equal(got, 0.25 * new)
    learnt = check_role(str(folder), "integrator")["trained_on"]
    assert set(learnt) == {*meta["trained_on"], "another"}

    with pytest.raises(UserError, match=r"config\.share=1\.0 must lie between 0 and 1"):
        export_adapter(str(trained[0]), folder, average_with=before, share=1.0)
    other = dataclasses.replace(config, alpha=2 * config.alpha)
    save_adapter(zeros, other, tmp_path / "other", meta["model"], training=told)
    with pytest.raises(UserError, match=r"config\.average_with=.* has rank 4, scale .* are needed"):
        export_adapter(str(trained[0]), folder, average_with=str(tmp_path / "other"))
    save_adapter(
        zeros, config, tmp_path / "reader", meta["model"], training={"component": "reader"}
    )
    with pytest.raises(UserError, match="component reader, where integrator is needed"):
        export_adapter(str(trained[0]), folder, average_with=str(tmp_path / "reader"))


def test_training_goes_on_from_an_adapter(trained, folders, tmp_path):
    spec = str(trained[0])
    config = config_of(folders, **{"lora.start": spec})
    base = load_decoder(str(folders[0]))
    mesh = sharding.make_mesh(1, 1, 1, devices=jax.devices()[:1])
    found, before = adapter.make_adapter(config, base.config, adapter.make_lora(config), mesh)
    state, _, meta = open_adapter(spec)
    assert hash_arrays(found) == hash_arrays(state) and before == meta["trained_on"]
    config.lora.rank = 2
    with pytest.raises(UserError, match="has rank 4, scale"):
        adapter.make_adapter(config, base.config, adapter.make_lora(config), mesh)
    config.lora.rank, config.component = 4, "reader"  # whatever it was trained for
    found, before = adapter.make_adapter(config, base.config, adapter.make_lora(config), mesh)
    assert hash_arrays(found) == hash_arrays(state) and before == meta["trained_on"]


def test_dev_questions_that_the_start_was_trained_on_are_counted(folders, capsys):
    config = config_of(folders, **{"lora.start": "W"})
    data = conversations.load_data(config, ChatTokenizer.load(str(folders[0])), 448)
    assert adapter.count_seen(config, data.trained_on, data) == 0
    assert adapter.count_seen(config_of(folders), (), data) == 0
    assert "lora.start" not in capsys.readouterr().err
    assert adapter.count_seen(config, ["another", data.measured_on[0]], data) == 1
    said = capsys.readouterr().err
    assert "WARNING: config.lora.start=W was trained on 1 of the 2 that dev examples are of" in said
    assert adapter.count_seen(config, None, data) is None
    assert "config.lora.start=W does not say what it was trained on" in capsys.readouterr().err


def test_supervised_tokens_are_counted_whatever_they_weigh(folders, monkeypatch):
    model, config = load_decoder(str(folders[0])).config, config_of(folders)
    ids = np.ones((1, 4), np.int32)
    batch = Batch(ids, ids, mask_BT=np.array([[0.0, 0.5, 4.0, 0.0]], np.float32))
    piece = MicroBatch(batch, np.zeros((1, 4), np.uint8), tokens=4, attended=16)
    monkeypatch.setattr(mfu, "peak_flops", lambda kind: 1e6)
    values = {"loss": 1.0, "tokens": 4.5}
    lora_config = adapter.make_lora(config)
    adapter.make_describe(model, lora_config)(values, [piece, piece], 2.0)
    assert values["supervised_tokens"] == 4 and "tokens" not in values
    flops = mfu.lora_flops(
        model, lora_config.rank, lora_config.names, tokens=8, supervised=4, attended=32
    )
    assert values["mfu"] == flops / 2.0 / (1e6 * jax.device_count())


# ----------------------------------------------------------------------------------------- refusals


def test_two_teachers_of_one_question_are_decoded_once(folders, tmp_path, one_device, capsys):
    one = [by_hand.trajectory(number, 1) for number in range(6)]
    two = [dataclasses.replace(t, teacher="llm") for t in one]
    both = f"('{write(tmp_path / 'a', one)}', '{write(tmp_path / 'b', two)}')"
    changes = {"decode.num_trajectories": 9, "dev_fraction": 0.4, "num_steps": 1, "eval_every": 0}
    adapter.train_and_evaluate(config_of((folders[0], both), **changes), tmp_path / "w")
    assert "dev/core_f1" in lines_of(tmp_path / "w")[-1]
    assert "dev decisions: 100%" in capsys.readouterr().err


def test_a_run_without_dev_examples_saves_and_writes_no_empty_line(folders, tmp_path, one_device):
    config = config_of(folders, dev_fraction=0.0, keep_checkpoints=9)
    adapter.train_and_evaluate(config, tmp_path)
    assert [line["step"] for line in lines_of(tmp_path)] == [1, 2, 3, 4]
    with Checkpoints(tmp_path, read_only=True) as checkpoints:
        assert checkpoints.all_steps() == [2, 4]
        assert checkpoints.best_step() is None and checkpoints.metrics(2) is None


def test_a_metric_that_is_not_measured_is_refused_before_training(folders, tmp_path, one_device):
    config = config_of(folders, best_metric="dev/core_f1", eval_every=0)
    wanted = (
        "best_metric=dev/core_f1 is not measured here; there are dev/loss, dev/loss_rationale, "
        "dev/loss_facts, dev/loss_question, dev/loss_stop$"
    )
    with pytest.raises(UserError, match=wanted):
        adapter.train_and_evaluate(config, tmp_path)
    assert not (tmp_path / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"trajectories": "nowhere"}, "nowhere does not exist"),
        ({"trajectories": "null"}, r"config\.trajectories is required"),
        ({"keep": "best"}, r"keep='best'"),
        ({"num_trajectories": -5}, r"config\.num_trajectories=-5 must not be negative"),
        ({"num_trajectories": 11}, r"num_trajectories=11, but there are 10"),
        ({"dev_fraction": 1.0}, r"dev_fraction=1\.0"),
        ({"length": 600}, r"config\.length=600 exceeds the model's 512"),
        ({"length": 30}, "nothing to train on"),
        ({"batch_size": 3, "rows_per_device": 2}, r"batch_size=3 is not a multiple of 2"),
        ({"model.remat": "some"}, r"remat='some' must be one of"),
        ({"buckets": "(9, 5)"}, r"buckets=\(9, 5\)"),
        ({"num_steps": 0, "num_epochs": 0}, "must not both be 0"),
        ({"chunk": 0}, r"config\.chunk=0"),
        ({"max_tokens": -1}, r"max_tokens=-1"),
        ({"kept_weight": -1.0}, r"config\.kept_weight=-1\.0 must not be negative"),
        ({"stop_weight": -1.0}, r"config\.stop_weight=-1\.0 must not be negative"),
        ({"keep_checkpoints": 0}, r"config\.keep_checkpoints=0 must be at least 1"),
        ({"lora.targets": "('lm_head',)"}, "lm_head"),
    ],
)
def test_what_cannot_be_trained_is_said(folders, tmp_path, one_device, changes, message):
    with pytest.raises(UserError, match=message):
        adapter.train_and_evaluate(config_of(folders, **changes), tmp_path)
    assert not (tmp_path / "metrics.jsonl").exists()


def test_a_line_that_is_no_trajectory_is_named(folders, tmp_path, one_device):
    file = tmp_path / "t.jsonl"
    file.write_text('{"question_id": "q", "question": "?"}\n')
    with pytest.raises(UserError, match=r"t\.jsonl.*1.*(steps|teacher)"):
        adapter.train_and_evaluate(config_of((folders[0], file)), tmp_path)


def test_a_step_that_is_not_finite_is_not_saved(folders, tmp_path, one_device):
    changes = {"optimizer.learning_rate": 1e30, "optimizer.clip_norm": 0.0, "eval_every": 0}
    with pytest.raises(UserError, match=r"step \d: .* not finite"):
        adapter.train_and_evaluate(config_of(folders, **changes), tmp_path)
    assert not list((tmp_path / "checkpoints").glob("[0-9]*"))


def test_operations_of_a_gradient():
    config = decoder.DecoderConfig(
        vocab_size=100, d_model=8, num_layers=3, num_heads=2, num_kv_heads=1, head_dim=4, d_ff=16
    )
    linear = 3 * (8 * 8 + 8 * 4 + 8 * 4 + 8 * 8 + 3 * 8 * 16)
    adapter = 3 * 2 * ((8 + 8) + (8 + 4))
    found = mfu.lora_flops(config, 2, ("q_proj", "v_proj"), tokens=10, supervised=4, attended=60)
    assert found == (4 * linear + 6 * adapter) * 10 + 4 * 8 * 100 * 4 + 6 * 3 * 2 * 4 * 60
    assert mfu.peak_flops("NVIDIA H100 80GB HBM3") == 989e12
    assert mfu.peak_flops("NVIDIA H100 PCIe") == 756e12
    assert mfu.peak_flops("cpu") is None
