"""Exported folders, from which sentence-transformers computes the same embeddings."""

import dataclasses
import json
import shutil
from typing import Any

import jax
import ml_dtypes
import numpy as np
import peft
import pytest
import safetensors.numpy
import tokenizers
import torch
import transformers
from sentence_transformers import SentenceTransformer
from tokenizers import models, pre_tokenizers, processors

from cirag_jax.errors import UserError
from cirag_jax.models.io.encoder_adapter import save_encoder_adapter
from cirag_jax.models.io.export import export_sentence_transformers
from cirag_jax.models.io.pretrained import load_encoder
from cirag_jax.models.io.tensor_files import save_tensors
from cirag_jax.models.io.weights import from_tensors, to_tensors
from cirag_jax.retrieval.encode import encode
from tests import tiny, tiny_adapter

ROTARY = ("modernbert", "nomic_bert", "gte", "jina_embeddings_v3")
TEXTS = ["<balia; born in; corum>", "who is the patron of corum?", "a", "saint potter " * 12]


def check(encoder, params, folder, tolerance=1e-5):
    """Checks that our encoder, the export, and our encoder loaded from the export agree."""
    model = SentenceTransformer(str(folder), device="cpu", local_files_only=True)
    again = load_encoder(str(folder))
    for kind, theirs in (("query", model.encode_query), ("passage", model.encode_document)):
        ours = encode(encoder, params, TEXTS, kind=kind)
        assert np.abs(ours - theirs(TEXTS, show_progress_bar=False)).max() < tolerance
        np.testing.assert_array_equal(ours, encode(again, None, TEXTS, kind=kind))


def test_export_minilm_embeddings_are_equal(tmp_path, minilm):
    encoder = load_encoder(str(minilm))
    check(encoder, None, export_sentence_transformers(encoder, tmp_path / "export"))


@pytest.mark.parametrize(
    ("kind", "pooling"), [("bert", "mean"), ("bert", "cls"), *((kind, "mean") for kind in ROTARY)]
)
def test_export_trained_parameters_and_prefixes(tmp_path, kind, pooling):
    encoder = load_encoder(
        str(tiny.model_folder(tmp_path / "tiny", kind=kind)),
        pooling=pooling,
        instructions={"query": "who was ", "passage": "known for "},
    )
    params = jax.tree.map(lambda x: x * 1.1, encoder.state)
    trained = dataclasses.replace(encoder, state=params)
    folder = export_sentence_transformers(trained, tmp_path / "deep" / "export")
    check(encoder, params, folder)
    stale = encode(encoder, None, TEXTS) - encode(encoder, params, TEXTS)
    assert np.abs(stale).max() > 1e-3  # the given parameters, not those of the encoder


def test_export_mpnet_trained_parameters(tmp_path):
    """A sentence-transformers folder with MPNet's tokenizer can be loaded and exported again."""
    letters = [chr(c) for c in range(33, 127)]
    words = ["<s>", "<pad>", "</s>", "[UNK]", *letters, *(f"##{c}" for c in letters), "<mask>"]
    config = transformers.MPNetConfig(
        vocab_size=len(words),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=142,
        initializer_range=0.2,
    )
    transformers.MPNetModel(config).save_pretrained(tmp_path / "bare")
    vocabulary = {word: i for i, word in enumerate(words)}
    tokenizer = transformers.MPNetTokenizer(vocab=vocabulary, model_max_length=140)
    tokenizer.save_pretrained(tmp_path / "bare")
    theirs = SentenceTransformer(str(tmp_path / "bare"), device="cpu")
    theirs.save_pretrained(str(tmp_path / "source"))
    encoder = load_encoder(str(tmp_path / "source"))
    assert (encoder.pooling, encoder.max_length, encoder.model_type) == ("mean", 140, "mpnet")
    wanted = theirs.encode(TEXTS, normalize_embeddings=True, show_progress_bar=False)
    ours = encode(encoder, None, TEXTS)
    assert np.abs(ours - wanted).max() < 1e-5
    params = jax.tree.map(lambda x: x * 1.1, encoder.state)
    trained = dataclasses.replace(encoder, state=params)
    folder = export_sentence_transformers(trained, tmp_path / "export")
    check(encoder, params, folder)
    assert np.abs(ours - encode(encoder, params, TEXTS)).max() > 1e-3


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_export_xlm_roberta(tmp_path, pooling):
    source = tmp_path / "xlmr"
    pieces = ["<s>", "<pad>", "</s>", "<unk>", *(chr(c) for c in range(33, 127))]
    config = transformers.XLMRobertaConfig(
        vocab_size=len(pieces) + 2,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=70,
        type_vocab_size=1,
        pad_token_id=1,
        initializer_range=0.3,
        layer_norm_eps=1e-5,
    )
    transformers.XLMRobertaModel(config).save_pretrained(source)
    scores = [(piece, -float(i)) for i, piece in enumerate([*pieces, "▁", "<mask>"])]
    tokenizer = tokenizers.Tokenizer(models.Unigram(scores, unk_id=3))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        unk_token="<unk>",
        cls_token="<s>",
        sep_token="</s>",
        model_max_length=68,
    )
    fast.save_pretrained(source)
    encoder = load_encoder(str(source), pooling=pooling)
    assert encoder.config.position_offset == 2
    check(encoder, None, export_sentence_transformers(encoder, tmp_path / "export"))


