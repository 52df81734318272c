"""DualRAG: rounds, ablations and the case study."""

import json

import pytest

from cirag_jax.commands import task
from cirag_jax.errors import UserError
from cirag_jax.methods.dualrag.method import DualragConfig, dualrag
from cirag_jax.runtime.requests import Generate, Generated, Rank, Retrieve
from cirag_jax.types import Passage, Question
from configs.methods import dualrag as dualrag_config
from tests.methods.fakes import FakeHandlers, prompt

QUESTION = "In which province was Ada Moen born?"
ADA = Passage("a", "Ada Moen", "Ada Moen was born in Lund. She paints.")
LUND = Passage("l", "Lund", "Lund is a town in Skane.")
NOISE = Passage("n", "Adam", "Adam is a name.")
MORE = "Where Ada Moen was born is missing."
DONE = "Ada Moen was born in Lund, which is in Skane."
BORN = "Ada Moen was born in Lund."
ANSWER = "Lund lies there.\nAnswer: Skane"


def thought_json(thought, retrieves):
    return json.dumps({"thought": thought, "need_retrieve": retrieves})


def entities_json(*pairs):
    return json.dumps({"entities": [{"entity": e, "keywords": list(q)} for e, *q in pairs]})


SEARCH, STOP = thought_json(MORE, True), thought_json(DONE, False)
ADA_QUERY = entities_json(("Ada Moen", "Ada Moen", "birthplace of Ada Moen"))


def fake(reasoner, entities=(), summaries=(), *, passages=None, scores=None, reader=ANSWER):
    texts = {
        "reasoner": list(reasoner), "entity_identifier": list(entities),
        "summarizer": list(summaries), "reader": [reader],
    }  # fmt: skip
    passages = passages or {"Lund": (LUND, NOISE), None: (NOISE, ADA)}
    return FakeHandlers(passages, {}, texts, {"a": 1.0, "l": 0.5, "n": -1.0} | (scores or {}))


def run(fakes, **settings):
    return fakes.drive(dualrag(Question("q", QUESTION, ()), DualragConfig(**settings)))


def test_answer_reads_an_empty_outline():
    result = run(fake([SEARCH, STOP], [ADA_QUERY], ["None"]))
    assert result.attempts[0].evidence == () and result.attempts[0].granularity == "sentence"


def test_dualrag_round_searches_and_extends_outline():
    fakes = fake([SEARCH, STOP], [ADA_QUERY], [BORN])
    result = run(fakes)
    assert fakes.kinds() == [
        "reasoner", "entity_identifier", "Retrieve", "Retrieve", "Rank", "summarizer", "reasoner",
        "reader",
    ]  # fmt: skip
    assert fakes.received(Retrieve) == [
        Retrieve("Ada Moen", 50),
        Retrieve("birthplace of Ada Moen", 50),
    ]
    # Documents are reranked against the entity's name; scores of 0 or less are dropped.
    assert fakes.received(Rank) == [Rank("Ada Moen", (NOISE, ADA), 10, "passages")]
    summary = prompt(fakes.received(Generate, "summarizer")[0])
    assert ADA.text in summary and NOISE.text not in summary
    assert MORE in summary and "birthplace of Ada Moen" in summary
    first, second = (prompt(r) for r in fakes.received(Generate, "reasoner"))
    assert "Knowledge:\nNothing yet." in first
    assert f"#### Ada Moen\n{BORN}" in second and second.endswith(f"Reasoning so far: {MORE}")
    last = prompt(fakes.received(Generate, "reader")[0])
    assert f"#### Ada Moen\n{BORN}" in last and last.endswith(f"Reasoning so far: {MORE} {DONE}")
    assert (result.answer, result.granularity) == ("Skane", "sentence")
    assert result.passages == ("a", "n")  # Kept documents come before dropped ones.
    assert result.attempts[0].evidence == (f"Ada Moen: {BORN}",)
    one, two = result.steps
    assert (one.thought, one.kept) == (MORE, ("a",))
    assert (one.query, one.more_queries) == ("Ada Moen", ("birthplace of Ada Moen",))
    assert one.notes["learnt"] == {"Ada Moen": BORN}
    assert (two.thought, two.passages) == (DONE, ())
    assert result.parse_errors == {}


