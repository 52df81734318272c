"""Questions about paths: templates, checks and requests."""

import dataclasses

import pytest

from cirag_jax.datasets import demo
from cirag_jax.errors import UserError
from cirag_jax.grade import equivalence, questions, triples
from cirag_jax.grade.questions import Checks, QuestionSettings, RelationTemplates, TypedTemplates
from cirag_jax.grade.records import Claim, Document, Edge, Fact
from cirag_jax.llm.types import Generated
from cirag_jax.types import Triple
from experiments.demo_dataset.text import fold

ROWS = (
    ("Low Tide", "director", "Ann Bell", "film", "Low Tide is a film by Ann Bell."),
    ("Ann Bell", "place of birth", "Osk", "bell", "Ann Bell was born in Osk."),
    ("Osk", "capital of", "Tarn", "osk", "Osk is the capital of Tarn."),
    ("Osk", "population", "1,234", "osk", "It has 1,234 people."),
)


def make_graph(*more, groups=()):
    """Returns a graph, claims and documents; each row of `ROWS` or ``more`` is a sentence."""
    rows = (*ROWS, *more)
    claims, sentences = [], {}
    for *_, home, text in rows:
        claims.append(Claim(home, len(sentences.setdefault(home, [])), text))
        sentences[home].append(text)
    result = triples.facts([(Triple(*row[:3]), at) for at, row in enumerate(rows)])
    documents = {name: Document(name, name, tuple(said)) for name, said in sentences.items()}
    clusters = (tuple(range(len(rows))),)
    return equivalence.link(result, clusters, groups, 12), claims, documents


def path_of(graph, *facts):
    return tuple(edge for fact in facts for edge in graph.own if edge.fact == fact)


def checks_of(made, one_source=False):
    graph, claims, documents = made
    return Checks(graph, claims, documents.values(), one_source)


def test_relation_templates_compose_one_question():
    graph, *_ = make_graph()
    requests = RelationTemplates(graph).ask(path_of(graph, 0, 1), graph.facts)
    assert requests == ("Where was the director of Low Tide born?", None)
    requests = RelationTemplates(graph).ask(path_of(graph, 0, 1, 3), graph.facts)
    assert requests[0] == "How many people live in the place of birth of the director of Low Tide?"
    more = [("Ann Bell", r, "Fenn", "x", f"Ann Bell {r} Fenn.") for r in ("was seen in", "liking")]
    graph, *_ = make_graph(*more)
    for fact in (4, 5):
        requests = RelationTemplates(graph).ask(path_of(graph, 0, fact), graph.facts)
        assert requests == ("", "no_template")


def _buried(place):
    return ("Ann Bell", "was buried in", place, "ann", f"Ann Bell was buried in {place}.")


@pytest.mark.parametrize(
    ("more", "path", "reason"),
    [
        ((), (0, 1, 3), None),
        ((("Low Tide", "director", "Bo Cade", "y", "Bo Cade made it."),), (0, 1), "ambiguous_step"),
        ((("Low Tide", "Director", "Ann Bell", "y", "It is by Ann Bell."),), (0, 1), None),
        ((("Low Tide", "director", "Bell", "y", "Bell made it."),), (0, 1), "ambiguous_step"),
        ((_buried("Rye, Osk"), _buried("Osk")), (0, 4), None),
        ((_buried("Rye, Osk"), _buried("Osk")), (0, 5), "ambiguous_step"),
        ((("Tarn", "river", "1,234", "film", "There were 1,234."),), (0, 1, 3), "answer_early"),
        ((("Osk", "is", "large", "film", "Osk is large."),), (0, 1, 3), "shortcut"),
        ((("Low Tide", "is", "x", "y", "Low Tide cost 1,234."),), (0, 1, 3), "shortcut"),
    ],
)
def test_checks_reject_paths_with_reason(more, path, reason):
    made = make_graph(*more)
    assert checks_of(made).path(path_of(made[0], *path)) == reason


