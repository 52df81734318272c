"""Greedy decoding of each model family compared with transformers."""

import os
import pathlib
from typing import Any

import jax
import numpy as np
import pytest
import torch
import transformers

from cirag_jax.llm.engine.engine import Engine
from cirag_jax.llm.types import Score
from cirag_jax.models import decoder, decoder_params
from cirag_jax.models.io.pretrained_decoder import load_decoder
from tests import tiny_decoder
from tests.llm.engine.engines import ask, open_engine, text

pytestmark = pytest.mark.slow

# Folders or GGUF files of real models, separated like PATH; for example a Gemma 3.
REAL_MODELS = [
    path for path in os.environ.get("CIRAG_JAX_TEST_MODELS", "").split(os.pathsep) if path
]
FAMILIES: dict[str, dict[str, Any]] = {
    "smollm3": {"use_sliding_window": True, "sliding_window": 6},
    "phi3": {"original_max_position_embeddings": 50},  # some texts become longer than this
    "gemma3_text": {"num_hidden_layers": 3, "layer_types": None, "sliding_window_pattern": 3},
}


def _generate(model, engine: Engine, request) -> np.ndarray:
    """Returns the greedy tokens of transformers, with its cache."""
    prompt = engine.tokenizer.encode_prompt(request.messages)[None].astype(np.int64)
    ends = sorted(engine.tokenizer.eos_ids)
    output = model.generate(
        torch.tensor(prompt),
        attention_mask=torch.ones(prompt.shape),
        max_new_tokens=request.max_tokens,
        do_sample=False,
        eos_token_id=ends,
        pad_token_id=ends[0],
    )
    return output[0, prompt.shape[1] :].numpy()


@pytest.mark.parametrize("family", FAMILIES)
def test_engine_greedy_tokens_equal_transformers(family, tmp_path):
    """Prompts are shorter and longer than windows and trained lengths, alone and together."""
    fields = {"max_position_embeddings": 512, **FAMILIES[family]}
    folder = tiny_decoder.folder(tmp_path, family, **fields)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    engine = open_engine(folder)
    requests = [ask(text(n, n), max_tokens=40) for n in (1, 4, 12, 40)]
    responses = engine.generate(requests)
    for request, response in zip(requests, responses, strict=True):
        expected = _generate(model.eval(), engine, request)
        assert [token.id for token in response.tokens or ()] == expected.tolist()


def test_engine_longrope_scores_equal_forward_pass(tmp_path):
    """Short and long continuations of one prompt have different rotary frequencies."""
    fields = {"max_position_embeddings": 512, "original_max_position_embeddings": 50}
    folder = tiny_decoder.folder(tmp_path, "phi3", **fields)
    engine = open_engine(folder)
    request = Score(ask(text(5, 5)).messages, ("a town", text(30, 3), " who"))
    prompt = engine.tokenizer.encode_prompt(request.messages)
    loaded = load_decoder(str(folder))
    params = decoder_params.to_params(loaded.state)
    (scored,) = engine.score([request])
    lengths = []
    for tokens in scored.tokens:
        ids = np.asarray([token.id for token in tokens], np.int32)
        row = np.concatenate([prompt, ids])[None]
        hidden = decoder.forward(loaded.config, params, row)[0, len(prompt) - 1 : -1]
        logprobs = jax.nn.log_softmax(decoder.logits(loaded.config, params, hidden), axis=-1)
        expected = np.asarray(logprobs)[np.arange(len(ids)), ids]
        np.testing.assert_allclose([token.logprob for token in tokens], expected, atol=2e-5)
        lengths.append(row.size)
    assert min(lengths) <= 50 < max(lengths)


@pytest.mark.parametrize("path", REAL_MODELS)
def test_engine_real_model_equals_transformers(path):
    """Continues a text longer than Gemma's window of 512 tokens; the tokenizers are equal, too."""
    file = pathlib.Path(path)
    where = {"gguf_file": file.name} if file.suffix == ".gguf" else {}
    folder = str(file.parent if where else file)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **where)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, **where
    )
    engine = Engine.open(path, dtype="float32")
    lines = (f"Line {i}: river {i} flows through town {7 * i % 13}.\n" for i in range(40))
    for prompt in ("The capital of France is Paris.  The capital of Germany is", "".join(lines)):
        request = ask(prompt, max_tokens=24)
        assert engine.tokenizer.tokenizer(prompt) == tokenizer(prompt)
        (response,) = engine.generate([request])
        expected = _generate(model.eval(), engine, request)
        assert [token.id for token in response.tokens or ()] == expected.tolist()
