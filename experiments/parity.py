"""Compares every model family that this package opens with transformers, as a Markdown table.

    python experiments/parity.py [--only=qwen3_moe,bert] [--docs=docs/models.md]

A tiny model with random weights is made for each family of the weight tables. In fp32, the table
has the largest difference of logits (decoders) or hidden states (encoders), and of a decoder's
embeddings from sentence-transformers; the command exits with 1 if one is above 1e-4. In bf16, it
has the mean difference from transformers in fp32, of this package and of transformers. Inputs are
longer than the attention windows, and one row is padded. ``--docs`` replaces the table in a page.
"""

import argparse
import pathlib
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers
from flax import nnx
from sentence_transformers import SentenceTransformer

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from cirag_jax.io import standard_streams, write_json, write_text
from cirag_jax.models import decoder, decoder_params
from cirag_jax.models.io import decoder_families, gguf_weights, pretrained, weights
from cirag_jax.models.io.pretrained_decoder import load_decoder
from cirag_jax.reports import tables
from cirag_jax.retrieval.encode import encode
from tests import tiny_decoder

LIMIT = 1e-4
LENGTHS = (90, 50)  # tokens of each row
# Without digits, which the tokenizer class of Qwen 2 splits whatever the tokenizer's file says.
TEXTS = ("the sailor was born in the town", "who is it?", "the mason, in the mill. " * 4)
# model_type -> models of the family; others appear with their model_type only.
MODELS = {
    "llama": "Llama 2 and 3, SmolLM2, TinyLlama",
    "qwen2": "Qwen 2 and 2.5",
    "qwen3": "Qwen 3",
    "qwen2_moe": "Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B",
    "qwen3_moe": "Qwen3-30B-A3B, Qwen3-Coder-30B-A3B",
    "mistral": "Mistral 7B",
    "mixtral": "Mixtral 8x7B and 8x22B",
    "smollm3": "SmolLM3",
    "phi3": "Phi-3, Phi-4, Phi-4-mini",
    "gemma2": "Gemma 2",
    "gemma3_text": "Gemma 3 (text)",
    "bert": "BERT, MiniLM, BGE, E5, GTE",
    "roberta": "RoBERTa",
    "xlm-roberta": "XLM-R, BGE-M3, multilingual E5",
    "camembert": "CamemBERT",
    "mpnet": "MPNet",
    "modernbert": "ModernBERT, gte-modernbert",
    "nomic_bert": "nomic-embed-text-v1.5, arctic-embed-m-long",
    "gte": "gte-base-en-v1.5, gte-multilingual",
    "jina_embeddings_v3": "jina-embeddings-v3",
}
# Fields of every tiny encoder, and of some families; others are the defaults of transformers.
_SIZES = {
    "vocab_size": 320,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "pad_token_id": 1,
}
_FIELDS: dict[str, dict[str, Any]] = {
    "roberta": {"type_vocab_size": 1},
    "xlm-roberta": {"type_vocab_size": 1},
    "camembert": {"type_vocab_size": 1},
}