def test_checks_one_source_rejects_restated_link():
    made = make_graph(("Ann Bell", "left", "Osk", "y", "Ann Bell left Osk."))
    path = path_of(made[0], 0, 1)
    assert checks_of(made).path(path) is None
    assert checks_of(made, one_source=True).path(path) == "told_twice"


def test_checks_reject_ambiguous_names():
    def fact(head, relation, tail, claim, *ids):
        return Fact(head, relation, tail, claim, *ids)

    facts = (
        fact("Low Tide", "shown in", "Georgia", 0, "tide", "country"),
        fact("Georgia", "capital", "Tbilisi", 1, "country", "tbilisi"),
        fact("Georgia", "capital", "Atlanta", 2, "state", "atlanta"),
    )
    claims = [Claim(f"d{i}", 0, f"{f.head} {f.relation} {f.tail}.") for i, f in enumerate(facts)]
    documents = [Document(c.document, "", (c.text,)) for c in claims]
    graph = equivalence.link(facts, (), (), 12)
    checks = Checks(graph, claims, documents, False)
    assert checks.path(graph.own[:2]) == "ambiguous_name"
    assert (
        Checks(equivalence.link(facts[:2], (), (), 12), claims, documents, False).path(
            graph.own[:2]
        )
        is None
    )


@pytest.mark.parametrize(
    ("question", "answer", "reason"),
    [
        ("Where was the maker of Low Tide born?", "Osk", None),
        ("Where was the maker of Low Tide born?", "osk", None),
        ("Where was Ann Bell, who made Low Tide, born?", "Osk", "names_later"),
        ("Where was AB, who made Low Tide, born?", "Osk", "names_later"),
        ("Was the maker of Low Tide born in Osk?", "Osk", "names_later"),
        ("Where was she born?", "Osk", "no_start"),
        ("Where was the maker of Low Tide born?", "Fenn", "answer_elsewhere"),
    ],
)
def test_checks_reject_questions_with_reason(question, answer, reason):
    made = make_graph()
    assert checks_of(made).question(path_of(made[0], 0, 1), question, answer) == reason


@pytest.mark.parametrize(
    ("start", "question", "reason"),
    [
        ("Museum of the Sea", "Who is the head of the sea museum?", None),
        ("Museum of the Sea", "Who is the head of the museum?", "no_start"),
        ("Museum of the Sea", "Who is the head of it?", "no_start"),
        ("Élan Vörk", "Who is the head of Élan Vörk?", None),
        ("Of the", "Who is the head of Of The?", None),
        ("Of the", "Who is the head?", "no_start"),
        ("M.S.", "Who is the head of the Museum of the Sea?", None),  # exactly equivalent
    ],
)
def test_checks_require_name_of_start(start, question, reason):
    group = equivalence.Group(0, ("m.s.", "museum of the sea"), "always")
    row = (start, "head", "Ann Low", "y", f"{start} is led by Ann Low.")
    made = make_graph(row, ("Museum of the Sea", "rival", "Fenn", "z", "x"), groups=[group])
    path = path_of(made[0], len(ROWS))
    assert checks_of(made).question(path, question, "Ann Low") == reason


def drive(settings, *answers, checks=True, groups=(), facts=(0, 1)):
    made = make_graph(groups=groups)
    path = path_of(made[0], *facts)
    templates = RelationTemplates(made[0]) if settings.kind == "rules" else None
    checked = checks_of(made) if checks else None
    return answer_requests(questions.ask(path, *made, settings, templates, checked), *answers)


def answer_requests(program, *answers):
    """Returns the requests of a program and its result."""
    requests = []
    try:
        request = next(program)
        for text in answers:
            requests.append(request)
            request = program.send(Generated(text, "stop"))
    except StopIteration as end:
        return requests, end.value
    raise AssertionError("the program made further requests")


GOOD = "Question: Where was the director of Low Tide born? | Answer: Osk"


def test_ask_by_model_is_validated_by_model():
    requests, result = drive(QuestionSettings(), GOOD, "True")
    assert result == {"question": "Where was the director of Low Tide born?", "answers": ["Osk"]}
    assert [r.role for r in requests] == ["asker", "validator"]
    shown = requests[0].messages[-1].text
    assert "Triple 1: Low Tide|director|Ann Bell\n" in shown
    assert "Claim 2: Ann Bell was born in Osk." in shown and "Context: film" in shown


