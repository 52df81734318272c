"""Using and exporting a trained adapter."""

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

from cirag_jax.commands import backends, evaluation, identity, opening
from cirag_jax.config_files import load_config
from cirag_jax.errors import UserError
from cirag_jax.llm.types import Generate, Message
from cirag_jax.methods.cirag import prompts
from cirag_jax.methods.common import extraction
from cirag_jax.models.io import workdir
from cirag_jax.models.io.peft_format import load_adapter, save_adapter
from cirag_jax.models.io.pretrained_decoder import load_decoder
from cirag_jax.models.io.workdir import check_role, export_adapter, open_adapter
from configs import common
from tests import tiny
from tests.distill import by_hand
from tests.training.students import train

pytestmark = pytest.mark.usefixtures("short_instruction")

_ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def trained(folders, tmp_path_factory):
    """The workdir and result of a short training run."""
    return train(folders, tmp_path_factory.mktemp("trained"))[:2]


def language_model(**changes):
    config = common.language_model()
    config.update({"context": 512, "prefix_tokens": 0, "batch_size": 2, **changes})
    return config


def texts(**changes):
    """Returns the greedy answers of a backend to two prompts, up to forty tokens each."""
    backend = backends.open_backend(language_model(**changes))
    requests = [
        Generate((Message("user", text),), max_tokens=40)
        for text in ("who is the patron of the town?", "where was the sailor born?")
    ]
    return [response.text for response in backend.generate(requests)]


def test_export_adapter_merged_and_peft_decode_the_same(trained, folders, tmp_path):
    pytest.importorskip("peft")
    workdir, base = str(trained[0]), str(folders[0])
    meta = export_adapter(workdir, tmp_path / "peft")
    export_adapter(workdir, tmp_path / "whole", merge=True)
    state, config, _ = open_adapter(workdir)
    reloaded, reloaded_config = load_adapter(tmp_path / "peft", load_decoder(base).config)
    for a, b in zip(tiny.arrays(state), tiny.arrays(reloaded), strict=True):
        np.testing.assert_array_equal(a, b)
    assert reloaded_config == config and meta["step"] == trained[1]["best_step"]
    expected = texts(adapter=workdir)  # The workdir names the base model.
    assert expected == texts(adapter=workdir, model=base)
    assert expected != texts(model=base)
    assert expected == texts(adapter=workdir, merge_adapter=True)
    assert expected == texts(adapter=str(tmp_path / "peft"), model=base)
    assert expected == texts(model=str(tmp_path / "whole"))
    from tests.tiny_adapter import quiet_peft

    with quiet_peft():
        assert expected == texts(adapter=workdir, backend="transformers")
    assert not list(tmp_path.parent.glob("cirag_adapter*"))


def test_identity_contains_hash_of_adapter(trained, folders, tmp_path):
    settings = identity.of_language_model(language_model(adapter=str(trained[0])))
    assert settings["model"] == str(folders[0])
    assert set(settings["adapter_weights"]) == {"checkpoint", "base"}
    assert settings["adapter_weights"]["base"] == settings["weights"]
    with pytest.raises(UserError, match="no complete checkpoint"):
        (tmp_path / "checkpoints").mkdir()
        backends.model_name(language_model(adapter=str(tmp_path)))


def test_check_adapters_changed_prompts_are_refused(trained):
    config = load_config(
        str(_ROOT / "configs/methods/cirag.py"), [f"--config.integrator.adapter={trained[0]}"]
    )
    opening.check_adapters(config, ("integrator",))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompts, "render_decision", lambda *_: "other words")
        with pytest.raises(UserError, match="have changed in this version; train it again"):
            opening.check_adapters(config, ("integrator",))
    # Adapters without a prompt digest are older than a change of one format.
    for prompt_format, refused in (("multi_turn", False), ("paper", True)):
        prompt = {"normalization": "ascii", "prompt_format": prompt_format, "few_shot": False}
        with pytest.raises(UserError) if refused else contextlib.nullcontext():
            opening.check_prompts("student", {"prompt": prompt})


def test_check_adapters_other_role_or_settings_are_refused(trained, folders, capsys, tmp_path):
    workdir = str(trained[0])

    def check(role, **changes):
        values = {f"{role}.adapter": workdir, "cirag.num_candidates": 2, **changes}
        overrides = [f"--config.{key}={value}" for key, value in values.items()]
        config = load_config(str(_ROOT / "configs/methods/cirag.py"), overrides)
        opening.check_adapters(config, (role,))

    check("integrator")
    for role in ("extractor", "reader"):
        with pytest.raises(UserError, match=f"component integrator; expected {role}"):
            check(role)
    assert "WARNING" not in capsys.readouterr().err
    check("integrator", **{"cirag.num_candidates": 15})
    assert "cirag.num_candidates=15, but" in capsys.readouterr().err
    expected = (
        r"different settings of normalization, few_shot; set --config\.cirag\.normalization=ascii "
        r"--config\.cirag\.few_shot=False\.$"
    )
    with pytest.raises(UserError, match=expected):
        check("integrator", **{"cirag.few_shot": True, "cirag.normalization": "unicode"})
    check("integrator", **{"cirag.few_shot": True, "integrator.backend": "openai"})
    sentences = {"cirag.units": "sentence", "cirag.prompt_format": "compact"}
    with pytest.raises(UserError, match=r"settings of units, .*--config\.cirag\.units=triple"):
        check("integrator", **sentences)
    export_adapter(workdir, tmp_path / "peft")  # Older exports have no units.
    description = json.loads((tmp_path / "peft/training.json").read_text("utf-8"))
    assert description["prompt"].pop("units") == "triple"
    (tmp_path / "peft/training.json").write_text(json.dumps(description))
    check("integrator", **{"integrator.adapter": tmp_path / "peft"})
    with pytest.raises(UserError, match=r"different settings of units, .*cirag\.units=triple"):
        check("integrator", **{"integrator.adapter": tmp_path / "peft", **sentences})
    old = shutil.copytree(workdir, tmp_path / "old")
    for file in old.glob("checkpoints/*/meta/*"):
        file.write_text(file.read_text("utf-8").replace('"prompt":', '"rendering":'))
    with pytest.raises(UserError, match="old has no prompt settings, .* earlier version"):
        check("integrator", **{"integrator.adapter": old})
    block = language_model(adapter=workdir)
    with pytest.raises(UserError, match="; expected extractor"):
        extraction.check_adapter(block, extraction.ExtractionSettings())


