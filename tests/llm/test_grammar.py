"""Token masks for JSON schemas, which must allow only valid texts."""

import json

import numpy as np
import pytest

from cirag_jax.errors import UserError
from cirag_jax.llm.chat import ChatTokenizer
from cirag_jax.llm.grammar import JsonGrammar, check_schema
from tests import tiny_decoder

SCHEMA = {
    "type": "object",
    "properties": {
        "done": {"type": "boolean"},
        "hops": {"enum": [1, 22, 333]},
        "chain": {
            "type": "array",
            "items": {"enum": ["mill", "town", "the town"]},
            "minItems": 1,
            "maxItems": 3,
        },
    },
    "required": ["done", "chain"],
    "additionalProperties": False,
}
V = tiny_decoder.VOCABULARY


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return ChatTokenizer.load(tiny_decoder.folder(tmp_path_factory.mktemp("g") / "model"))


@pytest.fixture(scope="module")
def grammar(tokenizer):
    return JsonGrammar(tokenizer, V + 37)  # a model's vocabulary is often padded


def allowed(state):
    mask = state.mask()
    assert mask.dtype == np.uint32 and mask.shape == (-(-(V + 37) // 32),)
    return [
        32 * word + bit for word in range(len(mask)) for bit in range(32) if mask[word] >> bit & 1
    ]


def test_random_walks_satisfy_the_schema(tokenizer, grammar):
    rng = np.random.default_rng(0)
    values = set()
    for _ in range(40):
        state, tokens = grammar.start(SCHEMA), []
        while not state.is_done:
            choices = allowed(state)
            assert choices and max(choices) < V
            token = int(rng.choice(choices))
            state.advance(token)
            if token in tokenizer.eos_ids:
                break
            tokens.append(token)
        value = json.loads(tokenizer.decode(tokens))
        assert set(value) <= {"done", "hops", "chain"} and isinstance(value["done"], bool)
        assert value.get("hops", 1) in (1, 22, 333)
        assert 1 <= len(value["chain"]) <= 3
        assert set(value["chain"]) <= {"mill", "town", "the town"}
        values.add(json.dumps(value))
    assert len(values) > 20


def test_eos_is_allowed_only_at_a_possible_end(tokenizer, grammar):
    (end,) = tokenizer.eos_ids
    state = grammar.start({"type": "integer", "minimum": 10})
    assert end not in allowed(state)
    for token in tokenizer.encode("19"):
        assert token in allowed(state)
        state.advance(token)
    assert end in allowed(state) and not state.is_done  # more digits may follow
    state = grammar.start({"const": "mill"})
    for token in tokenizer.encode('"mill"'):
        state.advance(token)
    assert state.is_done and allowed(state) == [end]


def test_advance_disallowed_token_is_rejected(tokenizer, grammar):
    state = grammar.start(SCHEMA)
    with pytest.raises(ValueError, match="does not fit"):
        state.advance(int(tokenizer.encode("x")[0]))


def test_states_are_independent(tokenizer, grammar):
    first, second = grammar.start(SCHEMA), grammar.start(SCHEMA)
    before = second.mask()
    first.advance(allowed(first)[0])
    np.testing.assert_array_equal(second.mask(), before)
    assert (first.mask() != before).any()


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "strin"},
        {"type": "object", "properties": 3},
        {"$ref": "#/nowhere"},
        {"type": "string", "pattern": "("},
        {"type": "array", "uniqueItems": True},
    ],
)
def test_unsupported_schema_is_rejected(grammar, schema):
    for check in (grammar.start, check_schema):
        with pytest.raises(UserError, match="json_schema cannot be enforced"):
            check(schema)


def test_string_excludes_special_and_padding_tokens(tokenizer, grammar):
    state = grammar.start({"type": "string"})
    state.advance(int(tokenizer.encode('"')[0]))
    choices = set(allowed(state))
    assert len(choices) > V // 2 and max(choices) < V
    assert choices.isdisjoint(tokenizer.tokenizer.convert_tokens_to_ids(tiny_decoder.SPECIAL))
