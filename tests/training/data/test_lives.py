"""Made-up lives: their facts, sentences and questions agree."""

from cirag_jax.training.data import lives


def test_lives_sentences_state_their_facts():
    dataset = lives.build(300, seed=3)
    assert len(dataset.questions) == 300 and {q.split for q in dataset.questions} == {"train"}
    for question in dataset.questions:
        assert question.evidences and question.supporting_sentences
        assert question.answers[0] in (question.evidences[-1][2], "yes", "no")
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
    questions = lives.build(1000, seed=3).questions
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
        assert question.answers[0] in ("yes", "no") or question.answers[0] not in question.question


def test_lives_yes_or_no_agrees_with_the_fact():
    """The asked value is the fact's, or a value of another relation of the same person."""
    dataset = lives.build(600, seed=3)
    answers = set()
    for question in dataset.questions:
        if question.answers[0] in ("yes", "no"):
            (head, _, tail) = tuple(question.evidences or ())[-1]
            person = next(p for p in dataset.corpus.values() if p.title == head)
            asked = question.question.removesuffix("?")
            assert asked.endswith(tail) == (question.answers[0] == "yes")
            assert asked.split()[-1] in person.text
            answers.add(question.answers[0])
    assert answers == {"yes", "no"}


def test_lives_people_have_contrasting_facts():
    """A passage states several values of one kind, such as two employers."""
    text = "\n".join(passage.text for passage in lives.build(300, seed=3).corpus.values())
    for words in ("founded", "studied under", "joined", "retired in", "took over from", "taught"):
        assert words in text
