"""The PyTorch backend, compared with ``transformers.generate`` and forward passes."""

import dataclasses
import json
import shutil
import sys
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from cirag_jax.commands import backends
from cirag_jax.errors import UserError
from cirag_jax.llm import transformers_backend
from cirag_jax.llm.engine.engine import Engine
from cirag_jax.llm.engine.shapes import EngineConfig
from cirag_jax.llm.transformers_backend import TransformersBackend, TransformersConfig
from cirag_jax.llm.types import Generate, Message, Score
from cirag_jax.models.lora import LoraConfig
from configs import common
from tests import tiny, tiny_adapter, tiny_decoder

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def causal_folder(tmp_path_factory):
    return tiny_decoder.folder(tmp_path_factory.mktemp("torch") / "llama")


@pytest.fixture(scope="module")
def t5_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("torch") / "t5"
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=tiny_decoder.VOCABULARY,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=False,
        decoder_start_token_id=0,
        pad_token_id=0,
        eos_token_id=2,
    )
    model = transformers.T5ForConditionalGeneration(config)
    with torch.no_grad():  # the outputs of fresh weights hardly depend on the text
        for parameter in model.parameters():
            parameter.mul_(3.0)
        # Without this, logits of several hundred would have rounding errors of 1e-4.
        model.lm_head.weight.mul_(1 / 60)
    model.save_pretrained(folder)
    tiny_decoder.write_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    """A model with learned positions. Its outputs would change if padding shifted the positions."""
    folder = tmp_path_factory.mktemp("torch") / "gpt2"
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=tiny_decoder.VOCABULARY,
        n_positions=256,
        n_embd=32,
        n_layer=2,
        n_head=4,
        initializer_range=0.4,
        bos_token_id=0,
        eos_token_id=2,
    )
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    tiny_decoder.write_tokenizer(folder)
    return TransformersBackend.open(str(folder), config=TransformersConfig(batch_size=3))


@pytest.fixture(scope="module")
def causal(causal_folder):
    return TransformersBackend.open(str(causal_folder), config=TransformersConfig(batch_size=3))


@pytest.fixture(scope="module")
def t5(t5_folder):
    return TransformersBackend.open(str(t5_folder), config=TransformersConfig(batch_size=3))


def ask(*texts, **fields):
    roles = ("user", "assistant")
    turns = tuple(Message(roles[i % 2], text) for i, text in enumerate(texts))
    return Generate(turns, **{"max_tokens": 12, **fields})


REQUESTS = [
    ask("where was the weaver born?"),
    ask("who is it", "the sailor", "and the patron saint of the harbour town?", max_tokens=5),
    ask("question:"),
    ask("the mill the mill the mill", max_tokens=20),
]


def by_transformers(backend, request):
    """Returns the greedy text of one request from ``model.generate``."""
    prompt = backend.tokenizer.encode_prompt(request.messages)
    out = backend.model.generate(
        torch.tensor(prompt, dtype=torch.long)[None],
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=request.max_tokens,
        do_sample=False,
    )[0].tolist()
    return backend.tokenizer.decode(out[1:] if backend.is_encoder_decoder else out[len(prompt) :])


@pytest.mark.parametrize("kind", ["causal", "gpt2", "t5"])
def test_greedy_texts_equal_transformers(kind, request):
    backend = request.getfixturevalue(kind)
    progress = []
    responses = backend.generate(REQUESTS, lambda done, tokens: progress.append((done, tokens)))
    assert [r.text for r in responses] == [by_transformers(backend, r) for r in REQUESTS]
    assert len({r.text for r in responses}) == 4
    for response, sent in zip(responses, REQUESTS, strict=True):
        usage = response.usage
        prompt = backend.tokenizer.encode_prompt(sent.messages)
        assert usage.prompt_tokens == len(prompt) and usage.cached_tokens == 0
        full = usage.generated_tokens == sent.max_tokens
        assert full or response.finish_reason == "stop"
    assert progress[-1] == (4, sum(r.usage.generated_tokens for r in responses))


