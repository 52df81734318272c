"""Corrupt model folders, GGUF files and checkpoints."""

import json
import pathlib
import shutil

import gguf
import numpy as np
import pytest
from flax import nnx
from hypothesis import example

from cirag_jax import io
from cirag_jax.errors import UserError
from cirag_jax.llm.chat import ChatTokenizer
from cirag_jax.models.io import (
    encoder_adapter,
    gguf_weights,
    modules,
    peft_format,
    pretrained,
    tensor_files,
    text_prefixes,
    tokenizer_files,
)
from cirag_jax.models.io.checkpoints import Checkpoints
from cirag_jax.models.io.pretrained_decoder import parse_decoder_config, read_decoder_config
from cirag_jax.models.io.weights import to_tensors
from cirag_jax.models.link_head import LinkHead, LinkHeadModule, load_link_head, read_record
from tests import tiny, tiny_decoder
from tests.attacks.hostile import (
    CORRUPTIONS,
    MUTATIONS,
    attack,
    attempt,
    corrupt,
    mutate_json,
    replaced,
    st,
    unchanged,
)

_RAW = tiny_decoder.config("llama", num_hidden_layers=1)
_DECODER = parse_decoder_config(_RAW, "config.json")


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory):
    """A model with one layer and a tokenizer."""
    file = tmp_path_factory.mktemp("gguf") / "model.gguf"
    backend = json.loads(tiny_decoder.tokenizer().to_str())
    tokens = sorted(backend["model"]["vocab"], key=backend["model"]["vocab"].get)
    merges = [" ".join(m) if isinstance(m, list) else m for m in backend["model"]["merges"]]
    extra = {
        "add_tokenizer_model": ("gpt2",),
        "add_tokenizer_pre": ("smollm",),
        "add_token_list": (tokens,),
        "add_token_merges": (merges,),
        "add_token_types": ([gguf.TokenType.NORMAL] * len(tokens),),
        "add_bos_token_id": (0,),
        "add_eos_token_id": (2,),
        "add_chat_template": (tiny_decoder.CHAT_TEMPLATE,),
    }
    tiny_decoder.write_gguf(file, _RAW, tiny_decoder.tensors(_RAW), extra=extra)
    return file


def _use_gguf(file: pathlib.Path) -> None:
    source = attempt(lambda: gguf_weights.open_gguf(file))
    if source is None:
        return
    attempt(lambda: read_decoder_config(file))
    attempt(lambda: gguf_weights.tokenizer_from_gguf(source))
    for name, shape in source.shapes:
        attempt(lambda name=name, shape=shape: source.read(name, (slice(None),) * len(shape)))


def test_gguf_intact_file_is_read(gguf_file):
    source = gguf_weights.open_gguf(gguf_file)
    assert read_decoder_config(gguf_file)[0].num_layers == 1
    assert gguf_weights.tokenizer_from_gguf(source)("the town").input_ids


@example([("over", 255, b"\xff\xff\xff\x7f")])  # the number of heads
@attack(40, CORRUPTIONS)
def test_gguf_corrupt_bytes(gguf_file, damages):
    file = gguf_file.with_name("damaged.gguf")
    file.write_bytes(corrupt(gguf_file.read_bytes(), damages))
    _use_gguf(file)


# Numbers of tensors and keys, the length of the first string, and the number of layers.
_COUNTS = (8, 16, 24, "block_count")