@pytest.mark.parametrize(
    ("answers", "reason"),
    [
        ((GOOD, "False"), "unclear"),
        ((GOOD, "hm"), "no_verdict"),
        (("I cannot",), "no_question"),
        (("Question: Where was Ann Bell of Low Tide born? | Answer: Osk",), "names_later"),
    ],
)
def test_ask_records_reason_of_rejection(answers, reason):
    _, result = drive(QuestionSettings(), *answers)
    assert result["reason"] == reason


def test_settings_kind_and_validation_determine_roles():
    requests, result = drive(QuestionSettings(kind="rules", validation="rules"))
    assert not requests and result["question"] == "Where was the director of Low Tide born?"
    clue = "Question: Where was Ann Bell of Low Tide born? | Answer: Osk"
    _, result = drive(QuestionSettings(validation="model"), clue, "True", checks=False)
    assert "reason" not in result
    assert QuestionSettings(kind="rules", validation="off").roles == ()


def templates_with_wordings(made, *facts):
    """Returns `WordedTemplates` for facts paraphrased by a fake model."""
    graph, claims, _ = made
    says = {
        "Low Tide": "Phrase: the director of Low Tide | Question: Who directed Low Tide?",
        "Ann Bell": "Phrase: the town where Ann Bell was born | Question: Where was Ann Bell born?",
        "Osk": "Phrase: what Osk rules | Question: What is Tarn to Osk?",
    }
    result = {}
    for at in facts:
        fact = graph.facts[at]
        program = questions.write_wording(fact, claims[fact.claim], QuestionSettings())
        # Without a wording, no reader checks it.
        requests, result[at] = answer_requests(
            program, says[fact.head], *[fact.tail][: fact.head != "Osk"]
        )
        for request in requests:
            assert request.role == "asker" and claims[at].text in request.messages[-1].text
        assert requests[-1].messages[-1].text.endswith(says[fact.head][-10:]) == (
            len(requests) == 2
        )
    return questions.WordedTemplates(result)


def test_worded_templates_compose_one_question():
    made = make_graph()
    graph = made[0]
    requests = templates_with_wordings(made, 0, 1).ask(path_of(graph, 0, 1), graph.facts)
    assert requests == ("Where was the director of Low Tide born?", None)
    # The last fact's wording names its answer, so it is rejected.
    templates = templates_with_wordings(made, 0, 1, 2)
    assert templates.ask(path_of(graph, 0, 1, 2), graph.facts) == ("", "no_wording")
    assert templates.ask(path_of(graph, 0, 1, 3), graph.facts) == ("", "no_wording")
    assert templates.answers(("Osk", "Osk town")) == ("Osk", "Osk town")


@pytest.mark.parametrize(
    ("read", "kept"),
    [
        ("osk.", True),
        ("In the town of Osk", True),
        ("Osk, Tarn\nI hope so", True),
        ("Oskton", False),
        ("none", False),
        ("None.", False),
        ("", False),
        ("...", False),
        ("in", False),
    ],
)
def test_write_wording_rejects_other_readings(read, kept):
    (graph, claims, _), settings = make_graph(), QuestionSettings()
    text = "Phrase: the town where Ann Bell was born | Question: Where was Ann Bell born?"
    _, result = answer_requests(
        questions.write_wording(graph.facts[1], claims[1], settings), text, read
    )
    assert result == {"reason": "read_otherwise"} if not kept else "reason" not in result
    number = dataclasses.replace(graph.facts[3], tail="1,234 people")
    text = "Phrase: the size of Osk | Question: How many people live in Osk?"
    _, result = answer_requests(questions.write_wording(number, claims[3], settings), text, "1,234")
    assert "reason" not in result


def test_worth_wording_needs_adjacent_facts():
    graph, *_ = make_graph(("Fenn", "borders", "Brum", "y", "Fenn borders Brum."))
    assert questions.worth_wording(graph.edges) == {0, 1, 2, 3}


