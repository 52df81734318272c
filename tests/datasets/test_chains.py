import dataclasses

import pytest

from cirag_jax.datasets import chains
from cirag_jax.datasets.chains import chain_of, pool_of, query_text, silver_chains, units_of
from cirag_jax.errors import UserError
from cirag_jax.types import Dataset, Passage, Question, SubQuestion, Triple
from tests import tiny

CORPUS = {
    "film": Passage(
        "film", "Grey Harbour", "Grey Harbour is a 1960 film. It was directed by Ana Prit.",
        ("Grey Harbour is a 1960 film.", "It was directed by Ana Prit."),
    ),
    "person": Passage(
        "person", "Ana Prit", "Ana Prit made films. She was born in Olden.",
        ("Ana Prit made films.", "She was born in Olden."),
    ),
    "other": Passage("other", "Blue Harbour", "Blue Harbour is a film by Jon Vey.", None),
    "jon": Passage("jon", "Jon Vey", "Jon Vey was born in Tarn.", None),
}  # fmt: skip
TRIPLES = {
    "film": (
        Triple("Grey Harbour", "released in", "1960", "film", 0),
        Triple("Grey Harbour", "director", "Ana Prit", "film", 1),
    ),
    "person": (Triple("Ana Prit", "birthplace", "Olden", "person", 1),),
    "other": (Triple("Blue Harbour", "film by", "Jon Vey", "other", 0),),
}
TWO_WIKI = Question(
    "q", "Where was the director of Grey Harbour born?", ("Olden",), type="compositional", hops=2,
    supporting=("person", "film"), supporting_sentences=(("person", 1), ("film", 1)),
    context=("other", "film", "person"),
    evidences=(("Grey Harbour", "director", "Ana Prit"), ("Ana Prit", "place of birth", "Olden")),
)  # fmt: skip


def _dataset(question, triples=TRIPLES):
    return Dataset("made", (question,), CORPUS, triples)


def _chain(question, kind, triples=TRIPLES):
    chain = chain_of(_dataset(question, triples), question, kind)
    assert chain is not None
    return chain


def _texts(question, kind, triples=TRIPLES):
    chain = _chain(question, kind, triples)
    return [step.text for step in chain.steps], chain.parents


def test_chain_2wiki_evidences_become_units_that_state_them():
    assert _texts(TWO_WIKI, "sentence") == (
        ["Grey Harbour: It was directed by Ana Prit.", "Ana Prit: She was born in Olden."],
        ((), (0,)),
    )
    assert _texts(TWO_WIKI, "triple")[0] == [
        "<Grey Harbour; director; Ana Prit>",
        "<Ana Prit; birthplace; Olden>",  # The extracted triple, not the annotation's wording.
    ]
    assert _texts(TWO_WIKI, "passage")[0][0].startswith("Grey Harbour. Grey Harbour is")


def test_chain_2wiki_missing_triple_is_replaced_by_the_annotation():
    assert _texts(TWO_WIKI, "triple", {})[0][1] == "<Ana Prit; place of birth; Olden>"


def test_chain_bridge_comparison_steps_need_only_their_own_bridge():
    question = dataclasses.replace(
        TWO_WIKI, type="bridge_comparison",
        question="Whose director was born in Olden, Grey Harbour's or Blue Harbour's?",
        supporting=("film", "other", "person", "jon"), supporting_sentences=None,
        evidences=(
            ("Grey Harbour", "director", "Ana Prit"), ("Blue Harbour", "director", "Jon Vey"),
            ("Ana Prit", "born in", "Olden"), ("Jon Vey", "born in", "Tarn"),
        ),
    )  # fmt: skip
    chain = _chain(question, "sentence")
    assert chain.parents == ((), (), (0,), (1,))
    assert chain.next_steps([]) == (0, 1)
    assert chain.next_steps([1]) == (0, 3)


def test_chain_comparison_steps_have_no_order():
    question = dataclasses.replace(TWO_WIKI, type="comparison")
    chain = _chain(question, "sentence")
    assert chain.comparison and chain.parents == ((), ())


def test_chain_two_facts_in_one_sentence_are_one_step():
    question = dataclasses.replace(
        TWO_WIKI, evidences=(*(TWO_WIKI.evidences or ()), ("Ana Prit", "was", "she"))
    )
    assert len(_texts(question, "passage")[0]) == 2


