"""Rotary and pre-norm encoders compared with transformers."""

import copy
import dataclasses
import functools
import json
import pathlib
from typing import Any

import jax
import numpy as np
import pytest
import torch
import transformers
from flax import nnx

from cirag_jax.errors import UserError
from cirag_jax.models.encoder import Encoder
from cirag_jax.models.io import tensor_files, weights
from cirag_jax.models.io.encoder_config import choose_tasks, read_config
from cirag_jax.models.rope import Rope, RopeScaling
from tests.models.test_encoder import batch, difference, hidden_states, torch_hidden

SIZES = {
    "vocab_size": 101,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "pad_token_id": 0,
}
MODERN = {**SIZES, "local_attention": 8, "initializer_cutoff_factor": 3.0}
MODELS: dict[str, tuple[type, type, dict[str, Any]]] = {
    "modernbert": (transformers.ModernBertModel, transformers.ModernBertConfig, MODERN),
    "nomic_bert": (transformers.NomicBertModel, transformers.NomicBertConfig, SIZES),
    "gte": (transformers.GteModel, transformers.GteConfig, SIZES),
    "jina_embeddings_v3": (
        transformers.JinaEmbeddingsV3Model,
        transformers.JinaEmbeddingsV3Config,
        SIZES,
    ),
}


