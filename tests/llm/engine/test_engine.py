"""The engine with a tiny model, whose responses must not depend on batching or caching."""

import dataclasses
import json
from typing import Any

import jax
import numpy as np
import pytest

from cirag_jax import sharding
from cirag_jax.errors import UserError
from cirag_jax.llm.chat import fit_prompt
from cirag_jax.llm.engine import steps
from cirag_jax.llm.engine.engine import Engine
from cirag_jax.llm.engine.shapes import EngineConfig, chunks, context_of
from cirag_jax.llm.types import Generate, Message, Score
from cirag_jax.models import decoder, decoder_params, lora
from cirag_jax.models.io import peft_format
from cirag_jax.models.io.pretrained_decoder import load_decoder
from cirag_jax.runtime import codec
from tests import tiny_decoder
from tests.llm.engine.engines import (
    SIZES,
    ask,
    mixed_requests,
    numbers,
    open_engine,
    pages_are_free,
    set_attention,
    text,
)

pytestmark = pytest.mark.slow


def test_row_with_nan_fails_and_others_keep_their_numbers(folder, engine):
    """The token "#" has no finite embedding; the prefix before it is cached for the next row."""
    nan_engine = open_engine(folder)
    (token,) = nan_engine.tokenizer.encode("#")
    params = nan_engine._model.weights.params
    params["embedding"] = params["embedding"].at[token].set(np.nan)
    shared = text(60, 3)
    sent = [*mixed_requests()[:3], ask(f"{shared} # {text(80, 4)}"), ask(f"{shared} a town")]
    for responses in (nan_engine.generate(sent), nan_engine.generate(sent[::-1])[::-1]):
        assert responses[3].error is not None and "not finite" in responses[3].error
        assert responses[3].usage.drafted_tokens == responses[3].usage.generated_tokens == 0
        others = responses[:3] + responses[4:]
        expected = engine.generate(sent[:3] + sent[4:])
        assert [numbers(r) for r in others] == [numbers(r) for r in expected]
    scored = nan_engine.score([Score(sent[0].messages, ("# a", "town", "the mill"))])[0]
    assert scored.error is not None and "not finite" in scored.error
    scored = nan_engine.score([Score(sent[0].messages, ("town", "the mill"))])[0]
    assert scored == dataclasses.replace(
        engine.score([Score(sent[0].messages, ("town", "the mill"))])[0], usage=scored.usage
    )


def test_row_is_independent_of_other_rows(engine):
    together = engine.generate(mixed_requests())
    separate = [engine.generate([request])[0] for request in mixed_requests()]
    assert [numbers(r) for r in together] == [numbers(r) for r in separate]
    backwards = engine.generate(mixed_requests()[::-1])[::-1]
    assert [numbers(r) for r in together] == [numbers(r) for r in backwards]
    short, long = ask(text(9, 1), attention=3), ask(text(150, 2), attention=3)
    assert engine.generate([short, long])[0].tokens == engine.generate([short])[0].tokens


def test_generate_reports_progress_and_early_responses(engine):
    progress, done = [], {}
    requests = mixed_requests()[::-1]
    responses = engine.generate(requests, lambda *counts: progress.append(counts), done.__setitem__)
    assert done == dict(enumerate(responses))
    assert list(done) != sorted(done)  # short answers come first
    assert progress == sorted(progress)
    total = sum(r.usage.generated_tokens for r in responses)
    assert progress[-1] == (len(responses), total)


def test_more_requests_are_answered_during_decoding(engine):
    slow = ask(text(3, 0), max_tokens=80)
    later = [
        [ask(text(4, 1), max_tokens=5), ask(text(300, 2))],  # the second does not fit
        [ask(text(60, 3), max_tokens=5)],  # much longer
        [ask(text(5, 4), temperature=0.8, seed=3), ask(text(7, 5), max_tokens=5)],
    ]
    requests, batches, order, before = [slow], list(later), [], []

    def more():
        before.append(len(order))
        new = batches.pop(0) if batches and len(order) >= len(requests) - 1 else []
        requests.extend(new)
        return new

    responses = engine.generate([slow], done=lambda index, _: order.append(index), more=more)
    assert requests == [slow, *(request for new in later for request in new)]
    assert sorted(order) == list(range(6)) and order.index(0) > 1
    separate = [engine.generate([request])[0] for request in requests]
    assert [r.error for r in responses] == [r.error for r in separate]
    assert [numbers(r) for r in responses if r.tokens] == [numbers(r) for r in separate if r.tokens]


