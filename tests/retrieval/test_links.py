"""Links from texts to passages whose titles they contain, and walks over these links."""

import re

import ml_collections
import numpy as np
import pytest

from cirag_jax.errors import UserError
from cirag_jax.retrieval import links
from cirag_jax.retrieval.links import LinkWalk, TitleIndex, WalkOptions
from cirag_jax.types import Passage
from configs import retrieval


def index(*titles):
    return TitleIndex([Passage(str(row), title, "text") for row, title in enumerate(titles)])


def corpus(**texts):
    return [Passage(title, title.replace("_", " "), text) for title, text in texts.items()]


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("Tuos was directed by Roderick Cabrido.", (1, 0)),  # A title may lack its parentheses.
        ("the film Grey Harbour, then Tuos", (1,)),
        ("RODERICK CABRIDO, and Roderick Cabrido again", (0,)),
        ("Roderick Cabrido Santos", (2,)),  # The longer title matches.
        ("a roderick cabrido in small letters", ()),
        ("He went on a Run with It.", ()),  # These are too short for titles of one word.
        ("Ünlü was born in 1950", (4,)),
        ("ولد في القاهرة سنة", (5,)),  # This script has no capital letters.
        ("1950 was the year", ()),
        (
            "He read of mice and Men, and of mice and men",
            (7,),
        ),  # It starts with a small letter.
        ("of mice and Ünlü", (4,)),  # An incomplete title does not hide other titles.
        ("", ()),
    ],
)
def test_titles_named_are_in_text_order(text, rows):
    names = "Roderick Cabrido", "Tuos (film)", "Roderick Cabrido Santos", "Run", "Ünlü", "القاهرة"
    titles = index(*names, "1950", "Of Mice and Men")
    assert titles.named(text) == rows


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("诗人李白出生于碎叶城。", (0, 1)),
        ("长江大桥跨越长江。", (3, 2)),  # The longer title matches.
        ("龙和人", ()),  # One character is no name.
        ("東京タワーとﾄﾖﾀの本社", (5, 6)),
        ("เขาเกิดที่กรุงเทพในปี", (7,)),
        ("นางสาว", ()),  # Two Thai letters are no name.
        ("서울은 수도이다", (9,)),
        ("देखो हिन्दी भाषा", (10,)),
        ("ＥＬＩＳＥ, Cafe\u0301 Royal", (11, 12)),
        ("ភ្នំពេញជារដ្ឋធានី", (13,)),
    ],
)
def test_titles_in_any_script_are_found(text, rows):
    names = (
        "李白",
        "碎叶城",
        "长江",
        "长江大桥",
        "龙",
        "東京タワー（建物）",
        "トヨタ",
        "กรุงเทพ",
        "นา",
    )
    titles = index(*names, "서울", "हिन्दी", "Elise", "Café Royal", "ភ្នំពេញ")
    assert titles.named(text) == rows


def test_titles_shared_title_names_all_passages():
    titles = index("Lund", "Lund (city)", "Lund", "Kiruna")
    assert titles.named("in Lund") == (0, 1, 2)
    assert titles.mentions("Kiruna, Lund, Kiruna") == [[3], [0, 1, 2]]


def test_titles_empty_title_is_never_named():
    assert index("", "()", "...").named("nothing () ... to name") == ()


def test_titles_are_not_regular_expressions():
    hostile = (
        "X",
        ".*",
        "(",
        "[A-Z]+",
        "\\",
        "Oslo|Rome",
        "C++ (language)",
        "N" * 10_000,
        "%s {0}",
    )
    titles = index(*hostile)
    assert titles.named("Anything X, Rome, C and OSLO ROME") == (5,)
    assert titles.named("N" * 9_999) == () and titles.named("N" * 10_000) == (7,)
    assert all(row in titles.named(f"It is {hostile[row]}.") for row in (5, 7))


def named_by_brute_force(titles, text):
    """Finds leftmost longest matches by trying every title at every word."""
    words, place, found = re.findall(r"\w+", text), 0, []
    forms = [(re.findall(r"\w+", t), row) for row, t in enumerate(titles)]
    forms += [(re.findall(r"\w+", t.partition(" (")[0]), row) for row, t in enumerate(titles)]
    while place < len(words):
        fits = []
        for form, row in forms:
            here = words[place : place + len(form)]
            same = [w.lower() for w in form] == [w.lower() for w in here]
            is_name = any(w[0].isupper() for w in here) and (len(here) > 1 or len(here[0]) > 3)
            if form and same and is_name:
                fits.append((len(form), row))
        longest = max((size for size, _ in fits), default=0)
        found += sorted({row for size, row in fits if size == longest} - set(found))
        place += max(longest, 1)
    return tuple(found)


