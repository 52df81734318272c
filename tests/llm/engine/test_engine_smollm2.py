"""The engine with the default model, compared with transformers on real prompts."""

import dataclasses
import json
from typing import Any

import numpy as np
import pytest

from cirag_jax.llm.engine.engine import Engine
from cirag_jax.llm.engine.shapes import EngineConfig
from cirag_jax.llm.types import Generate, Message, Score
from cirag_jax.models import decoder_params
from cirag_jax.models.io.pretrained_decoder import load_decoder, save_decoder

pytestmark = pytest.mark.slow

NEW_TOKENS = 16


@pytest.fixture(scope="module")
def engine(optimized):
    options = EngineConfig(batch_size=16, prefill_chunks=(64,))
    return Engine.open(dtype="float32", options=options)


@pytest.fixture(scope="module")
def requests(shared_data):
    """A batch of sixteen real questions, most of them preceded by real facts."""
    folder = shared_data / "musique"
    with (folder / "questions.jsonl").open(encoding="utf-8") as file:
        questions = [json.loads(next(file))["question"] for _ in range(16)]
    with (folder / "openie.jsonl").open(encoding="utf-8") as file:
        facts = [json.loads(next(file))["triples"] for _ in range(16)]
    found = []
    for i, (question, triples) in enumerate(zip(questions, facts, strict=True)):
        facts_json = json.dumps({"fact": triples[: i % 6]}, ensure_ascii=False)
        messages = (
            Message("system", "Answer the question from the facts, in a few words."),
            Message("user", f"{facts_json}\nQuestion: {question}"),
        )
        found.append(Generate(messages, max_tokens=NEW_TOKENS, logprobs=True))
    return found


@pytest.fixture(scope="module")
def responses(engine, requests):
    return engine.generate(requests)


def test_greedy_texts_equal_transformers(engine, requests, responses, tmp_path):
    import torch
    from transformers import AutoModelForCausalLM

    # Saves safetensors, because transformers takes 20 s to read the GGUF file.
    loaded = load_decoder(dtype="float32")
    save_decoder(loaded, decoder_params.to_params(loaded.state), tmp_path)
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    tokenizer = engine.tokenizer
    prompts = [tokenizer.encode_prompt(r.messages) for r in requests]
    longest = max(map(len, prompts))
    ids = np.full((len(prompts), longest), tokenizer.pad_id, np.int64)
    mask = np.zeros_like(ids)
    for i, prompt in enumerate(prompts):
        ids[i, longest - len(prompt) :] = prompt
        mask[i, longest - len(prompt) :] = 1
    with torch.inference_mode():
        out = model.generate(
            torch.tensor(ids),
            attention_mask=torch.tensor(mask),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            eos_token_id=sorted(tokenizer.eos_ids),
            pad_token_id=tokenizer.pad_id,
        )
    expected = [tokenizer.decode(row) for row in out[:, longest:].tolist()]
    assert [r.text for r in responses] == expected
    assert len(set(expected)) > 12


def test_guesses_change_no_number(engine, requests):
    """Half of the prompts ask for their own facts, which the guesses then find."""
    copying = [
        dataclasses.replace(
            request,
            messages=(*request.messages[:-1], Message("user", f"Repeat: {row.content}")),
            max_tokens=40,
        )
        for request in requests[1:5]
        for row in request.messages[-1:]
    ]
    sent = [*copying, *requests[:4]]
    exact, guessing = (
        engine.with_options(dataclasses.replace(engine.options, batch_size=1, lookup_tokens=count))
        for count in (0, 7)
    )
    expected = exact.generate(sent)
    assert [r.tokens for r in guessing.generate(sent)] == [r.tokens for r in expected]
    usage = guessing.usage
    assert usage.drafted_tokens > 0.3 * usage.generated_tokens and not exact.usage.drafted_tokens


def test_scores_equal_logprobs_of_generation(engine, requests, responses):
    pairs = []
    for request, response in zip(requests[:12], responses[:12], strict=True):
        tokens = [t for t in response.tokens if t.id not in engine.tokenizer.eos_ids]
        if engine.tokenizer.encode(response.text).tolist() == [t.id for t in tokens]:
            score_request = Score(request.messages, (response.text,))
            pairs.append((score_request, [t.logprob for t in tokens]))
    assert len(pairs) >= 8
    scores = engine.score([score_request for score_request, _ in pairs])
    for scored, (_, logprobs) in zip(scores, pairs, strict=True):
        np.testing.assert_allclose([t.logprob for t in scored.tokens[0]], logprobs, atol=1e-4)