def test_export_keeps_pooler_and_empty_prefixes(tmp_path, minilm):
    encoder = load_encoder(str(minilm))
    folder = export_sentence_transformers(encoder, tmp_path / "my-e5")
    again = load_encoder(str(folder))
    assert (again.query_prefix, again.passage_prefix) == ("", "")
    model = transformers.AutoModel.from_pretrained(folder)
    original = transformers.AutoModel.from_pretrained(minilm)
    assert (model.pooler.dense.weight == original.pooler.dense.weight).all()


@pytest.mark.parametrize(
    ("units", "unit"),
    [("triple", "<HEAD; RELATION; TAIL>"), ("sentence", "TITLE: SENTENCE"),
     ("passage", "TITLE. TEXT"), (None, "")],
)  # fmt: skip
def test_export_card_describes_units(tmp_path, units, unit):
    encoder = load_encoder(str(tiny.model_folder(tmp_path / "tiny")))
    folder = export_sentence_transformers(encoder, tmp_path / "export", units)
    card = (folder / "README.md").read_text()
    query = f"\nQUESTION\nknowledge {units}s: {unit}. {unit}.\n"
    assert (query in card and f"`{unit}`" in card) == (units is not None)
    assert "model.encode_query" in card
    assert "`tiny`" in card and str(tmp_path) not in card


def test_export_replaces_only_earlier_export(tmp_path):
    encoder = load_encoder(str(tiny.model_folder(tmp_path / "tiny")))
    folder = export_sentence_transformers(encoder, tmp_path / "export")
    (folder / "stale.txt").write_text("from the first export")
    export_sentence_transformers(encoder, folder)
    assert not (folder / "stale.txt").exists()
    other = tmp_path / "thesis"
    other.mkdir()
    (other / "chapter.tex").write_text("precious")
    with pytest.raises(UserError, match="neither empty nor an earlier export"):
        export_sentence_transformers(encoder, other)
    assert [file.name for file in other.iterdir()] == ["chapter.tex"]


def test_export_failure_keeps_earlier_export(tmp_path):
    encoder = load_encoder(str(tiny.model_folder(tmp_path / "tiny")))
    folder = export_sentence_transformers(encoder, tmp_path / "export")
    before = sorted(file.name for file in folder.iterdir())
    copy = tmp_path / "without_tokenizer"
    shutil.copytree(tmp_path / "tiny", copy)
    (copy / "tokenizer.json").unlink()
    with pytest.raises(UserError, match="tokenizer's files are missing"):
        export_sentence_transformers(dataclasses.replace(encoder, folder=copy), folder)
    assert sorted(file.name for file in folder.iterdir()) == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["export", "tiny", "without_tokenizer"]
    assert json.loads((folder / "modules.json").read_text())[1]["path"] == "1_Pooling"


def change_parameters(encoder, rank):
    """Returns the encoder's parameters with random changes of this rank in all linear layers."""
    rng = np.random.default_rng(0)
    tensors = to_tensors(encoder.state, encoder.config, encoder.model_type)
    for name, array in tensors.items():
        if "layer" in name and array.ndim == 2:
            down, up = (
                rng.normal(size=(rank, array.shape[1])),
                rng.normal(size=(array.shape[0], rank)),
            )
            tensors[name] = array + 0.1 * (up @ down).astype(np.float32)
    return tensors