def hf_model(kind: str, **changes: Any) -> transformers.PreTrainedModel:
    """Returns a tiny random model whose biases and norms are random, too."""
    torch.manual_seed(0)
    model, config, fields = MODELS[kind]
    model = model(config(**{**fields, **changes})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
            elif "embeddings" not in name:
                parameter.normal_(std=0.2)
    return model


def load(folder: pathlib.Path, **changes: Any):
    config, raw = read_config(folder)
    config = dataclasses.replace(config, **{"attention": "transposed", **changes})
    return config, *weights.load_state(folder, config, raw["model_type"])


@pytest.mark.parametrize(("attention", "scan_layers"), [("transposed", False), ("xla", True)])
@pytest.mark.parametrize("kind", MODELS)
def test_rotary_encoder_outputs_and_gradient_equal_transformers(
    tmp_path, kind, attention, scan_layers
):
    """Texts of up to 40 tokens are longer than ModernBERT's windows of 4 tokens on each side."""
    model = hf_model(kind)
    model.save_pretrained(tmp_path)
    config, graphdef, state = load(
        tmp_path, attention=attention, scan_layers=scan_layers, remat=scan_layers
    )
    tokens_BT, mask_BT = batch(config.pad_id, length=40)
    hidden_BTD = model(
        input_ids=torch.tensor(tokens_BT, dtype=torch.int64),
        attention_mask=torch.tensor(mask_BT, dtype=torch.int64),
    ).last_hidden_state
    weight_BTD = np.random.default_rng(1).normal(size=hidden_BTD.shape).astype(np.float32)
    weight_BTD *= mask_BT[..., None] / mask_BT.sum()
    (hidden_BTD * torch.tensor(weight_BTD)).sum().backward()

    def loss(state):
        ours_BTD = nnx.merge(graphdef, state)(tokens_BT, mask_BT)
        return (ours_BTD * weight_BTD).sum(), ours_BTD

    gradient, ours_BTD = jax.jit(jax.grad(loss, has_aux=True))(state)
    assert difference(ours_BTD, hidden_BTD.detach().numpy(), mask_BT) < 2e-5
    ours = weights.to_tensors(gradient, config, kind)
    theirs = {name: p.grad for name, p in model.named_parameters() if "pooler" not in name}
    assert ours.keys() == theirs.keys()
    for name in ours:
        np.testing.assert_allclose(ours[name], theirs[name], atol=1e-5, err_msg=name)


@pytest.mark.parametrize("kind", ["nomic_bert", "gte", "jina_embeddings_v3"])
def test_load_state_names_of_modules_give_same_parameters(tmp_path, kind):
    model = hf_model(kind)
    model.save_pretrained(tmp_path)
    config, _, state = load(tmp_path)
    tensors = {name: x.detach().numpy().copy() for name, x in model.named_parameters()}
    tensor_files.save_tensors(tensors, tmp_path / "model.safetensors")
    _, _, again = load(tmp_path, scan_layers=False)
    for one, other in zip(jax.tree.leaves(state), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(one, other)
    published = weights.to_tensors(state, config, kind, published=True)
    assert not any("self_attn" in name for name in published)


def published_config(kind: str, **changes: Any) -> dict[str, Any]:
    """Returns a config.json with the fields of a published model, in the sizes of `SIZES`."""
    same = {name: SIZES[name] for name in ("vocab_size", "pad_token_id", "initializer_range")}
    sizes = {**SIZES, "auto_map": {"AutoModel": "modeling--Model"}}
    configs = {
        "nomic": {
            **same, "model_type": "nomic_bert", "n_embd": 32, "n_head": 4, "n_inner": 48,
            "n_layer": 3, "n_positions": 64, "max_trained_positions": 64, "type_vocab_size": 2,
            "activation_function": "swiglu", "prenorm": False, "use_rms_norm": False,
            "parallel_block": False, "causal": False, "qkv_proj_bias": False,
            "mlp_fc1_bias": False, "mlp_fc2_bias": False, "layer_norm_epsilon": 1e-12,
            "rotary_emb_base": 1000, "rotary_emb_fraction": 1.0, "rotary_emb_interleaved": False,
            "rotary_emb_scale_base": None, "rotary_scaling_factor": None,
            "auto_map": sizes["auto_map"],
        },
        "gte": {
            **sizes, "model_type": "new", "hidden_act": "gelu", "layer_norm_type": "layer_norm",
            "layer_norm_eps": 1e-12, "type_vocab_size": 1, "pack_qkv": True, "rope_theta": 160000.0,
            "position_embedding_type": "rope", "logn_attention_scale": False,
        },
        "jina": {
            **sizes, "model_type": "xlm-roberta", "position_embedding_type": "rotary",
            "rotary_emb_base": 20000.0, "type_vocab_size": 1, "layer_norm_eps": 1e-5,
            "hidden_act": "gelu", "use_flash_attn": True, "emb_pooler": "mean",
        },
        "modernbert": {
            **MODERN, "model_type": "modernbert", "global_attn_every_n_layers": 3,
            "global_rope_theta": 160000.0, "local_rope_theta": 10000.0, "layer_norm_eps": 1e-5,
            "position_embedding_type": "absolute", "hidden_activation": "gelu",
        },
    }  # fmt: skip
    return {**configs[kind], **changes}


@pytest.mark.parametrize(
    ("published", "kind"),
    [("nomic", "nomic_bert"), ("gte", "gte"), ("jina", "jina_embeddings_v3"),
     ("modernbert", "modernbert")],
)  # fmt: skip
def test_read_config_published_fields_equal_those_of_transformers(tmp_path, published, kind):
    _, config_class, fields = MODELS[kind]
    config_class(**fields).save_pretrained(tmp_path)
    wanted, _ = read_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(published_config(published)))
    config, raw = read_config(tmp_path)
    assert config == wanted and "auto_map" not in raw
    (tmp_path / "config.json").write_text(json.dumps(raw))
    again = transformers.AutoConfig.from_pretrained(tmp_path)
    assert isinstance(again, config_class)
    again.save_pretrained(tmp_path)
    assert read_config(tmp_path)[0] == wanted


def test_read_config_defaults_equal_those_of_transformers(tmp_path):
    """transformers leaves out fields with default values of its classes' base classes."""
    for kind, (_, config_class, _) in MODELS.items():
        config_class().save_pretrained(tmp_path)
        wanted, _ = read_config(tmp_path)
        sizes = {name: getattr(config_class(), name) for name in SIZES if name in SIZES}
        sizes = {name: sizes[name] for name in sizes if not name.startswith("pad")}
        (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, **sizes}))
        assert read_config(tmp_path)[0] == wanted, kind
        if kind != "modernbert":  # rotary positions without a base
            rope = {"rope_type": "linear", "factor": 2.0}
            fields = {"model_type": kind, **sizes, "rope_parameters": rope}
            (tmp_path / "config.json").write_text(json.dumps(fields))
            theta = config_class(rope_parameters=dict(rope)).rope_parameters["rope_theta"]
            assert read_config(tmp_path)[0].rope == Rope(theta, RopeScaling("linear", 2.0))


