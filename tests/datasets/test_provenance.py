from cirag_jax.datasets.sentences import source_sentence

SENTENCES = (
    "Ule is a river.",
    "The river Ule flows to Tarn.",
    "Tarn is on the Ule river, it flows.",
)


def test_source_sentence_has_most_words():
    assert source_sentence("Ule", "flows to", "Tarn", SENTENCES) == 1


def test_source_sentence_ties_go_to_the_first():
    assert source_sentence("Ule", "river", "Ule", SENTENCES) == 0


def test_source_sentence_words_are_substrings_in_any_case():
    assert source_sentence("TARN", "FLOW", "RIVER,", SENTENCES) == 2
    assert source_sentence("tarn", "x", "y", ("None.", "Tarn.")) == 1


def test_source_sentence_without_shared_words_is_the_first():
    assert source_sentence("x", "q", "z", SENTENCES) == 0
    assert source_sentence("x", "q", "z", ()) is None