def test_t5_joins_turns_by_newlines(t5):
    prompt = t5.tokenizer.encode_prompt((Message("system", "a"), Message("user", "b")))
    assert t5.tokenizer.tokenizer.decode(prompt) == "a\nb"  # this tokenizer adds no EOS
    (response,) = t5.generate([ask("r", "q", "so", continue_final=True)])
    assert "encoder-decoder" in str(response.error)


def test_t5_special_tokens_are_ordinary_text(t5):
    prompt = t5.tokenizer.encode_prompt((Message("user", "a<|im_end|>b"),))
    assert 2 not in prompt and t5.tokenizer.tokenizer.decode(prompt) == "a<|im_end|>b"


def test_t5_keeps_eos_of_its_tokenizer(t5_folder):
    from tokenizers import processors

    backend = TransformersBackend.open(str(t5_folder))
    backend.tokenizer.tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="$A <|im_end|>", special_tokens=[("<|im_end|>", 2)]
    )
    assert backend.tokenizer.encode_prompt((Message("user", "b"),)).tolist()[-1] == 2


def test_details_equal_forward_pass(causal):
    sent = dataclasses.replace(REQUESTS[0], top_logprobs=3, entropy=True)
    (response,) = causal.generate([sent])
    tokens = response.tokens
    assert len(tokens) == response.usage.generated_tokens
    prompt = causal.tokenizer.encode_prompt(sent.messages)
    ids = torch.tensor([*prompt, *(t.id for t in tokens)], dtype=torch.long)
    with torch.inference_mode():
        logits_TV = causal.model(ids[None]).logits[0, len(prompt) - 1 : -1]
    logprobs_TV = torch.log_softmax(logits_TV.double(), -1).numpy()
    entropies = -(np.exp(logprobs_TV) * logprobs_TV).sum(-1)
    for token, logprobs_V, entropy in zip(tokens, logprobs_TV, entropies, strict=True):
        order = np.argsort(-logprobs_V)[:3]
        assert [index for _, index, _ in token.top] == order.tolist()
        np.testing.assert_allclose([v for *_, v in token.top], logprobs_V[order], atol=1e-5)
        assert token.logprob == pytest.approx(logprobs_V[token.id], abs=1e-5)
        assert token.entropy == pytest.approx(entropy, abs=1e-5)
        assert token.text == causal.tokenizer.piece(token.id)
    for i, token in enumerate(tokens):
        assert token.offset == len(causal.tokenizer.decode([t.id for t in tokens[:i]]))
    assert tokens[-1].offset > 0


@pytest.mark.parametrize("kind", ["causal", "t5"])
def test_scores_equal_logprobs_of_generation(kind, request):
    backend = request.getfixturevalue(kind)
    # Random models write parts of characters, which would be tokenized differently.
    schema = {"enum": ["the sailor was born in the harbour town"]}
    sent = dataclasses.replace(REQUESTS[0], max_tokens=99, logprobs=True, json_schema=schema)
    (response,) = backend.generate([sent])
    text = response.text
    (score,) = backend.score([Score(REQUESTS[0].messages, (text,))])
    ids = [token.id for token in score.tokens[0]]
    assert ids == backend.tokenizer.encode(text).tolist()
    assert (
        ids == [token.id for token in response.tokens][: len(ids)]
    )  # otherwise the comparison is meaningless
    expected = [token.logprob for token in response.tokens][: len(ids)]
    np.testing.assert_allclose([t.logprob for t in score.tokens[0]], expected, 3e-6, 1e-5)
    assert score.logprobs[0] == pytest.approx(sum(expected), rel=3e-6)


def test_samples_depend_only_on_the_seed(causal):
    sampled = [dataclasses.replace(r, temperature=1.0, seed=5) for r in REQUESTS]
    together = [r.text for r in causal.generate(sampled)]
    separate = [causal.generate([r])[0].text for r in sampled]
    assert together == separate
    assert together != [r.text for r in causal.generate(REQUESTS)]
    other = [dataclasses.replace(r, seed=6) for r in sampled]
    assert together != [r.text for r in causal.generate(other)]


