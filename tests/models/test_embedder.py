"""Decoders as text encoders equal sentence-transformers, and NV-Embed-v2 its official formulas."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import tokenizers
import torch
import transformers
from sentence_transformers import SentenceTransformer
from tokenizers import processors

from cirag_jax.errors import UserError
from cirag_jax.models.io.export import export_sentence_transformers
from cirag_jax.models.io.pretrained import load_encoder
from cirag_jax.models.pooling import UNPOOLED, embed
from cirag_jax.retrieval.encode import encode
from tests import tiny, tiny_embedder

pytestmark = pytest.mark.slow

TEXTS = ["the sailor was born", "a", "who is it?", "the weaver was born in 1984. " * 3]


def theirs(folder):
    return SentenceTransformer(str(folder), device="cpu", local_files_only=True)


def check_equal(folder):
    """Checks that both libraries give equal query and passage vectors."""
    encoder, model = load_encoder(str(folder)), theirs(folder)
    for kind, function in (("query", model.encode_query), ("passage", model.encode_document)):
        wanted = function(TEXTS, normalize_embeddings=True, show_progress_bar=False)
        np.testing.assert_allclose(encode(encoder, None, TEXTS, kind=kind), wanted, atol=1e-6)
    return encoder


@pytest.mark.parametrize(
    ("family", "pooling", "include_prompt"),
    [
        ("qwen3", "lasttoken", True),
        ("mistral", "lasttoken", True),
        ("llama", "mean", False),
        ("qwen2", "cls", False),
        ("gemma2", "mean", True),
    ],
)
def test_decoder_vectors_equal_sentence_transformers(tmp_path, family, pooling, include_prompt):
    folder = tiny_embedder.folder(
        tmp_path / "model", family, pooling=pooling, include_prompt=include_prompt
    )
    encoder = check_equal(folder)
    assert (encoder.pooling, encoder.dim) == (pooling, tiny_embedder.WIDTH)
    assert encoder.query_prefix == tiny_embedder.INSTRUCTION


@pytest.mark.parametrize("family", ["mistral", "phi3"])
def test_decoder_side_of_padding_does_not_matter(tmp_path, family):
    """With padding, the texts are longer than the 15 tokens at which Phi-3's positions change."""
    encoder = load_encoder(str(tiny_embedder.folder(tmp_path / "model", family)))
    rng = np.random.default_rng(0)
    tokens = rng.integers(3, 300, (2, 9)).astype(np.int32)
    padding, ones = np.zeros((2, 7), np.int32), np.ones((2, 9), np.int8)
    run = jax.jit(embed, static_argnums=0)
    rows = []
    for order in (1, -1):
        tokens_BT = np.concatenate([tokens, padding][::order], axis=1)
        mask_BT = np.concatenate([ones, padding.astype(np.int8)][::order], axis=1)
        rows.append(run(encoder.graphdef, encoder.state, tokens_BT, mask_BT))
    np.testing.assert_allclose(*rows, atol=1e-6)