def test_retrieve_entities_are_searched_together():
    fakes = fake(
        [SEARCH, STOP], [entities_json(("Ada Moen", "Ada"), ("Lund", "Lund"))], [BORN, "None"]
    )
    program = dualrag(Question("q", QUESTION, ()), DualragConfig())
    lists, response = [], None
    while True:
        try:
            request = program.send(response)
        except StopIteration as end:
            result = end.value
            break
        several = request if isinstance(request, list) else [request]
        lists += [several] if several is request else []
        responses = [fakes.answer(one) for one in several]
        response = responses if several is request else responses[0]
    assert [[type(r).__name__ for r in one] for one in lists] == [
        ["Retrieve", "Retrieve"], ["Rank", "Rank"], ["Generate", "Generate"],
    ]  # fmt: skip
    assert result.steps[0].notes["learnt"] == {"Ada Moen": BORN}  # "None" adds nothing.
    assert result.passages == ("a", "l", "n")


def test_dualrag_max_steps_leads_to_the_answer():
    fakes = fake([SEARCH] * 2, [ADA_QUERY, entities_json(("Lund", "Lund"))], [BORN, "In Skane."])
    result = run(fakes, max_steps=2)
    assert len(result.steps) == 2 and fakes.kinds()[-1] == "reader"


def test_aggregate_reads_only_new_documents():
    again = entities_json(("ada moen", "Lund"))  # The name has another spelling.
    fakes = fake([SEARCH, SEARCH, STOP], [ADA_QUERY, again], [BORN, "Lund is in Skane."],
                 passages={"Lund": (LUND, ADA), None: (NOISE, ADA)})  # fmt: skip
    result = run(fakes)
    second = prompt(fakes.received(Generate, "summarizer")[1])
    assert LUND.text in second and ADA.text not in second
    assert result.steps[1].notes["queries"] == {"Ada Moen": ["Lund"]}
    outline = f"#### Ada Moen\n{BORN}\nLund is in Skane."
    assert outline in prompt(fakes.received(Generate, "reader")[0])


def test_aggregate_no_new_documents_no_summary():
    again = entities_json(("Ada Moen", "Ada's birth"))
    fakes = fake([SEARCH, SEARCH, STOP], [ADA_QUERY, again], [BORN])
    result = run(fakes)
    assert fakes.kinds().count("summarizer") == 1  # The documents are the same.
    assert result.steps[1].kept == ("a",) and result.steps[1].notes["learnt"] == {}


def test_identify_entities_and_queries_are_limited():
    many = entities_json(("Ada Moen", "Ada", "her birth"), ("Lund", "Lund"))
    fakes = fake([SEARCH, STOP], [many], [BORN])
    run(fakes, num_retrieved=7, max_entities=1, max_keywords=1)
    assert fakes.received(Retrieve) == [Retrieve("Ada", 7)]
    listed = fakes.received(Generate, "entity_identifier")[0].json_schema["properties"]["entities"]
    assert listed["maxItems"] == 1
    assert listed["items"]["properties"]["keywords"]["maxItems"] == 1


def test_retrieve_without_entity_ranks_by_first_query():
    fakes = fake([SEARCH, STOP], [entities_json(("else", "a painter's province"))], [BORN])
    run(fakes)
    assert fakes.received(Rank)[0].query == "a painter's province"


def test_no_reasoner_writes_single_sentences():
    fakes = fake([f"{BORN} And more.", "So the answer is: Skane."], [ADA_QUERY], [BORN])
    result = run(fakes, use_reasoner=False)
    assert [s.thought for s in result.steps] == [BORN, "So the answer is: Skane."]
    assert all(r.json_schema is None for r in fakes.received(Generate, "reasoner"))
    assert DualragConfig(use_reasoner=False).needs.abilities == {
        "entity_identifier": ("json_schema",)
    }