def test_tiny_nucleus_is_greedy(causal):
    narrow = [
        dataclasses.replace(REQUESTS[0], temperature=1.0, top_p=1e-6, seed=s) for s in range(3)
    ]
    (greedy,) = causal.generate(REQUESTS[:1])
    assert {r.text for r in causal.generate(narrow)} == {greedy.text}


def test_stop_strings_cut_the_text(causal):
    (full,) = causal.generate(REQUESTS[3:])
    begin = full.text.index(".p.")
    end = begin + 3  # both strings end here, so one token completes both
    first, second = full.text[begin + 1 : end], full.text[begin:end]
    assert full.text.find(first) == begin + 1 and full.text.find(second) == begin
    stopped = dataclasses.replace(REQUESTS[3], stop=(first, second))
    (response,) = causal.generate([stopped])
    assert response.text == full.text[:begin]
    assert response.finish_reason == "stop"
    assert response.usage.generated_tokens < full.usage.generated_tokens


def test_continue_final_continues_the_text(causal):
    (full,) = causal.generate([dataclasses.replace(REQUESTS[0], max_tokens=9, logprobs=True)])
    cut = 4
    begun = causal.tokenizer.decode([t.id for t in full.tokens[:cut]])
    turns = (*REQUESTS[0].messages, Message("assistant", begun))
    sent = Generate(turns, "", 9 - cut, continue_final=True)
    prompt = causal.tokenizer.encode_prompt(turns, True).tolist()
    assert prompt[-cut:] == [t.id for t in full.tokens[:cut]]  # otherwise another text is continued
    assert begun + causal.generate([sent])[0].text == full.text


def test_json_schema_constrains_samples(causal):
    schema = {"enum": ["the mill", "the town"]}
    requests = [
        dataclasses.replace(REQUESTS[0], json_schema=schema, temperature=2.0, seed=s)
        for s in range(5)
    ]
    texts = [r.text for r in causal.generate(requests)]
    assert {json.loads(text) for text in texts} == {"the mill", "the town"}


def ngrams(tokens, size):
    return [tuple(tokens[i : i + size]) for i in range(len(tokens) - size + 1)]


@pytest.mark.parametrize("temperature", [0.0, 0.2])
def test_no_repeat_ngram_size(causal_folder, temperature):
    requests = [
        dataclasses.replace(r, max_tokens=40, logprobs=True, temperature=temperature)
        for r in REQUESTS
    ]
    free = TransformersBackend.open(str(causal_folder)).generate(requests)
    config = TransformersConfig(no_repeat_ngram_size=3)
    restricted = TransformersBackend.open(str(causal_folder), config=config).generate(requests)
    tokens = [[token.id for token in response.tokens or ()] for response in free]
    assert any(len(set(ngrams(own, 3))) < len(ngrams(own, 3)) for own in tokens)
    for response in restricted:
        own = ngrams([token.id for token in response.tokens or ()], 3)
        assert len(set(own)) == len(own)


def test_no_repeat_ngram_size_equals_engine(causal_folder):
    """Texts are equal even if rows span several chunks, have different lengths or start late."""
    requests = [dataclasses.replace(r, max_tokens=40) for r in REQUESTS]
    config = TransformersConfig(no_repeat_ngram_size=3)
    expected = TransformersBackend.open(str(causal_folder), config=config).generate(requests)
    sizes = {"batch_size": 3, "decode_chunk": 8}
    options = EngineConfig(**sizes, no_repeat_ngram_size=3)
    actual = Engine.open(str(causal_folder), options=options).generate(requests)
    assert [r.text for r in actual] == [r.text for r in expected]
    plain = Engine.open(str(causal_folder), options=EngineConfig(**sizes)).generate(requests)
    assert [r.text for r in plain] != [r.text for r in actual]


def test_json_schema_overrides_no_repeat(causal_folder):
    config = TransformersConfig(no_repeat_ngram_size=2)
    backend = TransformersBackend.open(str(causal_folder), config=config)
    schema = {"enum": [["the mill", "the mill", "the mill"]]}
    engine = Engine.open(str(causal_folder), options=EngineConfig(no_repeat_ngram_size=2))
    sent = dataclasses.replace(REQUESTS[0], json_schema=schema, max_tokens=60)
    for model in (backend, engine):
        (response,) = model.generate([sent])
        assert json.loads(response.text) == schema["enum"][0]


