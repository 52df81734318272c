"""Made-up lives: every annotated fact is stated where the annotation says, and nothing else is."""

from cirag_jax.datasets import lives


def test_every_fact_stands_in_its_sentence():
    dataset = lives.build(300, seed=3)
    assert len(dataset.questions) == 300 and {q.split for q in dataset.questions} == {"train"}
    for question in dataset.questions:
        assert question.evidences and question.supporting_sentences
        assert question.evidences[-1][2] == question.answers[0]
        places = zip(question.evidences, question.supporting_sentences, strict=True)
        for (head, _, tail), (passage_id, sentence) in places:
            passage = dataset.corpus[passage_id]
            assert passage.title == head and tail in (passage.sentences or ())[sentence]
        assert set(question.supporting or ()) <= set(question.context or ())
        assert question.evidences[0][2] == question.evidences[1][0]


def test_names_are_unique_and_passages_filled():
    passages = list(lives.build(300, seed=3).corpus.values())
    assert len({p.title for p in passages}) == len(passages)
    assert not any("{" in p.text or "}" in p.text for p in passages)
    assert all(p.text == " ".join(p.sentences or ()) for p in passages)


def test_the_seed_decides():
    assert lives.build(30, seed=1).questions == lives.build.__wrapped__(30, seed=1).questions
    assert lives.build(30, seed=1).questions != lives.build(30, seed=2).questions