def test_no_entities_thought_is_query_and_titles_are_headings():
    fakes = fake([SEARCH, STOP], (), [BORN], passages={None: (ADA, NOISE)})
    result = run(fakes, use_entities=False)
    assert fakes.received(Retrieve) == [Retrieve(MORE, 50)]
    assert fakes.received(Rank)[0].query == MORE
    assert result.steps[0].notes["learnt"] == {"Ada Moen": BORN}
    assert "entity_identifier" not in DualragConfig(use_entities=False).needs.roles


def test_no_outline_shows_documents():
    fakes = fake([SEARCH, STOP], [ADA_QUERY])
    result = run(fakes, use_outline=False)
    raw = f"#### Documents\n{ADA.title}: {ADA.text}"
    assert raw in prompt(fakes.received(Generate, "reasoner")[1])
    assert raw in prompt(fakes.received(Generate, "reader")[0])
    assert result.granularity == "passage"
    assert "summarizer" not in DualragConfig(use_outline=False).needs.roles


def test_no_reranker_keeps_retrieval_order():
    fakes = fake([SEARCH, STOP], [ADA_QUERY], [BORN])
    result = run(fakes, use_reranker=False, num_documents=1)
    assert fakes.received(Rank) == [] and result.steps[0].kept == ("n",)
    assert DualragConfig(use_reranker=False).needs.rankers == ()


def test_reason_unreadable_json_is_requested_again():
    fakes = fake(["I think", SEARCH, STOP], ["[", ADA_QUERY], [BORN])
    result = run(fakes)
    again = fakes.received(Generate, "reasoner")[1]
    assert [m.role for m in again.messages[-2:]] == ["assistant", "user"]
    assert again.messages[-2].text == "I think"
    assert result.parse_errors == {"reasoner_no_json": 1, "entities_broken_json": 1}


def test_reason_without_flag_only_first_round_retrieves():
    fakes = fake(["Hm.", "So."], ["?"], [BORN], passages={None: (ADA,)})
    result = run(fakes, max_retries=0)
    # The thought is the query; without a flag only the first round retrieves.
    assert [r.query for r in fakes.received(Retrieve)] == ["Hm."]
    assert [s.thought for s in result.steps] == ["Hm.", "So."]
    assert result.parse_errors == {"entities_no_json": 1, "reasoner_no_json": 2}


def test_answer_truncated_response_is_counted():
    fakes = fake([STOP], reader=Generated("Lund lies in", "length"))
    assert run(fakes).parse_errors == {"answer_truncated": 1}


def test_dualrag_cut_thoughts_and_summaries_are_counted():
    long = thought_json("L" * 39 + ".", True)
    fakes = fake([long, STOP], [ADA_QUERY], [Generated("Ada Moen was", "length")])
    result = run(fakes, max_thought=40)
    assert result.parse_errors == {"reasoner_thought_cut": 2, "summary_truncated": 1}
    assert result.steps[1].thought == DONE[:40]
    patterns = [
        request.json_schema["properties"]["thought"]["pattern"]
        for request in fakes.received(Generate, "reasoner")
    ]
    assert patterns == [r"^[^\s].{9,39}$"] * 2
    fakes = fake([thought_json("L" * 900, True), STOP], [ADA_QUERY], [BORN])
    result = run(fakes, max_thought=0)
    assert result.parse_errors == {} and len(result.steps[0].thought) == 900
    schema = fakes.received(Generate, "reasoner")[0].json_schema
    assert schema["properties"]["thought"]["pattern"] == r"^[^\s].{9,}$"
    fakes = fake([Generated("It was", "length"), "So the answer is: Lund."], summaries=[BORN])
    settings = {"use_reasoner": False, "use_entities": False, "num_documents": 1}
    assert run(fakes, **settings).parse_errors == {"reasoner_truncated": 1}


def test_identify_empty_responses_search_with_question():
    fakes = fake([Generated("", "length"), STOP], [""], [BORN], passages={None: (ADA,)})
    result = run(fakes, max_retries=0)
    assert [r.query for r in fakes.received(Retrieve)] == [QUESTION]
    assert result.parse_errors == {"entities_no_json": 1, "reasoner_truncated": 1}


