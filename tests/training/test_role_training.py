"""Students of a role: trained, checked, exported and used, as adapters and as complete models."""

import json
import pathlib
import runpy

import jax
import numpy as np
import pytest

from cirag_jax.commands import answer, backends, evaluation, opening
from cirag_jax.commands import task as task_lib
from cirag_jax.config_files import load_config
from cirag_jax.errors import UserError
from cirag_jax.llm.types import Generate, Message
from cirag_jax.methods.dualrag import prompts
from cirag_jax.methods.dualrag.settings import DualragConfig
from cirag_jax.models.io import workdir as workdir_lib
from cirag_jax.models.io.pretrained_decoder import load_decoder
from cirag_jax.training import adapter
from configs.common import language_model
from tests import tiny, tiny_decoder
from tests.training.data.test_role_examples import example, write

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("standard_promotion")]
_ROOT = pathlib.Path(__file__).resolve().parents[2]
SETTINGS = {**DualragConfig().__dict__, "few_shot": False}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("role")
    rows = [example(i, role) for i in range(8) for role in ("reasoner", "summarizer")]
    return tiny_decoder.folder(root / "base"), write(root / "examples", rows, settings=SETTINGS)


def config_of(folders, *more):
    values = [f"model.spec={folders[0]}", f"conversations={folders[1]}", "length=128", "chunk=64"]
    values += ["num_steps=6", "eval_every=3", "dev_fraction=0.25", "lora.rank=4", "mesh.data=1"]
    values += ["batch_size=2", "buckets=(64,)", "optimizer.learning_rate=0.01", *more]
    return load_config(str(_ROOT / "configs/role.py"), [f"--config.{value}" for value in values])


@pytest.fixture(scope="module")
def trained(folders, tmp_path_factory):
    """Workdirs of an adapter of the reasoner, and of a complete model of two roles."""
    results = {}
    settings = {
        "adapter": ("role=reasoner",),
        "model": ("role=('reasoner','summarizer')", "full_parameters=true"),
    }
    from cirag_jax import sharding

    make_mesh = sharding.make_mesh
    with pytest.MonkeyPatch.context() as patch, jax.numpy_dtype_promotion("standard"):
        patch.setattr(sharding, "make_mesh", lambda *s: make_mesh(*s, devices=jax.devices()[:1]))
        for name, more in settings.items():
            folder = tmp_path_factory.mktemp(name)
            results[name] = folder, adapter.train_and_evaluate(config_of(folders, *more), folder)
    return results


def test_train_role_lowers_the_loss(trained):
    for folder, result in trained.values():
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        dev = [line["dev/loss"] for line in lines if "dev/loss" in line]
        assert len(dev) == 3 and min(dev[1:]) < 0.9 * dev[0]
        assert result["complete"] and result["dev/loss"] == result["dev/loss_answer"] == min(
            dev[1:]
        )
    (_, first), (_, second) = trained.values()
    assert first["roles"] == {"reasoner": 6}
    assert second["roles"] == {"reasoner": 6, "summarizer": 6}
    names = [workdir_lib.trained_component(str(folder)) for folder, _ in trained.values()]
    assert names == ["reasoner", "reasoner+summarizer"]


def dualrag(**values):
    flags = [f"--config.{name.replace('__', '.')}={value}" for name, value in values.items()]
    return load_config(str(_ROOT / "configs/methods/dualrag.py"), flags)


def test_check_adapters_of_role_needs_its_method_and_prompts(trained, capsys):
    spec = str(trained["adapter"][0])
    good = {"reasoner__adapter": spec, "dualrag__few_shot": "false"}
    opening.check_adapters(dualrag(**good), ("reasoner",))
    with pytest.raises(UserError, match=r"settings of few_shot; set --config\.dualrag\.few_shot=F"):
        opening.check_adapters(dualrag(reasoner__adapter=spec), ("reasoner",))
    with pytest.raises(UserError, match="component reasoner; expected summarizer or integrator"):
        opening.check_adapters(dualrag(summarizer__adapter=spec), ("summarizer",))
    other = load_config(
        str(_ROOT / "configs/methods/metarag.py"), [f"--config.reader.adapter={spec}"]
    )
    with pytest.raises(UserError, match="component reasoner; expected reader"):
        opening.check_adapters(other, ("reader",))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompts, "_REASON", "Other words.")
        with pytest.raises(UserError, match="prompts that have changed in this version"):
            opening.check_adapters(dualrag(**good), ("reasoner",))
    with pytest.MonkeyPatch.context() as patch:  # The prompts of other roles do not matter.
        patch.setattr(prompts, "_SUMMARIZE", "Other words.")
        opening.check_adapters(dualrag(**good), ("reasoner",))
    assert "WARNING" not in capsys.readouterr().err
    config = dualrag(**good, dualrag__max_steps=2)
    needs = task_lib.method_settings(config).needs
    opening.warn_of_other_inputs(config, task_lib.Task(needs, *3 * (None,)))
    err = capsys.readouterr().err
    assert "trained with other inputs: " in err and "config.dualrag.max_steps 5 (now 2)" in err


