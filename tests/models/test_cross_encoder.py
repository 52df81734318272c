"""Cross-encoders compared with sentence-transformers, for both kinds of head, and exported."""

import dataclasses
import itertools
import json

import jax
import numpy as np
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, processors

from cirag_jax import sharding
from cirag_jax.errors import UserError
from cirag_jax.models import cross_encoder
from cirag_jax.models.encoder_config import EncoderConfig
from cirag_jax.models.io.export import export_cross_encoder
from cirag_jax.models.io.tokenizer_files import read_tokenizer
from cirag_jax.models.io.workdir import open_cross_encoder
from cirag_jax.retrieval.pairs import score_pairs, tokenize_pairs
from cirag_jax.retrieval.rankers import CrossEncoderRanker
from tests import tiny

_BERT_LIKE = ("bert", "nomic_bert")
_ROTARY = ("modernbert", "nomic_bert", "gte", "jina_embeddings_v3")
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_PAIRS = [
    ("who was born in corum", "a b c"),
    ("x", "y"),
    ("a " * 9, "b c " * 30),
    ("c d e " * 30, "f " * 4),
    ("q r " * 40, "s t " * 40),
    ("", "z"),
]


def _save_tokenizer(folder, kind, max_length):
    """Saves a tokenizer of letters that joins pairs like the tokenizers of its family."""
    import transformers

    specials = ["<s>", "<pad>", "</s>", "<unk>"]
    if kind in _BERT_LIKE:
        specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    words = [*specials, *_LETTERS, "who", "was", "born", "in", "corum"]
    inner = tokenizers.Tokenizer(
        models.WordLevel(
            {w: i for i, w in enumerate(words)}, unk_token=specials[1 if kind in _BERT_LIKE else -1]
        )
    )
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    if kind in _BERT_LIKE:
        pair, single = "[CLS] $A [SEP] $B:1 [SEP]:1", "[CLS] $A [SEP]"
        special = [("[CLS]", 2), ("[SEP]", 3)]
    else:
        pair, single = "<s> $A </s> </s> $B </s>", "<s> $A </s>"
        special = [("<s>", 0), ("</s>", 2)]
    inner.post_processor = processors.TemplateProcessing(
        single=single, pair=pair, special_tokens=special
    )
    names = ["input_ids", "attention_mask"] + (["token_type_ids"] if kind in _BERT_LIKE else [])
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token=specials[0 if kind in _BERT_LIKE else 1],
        model_max_length=max_length,
        model_input_names=names,
    ).save_pretrained(folder)
    return len(words)