def test_chain_musique_steps_match_triples_of_their_passages():
    question = dataclasses.replace(
        TWO_WIKI, type="2hop", evidences=None, supporting_sentences=None,
        decomposition=(
            SubQuestion("Grey Harbour >> director", "Ana Prit", "film"),
            SubQuestion("Where was #1 born?", "Olden", "person"),
        ),
    )  # fmt: skip
    texts, parents = _texts(question, "triple")
    assert texts == ["<Grey Harbour; director; Ana Prit>", "<Ana Prit; birthplace; Olden>"]
    assert parents == ((), (0,))
    assert _texts(question, "sentence")[0][1] == "Ana Prit: She was born in Olden."


def test_chain_hotpotqa_ends_at_the_answer():
    question = dataclasses.replace(TWO_WIKI, evidences=None, type="bridge")
    texts, parents = _texts(question, "sentence")
    assert texts == [
        "Grey Harbour: It was directed by Ana Prit.",
        "Ana Prit: She was born in Olden.",
    ]
    assert parents == ((), (0,))
    assert _texts(question, "triple")[0] == [
        "<Grey Harbour; director; Ana Prit>",
        "<Ana Prit; birthplace; Olden>",
    ]


def test_chain_only_gold_passages_give_a_chain_of_passages():
    question = dataclasses.replace(
        TWO_WIKI, evidences=None, supporting_sentences=None, supporting=("film", "person")
    )
    assert [t.partition(".")[0] for t in _texts(question, "passage")[0]] == [
        "Grey Harbour",
        "Ana Prit",
    ]


def test_chain_without_annotation_is_none():
    question = Question("q", "Anything?", ("a",))
    assert chain_of(_dataset(question), question, "sentence") is None
    with pytest.raises(UserError, match="none of the 1 questions of made yields a chain"):
        silver_chains(_dataset(question), [question], "sentence")


def test_units_of_passage_and_pool_of_question():
    dataset = _dataset(TWO_WIKI)
    assert [u.text for u in units_of(dataset, "jon", "sentence")] == [
        "Jon Vey: Jon Vey was born in Tarn."
    ]
    assert units_of(dataset, "jon", "triple") == ()
    assert {u.passage_id for u in pool_of(dataset, TWO_WIKI, "triple")} == {
        "film",
        "person",
        "other",
    }
    with pytest.raises(UserError, match="units='word' is not one of triple"):
        units_of(dataset, "jon", "word")  # pyright: ignore[reportArgumentType]


def test_units_blank_sentences_are_skipped_but_keep_their_index():
    passage = Passage("p", "T", "A. B.", ("A.", " ", "B."))
    dataset = Dataset("made", (), {"p": passage}, {})
    assert [u.text for u in units_of(dataset, "p", "sentence")] == ["T: A.", "T: B."]


def test_query_text_appends_the_chain():
    assert query_text("Who?", [], "triple") == "Who?"
    assert query_text("Who?", ["<a; b; c>", "<d; e; f>"], "triple") == (
        "Who?\nknowledge triples: <a; b; c>. <d; e; f>."
    )
    assert query_text("Who?", ["A b."], "sentence") == "Who?\nknowledge sentences: A b."


def test_units_of_unknown_kind_are_refused():
    assert chains.UNIT_KINDS == ("triple", "sentence", "passage")


@pytest.mark.parametrize("kind", chains.UNIT_KINDS)
def test_chain_equal_texts_of_two_passages_are_one_step(kind):
    dataset = tiny.dataset()
    question = dataset.questions[0]
    assert question.supporting and question.supporting_sentences
    corpus, triples = dict(dataset.corpus), dict(dataset.triples)
    for pid in question.supporting:
        corpus[f"twin {pid}"] = dataclasses.replace(corpus[pid], id=f"twin {pid}")
        triples[f"twin {pid}"] = tuple(
            triple._replace(passage_id=f"twin {pid}") for triple in triples[pid]
        )
    dataset = dataclasses.replace(dataset, corpus=corpus, triples=triples)
    twins = tuple(f"twin {pid}" for pid in question.supporting)
    question = dataclasses.replace(
        question,
        evidences=None,
        supporting=(*question.supporting, *twins),
        supporting_sentences=(*question.supporting_sentences, *((pid, 0) for pid in twins)),
    )
    chain = chain_of(dataset, question, kind)
    assert chain is not None
    texts = [step.text for step in chain.steps]
    assert len(texts) == len(set(texts)) == 2
    assert all(parent < step for step, parents in enumerate(chain.parents) for parent in parents)