def test_more_is_not_called_while_another_queue_is_longer(engine):
    """A few greedy requests must not delay a queue of sampled requests forever."""
    short, long = ask(text(3, 0), max_tokens=9, temperature=1.0), ask(text(60, 3), max_tokens=5)
    order, batches, counts = [], [[ask(text(4, 1), max_tokens=5)]], []

    def more():
        counts.append(len(order))
        return batches.pop() if batches else []

    engine.generate([short, long, long], done=lambda index, _: order.append(index), more=more)
    assert sorted(order) == [0, 1, 2, 3] and order[0] == 0 and counts[0] == 1


@pytest.mark.parametrize(
    ("more_first", "expected"),
    [
        (True, [0, 1, 2, 8, 9, 10, 3, 4, 5, 11, 12, 13, 6, 7, 14, 15]),
        (False, list(range(16))),
    ],
)
def test_more_requests_continue_programs_and_come_first(engine, more_first, expected):
    """Eight programs send two requests of one token each, i and i + 8, to an engine of 3 rows."""
    requests = [ask(text(3 + i, i), max_tokens=1) for i in range(16)]
    sent, order, responses, unanswered = list(range(8)), [], {}, []

    def done(index, response):
        order.append(sent[index])
        responses[sent[index]] = response

    def more():
        unanswered.append(len(sent) - len(order))
        new = [i + 8 for i in order if i < 8 and i + 8 not in sent]
        sent.extend(new)
        return [requests[i] for i in new]

    engine.serve(requests[:8], done, more, more_first=more_first)
    assert order == expected
    assert max(unanswered) == (8 if more_first else 2)  # two rows of three are busy
    together = engine.generate(requests)
    assert [numbers(responses[i]) for i in range(16)] == [numbers(r) for r in together]


def test_ended_rows_are_replaced_before_the_chunk_ends(engine, monkeypatch):
    """Chunks have 8 steps; seven answers of one token are decoded beside a long answer."""
    requests = [ask(text(9, i), max_tokens=1 if i else 24) for i in range(8)]
    decode, idle, least = steps.decode, [], []

    def noted(config, weights, cache, rows, *rest, **fields):
        least.append(int(fields["least"]))
        cache, out = decode(config, weights, cache, rows, *rest, **fields)
        rows_TB, tokens_TB = np.asarray(out["row"]), np.asarray(out["token"])
        active = [len(set(r[t >= 0])) for r, t in zip(rows_TB, tokens_TB, strict=True)]
        idle.append(sum((rows.remaining_B > 0).sum() - count for count in active if count))
        return cache, out

    def until_chunk_ends(*args, **fields):
        return noted(*args, **{**fields, "least": np.int32(1)})

    monkeypatch.setattr(steps, "decode", noted)
    responses, early = engine.generate(requests), sum(idle)
    assert idle[:3] == [0, 0, 0] and least[:4] == [3, 3, 3, 1]  # no request waits for the fourth
    idle.clear()
    monkeypatch.setattr(steps, "decode", until_chunk_ends)
    complete = engine.generate(requests)
    assert [numbers(r) for r in responses] == [numbers(r) for r in complete]
    assert 2 * early < sum(idle)