@pytest.mark.parametrize("kind", ["bert", "mpnet", *ROTARY])
def test_save_encoder_adapter_keeps_low_rank_change(tmp_path, kind):
    base = tiny.model_folder(tmp_path / "tiny", kind=kind)
    encoder = load_encoder(str(base), pooling="cls", instructions={"query": "who was "})
    tensors = change_parameters(encoder, 3)
    params = from_tensors(tensors, encoder.state, encoder.config, encoder.model_type)
    told = {"pooling": "cls", "query_prefix": "who was ", "passage_prefix": ""}
    before = to_tensors(encoder.state, encoder.config, encoder.model_type)
    how = {"base_model_name": str(base), "training": told}
    kept = save_encoder_adapter(tensors, before, tmp_path / "adapter", rank=3, **how)
    assert kept > 0.999
    opened = load_encoder(str(tmp_path / "adapter"))
    assert opened.pooling == "cls" and opened.query_prefix == "who was "
    assert opened.revision != encoder.revision
    wanted = encode(encoder, params, TEXTS, kind="query")
    found = encode(opened, None, TEXTS, kind="query")
    assert np.abs(wanted - found).max() < 2e-3 < np.abs(wanted - encode(encoder, None, TEXTS)).max()
    # sentence-transformers reads it too.
    theirs = SentenceTransformer(str(base), device="cpu", local_files_only=True)
    theirs.load_adapter(str(tmp_path / "adapter"))
    theirs = theirs.encode(TEXTS, show_progress_bar=False, normalize_embeddings=True)
    means = encode(load_encoder(str(tmp_path / "adapter"), pooling="mean"), None, TEXTS)
    assert np.abs(theirs - means).max() < 1e-5


def test_encoder_adapter_bf16_base_gives_same_values(tmp_path):
    encoder = load_encoder(str(tiny.model_folder(tmp_path / "tiny")))
    before = to_tensors(encoder.state, encoder.config, encoder.model_type)
    how = {"base_model_name": str(tmp_path / "tiny"), "training": {}}
    save_encoder_adapter(change_parameters(encoder, 2), before, tmp_path / "adapter", rank=2, **how)
    file, states = tmp_path / "adapter" / "adapter_model.safetensors", []
    rounded = {
        name: array.astype(ml_dtypes.bfloat16)
        for name, array in safetensors.numpy.load_file(file).items()
    }
    for dtype in (ml_dtypes.bfloat16, np.float32):
        save_tensors({name: array.astype(dtype) for name, array in rounded.items()}, file)
        states.append(load_encoder(str(tmp_path / "adapter")).state)
    moves = []
    for one, other, old in zip(*map(tiny.arrays, (*states, encoder.state)), strict=True):
        np.testing.assert_array_equal(one, other)
        moves.append(np.abs(one - old).max())
    assert max(moves) > 0.01


def test_encoder_adapter_wrong_fields_or_tensors_raise(tmp_path):
    base = tiny.model_folder(tmp_path / "tiny")
    encoder = load_encoder(str(base))
    before = to_tensors(encoder.state, encoder.config, encoder.model_type)
    folder = tmp_path / "adapter"
    how = {"base_model_name": str(base), "training": {}}
    with pytest.raises(UserError, match=r"config\.rank=0 must be at least 1"):
        save_encoder_adapter(change_parameters(encoder, 2), before, folder, rank=0, **how)
    kept = save_encoder_adapter(change_parameters(encoder, 2), before, folder, rank=1, **how)
    assert 0.3 < kept < 0.9
    config = json.loads((folder / "adapter_config.json").read_text())
    for changes, message in (
        ({"r": 2}, "the factors of .* have unexpected shapes"),
        ({"r": "2"}, "field r is '2', not a number"),
        ({"r": 0}, "field r is 0; it must be at least 1"),
        ({"lora_alpha": 10**400}, "field lora_alpha is 1000.*, not a number"),
        (
            {"base_model_name_or_path": "x" * 3000},
            "field base_model_name_or_path does not name a model",
        ),
        ({"base_model_name_or_path": None}, "field base_model_name_or_path does not name a model"),
        ({"task_type": "CAUSAL_LM"}, "field task_type is 'CAUSAL_LM'; expected FEATURE_EXTRACTION"),
    ):
        (folder / "adapter_config.json").write_text(json.dumps({**config, **changes}))
        with pytest.raises(UserError, match=message):
            load_encoder(str(folder))
    (folder / "adapter_config.json").write_text(json.dumps(config))
    file = folder / "adapter_model.safetensors"
    whole = safetensors.numpy.load_file(file)
    name = next(name for name in whole if name.endswith("lora_A.weight"))
    tensors = {"base_model.model.other.lora_A.weight": np.zeros((1, 2), np.float16)}
    save_tensors(tensors, file)
    with pytest.raises(UserError, match=r"other\.lora_A\.weight does not belong to this encoder"):
        load_encoder(str(folder))
    save_tensors({**whole, name: np.full_like(whole[name], np.nan)}, file)
    with pytest.raises(UserError, match=r"lora_A\.weight has numbers that are not finite"):
        load_encoder(str(folder))
    file.write_bytes(b"no")
    with pytest.raises(UserError, match=r"adapter_model\.safetensors: not a readable"):
        load_encoder(str(folder))