def test_check_adapters_of_another_method_is_refused(trained):
    meta = workdir_lib.check_role(str(trained["adapter"][0]), "reasoner")
    other = {**meta["prompt"], "method": "metarag"}
    with pytest.raises(UserError, match="was trained for the reasoner of metarag, not of dualrag"):
        opening._check_method(dualrag(), "reasoner", "spec", other)


def test_own_prompts_of_training_are_compared(trained, capsys):
    spec = str(trained["adapter"][0])
    config = dualrag(reasoner__adapter=spec)
    needs = task_lib.method_settings(config).needs
    task = task_lib.Task(needs, *3 * (None,))
    opening.warn_of_own_prompts(config, task)
    assert capsys.readouterr().err == ""
    meta = workdir_lib.check_role(spec, "reasoner")
    meta = {**meta, "own_prompts": {"reasoner": "0123"}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workdir_lib, "check_role", lambda *_: meta)
        opening.warn_of_own_prompts(config, task)
    assert "was trained with the prompts of a file, but this run" in capsys.readouterr().err


def text_of(**values):
    """Returns a model's greedy text."""
    block = language_model()
    with block.unlocked():
        block.update(prefix_tokens=0, batch_size=2, **values)
    backend = backends.open_backend(block)
    (response,) = backend.generate(
        [Generate((Message("system", "Be brief."), Message("user", "who?")), max_tokens=8)]
    )
    backend.close()
    return response.text


def test_export_of_complete_model_is_the_trained_model(trained, folders, tmp_path):
    spec = str(trained["model"][0])
    export = runpy.run_path(str(_ROOT / "launch/export.py"))["main"]
    config = load_config(str(_ROOT / "configs/export.py"), [f"--config.checkpoint={spec}"])
    result = export(config, tmp_path)
    assert result["merged"] is False and result["step"] == trained["model"][1]["best_step"]
    model = str(tmp_path / "model")
    kept, meta = workdir_lib.open_trained_decoder(spec)
    for a, b in zip(tiny.arrays(load_decoder(model).state), tiny.arrays(kept.state), strict=True):
        np.testing.assert_array_equal(a, b)
    base = tiny.arrays(load_decoder(str(folders[0])).state)
    assert all((a != b).any() for a, b in zip(base, tiny.arrays(kept.state), strict=True))
    assert text_of(model=model) == text_of(model=model, backend="transformers")
    assert text_of(model=model) != text_of(model=str(folders[0]))
    # The exported model is checked as an adapter is.
    assert workdir_lib.training_ids(model) == frozenset(meta["trained_on"])
    good = {"reasoner__model": model, "summarizer__model": model}
    roles = ("reasoner", "summarizer")
    opening.check_adapters(dualrag(**good, dualrag__few_shot="false"), roles)
    with pytest.raises(UserError, match="different settings of few_shot"):
        opening.check_adapters(dualrag(**good), roles)
    with pytest.raises(UserError, match=r"reasoner\+summarizer; expected entity_identifier"):
        opening.check_adapters(dualrag(entity_identifier__model=model), ("entity_identifier",))
    planned = answer.PlannedRun(
        dualrag(**good),
        task_lib.Task(task_lib.method_settings(dualrag()).needs, *3 * (None,)), [], {},
    )  # fmt: skip
    assert list(answer._trainable_models(planned)).count(model) == 2


def test_complete_model_is_no_adapter(trained, folders, tmp_path):
    spec = str(trained["model"][0])
    message = "has no adapter, because all parameters were trained; export it"
    with pytest.raises(UserError, match=message):
        opening.check_adapters(dualrag(reasoner__adapter=spec), ("reasoner",))
    with pytest.raises(UserError, match=message):
        workdir_lib.open_adapter(spec)
    with pytest.raises(UserError, match="config.average_with needs an adapter"):
        workdir_lib.export_adapter(spec, tmp_path, average_with=spec)
    with pytest.raises(UserError, match="config.lora.start must be null"):
        config = config_of(folders, "role=reasoner", "full_parameters=true", f"lora.start={spec}")
        adapter.train_and_evaluate(config, tmp_path)


def test_complete_model_resumes_with_the_same_weights(trained, folders, tmp_path, one_device):
    more = ("role=('reasoner','summarizer')", "full_parameters=true", "stop_after_minutes=1e-9")
    stopped = adapter.train_and_evaluate(config_of(folders, *more), tmp_path)
    assert 0 < stopped["step"] < 6
    resumed = adapter.train_and_evaluate(config_of(folders, *more[:2]), tmp_path)
    assert resumed["complete"]
    first, second = (
        tiny.arrays(workdir_lib.open_trained_decoder(str(folder))[0].state)
        for folder in (trained["model"][0], tmp_path)
    )
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a, b)


def test_evaluate_reader_refuses_readers_of_examples(trained, tmp_path):
    config = load_config(
        str(_ROOT / "configs/reader_eval.py"), [f"--config.checkpoint={trained['adapter'][0]}"]
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workdir_lib, "check_role", lambda *_: {"prompt": {"method": "kirag"}})
        with pytest.raises(
            UserError, match="trained on examples of kirag; evaluate it with launch"
        ):
            evaluation.models_of(config, "reader")