def _folder(folder, kind, *, labels=1, layers=2):
    """Saves a random cross-encoder in Hugging Face's format, with a distinct score per pair."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")

    vocabulary = _save_tokenizer(folder, kind, 48)
    torch.manual_seed(0)
    sizes = {
        "vocab_size": vocabulary, "hidden_size": 32, "num_hidden_layers": layers,
        "num_attention_heads": 4, "intermediate_size": 48, "num_labels": labels,
        "initializer_range": 0.4,
    }  # fmt: skip
    name = {"bert": "Bert", "modernbert": "ModernBert", "nomic_bert": "NomicBert", "gte": "Gte"}
    name |= {"jina_embeddings_v3": "JinaEmbeddingsV3"}
    if kind in name:
        changes = {"max_position_embeddings": 64, "pad_token_id": int(kind not in _BERT_LIKE)}
        if kind == "modernbert":
            changes |= {"local_attention": 8, "classifier_pooling": "mean", "norm_bias": True}
            changes |= {f"{name}_token_id": 0 for name in ("bos", "eos", "cls", "sep")}
        config = getattr(transformers, f"{name[kind]}Config")(**sizes, **changes)
        model = getattr(transformers, f"{name[kind]}ForSequenceClassification")(config)
    elif kind == "mpnet":
        config = transformers.MPNetConfig(**sizes, max_position_embeddings=66)
        model = transformers.MPNetForSequenceClassification(config)
    else:
        config = transformers.XLMRobertaConfig(
            **sizes, max_position_embeddings=66, type_vocab_size=1, pad_token_id=1
        )
        model = transformers.XLMRobertaForSequenceClassification(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.uniform_(-0.5, 0.5)
            elif kind == "modernbert" and "tok_embeddings" not in name and parameter.ndim == 2:
                parameter.normal_(std=0.4)
    model.eval().save_pretrained(folder)
    return folder


def _reference_logits(folder, pairs):
    """Returns the raw logits of sentence-transformers."""
    import torch
    from sentence_transformers import CrossEncoder

    return CrossEncoder(str(folder), device="cpu").predict(
        pairs, activation_fn=torch.nn.Identity(), show_progress_bar=False
    )


def _our_logits(folder, pairs, **options):
    return score_pairs(cross_encoder.load_cross_encoder(str(folder)), None, pairs, **options)


@pytest.mark.parametrize(
    ("kind", "layers"),
    [*itertools.product(("bert", "xlm-roberta", "mpnet"), (2, 12)), *((k, 2) for k in _ROTARY)],
)  # 12 layers run as a scan
def test_cross_encoder_logits_equal_sentence_transformers(tmp_path, kind, layers):
    pytest.importorskip("sentence_transformers")
    folder = _folder(tmp_path, kind, layers=layers)
    expected = _reference_logits(folder, _PAIRS)
    assert np.std(expected) > 0.1
    np.testing.assert_allclose(_our_logits(folder, _PAIRS), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["bert", "xlm-roberta", "mpnet", *_ROTARY])
def test_export_cross_encoder_scores_equal_in_both_libraries(tmp_path, kind):
    pytest.importorskip("sentence_transformers")
    from sentence_transformers import CrossEncoder

    model = cross_encoder.load_cross_encoder(str(_folder(tmp_path / "a", kind)), max_length=20)
    state = jax.tree.map(lambda x: x * 1.25, model.state)
    folder = export_cross_encoder(dataclasses.replace(model, state=state), tmp_path / "b")
    expected = score_pairs(model, state, _PAIRS)
    np.testing.assert_allclose(_our_logits(folder, _PAIRS), expected, atol=1e-5)
    theirs = CrossEncoder(str(folder), device="cpu").predict(_PAIRS, show_progress_bar=False)
    np.testing.assert_allclose(theirs, 1 / (1 + np.exp(-expected)), atol=1e-5)
    assert export_cross_encoder(model, folder) == folder  # replaces the earlier export
    np.testing.assert_allclose(
        _our_logits(folder, _PAIRS), score_pairs(model, None, _PAIRS), atol=1e-5
    )


def test_load_cross_encoder_from_encoder_needs_new_head(tmp_path):
    folder = tiny.model_folder(tmp_path / "model")
    with pytest.raises(UserError, match=r"is not a cross-encoder: tensor pooler"):
        cross_encoder.load_cross_encoder(str(folder))
    heads = [
        np.asarray(
            cross_encoder.load_cross_encoder(str(folder), new_head=seed).state["score_kernel"]
        )
        for seed in (0, 0, 1)
    ]
    np.testing.assert_array_equal(heads[0], heads[1])
    assert not np.array_equal(heads[0], heads[2])


@pytest.mark.parametrize("kind", ["bert", "xlm-roberta", "modernbert"])
def test_cross_encoder_score_is_log_odds_of_label(tmp_path, kind):
    folder = _folder(tmp_path / "a", kind, labels=3)
    file = folder / "config.json"
    names = {"id2label": {"0": "contradiction", "1": "entailment", "2": "neutral"}}
    file.write_text(json.dumps(json.loads(file.read_text()) | names))
    expected_BL = np.exp(_reference_logits(folder, _PAIRS))
    expected_BL /= expected_BL.sum(1, keepdims=True)
    assert np.std(expected_BL[:, 1]) > 0.01
    for label in ("entailment", "Entailment", "1"):
        model = cross_encoder.load_cross_encoder(str(folder), label=label)
        odds = score_pairs(model, None, _PAIRS)
        np.testing.assert_allclose(1 / (1 + np.exp(-odds)), expected_BL[:, 1], atol=1e-4)
    exported = export_cross_encoder(model, tmp_path / "b")
    np.testing.assert_allclose(
        _reference_logits(exported, _PAIRS), _reference_logits(folder, _PAIRS), atol=1e-5
    )
    assert json.loads((exported / "config.json").read_text())["id2label"] == names["id2label"]


def test_load_cross_encoder_wrong_label_raises(tmp_path):
    folder = str(_folder(tmp_path / "three", "bert", labels=3))
    for label, message in (
        (None, r"has 3 labels \(LABEL_0, LABEL_1, LABEL_2\); name the one that is scored"),
        ("LABEL_3", "has 3 labels .*, but not 'LABEL_3'"),
        ("3", "has 3 labels .*, but not '3'"),
    ):
        with pytest.raises(UserError, match=message):
            cross_encoder.load_cross_encoder(folder, label=label)
    with pytest.raises(UserError, match="has one label, so label 'LABEL_0' cannot be chosen"):
        cross_encoder.load_cross_encoder(str(_folder(tmp_path / "one", "bert")), label="LABEL_0")


@pytest.mark.parametrize(
    ("field", "value"),
    [("classifier_activation", "elu"), ("classifier_activation", ["gelu"]),
     ("classifier_pooling", "max")],
)  # fmt: skip
def test_load_cross_encoder_unsupported_head_is_named(tmp_path, field, value):
    folder = _folder(tmp_path, "modernbert")
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, field: value}))
    with pytest.raises(UserError, match=f"config.json: field {field} is .*; supported: "):
        cross_encoder.load_cross_encoder(str(folder))


def test_reranker_scores_independent_of_batch_and_devices(tmp_path):
    folder = _folder(tmp_path, "bert")
    together = _our_logits(folder, _PAIRS)
    alone = np.concatenate([_our_logits(folder, [pair]) for pair in _PAIRS])
    np.testing.assert_array_equal(together, alone)
    seen = []
    repeated = _our_logits(folder, [*_PAIRS, *_PAIRS], tokens_per_batch=64, progress=seen.append)
    np.testing.assert_allclose(repeated, [*together, *together], rtol=1e-5, atol=1e-5)
    assert sum(seen) == len(_PAIRS)
    mesh = sharding.make_mesh(fsdp=2)
    sharded = cross_encoder.load_cross_encoder(str(folder), mesh=mesh)
    np.testing.assert_allclose(
        score_pairs(sharded, None, _PAIRS, mesh=mesh), together, rtol=1e-4, atol=1e-5
    )


def test_reranker_truncates_longer_text_of_pair(tmp_path):
    model = cross_encoder.load_cross_encoder(str(_folder(tmp_path, "bert")))
    (row,) = tokenize_pairs(model, [("a b", "c " * 50)], 12)
    assert len(row.tokens_T) == 12
    assert list(row.types_T) == [0] * 4 + [1] * 8


@pytest.mark.parametrize("kind", ["bert", "xlm-roberta"])
def test_tokenize_pairs_equals_truncation_of_the_library(tmp_path, kind):
    vocabulary = _save_tokenizer(tmp_path, kind, 48)
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    model = cross_encoder.PairEncoder(
        graphdef=None, state=None,
        config=EncoderConfig(vocabulary, 8, 1, 1, 8, 64),
        tokenizer=read_tokenizer(tmp_path, vocabulary), max_length=48, model_type=kind, source="",
        folder=tmp_path, revision="", hf_config={},
    )  # fmt: skip
    texts = ["a b c " * count for count in range(8)]
    pairs = list(itertools.product(texts, texts))
    for limit in (5, 12, 13, 30):
        library.enable_truncation(limit, strategy="longest_first")
        expected = [(row.ids, row.type_ids) for row in library.encode_batch(pairs)]
        rows = tokenize_pairs(model, pairs, limit)
        assert [(row.tokens_T.tolist(), row.types_T.tolist()) for row in rows] == expected
    assert model.tokenizer.truncation is None


def test_reranker_scores_texts_of_each_query(tmp_path):
    folder = _folder(tmp_path, "xlm-roberta")
    reranker = CrossEncoderRanker(open_cross_encoder(str(folder))[0])
    scores = reranker.score(["a", "b", "c"], [["x", "y z"], [], ["x"]])
    assert [len(s) for s in scores] == [2, 0, 1]
    expected = _our_logits(folder, [("a", "x"), ("a", "y z"), ("c", "x")])
    np.testing.assert_array_equal(np.concatenate(scores), expected)
    assert reranker.score([], []) == []
