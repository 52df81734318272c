import logging

import bm25s
import numpy as np
import pytest
import Stemmer

from cirag_jax.datasets import demo
from cirag_jax.datasets.chains import passage_text
from cirag_jax.errors import UserError
from cirag_jax.retrieval.bm25 import BM25

TEXTS = ["the harbour of Olden", "a film about sailors", "sailors in the harbour", "nothing here"]


def test_bm25_ranks_by_shared_stems():
    rows, _ = BM25(TEXTS).search(["sailor at a harbour", "films"], 2)
    assert rows[0][0] == 2 and rows[1][0] == 1


def test_bm25_returns_only_allowed_rows():
    rows, _ = BM25(TEXTS).search(["sailor harbour"], 3, [np.array([3, 2, 0])])
    assert rows.tolist() == [[2, 0, -1]]


def test_bm25_texts_without_a_word_of_the_query_are_no_results():
    rows, scores = BM25(TEXTS).search(["sailors in the harbour", "films"], 4)
    assert rows.tolist() == [[2, 0, 1, -1], [1, -1, -1, -1]]
    assert ((scores > 0) == (rows >= 0)).all() and np.isneginf(scores[rows < 0]).all()


def test_bm25_letter_and_its_accent_are_one_word():
    rows, _ = BM25(["e\u0301cole publique", "cole slaw"]).search(["cole", "\u00e9cole"], 2)
    assert rows.tolist() == [[1, -1], [0, -1]]


def test_bm25_query_without_known_words_finds_nothing_and_warns_once(caplog):
    index = BM25(TEXTS)
    with caplog.at_level(logging.WARNING):
        rows, scores = index.search(["the of a", "zzz", "", "harbour"], 2)
        index.search(["yyy"], 2)
        index.search(["films"], 2, [np.array([0, 3])])
    assert rows.tolist() == [[-1, -1]] * 3 + [[0, 2]]
    assert np.isneginf(scores[:3]).all() and (scores[3] > 0).all()
    (message,) = caplog.messages
    assert message.startswith("BM25 finds nothing for 'the of a'")


# Texts in one script, and queries with the rows that they find first.
SCRIPTS = {
    "Chinese": (
        ["李白是唐代诗人，生于碎叶城。", "碎叶城位于今天的吉尔吉斯斯坦。", "長江是河流。", "鱼"],
        {"诗人李白出生在哪里？": 0, "吉尔吉斯斯坦的城市": 1, "河流": 2, "鱼在水里": 3, "李": 0},
    ),
    "Japanese": (
        ["東京タワーは東京都にあります。", "トヨタ自動車の本社は豊田市です。", "猫がいます"],
        {"東京タワーはどこですか": 0, "ﾄﾖﾀ": 1, "トヨタの本社": 1, "猫": 2},
    ),
    "Korean": (
        ["서울은 대한민국의 수도이다.", "부산은 항구 도시이다."],
        {"서울의 위치": 0, "부산": 1},
    ),
    "Thai": (["กรุงเทพเป็นเมืองหลวงของไทย", "เชียงใหม่อยู่ทางเหนือ"], {"เชียงใหม่อยู่ที่ไหน": 1, "กรุงเทพ": 0}),
    "Lao": (["ວຽງຈັນເປັນນະຄອນຫຼວງ", "ຫຼວງພະບາງຢູ່ພາກເໜືອ"], {"ວຽງຈັນ": 0, "ພະບາງ": 1}),
    "Khmer": (["ភ្នំពេញជារដ្ឋធានី", "សៀមរាបមានប្រាសាទ"], {"ភ្នំពេញ": 0, "ប្រាសាទ": 1}),
    "Burmese": (["ရန်ကုန်သည်မြို့ကြီးဖြစ်သည်", "မန္တလေးသည်မြောက်ပိုင်း"], {"မန္တလေး": 1, "ရန်ကုန်": 0}),
    "Hindi": (["दिल्ली भारत की राजधानी है", "मुंबई एक शहर है"], {"मुंबई": 1, "दिल्ली": 0}),
    "Arabic": (["مُحَمَّد كاتب", "القاهرة مدينة"], {"مُحَمَّد": 0, "القاهرة": 1}),
    "Latin": (
        ["Straße in Köln", "ＩＢＭ ﬁrst", "cafe\u0301 du monde", "Acme™ and x²"],
        {"STRASSE": 0, "straße": 0, "ibm": 1, "First": 1, "café": 2, "acme": 3, "x2": 3},
    ),
    "mixed": (
        ["She met 李白 in 1995.", "He met 杜甫 in 1995."],
        {"杜甫是谁": 1, "Who met 李白?": 0},
    ),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_bm25_scripts_and_unicode_variants_match(tmp_path, name):
    texts, queries = SCRIPTS[name]
    index = BM25([*texts, "Something else entirely, with more words."])
    index.save(tmp_path / "i")
    for either in (index, BM25.load(tmp_path / "i", len(texts) + 1)):
        rows, scores = either.search(list(queries), 1)
        assert rows[:, 0].tolist() == list(queries.values()) and (scores > 0).all()


def test_bm25_words_in_latin_letters_score_as_bm25s():
    dataset = demo.build()  # Some passages have names in other scripts.
    texts = [passage_text(passage) for passage in dataset.corpus.values()]
    tokenize = lambda texts: bm25s.tokenize(  # noqa: E731
        texts,
        stopwords="en",
        stemmer=Stemmer.Stemmer("english"),
        return_ids=False,
        show_progress=False,
    )
    reference = bm25s.BM25()
    reference.index(tokenize(texts), show_progress=False)
    questions = [q.question for q in dataset.questions if q.question.isascii()][::40]
    index = BM25(texts)
    assert len(index._rows)
    for question, words in zip(questions, tokenize(questions), strict=True):
        scores_N = index.scores(index.words([question])[0])
        np.testing.assert_array_equal(scores_N, reference.get_scores(words))


def test_bm25_damaged_rows_are_refused(tmp_path):
    index = BM25(SCRIPTS["Chinese"][0])
    for rows in ([0, 1], [0, 1, 2, 4], [-1, 0, 1, 2], [1, 0, 2, 3], [[0, 1, 2, 3]]):
        index.save(tmp_path / "i")
        np.save(tmp_path / "i" / "rows.npy", np.array(rows))
        with pytest.raises(UserError, match="is damaged"):
            BM25.load(tmp_path / "i", 4)


@pytest.mark.parametrize("texts", [["the of", "a"], ["", "  "], ["?!"]])
def test_bm25_texts_without_words_are_indexed(tmp_path, texts):
    index = BM25(texts)
    index.save(tmp_path / "i")
    for found in (index, BM25.load(tmp_path / "i", len(texts))):
        rows, scores = found.search(["sailors", "the", ""], 2)
        assert (rows == -1).all() and np.isneginf(scores).all()
