"""The cache of responses that several runs share."""

import pytest

from cirag_jax.errors import UserError
from cirag_jax.llm.types import Message, Usage
from cirag_jax.runtime.requests import Generate, Generated
from cirag_jax.runtime.store import ResponseCache

MODEL = {"model": "m", "dtype": None}
ASKED = Generate((Message("user", "Who?"),), "reader", 5)
SAID = Generated("Ada", "length", Usage(11, 3, 2, seconds=9.0))


@pytest.fixture
def cache(tmp_path):
    cache = ResponseCache(tmp_path / "cache.sqlite")
    yield cache
    cache.close()


def test_an_equal_request_is_answered_whoever_asks(cache):
    assert cache.find(MODEL, ASKED) is None
    cache.keep(MODEL, ASKED, SAID)
    other = Generate(ASKED.messages, "judge", 5)
    # It took no time and no money, and none of its prompt was computed.
    assert cache.find(MODEL, other) == Generated("Ada", "length", Usage(11, 11, 2))


@pytest.mark.parametrize(
    "changes",
    [
        {"max_tokens": 6},
        {"temperature": 0.1},
        {"seed": 1},
        {"stop": ("x",)},
        {"continue_final": True},
        {"messages": (Message("user", "Who", "?"),)},
        {"messages": (Message("system", "Who?"),)},
    ],
)
def test_another_request_is_another_response(cache, changes):
    cache.keep(MODEL, ASKED, SAID)
    fields = {"messages": ASKED.messages, "max_tokens": 5, **changes}
    assert cache.find(MODEL, Generate(**fields)) is None
    assert cache.find({**MODEL, "dtype": "bfloat16"}, ASKED) is None


def test_it_outlives_its_run_and_may_be_shared(tmp_path):
    one, two = ResponseCache(tmp_path / "c"), ResponseCache(tmp_path / "c")
    one.keep(MODEL, ASKED, SAID)
    assert two.find(MODEL, ASKED) is not None
    two.keep(MODEL, ASKED, Generated("Bo", "stop"))
    one.close()
    two.close()
    three = ResponseCache(tmp_path / "c")
    found = three.find(MODEL, ASKED)
    assert isinstance(found, Generated) and found.text == "Bo"
    three.close()


def test_what_is_no_cache_is_refused(tmp_path):
    (tmp_path / "notes").write_text("no database at all, but a good deal of text\n" * 50)
    with pytest.raises(UserError, match=r"config\.cache=.*notes cannot be used: "):
        ResponseCache(tmp_path / "notes")
    with pytest.raises(UserError, match=r"config\.cache="):
        ResponseCache(tmp_path / "no" / "folder")


def test_a_full_disk_is_one_sentence(cache):
    pages = cache._db.execute("PRAGMA page_count").fetchone()[0]
    cache._db.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(UserError, match=r"config\.cache=.* cannot be used: .*full"):
        cache.keep(MODEL, ASKED, Generated("x" * 50_000, "stop"))
    assert cache.find(MODEL, ASKED) is None