@pytest.mark.parametrize(
    ("script", "config", "message"),
    [
        ("train", "integrator_eval", "--config is not a training config"),
        ("evaluate", "integrator", "--config is not an evaluation config"),
        ("train", "integrator", "config.component='critic' is not one of aligner, "),
        (
            "evaluate",
            "integrator_eval",
            "config.component='critic' is not one of null, integrator, ",
        ),
    ],
)
def test_command_wrong_config_or_component_is_refused(tmp_path, script, config, message):
    command = runpy.run_path(str(_ROOT / f"launch/{script}.py"))["main"]
    loaded = load_config(str(_ROOT / f"configs/{config}.py"), ["--config.component=critic"])
    with pytest.raises(UserError, match=message):
        command(loaded, tmp_path)


def test_training_ids_of_workdir_are_training_questions(trained):
    seen = workdir.training_ids(str(trained[0]))
    assert seen is not None and len(seen) == 10
    assert seen < {by_hand.trajectory(n).question_id for n in range(12)}


def test_models_of_student_with_own_prompts_is_refused(trained, monkeypatch):
    meta = check_role(str(trained[0]), "integrator")
    assert meta["own_prompts"] is None
    monkeypatch.setattr(workdir, "check_role", lambda *_: {**meta, "own_prompts": "digest"})
    config = load_config(str(_ROOT / "configs/integrator_eval.py"), [])
    config.checkpoint = str(trained[0])
    with pytest.raises(UserError, match="was trained with the prompts of a file, which this eval"):
        evaluation.models_of(config, "integrator")


def test_export_command_writes_peft_folder(trained, tmp_path):
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
        ({"dtype": "float16"}, r"config\.dtype='float16' is not one of null, float32, bfloat16"),
        ({"dtype": "int8", "merge": True}, r"config\.dtype='int8' is not one of"),
        ({"share": 0.3}, r"config\.share=0\.3 needs config\.average_with"),
    ],
)
def test_export_command_invalid_config_writes_nothing(trained, tmp_path, changes, message):
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
def test_export_adapter_merged_has_precision_of_base(trained, tmp_path, base, asked, written):
    """The precision depends on the base's config or the request, not on the machine."""
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


def test_export_adapter_keeps_description_of_workdir(trained, folders, tmp_path):
    folder = str(tmp_path / "model")
    description = export_adapter(str(trained[0]), pathlib.Path(folder), dtype="bfloat16")
    exported = check_role(folder, "integrator")
    names = ("prompt", "prompt_digest", "own_prompts", "trained_on", "num_candidates", "model")
    for name in names:
        assert exported[name] == description[name]
    with pytest.raises(UserError, match="component integrator; expected reader"):
        check_role(folder, "reader")
    with safetensors.safe_open(f"{folder}/adapter_model.safetensors", "np") as file:
        assert file.get_tensor(next(iter(file.keys()))).dtype == "bfloat16"
    (tmp_path / "model/training.json").write_text("{")
    with pytest.raises(UserError, match=r"training\.json cannot be read"):
        check_role(folder, "integrator")


def test_export_adapter_average_with_start(trained, folders, tmp_path):
    state, config, meta = open_adapter(str(trained[0]))
    model = load_decoder(str(folders[0])).config
    zeros = jax.tree.map(np.zeros_like, state)
    description = {"component": "integrator", "trained_on": ["another"]}
    before = str(
        save_adapter(zeros, config, tmp_path / "before", meta["model"], training=description)
    )
    folder = tmp_path / "mean"
    export_adapter(str(trained[0]), folder, average_with=before, share=0.25)
    mean, _ = load_adapter(folder, model)
    for got, new in zip(tiny.arrays(mean), tiny.arrays(state), strict=True):
        np.testing.assert_array_equal(got, 0.25 * new)
    trained_on = check_role(str(folder), "integrator")["trained_on"]
    assert set(trained_on) == {*meta["trained_on"], "another"}

    with pytest.raises(UserError, match=r"config\.share=1\.0 must lie between 0 and 1"):
        export_adapter(str(trained[0]), folder, average_with=before, share=1.0)
    other = dataclasses.replace(config, alpha=2 * config.alpha)
    save_adapter(zeros, other, tmp_path / "other", meta["model"], training=description)
    with pytest.raises(UserError, match=r"config\.average_with=.* has rank 4.*; expected rank"):
        export_adapter(str(trained[0]), folder, average_with=str(tmp_path / "other"))
    save_adapter(
        zeros, config, tmp_path / "reader", meta["model"], training={"component": "reader"}
    )
    with pytest.raises(UserError, match="component reader; expected integrator"):
        export_adapter(str(trained[0]), folder, average_with=str(tmp_path / "reader"))