def test_identify_repeated_queries_become_question_then_end():
    fakes = fake([SEARCH] * 3, [ADA_QUERY] * 3, [BORN, "More."], passages={None: (ADA,)})
    result = run(fakes)
    asked = [r.query for r in fakes.received(Retrieve)]
    assert asked == ["Ada Moen", "birthplace of Ada Moen", QUESTION]
    assert len(result.steps) == 3 and result.steps[2].passages == ()
    assert result.parse_errors["repeated_query"] == 2


def test_identify_unnamed_entities_are_counted():
    asks = entities_json(("", "painters"), ("Osk Bay", "Osk Bay"))
    fakes = fake([SEARCH, STOP], [asks], [BORN],
                 passages={"Osk Bay": (NOISE,), None: (ADA,)})  # fmt: skip
    result = run(fakes)
    assert result.steps[0].notes["queries"] == {"else": ["painters"], "Osk Bay": ["Osk Bay"]}
    assert result.parse_errors == {
        "entities_unnamed": 1, "entity_never_named": 1, "entity_without_documents": 1,
    }  # fmt: skip


def test_entities_named_allows_unsearched_names():
    fakes = fake(
        [STOP, STOP], [entities_json(("Ada Moen", "x y")), entities_json(("Lund", "Lund"))]
    )
    result = run(fakes, min_retrievals=2, max_steps=2, entities="named", summarizer="sentences",
                num_sentences=1, reader_format="chain")  # fmt: skip
    listed = [
        r.json_schema["properties"]["entities"]
        for r in fakes.received(Generate, "entity_identifier")
    ]
    allowed = [one["items"]["properties"]["entity"]["enum"] for one in listed]
    assert allowed == [["Ada Moen", "Lund", "Skane"], ["Lund", "Skane"]]
    assert [one["minItems"] for one in listed] == [3, 2]
    assert [r.query for r in fakes.received(Retrieve)] == ["Ada Moen", "x y", "Lund"]
    own = ("Ada Moen: Ada Moen was born in Lund.", "Ada Moen: She paints.")
    assert fakes.received(Rank)[1] == Rank(QUESTION, own, 1, "passages")
    # The next query continues from the outline.
    assert fakes.received(Rank)[3].query == f"{QUESTION}\nknowledge sentences: {own[0]}"
    assert result.attempts[0].evidence == (own[0], "Lund: Lund is a town in Skane.")
    (last,) = fakes.received(Generate, "reader")
    assert "Sentences:\nAda Moen: Ada Moen was born" in prompt(last)
    assert "summarizer" not in DualragConfig(summarizer="sentences").needs.roles


def test_summarizer_sentences_are_noted_once():
    plain = Passage("a", "Ada Moen", "Ada Moen was born in Lund.")
    fakes = fake([SEARCH, SEARCH, STOP], [ADA_QUERY, entities_json(("Lund", "Osk"))],
                 passages={None: (plain,)})  # fmt: skip
    result = run(fakes, summarizer="sentences")
    assert [step.notes["learnt"] for step in result.steps[:2]] == [
        {"Ada Moen": "Ada Moen: Ada Moen was born in Lund."}, {},
    ]  # fmt: skip


def test_entities_named_without_names_searches_thought():
    fakes = fake(
        [thought_json("no capitals here", True), STOP], (), [BORN], passages={None: (ADA,)}
    )
    program = dualrag(Question("q", "who was it?", ()), DualragConfig(entities="named"))
    fakes.drive(program)
    assert fakes.received(Retrieve) == [Retrieve("no capitals here", 50)]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_steps": 0}, "max_steps"),
        ({"num_sentences": 0}, "num_sentences"),
        ({"max_retries": -1}, "max_retries"),
        ({"entities": "some"}, "entities='some'"),
        ({"entities": "named", "constrained": False}, "needs constrained"),
        ({"summarizer": "none"}, "summarizer='none'"),
        ({"summarizer": "sentences", "use_reranker": False}, "needs use_reranker"),
        ({"reader_format": "xml"}, "reader_format='xml'"),
    ],
)
def test_dualrag_config_invalid_settings_are_refused(settings, words):
    with pytest.raises(UserError, match=words):
        DualragConfig(**settings)