@pytest.mark.parametrize("done", [0, 1, 63, 64, 100, 250])
def test_chunks_cover_remaining_tokens(done):
    for end in (done, done + 1, done + 5, (done + 256) // 2, 255, 256):
        computed = [
            i for start, size in chunks(done, end, (64, 16)) for i in range(start, start + size)
        ]
        assert computed[: end - done] == list(range(done, end)) and len(computed) < end - done + 16


def test_finish_reasons(engine, folder):
    long = engine.generate([ask("the town", max_tokens=40)])[0]
    assert long.finish_reason == "length"
    assert long.tokens is not None and len(long.tokens) == 40
    # A stop string in the middle of the text, which may span tokens.
    stop = long.text[17:20]
    assert len(stop) == 3
    cut = engine.generate([ask("the town", max_tokens=40, stop=("@@@", stop))])[0]
    assert cut.finish_reason == "stop"
    assert cut.text == long.text[: long.text.index(stop)]
    assert stop in engine.tokenizer.decode([t.id for t in cut.tokens])
    assert stop not in engine.tokenizer.decode([t.id for t in cut.tokens[:-1]])
    assert cut.usage.generated_tokens == len(cut.tokens) < 40
    # Any generated token may be the end of turn.
    ends = open_engine(folder, prefix_tokens=0)
    ends.tokenizer.eos_ids = frozenset({long.tokens[11].id})
    ended = ends.generate([ask("the town", max_tokens=40)])[0]
    first = next(i for i, t in enumerate(long.tokens) if t.id == long.tokens[11].id)
    assert ended.finish_reason == "stop"
    assert [t.id for t in ended.tokens or ()] == [t.id for t in long.tokens[: first + 1]]


def test_full_context_ends_the_text(folder):
    engine = open_engine(folder)
    engine.tokenizer.eos_ids = frozenset()
    request = ask(text(110, 3), max_tokens=500)
    length = len(engine.tokenizer.encode_prompt(request.messages))
    response = engine.generate([request])[0]
    assert response.error is None and response.finish_reason == "length"
    assert len(response.tokens) == 512 - length


def by_forward(folder, ids, continuation):
    """Returns the log-probabilities [T, V] after ``ids`` and after each continuation token."""
    loaded = load_decoder(str(folder))
    params = decoder_params.to_params(loaded.state)
    tokens = np.concatenate([ids, continuation]).astype(np.int32)[None]
    hidden = decoder.forward(loaded.config, params, tokens)
    logits = decoder.logits(loaded.config, params, hidden)[0, len(ids) - 1 :]
    return np.asarray(jax.nn.log_softmax(logits, axis=-1))


def test_continue_final_equals_forward_pass(engine, folder):
    request = ask("who is the weaver?", "the weaver is", max_tokens=14, continue_final=True)
    response = engine.generate([request])[0]
    prompt = engine.tokenizer.encode_prompt(request.messages, continue_final=True)
    tokens = [token.id for token in response.tokens or ()]
    logprobs = by_forward(folder, prompt, tokens[:-1])
    assert logprobs.argmax(-1).tolist() == tokens
    assert response.usage.prompt_tokens == len(prompt)
    closed = dataclasses.replace(request, continue_final=False)
    assert engine.generate([closed])[0].text != response.text


def test_samples_depend_only_on_the_seed(engine):
    def sampled(name, seed, prompt=4):
        return ask(name, text(6, prompt), temperature=0.9, top_p=0.8, seed=seed, entropy=True)

    separate = [engine.generate([sampled("a", seed)])[0] for seed in range(4)]
    crowd = [sampled("a", seed) for seed in range(4)] + [sampled("b", 1, prompt=9)]
    together = engine.generate(crowd[::-1])[::-1]
    assert [numbers(r) for r in together[:4]] == [numbers(r) for r in separate]
    assert len({r.text for r in separate}) > 1
    greedy = [dataclasses.replace(sampled("a", s), temperature=0.0) for s in (0, 1)]
    texts = {r.text for r in engine.generate(greedy)}
    assert len(texts) == 1 and texts != {separate[0].text}


def test_details_equal_transformers(engine, folder):
    import torch
    from transformers import AutoModelForCausalLM

    request = ask(text(8, 5), max_tokens=12, top_logprobs=3, entropy=True, attention=4)
    response = engine.generate([request])[0]
    prompt = engine.tokenizer.encode_prompt(request.messages)
    ids = np.concatenate([prompt, [t.id for t in response.tokens]])
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.inference_mode():
        out = model(torch.tensor(ids[None].astype(np.int64)), output_attentions=True)
    # Row i belongs to the token at position len(prompt) + i.
    rows = slice(len(prompt) - 1, len(ids) - 1)
    logprobs = torch.log_softmax(out.logits[0, rows], -1).numpy()
    entropies = -(np.exp(logprobs) * logprobs).sum(-1)
    for i, token in enumerate(response.tokens):
        assert token.logprob == pytest.approx(logprobs[i, token.id], abs=2e-5)
        assert token.entropy == pytest.approx(entropies[i], abs=2e-5)
        best = np.argsort(-logprobs[i])[:3]
        assert [t[1] for t in token.top] == best.tolist()
        np.testing.assert_allclose([t[2] for t in token.top], logprobs[i, best], atol=2e-5)
        assert token.text == engine.tokenizer.piece(token.id)
    weights_TS = out.attentions[-1][0].numpy().mean(0)[rows]
    for i, token in enumerate(response.tokens):
        best = np.argsort(-weights_TS[i])[:4]
        assert [position for _, position, _ in token.attended] == best.tolist()
        assert [piece for piece, *_ in token.attended] == [
            engine.tokenizer.piece(int(ids[position])) for position in best
        ]
        np.testing.assert_allclose([w for *_, w in token.attended], weights_TS[i, best], atol=2e-6)
        # Row i + 1 belongs to the token itself; later tokens start at row i + 2.
        later = weights_TS[i + 2 :, len(prompt) + i]
        assert token.received == pytest.approx(later.max(initial=0.0), abs=2e-6)
        written = engine.tokenizer.decode([t.id for t in response.tokens[:i]])
        assert token.offset == len(written)
    # The journal and the cache store all details.
    encoded = json.loads(codec.dump(codec.encode_response(request, response)))
    assert codec.decode_response(request, encoded) == response


def test_scores_equal_forward_pass(engine, caching_engine, folder):
    request = Score(ask(text(80, 6)).messages, (" " + text(20, 7),))
    prompt = engine.tokenizer.encode_prompt(request.messages)
    continuation = engine.tokenizer.encode(request.continuations[0])
    expected = by_forward(folder, prompt, continuation)[np.arange(len(continuation)), continuation]
    for chosen in (engine, caching_engine, caching_engine):
        score = chosen.score([request])[0]
        assert [t.id for t in score.tokens[0]] == continuation.tolist()
        np.testing.assert_allclose([t.logprob for t in score.tokens[0]], expected, atol=2e-5)
        assert score.logprobs[0] == pytest.approx(expected.sum(), abs=2e-4)
    assert score.usage.cached_tokens == 128


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3_text"])  # windows of 6 tokens
def test_score_prefills_the_prompt_once(tmp_path, monkeypatch, family):
    """Each prompt is prefilled once, and continuations in one call do not affect each other."""
    folder = tiny_decoder.folder(tmp_path, family, max_position_embeddings=512)
    engine = open_engine(folder, prefix_tokens=0)
    choices = tuple(f" {number}\n" for number in range(1, 31))
    requests = [
        Score(ask(text(40, 6)).messages, (*choices, " none\n", " 7\n", " 8\n")),
        Score(ask(text(9, 3)).messages, ("a town", text(40, 4), "the weaver")),
        Score(ask(text(248, 5) + " a").messages, ("a town", text(3, 8), "who")),
    ]
    calls: dict[str, list[int]] = {"prefill": [], "score": []}

    def counted(name, program):
        def call(*args, **fields):
            calls[name].append(args[4].size)
            return program(*args, **fields)

        return call

    for name in calls:
        monkeypatch.setattr(steps, name, counted(name, getattr(steps, name)))
    scored = engine.score(requests)
    prompts = [engine.tokenizer.encode_prompt(request.messages) for request in requests]
    new = [
        [engine.tokenizer.encode(text) for text in request.continuations] for request in requests
    ]
    # A call has eight of the 31 distinct choices. A continuation of over 64 tokens takes two calls.
    # Near the end of the context, each call has one continuation.
    assert calls["score"] == [64] * 4 + [64] * 4 + [8] * 3
    assert len(prompts[2]) - 1 + 8 > engine.context
    assert sum(calls["prefill"]) < 1.1 * sum(map(len, prompts))
    assert pages_are_free(engine)
    loaded = load_decoder(str(folder))
    params = decoder_params.to_params(loaded.state)
    for prompt, continuations, response in zip(prompts, new, scored, strict=True):
        length = len(prompt) + max(map(len, continuations))
        tokens = np.zeros((len(continuations), length), np.int32)
        for row, ids in zip(tokens, continuations, strict=True):
            row[: len(prompt) + len(ids)] = np.concatenate([prompt, ids])
        hidden = decoder.forward(loaded.config, params, tokens)[:, len(prompt) - 1 :]
        logprobs = jax.nn.log_softmax(decoder.logits(loaded.config, params, hidden), axis=-1)
        for row, ids, tokens in zip(logprobs, continuations, response.tokens, strict=True):
            assert [token.id for token in tokens] == ids.tolist()
            expected = np.asarray(row)[np.arange(len(ids)), ids]
            np.testing.assert_allclose([t.logprob for t in tokens], expected, atol=2e-5)


def test_json_schema_constrains_the_text(engine):
    schema = {
        "type": "object",
        "properties": {"need": {"type": "boolean"}, "n": {"type": "integer", "maximum": 99}},
        "required": ["need", "n"],
        "additionalProperties": False,
    }
    free = ask(text(9, 2))
    requests = [ask(text(6, 1), json_schema=schema, max_tokens=60), free]
    constrained, other = engine.generate(requests)
    assert constrained.finish_reason == "stop"
    value = json.loads(constrained.text)
    assert set(value) == {"need", "n"} and isinstance(value["need"], bool)
    assert numbers(other) == numbers(engine.generate([free])[0])


def test_bad_request_does_not_affect_others(engine):
    good = ask(text(5, 1))
    bad = [
        ask(text(300, 1)),
        ask(text(5, 1), max_tokens=0),
        ask(text(5, 1), temperature=-1.0),
        ask(text(5, 1), stop=("",)),
        ask(text(5, 1), json_schema={"type": "nonsense"}),
        Generate((), max_tokens=4),
    ]
    responses = engine.generate([*bad, good])
    assert [r.finish_reason for r in responses] == ["error"] * len(bad) + ["length"]
    assert "only 511 fit" in responses[0].error
    assert numbers(responses[-1]) == numbers(engine.generate([good])[0])
    score = engine.score([Score(good.messages, (text(300, 2),))])[0]
    assert "only 512 fit" in score.error and not score.tokens


def test_truncation_shortens_oldest_observations(folder):
    engine = open_engine(folder, overflow="truncate", context=128)
    messages = [Message("user", "who is it?", text(60, 1)), Message("assistant", "the weaver")]
    messages.append(Message("user", "where?", text(10, 2)))
    response = engine.generate([Generate(tuple(messages), max_tokens=4)])[0]
    assert response.error is None and response.usage.truncated == 1
    assert engine.usage.truncated == 1
    prompt, count = fit_prompt(engine.tokenizer, messages, 127, "truncate", room=3)
    shown = engine.tokenizer.decode(prompt)
    assert count == 1 and text(10, 2) in shown and shown.count("[omitted]") == 1
    assert 116 <= response.usage.prompt_tokens == len(prompt) <= 124  # leaves room for the answer


@pytest.mark.parametrize(("asked", "context"), [(0, 512), (100, 100), (300, 300), (9999, 512)])
def test_context_of_stays_within_the_model(asked, context):
    options = EngineConfig(**{**SIZES, "context": asked})
    assert context_of(options, 512) == context


def test_experts_generate_like_transformers_in_any_batch(tmp_path):
    import torch
    from transformers import AutoModelForCausalLM

    folder = tiny_decoder.folder(
        tmp_path, "qwen3_moe", max_position_embeddings=512, num_experts=16, mlp_only_layers=[1]
    )
    engine = open_engine(folder)
    together = engine.generate(mixed_requests())
    separate = [engine.generate([request])[0] for request in mixed_requests()]
    assert [numbers(r) for r in together] == [numbers(r) for r in separate]
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for request, response in zip(mixed_requests(), together, strict=True):
        prompt = engine.tokenizer.encode_prompt(request.messages)
        ids = torch.tensor(prompt[None].astype(np.int64))
        expected = model.generate(ids, max_new_tokens=request.max_tokens, do_sample=False)
        found = [token.id for token in response.tokens or ()]
        assert found == expected[0, len(prompt) :].tolist()[: len(found)]
        assert len(found) == request.max_tokens or response.finish_reason == "stop"


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_moe"])
def test_sharded_equals_unsharded(tmp_path, family):
    folder = tiny_decoder.folder(tmp_path / family, family, max_position_embeddings=512)
    mesh = sharding.make_mesh(data=2, fsdp=2, tensor=2)
    sizes = EngineConfig(**{**SIZES, "batch_size": 4})
    sharded = Engine.open(str(folder), mesh=mesh, options=sizes)
    kernel = sharded._model.weights.params["layers"][0]["q_proj"]
    assert len(kernel.sharding.device_set) == 8 and not kernel.sharding.is_fully_replicated
    plain = Engine.open(str(folder), options=sizes)
    for ours, theirs in zip(
        sharded.generate(mixed_requests()), plain.generate(mixed_requests()), strict=True
    ):
        assert ours.text == theirs.text
        np.testing.assert_allclose(
            [t[1] for t in numbers(ours)], [t[1] for t in numbers(theirs)], atol=2e-5
        )
    with jax.set_mesh(mesh):
        cache = decoder.empty_cache(sharded.config, 4, 128)["k"][0]
    assert cache.sharding.shard_shape(cache.shape) == (4, 1, sharded.config.head_dim, 128)


def test_adapter_applied_equals_merged(folder, engine, tmp_path, monkeypatch):
    loaded = load_decoder(str(folder))
    config = lora.LoraConfig(rank=4, alpha=32, dropout=0.5)
    state = lora.init_adapter(loaded.config, config, seed=1)
    state = jax.tree.map(lambda x: x + 0.05, state)
    peft_format.save_adapter(state, config, tmp_path / "adapter", str(folder))
    sizes = EngineConfig(**SIZES)
    adapted_engine = Engine.open(str(folder), adapter=str(tmp_path / "adapter"), options=sizes)
    adapted = adapted_engine.generate(mixed_requests())
    plain = engine.generate(mixed_requests())
    assert [r.text for r in adapted] != [r.text for r in plain]
    # Without dropout, results are reproducible.
    assert [numbers(r) for r in adapted_engine.generate(mixed_requests()[:3])] == [
        numbers(r) for r in adapted_engine.generate(mixed_requests()[:3])
    ]
    merged = Engine.open(
        str(folder), adapter=str(tmp_path / "adapter"), merge_adapter=True, options=sizes
    )
    assert [r.text for r in merged.generate(mixed_requests())] == [r.text for r in adapted]
    with monkeypatch.context() as patch:
        patch.setattr(jax, "default_backend", lambda: "gpu")
        fused = Engine.open(
            str(folder), adapter=str(tmp_path / "adapter"), dtype="float32", options=sizes
        )
    set_attention(fused, "transposed")
    assert "qkv_proj" in fused._model.weights.params["layers"][0]
    assert [r.text for r in fused.generate(mixed_requests())] == [r.text for r in adapted]


@pytest.mark.parametrize(
    ("features", "stored"), [("flags : sse avx512_bf16", "bfloat16"), ("flags : sse", "float32")]
)
def test_bf16_on_cpu_applies_to_weights_only(
    folder, engine, tmp_path, monkeypatch, features, stored
):
    """Weights are bf16 only if the CPU supports it; the cache then stores the bits of bf16."""
    (tmp_path / "cpuinfo").write_text(features)
    monkeypatch.setattr("cirag_jax.llm.engine.loading.CPU_FEATURES", tmp_path / "cpuinfo")
    options = EngineConfig(**{**SIZES, "prefix_tokens": 0})
    bf16_engine = Engine.open(str(folder), dtype="bfloat16", options=options)
    assert (bf16_engine.config.dtype, bf16_engine.config.param_dtype) == ("float32", stored)
    responses, exact = bf16_engine.generate(mixed_requests()), engine.generate(mixed_requests())
    assert not any(r.error for r in responses)
    cached = {array.dtype.name for array in jax.tree.leaves(bf16_engine._model.store.cache)}
    assert cached == {"uint16" if stored == "bfloat16" else "float32"}
    if stored == "float32":
        assert [r.text for r in responses] == [r.text for r in exact]


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_moe"])
def test_int8_on_cpu_is_close_to_fp32(tmp_path, family):
    """All kernels are int8, also of experts and of tied output layers, and under an adapter."""
    folder = tiny_decoder.folder(tmp_path, family, max_position_embeddings=512)
    config = lora.LoraConfig(rank=4, alpha=32, targets=("q_proj", "v_proj"))
    state = lora.init_adapter(load_decoder(str(folder)).config, config, seed=1)
    adapter = jax.tree.map(lambda x: x + 0.05, state), config
    options = EngineConfig(**{**SIZES, "prefix_tokens": 0})
    texts = (text(20, 7), text(20, 8), text(20, 9))
    score_request = Score(ask(text(30, 6)).messages, texts)
    for chosen in (None, adapter):
        exact, int8_engine = (
            Engine.open(str(folder), adapter=chosen, dtype=dtype, options=options)
            for dtype in ("float32", "int8")
        )
        layer = int8_engine._model.weights.params["layers"][0]
        kernels = [*(layer[n] for n in layer if n.endswith("_proj") or n.startswith("expert_"))]
        kernels.append(int8_engine._model.weights.params["lm_head"])
        assert len(kernels) == 8 and {k.values_OI.dtype.name for k in kernels} == {"int8"}
        logprobs, expected = (
            np.asarray(
                [[t.logprob for t in tokens[:20]] for tokens in e.score([score_request])[0].tokens]
            )
            for e in (int8_engine, exact)
        )
        assert 0 < np.abs(logprobs - expected).mean() < 0.1 * expected.std()
    plain = int8_engine.with_options(dataclasses.replace(options, lookup_tokens=0))
    ours, theirs = (engine.generate(mixed_requests()) for engine in (int8_engine, plain))
    assert [numbers(r) for r in ours] == [numbers(r) for r in theirs]
    assert int8_engine.usage.drafted_tokens > 0


def test_int8_is_refused_on_accelerators_and_in_training(folder, monkeypatch):
    with pytest.raises(UserError, match="int8 is for generation only"):
        load_decoder(str(folder), dtype="int8")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with pytest.raises(UserError, match="dtype=int8 is for one CPU"):
        Engine.open(str(folder), dtype="int8")
    with pytest.raises(UserError, match="int4"):
        Engine.open(str(folder), dtype="int4")


def test_open_keeps_one_copy_of_weights(folder, monkeypatch):
    loaded = []

    def load(*args, **fields):
        loaded.append(load_decoder(*args, **fields))
        return loaded[-1]

    monkeypatch.setattr("cirag_jax.llm.engine.loading.load_decoder", load)
    open_engine(folder)
    stacked = jax.tree.leaves(decoder_params.to_params(loaded[0].state)["layers"])
    assert stacked and all(array.is_deleted() for array in stacked)