def test_ask_by_hops_calls_only_the_validator():
    made = make_graph()
    settings, path = QuestionSettings(kind="hops"), path_of(made[0], 0, 1)
    program = questions.ask(
        path, *made, settings, templates_with_wordings(made, 0, 1), checks_of(made)
    )
    requests, result = answer_requests(program, "True")
    assert [request.role for request in requests] == ["validator"]
    assert result == {"question": "Where was the director of Low Tide born?", "answers": ["Osk"]}


def test_extract_counts_unsupported_triples():
    claims = ["Low Tide is a film by Ann Bell.", "Ann Bell was born in Osk."]
    text = "(Low Tide|director|Ann Bell|1)\n(Ann Bell|born in|Osk|1)\n(ann bell|came from|OSK|2)"
    _, result = answer_requests(triples.extract(claims, triples.TripleSettings()), text)
    kept = [["Low Tide", "director", "Ann Bell", 0], ["ann bell", "came from", "OSK", 1]]
    assert result == {"triples": kept, "problems": ["not_said"]}


def test_ask_accepts_equivalent_answers():
    rows = (("the town of Osk", "county", "Brum", "y", "The town of Osk is in Brum."),)
    group = equivalence.Group(0, ("osk", "the town of osk"), "always")
    made = make_graph(*rows, groups=[group])
    path = path_of(made[0], 0, 1)
    assert questions.answer_names(path, made[0]) == ("Osk", "the town of Osk")
    longer = path_of(made[0], 0, 1, 4)
    assert questions.same_names(longer, made[0]) == [("Osk", "the town of Osk")]
    shown = questions.path_messages(longer, *made, QuestionSettings())[-1].text
    assert "The same thing: Osk = the town of Osk" in shown


def _typed_path(*typed):
    """Returns a path along typed triples, and the path's facts."""
    facts = [
        Fact(*t.triple[:3], 0, t.head, t.target or t.triple.tail, t.type) for t in typed
    ]  # fmt: skip
    return tuple(Edge(i, f.head_id, f.tail_id) for i, f in enumerate(facts)), facts


def test_typed_templates_write_natural_questions():
    templates, by_triple = TypedTemplates(), {t.triple[:4]: t for t in demo.typed_triples()}
    reasons = set()
    for question in demo.build().questions:
        if question.type != "bridge" or question.hops != 3:
            continue
        stated = zip(question.evidences or (), question.supporting or (), strict=True)
        chain = [by_triple[(*evidence, passage_id)] for evidence, passage_id in stated]
        path, facts = _typed_path(*chain)
        text, reason = templates.ask(path, facts)
        reasons.add(reason)
        if not reason:
            assert facts[0].head.casefold() in text.casefold() and text.endswith("?")
            words = text.split()
            assert len(set(zip(words, words[1:], words[2:], strict=False))) == len(words) - 2
            assert not any(f" {fold(f.tail)} " in f" {fold(text)} " for f in facts)
            assert templates.answers((facts[-1].tail,))[0] == facts[-1].tail
    assert None in reasons and reasons <= {None, "no_template", "clumsy"}


def test_typed_templates_several_tails_or_namesakes_are_ambiguous():
    templates, entities = TypedTemplates(), demo.entities()
    switzerland = entities["country:CH"].triples
    language = next(t for t in switzerland if t.type == "country.language")
    assert templates.ask(*_typed_path(language)) == ("", "ambiguous_step")
    assert not entities["country:GE"].starts_questions  # Georgia is also a state
    capital = next(t for t in entities["country:GE"].triples if t.type == "country.capital")
    assert templates.ask(*_typed_path(capital)) == ("", "ambiguous_start")


def test_typed_templates_number_words_are_answers_too():
    assert TypedTemplates().answers(("two films",)) == ("two films", "two", "2")


@pytest.mark.parametrize("fields", [{"kind": "off"}, {"validation": "x"}, {"max_tokens": 0}])
def test_settings_reject_invalid_values(fields):
    with pytest.raises(UserError, match="config.questions"):
        QuestionSettings(**fields)