def test_mentions_equal_brute_force():
    rng = np.random.default_rng(0)
    words = ("Anna", "anna", "Bo", "Old", "harbour", "the", "The", "of", "Lund", "film")

    def draw(most):
        return " ".join(rng.choice(words, rng.integers(1, most)))

    titles = [draw(5) for _ in range(60)] + [f"{draw(4)} (film)" for _ in range(20)]
    title_index = index(*titles)
    texts = [draw(40) for _ in range(200)]
    named = [title_index.named(text) for text in texts]
    assert named == [named_by_brute_force(titles, text) for text in texts]
    assert sum(map(len, named)) > 500


def random_mentions(rng, size):
    """Returns mentions of titles with one to three passages; every fifth text mentions none."""
    titles = [sorted(rng.choice(size, rng.integers(1, 4), replace=False)) for _ in range(size)]
    drawn = [rng.choice(size, rng.integers(0, 5), replace=False) for _ in range(size)]
    return [
        [] if source % 5 == 0 else [[int(row) for row in titles[t]] for t in sorted(found)]
        for source, found in enumerate(drawn)
    ]


def weights_of(mentions, backward):
    """Returns the edge weights that the docstring of `transitions` defines."""
    size = len(mentions)
    share_NN, count_N = np.zeros((size, size)), np.zeros(size)
    for source, titles in enumerate(mentions):
        for rows in titles:
            for row in rows:
                if row != source:
                    share_NN[source, row] += 1 / len(rows)
                    count_N[row] += 1
    weight_NN = share_NN / np.maximum(count_N, 1)
    return weight_NN + backward * weight_NN.T


@pytest.mark.parametrize("backward", [0.0, 0.3])
@pytest.mark.parametrize("restart", [0.15, 0.5, 0.9])
def test_page_rank_equals_networkx(restart, backward):
    networkx = pytest.importorskip("networkx")
    rng = np.random.default_rng(round(restart * 100))
    mentions = random_mentions(rng, 40)
    seed_NQ = (rng.random((40, 3)) * (rng.random((40, 3)) < 0.2)).astype(np.float32)
    rank_NQ = links.page_rank(links.transitions(mentions, backward), seed_NQ, restart)
    graph = networkx.from_numpy_array(weights_of(mentions, backward), create_using=networkx.DiGraph)
    for query in range(3):
        expected = networkx.pagerank(
            graph,
            alpha=1 - restart,
            personalization={row: float(weight) for row, weight in enumerate(seed_NQ[:, query])},
            tol=1e-12,
            max_iter=1000,
        )
        np.testing.assert_allclose(rank_NQ[:, query], [expected[n] for n in range(40)], atol=1e-6)


def test_page_rank_converges():
    seed_NQ = np.array([[1], [0]], np.float32)
    rank_NQ = links.page_rank(links.transitions([[[1]], [[0]]], 0.0), seed_NQ, 0.5)
    np.testing.assert_allclose(rank_NQ, [[2 / 3], [1 / 3]], atol=1e-6)


def test_page_rank_stays_within_allowed_rows():
    """Ranks are the stationary distribution of a walk that restarts instead of leaving the rows."""
    rng, restart = np.random.default_rng(1), 0.4
    step_NN = links.transitions(random_mentions(rng, 30), 0.3)
    seed_NQ = rng.random((30, 2)).astype(np.float32)
    may_NQ = rng.random((30, 2)) < 0.6
    rank_NQ = links.page_rank(step_NN, seed_NQ, restart, may_NQ)
    for query in range(2):
        seed_N = seed_NQ[:, query] * may_NQ[:, query]
        seed_N = seed_N / seed_N.sum()
        within_NN = step_NN.toarray() * may_NQ[:, query]
        chain_NN = within_NN + np.outer(1 - within_NN.sum(axis=1), seed_N)
        chain_NN = (1 - restart) * chain_NN + restart * seed_N
        rank_N = rank_NQ[:, query]
        np.testing.assert_allclose(rank_N @ chain_NN, rank_N, atol=1e-6)
        assert not rank_N[~may_NQ[:, query]].any() and rank_N.sum() == pytest.approx(1, abs=1e-6)