@pytest.mark.parametrize("place", _COUNTS)
@pytest.mark.parametrize("count", [0, 1 << 31, (1 << 63) - 1, (1 << 64) - 1])
def test_gguf_impossible_count_is_rejected(gguf_file, place, count):
    content = bytearray(gguf_file.read_bytes())
    if place == "block_count":
        place = content.index(b"llama.block_count") + len(b"llama.block_count") + 4
        content[place : place + 4] = (count % (1 << 32)).to_bytes(4, "little")
    else:
        content[place : place + 8] = count.to_bytes(8, "little")
    file = gguf_file.with_name("counted.gguf")
    file.write_bytes(content)
    _use_gguf(file)
    with pytest.raises(UserError):
        read_decoder_config(file)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a decoder, files of an encoder, and an adapter."""
    root = tmp_path_factory.mktemp("model")
    tiny_decoder.folder(root / "decoder", num_hidden_layers=1)
    tensor_files.save_tensors({"a": np.ones((2, 3), np.float32)}, root / "shard.safetensors")
    (root / "shards").mkdir()
    (root / "shard.safetensors").rename(root / "shards" / "one.safetensors")
    for name, value in _FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(json.dumps(value))
    rank = 2
    tensors = {}
    for module, (rows, columns) in {"q_proj": (32, 32)}.items():
        path = f"base_model.model.model.layers.0.self_attn.{module}"
        tensors[f"{path}.lora_A.weight"] = np.ones((rank, columns), np.float32)
        tensors[f"{path}.lora_B.weight"] = np.ones((rows, rank), np.float32)
    tensor_files.save_tensors(tensors, root / "adapter" / "adapter_model.safetensors")
    return root


_FILES = {
    "shards/model.safetensors.index.json": {"weight_map": {"a": "one.safetensors"}},
    "adapter/adapter_config.json": peft_format.config_json("x", 2, 4.0, ["q_proj"], "CAUSAL_LM"),
    "adapter/training.json": {"component": "reader", "units": "triple"},
    "encoder/config.json": {
        **{"model_type": "bert", "vocab_size": 9, "hidden_size": 8, "num_hidden_layers": 1},
        **{"num_attention_heads": 2, "intermediate_size": 8, "max_position_embeddings": 16},
    },
    "encoder/modules.json": [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "pool", "type": "sentence_transformers.models.Pooling"},
    ],
    "encoder/pool/config.json": {"pooling_mode_mean_tokens": True},
    "encoder/config_sentence_transformers.json": {"prompts": {"query": "q: ", "document": "d: "}},
    "encoder/sentence_bert_config.json": {"max_seq_length": 12},
    "encoder/tokenizer_config.json": {"model_max_length": 14},
    "encoder/cirag_jax.json": {"query_prefix": "q", "passage_prefix": "p"},
}


def _read_encoder(root: pathlib.Path) -> None:
    folder = root / "encoder"
    config, _ = pretrained.read_config(folder)
    assert 0 < tokenizer_files.read_max_length(folder, config) <= config.max_length
    assert modules.read_modules(folder, config.d_model).pooling in ("mean", "cls", "lasttoken")
    assert all(isinstance(prefix, str | None) for prefix in text_prefixes.read_prefixes(folder, ""))


def _read_tokenizer(root: pathlib.Path) -> None:
    ChatTokenizer.load(root / "decoder").encode("the town")


READS = {
    "shards/model.safetensors.index.json": lambda root: [
        array.sum() for _, _, array in tensor_files.read_tensors(root / "shards")
    ],
    "adapter/adapter_config.json": lambda root: peft_format.load_adapter(
        root / "adapter", _DECODER
    ),
    "adapter/training.json": lambda root: peft_format.read_training(root / "adapter"),
    **{name: _read_encoder for name in _FILES if name.startswith("encoder/")},
    "decoder/config.json": lambda root: read_decoder_config(root / "decoder"),
}
TOKENIZER = ("generation_config.json", "tokenizer_config.json", "tokenizer.json")


def _attack(folder: pathlib.Path, name: str, content: bytes, read) -> None:
    with replaced(folder / name, content), unchanged(folder):
        attempt(lambda: read(folder))


@pytest.mark.parametrize("name", READS)
def test_intact_files_are_read(folder, name):
    READS[name](folder)


@pytest.mark.parametrize("name", READS)
@attack(10, MUTATIONS)
def test_mutated_json(folder, name, changes):
    content = json.loads((folder / name).read_text())
    _attack(folder, name, mutate_json(content, changes), READS[name])


@pytest.mark.parametrize("shard", ["[" * 1000, "\0", "../model.safetensors", "/etc/passwd", ""])
def test_shard_with_bad_name_is_rejected(tmp_path, shard):  # found by `make attack`
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": shard}}))
    with pytest.raises(UserError, match="is not in the folder"):
        tensor_files.weight_files(tmp_path)


@pytest.mark.parametrize("name", ["x" * 1000, "\0", "absent"])
def test_optional_file_with_any_name(tmp_path, name):  # found by `make attack`
    assert io.read_object(tmp_path / name, optional=True) == {}


@pytest.mark.parametrize("name", READS)
@attack(3, CORRUPTIONS)
def test_corrupt_bytes(folder, name, damages):
    _attack(folder, name, corrupt((folder / name).read_bytes(), damages), READS[name])


@pytest.mark.parametrize("name", TOKENIZER)
@attack(2, MUTATIONS)
def test_tokenizer_mutated_json(folder, name, changes):
    name = f"decoder/{name}"
    content = json.loads((folder / name).read_text())
    _attack(folder, name, mutate_json(content, changes), _read_tokenizer)


@pytest.mark.parametrize(
    "fields",
    [{"model_max_length": "long"}, {"tokenizer_class": 7}, {"chat_template": [1]}, [], "DEEP"],
)
def test_tokenizer_bad_setting(folder, fields):
    name = "decoder/tokenizer_config.json"
    content = json.loads((folder / name).read_text())
    other = {**content, **fields} if isinstance(fields, dict) else fields
    _attack(folder, name, mutate_json([other], (False, [(0, other)]))[1:-1], _read_tokenizer)


def _read_safetensors(root: pathlib.Path) -> None:
    for _, _, array in tensor_files.read_tensors(root / "shards"):
        assert array.size >= 0
    with tensor_files.TensorFiles(root / "shards") as files:
        for name, shape in files.shapes:
            files.read(name, (slice(None),) * len(shape))


@attack(30, CORRUPTIONS)
def test_safetensors_corrupt_bytes(folder, damages):
    name = "shards/one.safetensors"
    _attack(folder, name, corrupt((folder / name).read_bytes(), damages), _read_safetensors)


@attack(40, MUTATIONS, st.sampled_from([None, 0, 1 << 40, (1 << 64) - 1]))
def test_safetensors_mutated_header(folder, changes, length):
    name = "shards/one.safetensors"
    content = (folder / name).read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = mutate_json(json.loads(content[8 : 8 + size]), changes)
    claimed = len(header) if length is None else length
    other = claimed.to_bytes(8, "little") + header + content[8 + size :]
    _attack(folder, name, other, _read_safetensors)


@pytest.fixture(scope="module")
def adapter_folder(tmp_path_factory):
    """An encoder, and a folder with an adapter and a link head."""
    root = tmp_path_factory.mktemp("adapter_folder")
    encoder = pretrained.load_encoder(str(tiny.model_folder(root / "encoder")))
    before = to_tensors(encoder.state, encoder.config, encoder.model_type)
    trained = {name: array + 0.25 * (array.ndim == 2) for name, array in before.items()}
    (root / "both").mkdir()
    training = {"query_prefix": "q: ", "pooling": "cls"}
    encoder_adapter.save_encoder_adapter(
        trained, before, root / "both", rank=1, base_model_name="x", training=training
    )
    ones = np.ones(3, np.float32)
    head = LinkHead(LinkHeadModule(0 * ones, ones, 2, nnx.Rngs(0)), tuple("abc"), "triple", 2)
    head.save(root / "both")
    return encoder, root / "both"


def _read_adapter(encoder, folder: pathlib.Path) -> None:
    base, training = encoder_adapter.read_base_model(folder)
    assert not (folder / base).exists()  # a valid path
    assert training.get("pooling") in (None, "cls", "mean")
    encoder_adapter.add_adapter(encoder.state, encoder.config, encoder.model_type, folder)


def _read_head(encoder, folder: pathlib.Path) -> None:
    del encoder
    assert isinstance(read_record(folder), dict)
    head = load_link_head(folder, tuple("abc"))
    if head is not None:
        assert np.isfinite(head.score([np.ones((2, 3), np.float32)])).all()


ADAPTER_READS = {
    "adapter_config.json": _read_adapter,
    "training.json": _read_adapter,
    "adapter_model.safetensors": _read_adapter,
    "link_head.safetensors": _read_head,
}


@pytest.mark.parametrize("name", ADAPTER_READS)
def test_adapter_intact_files_are_read(adapter_folder, name):
    ADAPTER_READS[name](*adapter_folder)


@pytest.mark.parametrize("name", ADAPTER_READS)
@attack(8, CORRUPTIONS)
def test_adapter_corrupt_bytes(adapter_folder, name, damages):
    encoder, folder = adapter_folder
    content = corrupt((folder / name).read_bytes(), damages)
    _attack(folder, name, content, lambda root: ADAPTER_READS[name](encoder, root))


def _header(content: bytes, change) -> bytes:
    """Returns a safetensors file with a changed header."""
    size = int.from_bytes(content[:8], "little")
    header = change(json.loads(content[8 : 8 + size]))
    return len(header).to_bytes(8, "little") + header + content[8 + size :]


@pytest.mark.parametrize("name", ADAPTER_READS)
@example((False, [(16, 10**400)]))  # lora_alpha
@attack(20, MUTATIONS)
def test_adapter_mutated_values(adapter_folder, name, changes):
    encoder, folder = adapter_folder
    content = (folder / name).read_bytes()
    if name.endswith(".json"):
        content = mutate_json(json.loads(content), changes)
    else:
        content = _header(content, lambda header: mutate_json(header, changes))
    _attack(folder, name, content, lambda root: ADAPTER_READS[name](encoder, root))


# Unsupported dtypes, with their numbers of bits.
_UNSUPPORTED = {"F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4, "C64": 64}


def _unsupported_tensor(dtype: str, shape: list[int], name: str, metadata: dict[str, str]) -> bytes:
    size = np.prod(shape) * _UNSUPPORTED[dtype] // 8
    tensor = {"dtype": dtype, "shape": shape, "data_offsets": [0, int(size)]}
    header = json.dumps({"__metadata__": metadata, name: tensor}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(int(size))


@pytest.mark.parametrize("dtype", _UNSUPPORTED)
def test_unsupported_dtype_is_rejected(folder, adapter_folder, tmp_path, dtype):
    encoder, source = adapter_folder
    decoder_adapter, shards = (
        shutil.copytree(folder / n, tmp_path / n) for n in ("adapter", "shards")
    )
    both = shutil.copytree(source, tmp_path / "both")
    key = "base_model.model.encoder.layer.0.attention.self.query.lora_A.weight"
    (both / "adapter_model.safetensors").write_bytes(_unsupported_tensor(dtype, [1, 32], key, {}))
    metadata = {"features": "a,b,c", "units": "triple", "steps": "2"}
    (both / "link_head.safetensors").write_bytes(_unsupported_tensor(dtype, [2], "out_H", metadata))
    key = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    (decoder_adapter / "adapter_model.safetensors").write_bytes(
        _unsupported_tensor(dtype, [2, 32], key, {})
    )
    (shards / "one.safetensors").write_bytes(_unsupported_tensor(dtype, [2, 2], "a", {}))

    def read_slices():
        with tensor_files.TensorFiles(shards) as files:
            files.read("a", (slice(None), slice(None)))

    for read in (
        lambda: _read_adapter(encoder, both),
        lambda: _read_head(encoder, both),
        lambda: peft_format.load_adapter(decoder_adapter, _DECODER),
        lambda: list(tensor_files.read_tensors(shards)),
        read_slices,
    ):
        with pytest.raises(
            UserError, match=r"safetensors: .* (float\d_\w+|complex num\w+),? .*not supported"
        ):
            read()


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    root = tmp_path_factory.mktemp("checkpoints")
    with Checkpoints(root) as saved:
        for step in (1, 2):
            state = {"x": np.float32(step)}
            saved.save(step, state, {"at": step}, {"component": "aligner"})
            saved.add_metrics(step, {"dev/mrr": 0.5})
    return root


_ITEMS = {
    "metrics": "1/metrics/metrics",
    "meta": "1/meta/metadata",
    "data": "1/data/process_0-of-1.json",
}


def _use_checkpoints(root: pathlib.Path) -> None:
    with Checkpoints(root, read_only=True) as opened:
        step = opened.best_step()
        attempt(lambda: opened.metrics(step))
        attempt(lambda: opened.meta(step))
        attempt(lambda: opened.restore(step, {"x": np.float32(0)}))


@pytest.mark.parametrize("item", _ITEMS)
@attack(3, MUTATIONS)
def test_checkpoints_mutated_json(checkpoints, item, changes):
    path = checkpoints / _ITEMS[item]
    with replaced(path, mutate_json(json.loads(path.read_bytes()), changes)):
        attempt(lambda: _use_checkpoints(checkpoints))


@pytest.mark.parametrize("content", [b"", b"[" * 100_000, b"[]", b'{"dev/mrr": "x"}', b"\xff"])
def test_checkpoints_bad_metrics_are_rejected(checkpoints, content):
    with (
        replaced(checkpoints / _ITEMS["metrics"], content),
        pytest.raises(UserError, match="metrics of a checkpoint"),
    ):
        Checkpoints(checkpoints, read_only=True)


@attack(4, CORRUPTIONS, st.integers(0, 100))
def test_checkpoints_corrupt_bytes(checkpoints, damages, place):
    files = [path for path in sorted((checkpoints / "1").rglob("*")) if path.is_file()]
    path = files[place % len(files)]
    with replaced(path, corrupt(path.read_bytes(), damages)):
        attempt(lambda: _use_checkpoints(checkpoints))