def batch(vocabulary: int, pad_id: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Returns random tokens ``[B, T]``, padded on the right, and the mask of real tokens."""
    length = max(LENGTHS)
    tokens_BT = np.random.default_rng(0).integers(5, vocabulary, (len(LENGTHS), length))
    mask_BT = np.arange(length) < np.asarray(LENGTHS)[:, None]
    return np.where(mask_BT, tokens_BT, pad_id).astype(np.int32), mask_BT


def decoder_outputs(folder: pathlib.Path, kind: str) -> Iterator[np.ndarray]:
    """Yields logits of real tokens: ours and theirs in fp32, ours and theirs in bf16."""
    tiny_decoder.folder(folder, kind)
    for dtype in ("float32", "bfloat16"):
        loaded = load_decoder(str(folder), dtype=dtype)
        tokens_BT, mask_BT = batch(loaded.config.vocab_size)
        params, lengths_B = decoder_params.to_params(loaded.state), jnp.asarray(LENGTHS)
        hidden = decoder.forward(loaded.config, params, jnp.asarray(tokens_BT), lengths_B=lengths_B)
        yield np.asarray(decoder.logits(loaded.config, params, hidden))[mask_BT]
        yield _torch(transformers.AutoModelForCausalLM, folder, dtype, tokens_BT, mask_BT).logits


def encoder_outputs(folder: pathlib.Path, kind: str) -> Iterator[np.ndarray]:
    """Yields hidden states of real tokens, as `decoder_outputs`."""
    torch.manual_seed(0)
    fields = transformers.AutoConfig.for_model(kind, **_SIZES, **_FIELDS.get(kind, {}))
    model = transformers.AutoModel.from_config(fields)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms and biases
                parameter.add_(0.3 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    for dtype in ("float32", "bfloat16"):
        config, raw = pretrained.read_config(folder)
        config = pretrained.with_compute_options(config, dtype=dtype)
        graphdef, state = weights.load_state(folder, config, raw["model_type"])
        tokens_BT, mask_BT = batch(config.vocab_size, config.pad_id)
        yield np.asarray(nnx.merge(graphdef, state)(tokens_BT, mask_BT), np.float32)[mask_BT]
        yield _torch(transformers.AutoModel, folder, dtype, tokens_BT, mask_BT).last_hidden_state


def vector_difference(family: str) -> float:
    """Returns the largest difference of a decoder's embeddings from sentence-transformers."""
    modules = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    with tempfile.TemporaryDirectory() as name:
        folder = tiny_decoder.folder(name, family)
        entries = []
        for i, (path, kind) in enumerate(modules):
            (folder / path).mkdir(exist_ok=True)
            module = f"sentence_transformers.models.{kind}"
            entries.append({"idx": i, "name": str(i), "path": path, "type": module})
        write_json(folder / "modules.json", entries)
        pooling = {"word_embedding_dimension": 32, "pooling_mode_lasttoken": True}
        write_json(folder / "1_Pooling/config.json", pooling | {"pooling_mode_mean_tokens": False})
        write_json(folder / "2_Normalize/config.json", {})
        ours = encode(pretrained.load_encoder(str(folder)), None, TEXTS)
        model = SentenceTransformer(str(folder), device="cpu", local_files_only=True)
        # One by one: with Phi 3, transformers scales positions by the longest text of a batch.
        theirs = model.encode(list(TEXTS), batch_size=1, show_progress_bar=False)
    return float(np.abs(ours - theirs).max())


class _Outputs(dict):
    __getattr__ = dict.__getitem__


def _torch(kind: Any, folder: Any, dtype: str, tokens_BT: np.ndarray, mask_BT: np.ndarray) -> Any:
    """Returns the outputs of transformers at real tokens, as fp32 arrays."""
    model = kind.from_pretrained(
        folder,
        dtype=getattr(torch, dtype),
        attn_implementation="eager",
        experts_implementation="eager",
    ).eval()
    with torch.inference_mode():
        outputs = model(torch.tensor(tokens_BT).long(), attention_mask=torch.tensor(mask_BT).long())
    arrays = {
        k: v.float().numpy()[mask_BT]
        for k, v in outputs.items()
        if torch.is_tensor(v) and v.ndim == 3
    }
    return _Outputs(arrays)


KINDS = {
    "decoder": (decoder_families.FAMILIES, decoder_outputs),
    "encoder": (weights.FAMILIES, encoder_outputs),
}


def compare(kind: str, family: str) -> tuple[float, float, float]:
    """Returns the largest difference in fp32, and the mean ones of ours and theirs in bf16."""
    _, outputs = KINDS[kind]
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs, ours_bf16, theirs_bf16 = outputs(pathlib.Path(folder), family)
    rough, their_rough = (float(np.abs(x - theirs).mean()) for x in (ours_bf16, theirs_bf16))
    return float(np.abs(ours - theirs).max()), rough, their_rough


def gguf_of(family: str) -> str:
    """Returns whether GGUF files of a family can be opened; some have ``llama``."""
    if family in ("mistral", "mixtral"):
        return "as `llama`"
    return "yes" if family in gguf_weights.ARCHITECTURES.values() else "no"


def rows(only: Sequence[str] = ()) -> list[tuple[str, ...]]:
    """Returns the rows of the table, the header first."""
    heads = ("fp32", "vectors", "bf16", "bf16, transformers")
    found: list[tuple[str, ...]] = [("`model_type`", "models", "use", "GGUF", *heads)]
    uses = {
        "decoder": "LoRA, generation, embeddings, export",
        "encoder": "training, LoRA export, export",
    }
    for kind, (families, _) in KINDS.items():
        for family in families:
            if only and family not in only:
                continue
            exact, ours, theirs = compare(kind, family)
            vectors = f"{vector_difference(family):.0e}" if kind == "decoder" else ""
            found.append(
                (
                    *(f"`{family}`", MODELS.get(family, ""), uses[kind], gguf_of(family)),
                    *(f"{exact:.0e}", vectors, f"{ours:.4f}", f"{theirs:.4f}"),
                )
            )
    return found


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", 1)[0])
    parser.add_argument("--only", default="", help="families, separated by commas; default: all")
    parser.add_argument("--docs", help="page whose table is replaced")
    return parser.parse_args()


def main() -> None:
    """Prints the table; exits with 1 if a difference in fp32 is above the limit."""
    options = _parse()
    jax.config.update("jax_platforms", "cpu")
    transformers.logging.set_verbosity_error()
    found = rows([name for name in options.only.split(",") if name])
    table = tables.markdown(found)
    if options.docs:
        page = pathlib.Path(options.docs)
        text = page.read_text("utf-8")
        parts = re.split(r"(?<=\n)\|[^\n]*model_type(?:[^\n]*\n\|)*[^\n]*\n", text)
        if len(parts) != 2:
            raise SystemExit(f"{page} does not have one table of `model_type`")
        write_text(page, [parts[0] + table + "\n" + parts[1]])
    print(table)
    worst = max(float(cell) for row in found[1:] for cell in row[4:6] if cell)
    sys.exit(worst > LIMIT)


if __name__ == "__main__":
    with standard_streams():
        main()
