"""The cache of responses, which several runs share."""

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


def test_find_ignores_the_role(cache):
    assert cache.find(MODEL, ASKED) is None
    cache.keep(MODEL, ASKED, SAID)
    other = Generate(ASKED.messages, "judge", 5)
    # It took no time, and its whole prompt counts as cached.
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
def test_find_other_request_is_missing(cache, changes):
    cache.keep(MODEL, ASKED, SAID)
    fields = {"messages": ASKED.messages, "max_tokens": 5, **changes}
    assert cache.find(MODEL, Generate(**fields)) is None
    assert cache.find({**MODEL, "dtype": "bfloat16"}, ASKED) is None


def test_cache_is_persistent_and_shared(tmp_path):
    one, two = ResponseCache(tmp_path / "c"), ResponseCache(tmp_path / "c")
    one.keep(MODEL, ASKED, SAID)
    assert two.find(MODEL, ASKED) is not None
    two.keep(MODEL, ASKED, Generated("Bo", "stop"))
    one.close()
    two.close()
    three = ResponseCache(tmp_path / "c")
    response = three.find(MODEL, ASKED)
    assert isinstance(response, Generated) and response.text == "Bo"
    three.close()


def test_cache_bad_file_is_rejected(tmp_path):
    (tmp_path / "notes").write_text("this is text and not a database\n" * 50)
    with pytest.raises(UserError, match=r"config\.cache=.*notes cannot be used: "):
        ResponseCache(tmp_path / "notes")
    with pytest.raises(UserError, match=r"config\.cache="):
        ResponseCache(tmp_path / "no" / "folder")


def test_full_disk_is_a_user_error(cache):
    pages = cache._db.execute("PRAGMA page_count").fetchone()[0]
    cache._db.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(UserError, match=r"config\.cache=.* cannot be used: .*full"):
        cache.keep(MODEL, ASKED, Generated("x" * 50_000, "stop"))
    assert cache.find(MODEL, ASKED) is None