def test_decoder_end_token_of_tokenizer_config_is_added(tmp_path):
    """Like E5-Mistral's, whose tokenizer.json does not have it."""
    folder = tiny_embedder.folder(tmp_path / "model", "mistral")
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {"add_eos_token": True, "padding_side": "left"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    encoder = load_encoder(str(folder))
    (row,) = encoder.tokenize(["a"])
    assert (row.ids[0], row.ids[-1]) == (1, 2)
    (row,) = encoder.tokenize(["the town " * 90], 8)
    assert (len(row.ids), row.ids[-1]) == (8, 2)  # the end token survives truncation
    settings["eos_token"] = "</s>"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(UserError, match="cannot add its eos_token '</s>' to texts"):
        load_encoder(str(folder))


def test_decoder_bidirectional_equals_transformers(tmp_path):
    """Longer than one block, so that attention runs in blocks."""
    folder = tiny_embedder.folder(
        tmp_path / "model", "llama", pooling="mean", max_position_embeddings=700
    )
    text = "the sailor was born in the harbour town. " * 40
    encoder = load_encoder(str(folder), bidirectional=True)
    model = transformers.AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
    ids = torch.tensor([encoder.tokenize([text], 600)[0].ids])
    with torch.no_grad():
        mask = torch.zeros(1, 1, ids.shape[1], ids.shape[1])
        hidden = model(ids, attention_mask=mask).last_hidden_state.mean(1)
    wanted = torch.nn.functional.normalize(hidden).numpy()
    ours = encode(encoder, None, [text], max_length=600)
    assert ids.shape[1] > 300
    np.testing.assert_allclose(ours, wanted, atol=5e-7)
    causal = encode(load_encoder(str(folder)), None, [text], max_length=600)
    assert np.abs(causal - ours).max() > 1e-2
    raw = json.loads((folder / "config.json").read_text()) | {"is_causal": False}
    (folder / "config.json").write_text(json.dumps(raw))
    np.testing.assert_array_equal(
        ours, encode(load_encoder(str(folder)), None, [text], max_length=600)
    )


def dense(d_in, d_out, activation, **fields):
    name = f"torch.nn.modules.activation.{activation}"
    name = "torch.nn.modules.linear.Identity" if activation == "Identity" else name
    return {"in_features": d_in, "out_features": d_out, "activation_function": name, **fields}


DENSE = (dense(32, 48, "Tanh"), dense(48, 20, "Identity", bias=False))


def test_dense_layers_over_decoder_equal_sentence_transformers(tmp_path):
    layers = (dense(32, 48, "GELU"), dense(48, 20, "SiLU"))
    folder = tiny_embedder.folder(tmp_path / "model", pooling="mean", dense=layers)
    assert check_equal(folder).dim == 20


def test_embedding_gemma_equals_sentence_transformers(tmp_path):
    """Bidirectional Gemma 3 with windows to both sides, and two dense layers."""
    prompts = {"query": "task: search result | query: ", "document": "title: none | text: "}
    folder = tiny_embedder.folder(
        tmp_path / "model",
        "gemma3_text",
        pooling="mean",
        prompts=prompts,
        dense=(dense(32, 64, "Identity", bias=False), dense(64, 32, "Identity", bias=False)),
        use_bidirectional_attention=True,
    )
    encoder = check_equal(folder)
    windows = encoder.config.decoder.windows
    assert not encoder.config.decoder.causal and 0 < max(windows) < 8
    assert (encoder.query_prefix, encoder.passage_prefix) == tuple(prompts.values())
    assert len(encoder.tokenize([TEXTS[-1]])[0].ids) > 3 * max(windows)
    causal = load_encoder(str(folder), bidirectional=False)
    again = check_equal(export_sentence_transformers(causal, tmp_path / "export"))
    assert again.config.decoder.causal
    np.testing.assert_array_equal(encode(again, None, TEXTS), encode(causal, None, TEXTS))


def test_dense_layers_over_encoder_equal_sentence_transformers(tmp_path):
    folder = tiny.model_folder(tmp_path / "model")
    tiny_embedder.add_modules(folder, dense=DENSE)
    assert check_equal(folder).dim == 20


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pooling": "weightedmean"}, "pooling .'weightedmean'. is not supported; expected mean"),
        ({"dense": (dense(32, 8, "ELU"),)}, "activation_function is .*ELU"),
        ({"dense": (dense(31, 8, "Tanh"),)}, "in_features is 31; supported: 32"),
        ({"dense": (dense(32, 8, "Tanh", use_residual=True),)}, "use_residual is True"),
        ({"pooling": ["mean", "cls"]}, r"pooling \['cls', 'mean'\] is not supported"),
        ({"dense": (dense(32, 8, "Tanh", module_output_name="x"),)}, "module_output_name is 'x'"),
    ],
)
def test_modules_unsupported_are_refused(tmp_path, change, message):
    folder = tiny_embedder.folder(tmp_path / "model", **change)
    with pytest.raises(UserError, match=message):
        load_encoder(str(folder))