def test_load_encoder_adapter_of_peft_with_unequal_modules_equals_sentence_transformers(tmp_path):
    base = tiny.model_folder(tmp_path / "tiny")
    settings: dict[str, Any] = {"rank_pattern": {"query": 2}, "alpha_pattern": {"value": 9}}
    settings |= {"use_rslora": True, "target_modules": ["query", "value", "intermediate.dense"]}
    config = peft.LoraConfig(task_type=peft.TaskType.FEATURE_EXTRACTION, r=3, **settings)
    with tiny_adapter.quiet_peft():
        model = peft.get_peft_model(transformers.AutoModel.from_pretrained(base), config)
    generator = torch.Generator().manual_seed(0)
    for name, weight in model.named_parameters():
        if "lora_" in name:
            weight.data.copy_(0.3 * torch.randn(weight.shape, generator=generator))
    model.save_pretrained(tmp_path / "adapter")
    ours = encode(load_encoder(str(tmp_path / "adapter"), pooling="mean"), None, TEXTS)
    theirs = SentenceTransformer(str(base), device="cpu", local_files_only=True)
    theirs.load_adapter(str(tmp_path / "adapter"))
    theirs = theirs.encode(TEXTS, show_progress_bar=False, normalize_embeddings=True)
    assert np.abs(theirs - ours).max() < 1e-5
    assert np.abs(ours - encode(load_encoder(str(base)), None, TEXTS)).max() > 0.01
    file = tmp_path / "adapter/adapter_config.json"
    for field, value in (("use_dora", True), ("bias", "all"), ("peft_type", "LOHA")):
        file.write_text(json.dumps({**json.loads(file.read_text()), field: value}))
        with pytest.raises(UserError, match=f"field {field} is {value!r}"):
            load_encoder(str(tmp_path / "adapter"))
        fixed = {"use_dora": False, "bias": "none"}
        file.write_text(json.dumps({**json.loads(file.read_text()), **fixed}))


@pytest.mark.parametrize("tasks", [None, "retrieval.passage"])
def test_export_task_adapters_are_merged_for_each_role(tmp_path, tasks):
    base = tiny.model_folder(tmp_path / "tiny", kind="jina_embeddings_v3")
    raw = json.loads((base / "config.json").read_text())
    raw |= {"lora_adaptations": ["retrieval.query", "retrieval.passage"], "lora_rank": 2}
    raw["task_instructions"] = {"retrieval.query": "who is ", "retrieval.passage": "known for "}
    (base / "config.json").write_text(json.dumps(raw))
    rng, tensors = np.random.default_rng(0), {}
    for name, array in safetensors.numpy.load_file(base / "model.safetensors").items():
        if array.ndim < 2:
            tensors[name] = array
            continue
        module = f"{name.removesuffix('.weight')}.parametrizations.weight"
        tensors[f"{module}.original"] = array
        rows, columns = array.shape
        sides = {"A": (2, 2, columns), "B": (2, rows, 2)}
        if "embeddings" in name:
            sides = {"A": (2, rows, 2), "B": (2, 2, columns)}
        for side, shape in sides.items():
            tensors[f"{module}.0.lora_{side}"] = rng.normal(size=shape).astype(np.float32)
    save_tensors(tensors, base / "model.safetensors")
    encoder = load_encoder(str(base), tasks=tasks)
    assert encoder.query_prefix == ("known for " if tasks else "who is ")
    folder = export_sentence_transformers(encoder, tmp_path / "export")
    model = SentenceTransformer(str(folder), device="cpu", local_files_only=True)
    query, passage = (encode(encoder, None, TEXTS, kind=kind) for kind in ("query", "passage"))
    assert np.abs(query - model.encode_query(TEXTS)).max() < 1e-5
    assert np.abs(passage - model.encode_document(TEXTS)).max() < 1e-5
    if tasks is None:
        assert np.abs(passage - model.encode(TEXTS, prompt_name="document")).max() < 1e-5
        assert np.abs(query - passage).max() > 0.1
        return
    again = load_encoder(str(folder))  # its weights contain the adapter
    assert again.tasks == () and again.query_prefix == "known for "
    assert np.abs(query - encode(again, None, TEXTS, kind="query")).max() < 1e-5