TASKS = ["retrieval.query", "retrieval.passage", "separation"]


def jina_folder(folder: pathlib.Path) -> transformers.PreTrainedModel:
    """Writes a jina-embeddings-v3 as published, with random task adapters; returns its base.

    The format of adapters: the weight of task t is ``W + s B[t] A[t]`` in linear layers and ``W + s
    A[t] B[t]`` in embedding tables, with s = alpha / rank (Sturua et al., 2024, section 4).
    """
    model = hf_model("jina_embeddings_v3")
    model.save_pretrained(folder)
    raw = published_config("jina", lora_adaptations=TASKS, lora_rank=2, lora_alpha=3)
    raw["task_instructions"] = {"retrieval.query": "who is ", "retrieval.passage": "known for "}
    (folder / "config.json").write_text(json.dumps(raw))
    rng = np.random.default_rng(0)
    tensors = {}
    for name, _, array in tensor_files.read_tensors(folder):
        if array.ndim < 2:
            tensors[f"roberta.{name}"] = array
            continue
        base = f"roberta.{name.removesuffix('.weight')}.parametrizations.weight"
        tensors[f"{base}.original"] = array
        (rows, columns), count = array.shape, len(TASKS)
        sides = {"A": (count, 2, columns), "B": (count, rows, 2)}
        if "embeddings" in name:
            sides = {"A": (count, rows, 2), "B": (count, 2, columns)}
        for side, shape in sides.items():
            factor = 0.3 * rng.normal(size=shape).astype(np.float32)
            tensors[f"{base}.0.lora_{side}"] = factor
    tensor_files.save_tensors(tensors, folder / "model.safetensors")
    return model


def with_task(model: transformers.PreTrainedModel, folder: pathlib.Path, task: int):
    """Adds the adapter of a task to the weights of a base model."""
    tensors = {name: array for name, _, array in tensor_files.read_tensors(folder)}
    state = model.state_dict()
    for name, array in tensors.items():
        if not name.endswith("lora_A"):
            continue
        a, b = array[task], tensors[f"{name[:-1]}B"][task]
        change = 1.5 * torch.tensor(a @ b if "embeddings" in name else b @ a)
        module = name.removeprefix("roberta.").removesuffix(".parametrizations.weight.0.lora_A")
        module = module.replace("encoder.layers", "layers")
        if "Wqkv" in module:
            for part, rows in zip("qkv", change.chunk(3), strict=True):
                state[module.replace("mixer.Wqkv", f"self_attn.{part}_proj") + ".weight"] += rows
        else:
            state[module.replace("mixer.out_proj", "self_attn.o_proj") + ".weight"] += change


