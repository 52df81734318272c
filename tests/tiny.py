"""A tiny encoder and a tiny dataset for tests that train or search."""

import json
import pathlib

import jax
import numpy as np
import tokenizers
from flax import nnx
from tokenizers import models, normalizers, pre_tokenizers, processors

from cirag_jax.datasets import jsonl
from cirag_jax.models.encoder import Encoder
from cirag_jax.models.encoder_config import EncoderConfig
from cirag_jax.models.io import pretrained, tensor_files, weights
from cirag_jax.types import Dataset, Passage, Question, Triple

_NAMES = [
    f"{first}{last}"
    for first in ("bal", "cor", "dun", "fen")
    for last in ("ia", "or", "um", "is", "ek", "an")
]
_CRAFTS = ("potter", "sailor", "weaver", "mason", "singer", "tanner")

_ARCHITECTURES = {
    "bert": "BertModel",
    "mpnet": "MPNetModel",
    "modernbert": "ModernBertModel",
    "nomic_bert": "NomicBertModel",
    "gte": "GteModel",
    "jina_embeddings_v3": "JinaEmbeddingsV3Model",
}
_MODERNBERT_IDS = ("bos", "cls", "sep", "eos")


def dataset() -> Dataset:
    """Makes two-hop questions in two splits: people, their birth towns, and the towns' patrons."""
    corpus: dict[str, Passage] = {}
    triples: dict[str, tuple[Triple, ...]] = {}
    people, towns = _NAMES[:12], _NAMES[12:]
    for index, (person, town) in enumerate(zip(people, towns, strict=True)):
        craft, patron = _CRAFTS[index % 6], _CRAFTS[(index * 5 + 1) % 6]
        for pid, title, facts in (
            (f"p{index}", person, [(person, "born in", town), (person, "worked as", craft)]),
            (f"t{index}", town, [(town, "patron", f"saint {patron}"), (town, "known for", craft)]),
        ):
            sentences = tuple(f"{h} {r} {t}." for h, r, t in facts)
            corpus[pid] = Passage(pid, title, " ".join(sentences), sentences)
            triples[pid] = tuple(Triple(h, r, t, pid, i) for i, (h, r, t) in enumerate(facts))
    questions = []
    for index, (person, town) in enumerate(zip(people, towns, strict=True)):
        patron = triples[f"t{index}"][0].tail
        others = [(index + step) % 12 for step in (1, 2, 3)]
        questions.append(
            Question(
                id=f"q{index}",
                question=f"who is the patron of the town where {person} was born?",
                answers=(patron,),
                type="bridge",
                hops=2,
                split="train" if index < 8 else "dev",
                supporting=(f"p{index}", f"t{index}"),
                supporting_sentences=((f"p{index}", 0), (f"t{index}", 0)),
                context=(f"p{index}", f"t{index}", *(f"{k}{o}" for o in others for k in "pt")),
                evidences=((person, "born in", town), (town, "patron", patron)),
            )
        )
    return Dataset("tiny", tuple(questions), corpus, triples)


def dataset_folder(folder: pathlib.Path) -> pathlib.Path:
    """Writes the tiny dataset as a JSONL folder."""
    jsonl.write_dataset(dataset(), folder)
    return folder


def model_folder(
    folder: pathlib.Path, *, d_model: int = 32, kind: str = "bert", positions: int = 128
) -> pathlib.Path:
    """Writes a two-layer random encoder with a tokenizer of letters and words.

    ``kind`` is ``bert``, ``mpnet`` or the ``model_type`` of an encoder with rotary positions.
    """
    folder.mkdir(parents=True, exist_ok=True)
    is_mpnet = kind == "mpnet"
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    if is_mpnet:
        specials = ["<s>", "<pad>", "</s>", "[UNK]"]
    start, end = (specials[0], specials[2]) if is_mpnet else (specials[2], specials[3])
    words = [*specials, *_pieces()]
    tokenizer = tokenizers.Tokenizer(
        models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]")
    )
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{start} $A {end}",
        pair=f"{start} $A {end} {end} $B {end}" if is_mpnet else "[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(word, words.index(word)) for word in (start, end)],
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "architectures": [_ARCHITECTURES[kind]],
        "model_type": kind,
        "vocab_size": len(words),
        "hidden_size": d_model,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 2 * d_model,
        "max_position_embeddings": positions + 2 * is_mpnet,
        "layer_norm_eps": 1e-12,
        "hidden_act": "gelu",
        "pad_token_id": int(is_mpnet),
        **({"relative_attention_num_buckets": 32} if is_mpnet else {"type_vocab_size": 2}),
    }
    if kind == "modernbert":
        config |= {"local_attention": 8, "layer_types": ["full_attention", "sliding_attention"]}
        config |= {f"{name}_token_id": 2 + (name in ("sep", "eos")) for name in _MODERNBERT_IDS}
    if kind not in ("bert", "mpnet"):  # of other families, transformers does not know the class
        names = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
        names |= {"unk_token": "[UNK]", "tokenizer_class": "PreTrainedTokenizerFast"}
        (folder / "tokenizer_config.json").write_text(json.dumps(names))
    (folder / "config.json").write_text(json.dumps(config))
    encoder, _ = pretrained.read_config(folder)
    _, state = nnx.split(Encoder(encoder, rngs=nnx.Rngs(0)))
    # Larger than BERT's 0.02, so that texts differ before training.
    state = jax.tree.map(lambda x: x * 5 if x.ndim > 1 else x, state)
    tensors = weights.to_tensors(state, encoder, kind, published=True)
    tensor_files.save_tensors(tensors, folder / "model.safetensors")
    return folder


def add_words(folder: pathlib.Path, *words: str) -> None:
    """Adds words to the tokenizer of a model folder, but not to its embedding table."""
    file = str(folder / "tokenizer.json")
    tokenizer = tokenizers.Tokenizer.from_file(file)
    tokenizer.add_tokens(list(words))
    tokenizer.save(file)


def _pieces() -> list[str]:
    letters = "abcdefghijklmnopqrstuvwxyz0123456789"
    whole = [w for name in _NAMES for w in (name,)] + list(_CRAFTS)
    common = [
        "who",
        "is",
        "the",
        "patron",
        "of",
        "town",
        "where",
        "was",
        "born",
        "in",
        "worked",
        "as",
        "known",
        "for",
        "saint",
        "knowledge",
        "triples",
    ]
    return [*dict.fromkeys([*whole, *common, *letters, *(f"##{c}" for c in letters), *"<>;:.?"])]


def arrays(tree) -> list[np.ndarray]:
    """Returns the leaves of a pytree as NumPy arrays."""
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


def random_encoder(config: EncoderConfig, seed: int = 0) -> tuple[nnx.GraphDef, nnx.State]:
    """Returns an `Encoder` as (graphdef, random parameters); compiles only once."""
    graphdef, _ = nnx.split(nnx.eval_shape(lambda: Encoder(config, rngs=nnx.Rngs(0))))
    return graphdef, jax.jit(lambda: nnx.state(Encoder(config, rngs=nnx.Rngs(seed))))()
