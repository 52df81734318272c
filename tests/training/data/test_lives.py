"""Made-up lives: their facts, sentences and questions agree."""

from cirag_jax.training.data import lives


def test_lives_sentences_state_their_facts():
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


def test_lives_titles_are_unique_and_slots_filled():
    passages = list(lives.build(300, seed=3).corpus.values())
    assert len({p.title for p in passages}) == len(passages)
    assert not any("{" in p.text or "}" in p.text for p in passages)
    assert all(p.text == " ".join(p.sentences or ()) for p in passages)


def test_lives_depend_on_seed():
    assert lives.build(30, seed=1).questions == lives.build.__wrapped__(30, seed=1).questions
    assert lives.build(30, seed=1).questions != lives.build(30, seed=2).questions


def test_lives_kin_matches_two_relations():
    steps = {
        "paternal grandmother": ("father", "mother"),
        "maternal grandfather": ("mother", "father"),
        "mother-in-law": ("spouse", "mother"),
        "child-in-law": ("child", "spouse"),
    }
    questions = lives.build(300, seed=3).questions
    for kin, relations in steps.items():
        named = (f"the {kin} of", f"'s {kin}?")
        asked = [q for q in questions if any(name in q.question for name in named)]
        assert asked, kin
        for question in asked:
            first, second = tuple(question.evidences or ())
            assert (first[1], second[1]) == relations and first[0] in question.question


def test_lives_questions_do_not_name_the_answer():
    """If it named the answer, the second hop would lead back to the first passage."""
    for question in lives.build(300, seed=3).questions:
        assert question.answers[0] not in question.question