def test_dualrag_case_study_matches_the_paper():
    """Entities, queries and the answer are from Table 7; passages and thoughts are invented."""
    question = "Which film has the director who was born later, El Extraño Viaje or Love In Pawn?"
    viaje = Passage("v", "El extraño viaje", "A drama of 1964 by Fernando Fernán Gómez.")
    pawn = Passage("p", "Love in Pawn", "A comedy of 1953 that Charles Saunders directed.")
    lover = Passage("w", "A Lover in Pawn", "A silent drama of 1920 by Victor Sjöström.")
    gomez = Passage("g", "Fernando Fernán Gómez", "He was born on 28 August 1921.")
    around = Passage("r", "La vida alrededor", "A Spanish comedy of 1959.")
    saunders = Passage("s", "Charles Saunders (director)", "He was born on 8 April 1904.")
    first = thought_json(
        "Who directed either film, and when these two were born, is missing.", True
    )
    films = entities_json(
        ("El Extraño Viaje", "El Extraño Viaje director", "El Extraño Viaje director birth year"),
        ("Love In Pawn", "Love In Pawn director", "When was the director of Love In Pawn born"),
    )
    second = thought_json(
        "Fernando Fernán Gómez and Charles Saunders: their birth years are missing.", True
    )
    people = entities_json(
        ("Fernando Fernán Gómez", "Fernando Fernán Gómez", "Fernando Fernán Gómez birth year"),
        ("Charles Saunders", "Charles Saunders birth year"),
    )
    last = thought_json(
        "1921 is later than 1904, so it is the film of Fernando Fernán Gómez.", False
    )
    summaries = [
        "El extraño viaje was directed by Fernando Fernán Gómez.",
        "Love in Pawn was directed by Charles Saunders.",
        "Fernando Fernán Gómez was born on 28 August 1921.",
        "Charles Saunders was born on 8 April 1904.",
    ]
    fakes = FakeHandlers(
        {
            "El Extraño Viaje director": (viaje, pawn),
            "El Extraño Viaje director birth year": (viaje,),
            "Love In Pawn director": (lover, pawn),
            "When was the director of Love In Pawn born": (pawn, lover),
            "Fernando Fernán Gómez": (gomez, viaje), "Fernando Fernán Gómez birth year": (around,),
            "Charles Saunders birth year": (saunders, pawn),
        },
        {},
        {
            "reasoner": [first, second, last], "entity_identifier": [films, people],
            "summarizer": list(summaries), "reader": ["Born later.\nAnswer: El Extraño Viaje"],
        },
        {"v": 3.0, "p": 2.0, "g": 4.0, "s": 4.0, "w": -2.0, "r": -3.0},
    )  # fmt: skip
    result = fakes.drive(dualrag(Question("q", question, ()), DualragConfig()))
    assert [len(s.passages) for s in result.steps] == [2, 4, 0]
    assert [r.query for r in fakes.received(Rank)] == [
        "El Extraño Viaje", "Love In Pawn", "Fernando Fernán Gómez", "Charles Saunders",
    ]  # fmt: skip
    outline = "\n\n".join(
        f"#### {entity}\n{summary}"
        for entity, summary in zip(
            ["El Extraño Viaje", "Love In Pawn", "Fernando Fernán Gómez", "Charles Saunders"],
            summaries,
            strict=True,
        )
    )
    assert outline in prompt(fakes.received(Generate, "reader")[0])
    assert result.answer == "El Extraño Viaje" and result.parse_errors == {}
    assert result.passages[:4] == ("v", "p", "g", "s")
    assert set(result.passages[4:]) == {"w", "r"}


def test_paper_preset_has_the_defaults():
    paper = dualrag_config.get_config("paper")
    assert DualragConfig(**task.plain(paper.dualrag)) == DualragConfig()
    ranker = paper.rankers.passages  # Scores are logits.
    assert (ranker.kind, ranker.model) == ("cross_encoder", "BAAI/bge-reranker-v2-m3")