def test_bad_requests_do_not_affect_others(causal_folder):
    config = TransformersConfig(context=40, overflow="truncate")
    backend, responses_by_index = TransformersBackend.open(str(causal_folder), config=config), {}
    long, fits = " the harbour" * 40, (Message("user", "who?", " the harbour" * 40),)
    requests = {
        "long": ask(long),
        "fits": Generate(fits, "", 99),
        "attention": ask("q", attention=3),
        "schema": ask("q", json_schema={"type": "strin"}),
        "fine": ask("q"),
    }
    responses = backend.generate(list(requests.values()), done=responses_by_index.__setitem__)
    by_id = dict(zip(requests, responses, strict=True))
    assert "fit" in str(by_id["long"].error)
    assert "attention" in str(by_id["attention"].error)
    assert "json_schema" in str(by_id["schema"].error)
    assert by_id["fits"].usage.truncated == 1 and by_id["fine"].error is None
    usage = by_id["fits"].usage
    assert by_id["fits"].finish_reason == "length"
    assert usage.prompt_tokens + usage.generated_tokens == 40  # the context, not 99
    assert responses_by_index == dict(enumerate(responses))
    assert backend.usage.truncated == 1


def test_pickles_are_rejected(tmp_path, monkeypatch, causal_folder):
    def opened(*_, **__):
        raise AssertionError("a pickle was opened")

    monkeypatch.setattr(torch, "load", opened)
    model, adapter = tmp_path / "model", tmp_path / "adapter"
    shutil.copytree(causal_folder, model)
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"pytorch_model\.bin is a pickle"):
        TransformersBackend.open(str(model))
    with tiny_adapter.quiet_peft():
        tiny_adapter.peft_model(causal_folder, LoraConfig(4, 8)).save_pretrained(adapter)
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")
    with pytest.raises(UserError, match=r"adapter_model\.bin is a pickle"):
        TransformersBackend.open(str(causal_folder), adapter=str(adapter))
    (adapter / "adapter_model.bin").unlink()
    with pytest.raises(UserError, match="has no adapter_model.safetensors"):
        TransformersBackend.open(str(causal_folder), adapter=str(adapter))


def test_open_split_gguf_is_refused(tmp_path):
    for part in (1, 2):
        (tmp_path / f"m-0000{part}-of-00002.gguf").touch()
    with pytest.raises(UserError, match=r"m-00001-of-00002\.gguf is split, .* use backend=jax"):
        transformers_backend._load(tmp_path / "m-00001-of-00002.gguf", "auto")


def test_open_tokens_beyond_table_are_refused(tmp_path, causal_folder):
    folder = shutil.copytree(causal_folder, tmp_path / "more")
    tiny.add_words(folder, "zyx")
    with pytest.raises(UserError, match=r"which has 320 rows: 'zyx' \(320\); remove"):
        TransformersBackend.open(str(folder))


def test_generate_raises_no_warnings(causal_folder, monkeypatch):
    warnings = []
    logger: Any = sys.modules["transformers.generation.utils"].logger
    monkeypatch.setattr(logger, "warning_once", warnings.append)
    TransformersBackend.open(str(causal_folder)).generate(REQUESTS)
    assert not warnings


def test_open_bad_model_is_rejected(tmp_path, monkeypatch, causal_folder):
    with pytest.raises(UserError, match="float8"):
        TransformersBackend.open(str(causal_folder), config=TransformersConfig(dtype="float8"))
    (tmp_path / "config.json").write_text('{"model_type": "nothing"}')
    with pytest.raises(UserError, match=str(tmp_path)):
        TransformersBackend.open(str(tmp_path))
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, TransformersBackend.__module__)
    block = common.language_model()
    block.update({"backend": "transformers", "model": str(causal_folder)})
    with pytest.raises(UserError, match="pip install torch"):
        backends.open_backend(block)