FILMS = corpus(
    Grey_Harbour="Grey Harbour is a film by Anna Berg.",
    Anna_Berg="Anna Berg was born in Visby.",
    Visby="Visby is a town.",
    Red_Harbour="A film.",
    Kiruna="A town. It is not near Visby.",
)


def test_walk_reaches_linked_passages():
    walk = LinkWalk(FILMS)
    questions = ["Where was the director of Grey Harbour born?"]
    assert walk.search(questions, [[3, 0]], 4) == [[0, 1, 3, 2]]
    # With only the other ranking, only the title in the question, or neither.
    assert walk.search(["Who?"], [[3, 1]], 9) == [[3, 1, 2, 0, 4]]
    assert walk.search(questions, [[]], 2) == [[0, 1]]
    assert walk.search(["Who?"], [[]], 3) == [[]]


def test_walk_unreached_passages_come_last_in_order():
    walk = LinkWalk(FILMS, WalkOptions(seeds=1, backward=0.0))
    assert walk.search(["Who?"], [[3, 4, 2, 0]], 3) == [[3, 4, 2]]
    assert walk.search(["Who?"], [[1, 4, 3, 2]], 9) == [[1, 2, 4, 3]]


def test_walk_without_links_keeps_the_first_ranking():
    walk = LinkWalk(corpus(Alpha="a", Beta="b", Gamma="c", Delta="d"))
    assert walk.search(["Is it so?", "or so?"], [[2, 0, 3, 1], [1, 3]], 3) == [[2, 0, 3], [1, 3]]
    assert walk.search(["Is it Beta?"], [[2, 0]], 3) == [[1, 2, 0]]
    walk = LinkWalk(corpus(Alpha="a", Beta="b", Gamma="c"), WalkOptions(seeds=0))
    assert walk.search(["Beta or Alpha?"], [[2, 1, 0]], 3) == [[1, 0, 2]]  # Ties keep their order.
    assert LinkWalk([]).search([], [], 3) == []


def test_walk_returns_only_allowed_passages():
    walk = LinkWalk(FILMS)
    questions = ["Where was the director of Grey Harbour born?", "What is Grey Harbour?"]
    allowed = [np.array([3, 1, 2]), np.array([0, 1])]
    assert walk.search(questions, [[3], [0]], 9, allowed) == [[3], [0, 1]]


def test_walk_passages_divide_the_weight_of_their_title():
    passages = [*corpus(Lund="in Skåne"), *corpus(Lund="by Malmö"), *corpus(Kiruna="north")]
    step_NN = links.transitions([[[1]], [[0], [2]], [[0, 1]]], 0.0).toarray()
    np.testing.assert_allclose(step_NN, [[0, 1, 0], [1 / 3, 0, 2 / 3], [0.5, 0.5, 0]], atol=1e-6)
    for weight, best in ((1.5, 2), (2.5, 0)):
        walk = LinkWalk(passages, WalkOptions(title_weight=weight))
        assert walk.search(["Lund?"], [[2]], 1) == [[best]]


def test_walk_blocks_give_the_same_result(monkeypatch):
    walk = LinkWalk(FILMS)
    questions = [f"What of {passage.title}?" for passage in FILMS] * 3
    first = [[row % 5, (row + 2) % 5] for row in range(15)]
    allowed = [np.array([row % 5, (row + 1) % 5, 1]) for row in range(15)]
    whole = [walk.search(questions, first, 4), walk.search(questions, first, 4, allowed)]
    monkeypatch.setattr(links, "_BLOCK", 20)
    assert [walk.search(questions, first, 4), walk.search(questions, first, 4, allowed)] == whole


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("restart", 1.0, "config.links.restart=1.0 must lie between 0 and 1"),
        ("restart", 0.0, "config.links.restart=0.0 must lie between 0 and 1"),
        ("seeds", -1, "config.links.seeds=-1 must not be negative"),
        ("backward", -0.5, "config.links.backward=-0.5 must not be negative"),
    ],
)
def test_walk_options_out_of_range_are_refused(field, value, message):
    config = ml_collections.ConfigDict(retrieval.get_config().links)
    assert WalkOptions.of(config) == WalkOptions()
    config[field] = value
    with pytest.raises(UserError, match=re.escape(message)):
        WalkOptions.of(config)