@pytest.mark.parametrize(
    ("kinds", "message"),
    [
        (["Transformer", "Pooling", "Pooling"], "Transformer, Pooling, Pooling are not supported"),
        (["Pooling", "Transformer"], "Pooling, Transformer are not supported in this order"),
        (["Transformer", "Dense", "Pooling"], "Transformer, Dense, Pooling are not supported in"),
        (["Transformer", "Pooling", "LSTM"], "modules.json: module 'LSTM' is not supported"),
    ],
)
def test_modules_in_other_order_are_refused(tmp_path, kinds, message):
    folder = tiny_embedder.folder(tmp_path / "model")
    modules = [{"type": f"sentence_transformers.models.{kind}", "path": ""} for kind in kinds]
    (folder / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(UserError, match=message):
        load_encoder(str(folder))


def test_dense_weights_of_other_shape_are_refused(tmp_path):
    folder = tiny_embedder.folder(tmp_path / "model", dense=(dense(32, 8, "Tanh"),))
    file = folder / "2_Dense/config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "out_features": 9}))
    message = r"2_Dense: tensor linear.weight has shape \(8, 32\), but .* implies \(9, 32\)"
    with pytest.raises(UserError, match=message):
        load_encoder(str(folder))


def official_nv_embed(folder, encoder, texts, instruction):
    """NV-Embed's formulas (Lee et al., 2024, section 3.1, and its published inference code)."""
    config = json.loads((folder / "config.json").read_text())
    stored = safetensors.numpy.load_file(folder / "model.safetensors")
    tensors = {name: torch.tensor(array) for name, array in stored.items()}
    text_config = {**config["text_config"], "model_type": "mistral", "sliding_window": None}
    model = transformers.MistralModel(
        transformers.MistralConfig(**text_config, attn_implementation="eager")
    ).eval()
    prefix = "embedding_model."
    model.load_state_dict(
        {n.removeprefix(prefix): x for n, x in tensors.items() if n.startswith(prefix)}
    )

    def p(name):
        return tensors[f"latent_attention_model.{name}"]

    def norm(x, name):
        name = f"cross_attend_blocks.{name}"
        return torch.nn.functional.layer_norm(
            x, x.shape[-1:], p(f"{name}.weight"), p(f"{name}.bias")
        )

    heads = config["latent_attention_config"]["num_cross_heads"]
    tokenizer, rows = encoder.tokenizer, []
    for text in texts:
        ids = torch.tensor([tokenizer.encode(instruction + text + "<|im_end|>").ids])
        with torch.no_grad():
            mask = torch.zeros(1, 1, ids.shape[1], ids.shape[1])
            x = model(ids, attention_mask=mask).last_hidden_state[0]
            query = norm(x, "0.norm") @ p("cross_attend_blocks.0.fn.to_q.weight").T
            context = norm(p("latents"), "0.norm_context")
            key, value = (context @ p("cross_attend_blocks.0.fn.to_kv.weight").T).chunk(2, -1)
            q, k, v = (y.unflatten(-1, (heads, -1)).transpose(0, 1) for y in (query, key, value))
            probs = torch.softmax(q @ k.transpose(1, 2) / k.shape[-1] ** 0.5, -1)
            mixed = (probs @ v).transpose(0, 1).flatten(1)
            x = x + mixed @ p("cross_attend_blocks.0.fn.to_out.weight").T
            up = norm(x, "1.norm") @ p("cross_attend_blocks.1.fn.net.0.weight").T
            wide, gate = (up + p("cross_attend_blocks.1.fn.net.0.bias")).chunk(2, -1)
            wide = wide * torch.nn.functional.gelu(gate)
            x = x + wide @ p("cross_attend_blocks.1.fn.net.2.weight").T
            x = x + p("cross_attend_blocks.1.fn.net.2.bias")
            skipped = len(tokenizer.encode(instruction, add_special_tokens=False).ids)
            rows.append(torch.nn.functional.normalize(x[skipped:].mean(0), dim=0).numpy())
    return np.stack(rows)


def test_nv_embed_equals_official_formulas(tmp_path):
    folder = tiny_embedder.nv_embed(tmp_path / "nv-embed")
    encoder = load_encoder(str(folder), dtype="float32")
    assert encoder.query_prefix.startswith("Instruct: Given a question, retrieve passages")
    for kind, instruction in (("query", encoder.query_prefix), ("passage", "")):
        wanted = official_nv_embed(folder, encoder, TEXTS, instruction)
        np.testing.assert_allclose(encode(encoder, None, TEXTS, kind=kind), wanted, atol=5e-7)
    pooled = np.asarray(encode(encoder, None, [encoder.query_prefix + TEXTS[0]]))
    assert np.abs(pooled - encode(encoder, None, TEXTS[:1], kind="query")).max() > 1e-3


def test_nv_embed_bad_latents_are_refused(tmp_path):
    folder = tiny_embedder.nv_embed(tmp_path / "nv", latent_attention_config={"latent_dim": 16})
    with pytest.raises(UserError, match="latent_attention_config: field latent_dim is 16"):
        load_encoder(str(folder))
    folder = tiny_embedder.nv_embed(tmp_path / "nv2", text_config=None)
    with pytest.raises(UserError, match="field text_config is None, not an object"):
        load_encoder(str(folder))


@pytest.mark.parametrize("field", ["add_eos", "is_mask_instruction"])
def test_nv_embed_flag_of_other_type_names_file(tmp_path, field):
    folder = tiny_embedder.nv_embed(tmp_path / "nv", **{field: 1})
    with pytest.raises(UserError, match=f"nv/config.json: field {field} is 1, neither true nor"):
        load_encoder(str(folder))


def test_decoder_padding_token_outside_vocabulary_is_refused(tmp_path):
    folder = tiny_embedder.folder(tmp_path / "model", "llama", pad_token_id=5000)
    with pytest.raises(UserError, match="config.json: field pad_token_id is 5000; supported: 0 to"):
        load_encoder(str(folder))
    none = tiny_embedder.folder(tmp_path / "none", "llama", pad_token_id=-1)
    assert load_encoder(str(none)).config.pad_id == 0


def test_pool_unpooled_tokens_are_attended_but_not_pooled(tmp_path):
    encoder = load_encoder(str(tiny_embedder.folder(tmp_path / "model", pooling="mean")))
    tokens_BT = jnp.arange(3, 11, dtype=jnp.int32)[None]
    run = jax.jit(embed, static_argnums=0)

    def vector(*mask):
        mask_BT = np.asarray([mask], np.int8)
        return np.asarray(run(encoder.graphdef, encoder.state, tokens_BT, mask_BT)[0])

    prompt = vector(UNPOOLED, UNPOOLED, *[1] * 6)
    assert np.abs(prompt - vector(*[1] * 8)).max() > 1e-3
    assert np.abs(prompt - vector(0, 0, *[1] * 6)).max() > 1e-3


@pytest.mark.parametrize("kind", ["encoder", "decoder"])
def test_export_dense_layers_equal_sentence_transformers(tmp_path, kind):
    if kind == "encoder":
        folder = tiny.model_folder(tmp_path / "model")
        tiny_embedder.add_modules(folder, dense=DENSE)
    else:
        folder = tiny_embedder.folder(tmp_path / "model", pooling="mean", dense=DENSE)
    encoder = load_encoder(str(folder))
    export = export_sentence_transformers(encoder, tmp_path / "export")
    again = check_equal(export)
    np.testing.assert_array_equal(encode(encoder, None, TEXTS), encode(again, None, TEXTS))
