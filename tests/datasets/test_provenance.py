from cirag_jax.datasets.sentences import source_sentence

SENTENCES = (
    "Ule is a river.",
    "The river Ule flows to Tarn.",
    "Tarn is on the Ule river, it flows.",
)


def test_the_sentence_with_most_words_wins():
    assert source_sentence("Ule", "flows to", "Tarn", SENTENCES) == 1


def test_the_first_sentence_wins_a_tie():
    assert source_sentence("Ule", "river", "Ule", SENTENCES) == 0


def test_words_are_substrings_in_any_case():
    assert source_sentence("TARN", "FLOW", "RIVER,", SENTENCES) == 2
    assert source_sentence("tarn", "x", "y", ("None.", "Tarn.")) == 1


def test_no_shared_word_gives_the_first_and_no_sentence_none():
    assert source_sentence("x", "q", "z", SENTENCES) == 0
    assert source_sentence("x", "q", "z", ()) is None