@pytest.mark.parametrize("scan_layers", [False, True])
def test_jina_task_adapters_equal_merged_weights(tmp_path, scan_layers):
    """Each row of one batch has the adapter of its role."""
    jina_folder(tmp_path)
    plain, raw = read_config(tmp_path)
    config, names = choose_tasks(plain, raw, "config.json", None)
    assert names == ("retrieval.query", "retrieval.passage") and config.tasks == (0, 1)
    config = dataclasses.replace(config, attention="transposed", scan_layers=scan_layers)
    graphdef, state = weights.load_state(tmp_path, config, raw["model_type"])
    tokens_BT, mask_BT = batch(config.pad_id, length=20)
    passage_B = np.arange(len(tokens_BT)) % 2 == 1

    @jax.jit
    def hidden(state):
        return nnx.merge(graphdef, state)(tokens_BT, mask_BT, passage_B=passage_B)

    ours_BTD = np.asarray(hidden(state))
    for passage in (False, True):
        model = jina_folder(tmp_path)
        with_task(model, tmp_path, int(passage))
        theirs_BTD = torch_hidden(model, tokens_BT, mask_BT)
        rows = passage_B == passage
        assert difference(ours_BTD[rows], theirs_BTD[rows], mask_BT[rows]) < 2e-5
        assert difference(ours_BTD[~rows], theirs_BTD[~rows], mask_BT[~rows]) > 0.1
        merged, config_of = weights.merge_tasks(state, config, passage=passage)
        graph = nnx.split(nnx.eval_shape(lambda c=config_of: Encoder(c, rngs=nnx.Rngs(0))))[0]
        again_BTD = hidden_states(graph, merged, tokens_BT, mask_BT)
        assert difference(again_BTD, theirs_BTD, mask_BT) < 2e-5
    tensors = weights.to_tensors(state, config, raw["model_type"])
    again = weights.from_tensors(tensors, state, config, raw["model_type"])
    for one, other in zip(jax.tree.leaves(state), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(one, other)
    _, base = weights.load_state(tmp_path, plain, raw["model_type"])
    assert not any("task" in str(path) for path, _ in nnx.to_flat_state(base))


def test_choose_tasks_by_name(tmp_path):
    jina_folder(tmp_path)
    plain, raw = read_config(tmp_path)
    choose = functools.partial(choose_tasks, plain, raw, "config.json")
    assert choose("none") == (plain, ())
    assert choose("separation")[0].tasks == (2,)
    assert choose("separation, separation")[0].tasks == (2,)
    assert choose("retrieval.passage,retrieval.query")[0].tasks == (1, 0)
    with pytest.raises(UserError, match="config.json: the model has no task 'x'; its tasks are: r"):
        choose("x")
    with pytest.raises(
        UserError, match="config.json: tasks .* must be one task, or those of queries and"
    ):
        choose(",".join(TASKS))
    assert choose_tasks(plain, {}, "config.json", None) == (plain, ())


def scaled(kind: str, **fields: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": 1000.0, "factor": 2.0, **fields}


TRAINED = {"original_max_position_embeddings": 16}
LLAMA3 = scaled("llama3", low_freq_factor=1.0, high_freq_factor=4.0, **TRAINED)
YARN = scaled("yarn", factor=4.0, beta_fast=2, **TRAINED)
LONGROPE = scaled(
    "longrope",
    short_factor=[1.0, 1.1, 1.2, 1.3],
    long_factor=[1.5, 2.0, 3.0, 4.0],
    **{**TRAINED, "factor": 4.0},
)


@pytest.mark.parametrize(
    ("kind", "scaling", "limit"),
    [
        ("nomic_bert", scaled("dynamic"), 32),
        ("nomic_bert", YARN, 16),
        ("nomic_bert", scaled("llama3", low_freq_factor=0.5, high_freq_factor=2.0), 16),
        ("gte", scaled("dynamic", factor=3.0), 48),
        ("gte", LLAMA3, 16),
        ("gte", LONGROPE, 16),
        ("jina_embeddings_v3", {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5}, 16),
        ("jina_embeddings_v3", LONGROPE, 16),
        ("modernbert", [scaled("linear")] * 2, 16),
        ("modernbert", [scaled("dynamic"), {"rope_type": "default", "rope_theta": 100.0}], 16),
        ("modernbert", [YARN, LLAMA3], 16),
        ("modernbert", [LLAMA3, {**YARN, "attention_factor": 0.8}], 16),
        ("modernbert", [LONGROPE, LONGROPE], 16),
    ],
)
def test_rotary_encoder_scaled_positions_equal_transformers(tmp_path, kind, scaling, limit):
    """Texts of 40 tokens are longer than the trained length of 16; each is scaled by its length."""
    if kind == "modernbert":
        scaling = dict(zip(("full_attention", "sliding_attention"), scaling, strict=True))
    model = hf_model(kind, max_position_embeddings=16, rope_parameters=copy.deepcopy(scaling))
    model.save_pretrained(tmp_path)
    config, raw = read_config(tmp_path)
    assert config.max_length == limit
    config = dataclasses.replace(config, max_positions=64, attention="transposed")
    graphdef, state = weights.load_state(tmp_path, config, raw["model_type"])
    tokens_BT, mask_BT = batch(config.pad_id, length=40)
    mask_BT[:, :4] = True
    assert {True, False} == {bool(length > 16) for length in mask_BT.sum(1)}
    ours_BTD = np.asarray(hidden_states(graphdef, state, tokens_BT, mask_BT))
    for row, length in enumerate(mask_BT.sum(1)):
        alone = np.s_[row : row + 1, :length]
        theirs_BTD = torch_hidden(model, tokens_BT[alone], mask_BT[alone])
        assert difference(ours_BTD[alone], theirs_BTD, mask_BT[alone]) < 2e-5


@pytest.mark.parametrize(
    ("published", "change", "message"),
    [
        ("nomic", {"prenorm": True}, "field prenorm is True; supported: false"),
        ("nomic", {"num_experts": 8}, "field num_experts is 8; supported: 0"),
        ("nomic", {"qkv_proj_bias": True}, "field qkv_proj_bias is True"),
        (
            "nomic",
            {"activation_function": "gelu"},
            "activation_function is 'gelu'; .* swiglu",
        ),
        ("nomic", {"rotary_emb_interleaved": True}, "field rotary_emb_interleaved is True"),
        ("nomic", {"rotary_emb_fraction": 0.1}, "field partial_rotary_factor is 0.1"),
        ("nomic", {"n_head": 5}, "field hidden_size is 32; supported: multiples of 10"),
        ("gte", {"layer_norm_type": "rms_norm"}, "field layer_norm_type is 'rms_norm'"),
        ("gte", {"pack_qkv": False}, "field pack_qkv is False"),
        ("gte", {"rope_scaling": {"type": "ntk", "factor": 2, "mixed_b": 0.6}}, "field mixed_b is"),
        ("gte", {"rope_scaling": {"type": "yarn", "factor": 2}}, "rope_scaling.type is 'yarn'"),
        (
            "gte",
            {"rope_scaling": {"type": "linear", "factor": 0}},
            "field factor is 0.0; .* above 0",
        ),
        ("gte", {"rope_scaling": 3}, "field rope_scaling is 3; supported: an object"),
        ("jina", {"position_embedding_type": "alibi"}, "field position_embedding_type is 'alibi'"),
        (
            "modernbert",
            {"layer_types": ["full_attention"]},
            "field layer_types is .* 3 times",
        ),
        (
            "modernbert",
            {"local_attention": 1},
            "field local_attention is 1; supported: 2",
        ),
        ("modernbert", {"global_attn_every_n_layers": 0}, "global_attn_every_n_layers is 0, not a"),
        (
            "modernbert",
            {"rope_parameters": {"full_attention": 5}},
            r"field rope_parameters.full_attention is 5; supported: an object",
        ),
        (
            "modernbert",
            {"rope_scaling": [1]},
            r"field rope_scaling is \[1\]; supported: an object",
        ),
        (
            "modernbert",
            {"rope_parameters": {"x": {}}},
            "field rope_parameters is .* one of",
        ),
        (
            "modernbert",
            {"rope_scaling": {**LONGROPE, "long_factor": [1.0]}},
            "field long_factor has 1 numbers; a head needs 4",
        ),
        ("jina", {"rope_scaling": {"type": "su"}}, "field rope_type is 'su'; .* llama3, yarn, lon"),
        ("modernbert", {"hidden_activation": "tanh"}, "field hidden_activation is 'tanh'"),
        ("modernbert", {"norm_bias": 1}, "field norm_bias is 1, neither true nor false"),
    ],
)
def test_read_config_unsupported_field_of_published_model_raises(
    tmp_path, published, change, message
):
    (tmp_path / "config.json").write_text(json.dumps(published_config(published, **change)))
    with pytest.raises(UserError, match=message):
        read_config(tmp_path)


def test_read_config_scaled_positions_of_published_models(tmp_path):
    def rope(published, **changes):
        (tmp_path / "config.json").write_text(json.dumps(published_config(published, **changes)))
        config, raw = read_config(tmp_path)
        (tmp_path / "config.json").write_text(json.dumps(raw))
        assert read_config(tmp_path)[0] == config
        return config

    nomic = rope("nomic", rotary_scaling_factor=2, max_trained_positions=16)
    assert nomic.rope == Rope(1000.0, RopeScaling("dynamic", 2.0, 16)) and nomic.max_length == 64
    assert rope("nomic", rotary_emb_fraction=0.5).rotary_dim == 4
    multilingual = rope("gte", rope_theta=20000.0, rope_scaling={"type": "ntk", "factor": 8.0})
    assert multilingual.rope == Rope(160000.0, RopeScaling("linear", 8.0 ** (2 / 8)))
