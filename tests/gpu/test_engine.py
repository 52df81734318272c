"""The engine on GPUs, compared with transformers in fp32 on the CPU.

As in `test_parity`, the same tests on a CPU check the comparison.
"""

import jax
import numpy as np
import pytest

from cirag_jax.llm.engine.engine import Engine
from cirag_jax.llm.engine.shapes import EngineConfig
from tests import tiny_decoder
from tests.gpu import parity
from tests.gpu.conftest import targets
from tests.llm.engine.engines import ask, text

# The largest difference of log-probabilities. With bf16, it stems from rounded hidden states.
TOLERANCES = {"float32": 1e-4, "bfloat16": 0.1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    fields = {**parity.decoder_fields(parity.GPU), "num_hidden_layers": 3}
    return tiny_decoder.folder(tmp_path_factory.mktemp("decoder"), **fields)


def open_engine(target, folder, dtype):
    mesh = target.mesh if target.mesh.size > 1 else None
    options = EngineConfig(
        batch_size=4, cache_tokens=4096, prefix_tokens=2048, context=1024, lookup_tokens=0
    )
    return Engine.open(str(folder), dtype=dtype, mesh=mesh, options=options)


def requests():
    """Returns prompts of 60 to 500 tokens, which share their beginnings."""
    shared = text(40, 0)
    return [ask(f"{shared} {text(count, count)}", max_tokens=16) for count in (1, 50, 120, 200, 7)]


@targets((1, 1, 1), (1, 1, 2))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_engine_greedy_log_probabilities_equal_transformers(target, folder, dtype):
    import torch
    import transformers

    tolerance = TOLERANCES[dtype]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    precision = "highest" if dtype == "float32" else None  # A GPU would round fp32 to TF32.
    with jax.default_matmul_precision(precision):
        engine = open_engine(target, folder, dtype)
        responses = engine.generate(requests())
    for request, response in zip(requests(), responses, strict=True):
        prompt = engine.tokenizer.encode_prompt(request.messages)
        assert response.tokens is not None
        tokens = [token.id for token in response.tokens]
        ids = torch.tensor([[*prompt.tolist(), *tokens]])
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1]
        logprobs = torch.log_softmax(logits, -1).numpy()
        theirs = logprobs[np.arange(len(tokens)), tokens]
        ours = np.asarray([token.logprob for token in response.tokens])
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=tolerance)
        # No other token is more probable.
        np.testing.assert_allclose(theirs, logprobs.max(-1), rtol=0, atol=2 * tolerance)


@targets((1, 1, 1), (1, 1, 2))
def test_engine_numbers_do_not_depend_on_earlier_or_other_requests(target, folder):
    sent = requests()
    alone = open_engine(target, folder, None).generate(sent[1:2])[0]
    engine = open_engine(target, folder, None)
    mixed = engine.generate(sent[::-1])[::-1]
    again = engine.generate(sent)
    assert again[2].usage.cached_tokens > 0
    assert alone.tokens == mixed[1].tokens == again[1].tokens
