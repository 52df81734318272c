"""DualRAG by hand."""

import json

import pytest

from cirag_jax.commands import task
from cirag_jax.errors import UserError
from cirag_jax.methods.dualrag.method import DualragConfig, dualrag
from cirag_jax.runtime.requests import Generate, Generated, Rank, Retrieve
from cirag_jax.types import Passage, Question
from configs.methods import dualrag as dualrag_config
from tests.methods.by_hand import Hand, prompt

QUESTION = "In which province was Ada Moen born?"
ADA = Passage("a", "Ada Moen", "Ada Moen was born in Lund. She paints.")
LUND = Passage("l", "Lund", "Lund is a town in Skane.")
NOISE = Passage("n", "Adam", "Adam is a name.")
MORE = "Where Ada Moen was born is missing."
DONE = "Ada Moen was born in Lund, which is in Skane."
BORN = "Ada Moen was born in Lund."
ANSWERS = "Lund lies there.\nAnswer: Skane"


def said(thought, retrieves):
    return json.dumps({"thought": thought, "need_retrieve": retrieves})


def wants(*pairs):
    return json.dumps({"entities": [{"entity": e, "keywords": list(q)} for e, *q in pairs]})


GOES_ON, STOPS = said(MORE, True), said(DONE, False)
ASKS_ADA = wants(("Ada Moen", "Ada Moen", "birthplace of Ada Moen"))


def hand(reasoner, entities=(), summaries=(), *, found=None, scores=None, reader=ANSWERS):
    texts = {
        "reasoner": list(reasoner), "entity_identifier": list(entities),
        "summarizer": list(summaries), "reader": [reader],
    }  # fmt: skip
    found = found or {"Lund": (LUND, NOISE), None: (NOISE, ADA)}
    return Hand(found, {}, texts, {"a": 1.0, "l": 0.5, "n": -1.0} | (scores or {}))


def run(hands, **settings):
    return hands.drive(dualrag(Question("q", QUESTION, ()), DualragConfig(**settings)))


# ------------------------------------------------------------------------------------ the loop


def test_an_empty_outline_is_what_is_read():
    found = run(hand([GOES_ON, STOPS], [ASKS_ADA], ["None"]))
    assert found.attempts[0].evidence == () and found.attempts[0].granularity == "sentence"


def test_it_searches_for_what_is_missing_and_notes_what_it_learns():
    hands = hand([GOES_ON, STOPS], [ASKS_ADA], [BORN])
    found = run(hands)
    assert hands.kinds() == [
        "reasoner", "entity_identifier", "Retrieve", "Retrieve", "Rank", "summarizer", "reasoner",
        "reader",
    ]  # fmt: skip
    assert hands.asked(Retrieve) == [
        Retrieve("Ada Moen", 50),
        Retrieve("birthplace of Ada Moen", 50),
    ]
    # Reranked against the entity's name, not against a query; what scores 0 or less is dropped.
    assert hands.asked(Rank) == [Rank("Ada Moen", (NOISE, ADA), 10, "passages")]
    summary = prompt(hands.asked(Generate, "summarizer")[0])
    assert ADA.text in summary and NOISE.text not in summary
    assert MORE in summary and "birthplace of Ada Moen" in summary
    first, second = (prompt(r) for r in hands.asked(Generate, "reasoner"))
    assert "Knowledge:\nNothing yet." in first
    assert f"#### Ada Moen\n{BORN}" in second and second.endswith(f"Reasoning so far: {MORE}")
    read = prompt(hands.asked(Generate, "reader")[0])
    assert f"#### Ada Moen\n{BORN}" in read and read.endswith(f"Reasoning so far: {MORE} {DONE}")
    assert (found.answer, found.granularity) == ("Skane", "sentence")
    assert found.passages == ("a", "n")  # kept before dropped
    assert found.attempts[0].evidence == (f"Ada Moen: {BORN}",)
    one, two = found.steps
    assert (one.thought, one.kept) == (MORE, ("a",))
    assert (one.query, one.more_queries) == ("Ada Moen", ("birthplace of Ada Moen",))
    assert one.notes["learnt"] == {"Ada Moen": BORN}
    assert (two.thought, two.passages) == (DONE, ())
    assert found.parse_errors == {}


def test_entities_are_searched_at_the_same_time():
    hands = hand([GOES_ON, STOPS], [wants(("Ada Moen", "Ada"), ("Lund", "Lund"))], [BORN, "None"])
    program = dualrag(Question("q", QUESTION, ()), DualragConfig())
    lists, response = [], None
    while True:
        try:
            request = program.send(response)
        except StopIteration as end:
            found = end.value
            break
        several = request if isinstance(request, list) else [request]
        lists += [several] if several is request else []
        responses = [hands.answer(one) for one in several]
        response = responses if several is request else responses[0]
    assert [[type(r).__name__ for r in one] for one in lists] == [
        ["Retrieve", "Retrieve"], ["Rank", "Rank"], ["Generate", "Generate"],
    ]  # fmt: skip
    assert found.steps[0].notes["learnt"] == {"Ada Moen": BORN}  # "None" is no knowledge
    assert found.passages == ("a", "l", "n")


def test_the_last_round_goes_to_the_answer_as_well():
    hands = hand([GOES_ON] * 2, [ASKS_ADA, wants(("Lund", "Lund"))], [BORN, "In Skane."])
    found = run(hands, max_steps=2)
    assert len(found.steps) == 2 and hands.kinds()[-1] == "reader"


def test_an_entity_reads_only_documents_that_are_new_to_it():
    again = wants(("ada moen", "Lund"))  # the known entity, spelt otherwise
    hands = hand([GOES_ON, GOES_ON, STOPS], [ASKS_ADA, again], [BORN, "Lund is in Skane."],
                 found={"Lund": (LUND, ADA), None: (NOISE, ADA)})  # fmt: skip
    found = run(hands)
    second = prompt(hands.asked(Generate, "summarizer")[1])
    assert LUND.text in second and ADA.text not in second
    assert found.steps[1].notes["queries"] == {"Ada Moen": ["Lund"]}
    outline = f"#### Ada Moen\n{BORN}\nLund is in Skane."
    assert outline in prompt(hands.asked(Generate, "reader")[0])


def test_an_entity_without_new_documents_is_not_summarised():
    again = wants(("Ada Moen", "Ada's birth"))
    hands = hand([GOES_ON, GOES_ON, STOPS], [ASKS_ADA, again], [BORN])
    found = run(hands)
    assert hands.kinds().count("summarizer") == 1  # the same documents
    assert found.steps[1].kept == ("a",) and found.steps[1].notes["learnt"] == {}


def test_a_round_asks_for_so_much_and_no_more():
    many = wants(("Ada Moen", "Ada", "her birth"), ("Lund", "Lund"))
    hands = hand([GOES_ON, STOPS], [many], [BORN])
    run(hands, num_retrieved=7, max_entities=1, max_keywords=1)
    assert hands.asked(Retrieve) == [Retrieve("Ada", 7)]
    listed = hands.asked(Generate, "entity_identifier")[0].json_schema["properties"]["entities"]
    assert listed["maxItems"] == 1
    assert listed["items"]["properties"]["keywords"]["maxItems"] == 1


def test_ranks_by_the_first_query_where_no_entity_could_be_named():
    hands = hand([GOES_ON, STOPS], [wants(("else", "a painter's province"))], [BORN])
    run(hands)
    assert hands.asked(Rank)[0].query == "a painter's province"


# ------------------------------------------------------------------------------------ ablations


def test_without_the_reasoner_it_thinks_in_single_sentences():
    hands = hand([f"{BORN} And more.", "So the answer is: Skane."], [ASKS_ADA], [BORN])
    found = run(hands, use_reasoner=False)
    assert [s.thought for s in found.steps] == [BORN, "So the answer is: Skane."]
    assert all(r.json_schema is None for r in hands.asked(Generate, "reasoner"))
    assert DualragConfig(use_reasoner=False).needs.abilities == {
        "entity_identifier": ("json_schema",)
    }


def test_without_entities_the_thought_is_the_query_and_titles_head_the_outline():
    hands = hand([GOES_ON, STOPS], (), [BORN], found={None: (ADA, NOISE)})
    found = run(hands, use_entities=False)
    assert hands.asked(Retrieve) == [Retrieve(MORE, 50)]
    assert hands.asked(Rank)[0].query == MORE
    assert found.steps[0].notes["learnt"] == {"Ada Moen": BORN}
    assert "entity_identifier" not in DualragConfig(use_entities=False).needs.roles


def test_without_the_outline_models_read_the_documents():
    hands = hand([GOES_ON, STOPS], [ASKS_ADA])
    found = run(hands, use_outline=False)
    raw = f"#### Documents\n{ADA.title}: {ADA.text}"
    assert raw in prompt(hands.asked(Generate, "reasoner")[1])
    assert raw in prompt(hands.asked(Generate, "reader")[0])
    assert found.granularity == "passage"
    assert "summarizer" not in DualragConfig(use_outline=False).needs.roles


def test_without_the_reranker_the_retriever_decides():
    hands = hand([GOES_ON, STOPS], [ASKS_ADA], [BORN])
    found = run(hands, use_reranker=False, num_documents=1)
    assert hands.asked(Rank) == [] and found.steps[0].kept == ("n",)
    assert DualragConfig(use_reranker=False).needs.rankers == ()


# ------------------------------------------------------------------------- what models do wrong


def test_json_that_cannot_be_read_is_asked_for_once_more():
    hands = hand(["I think", GOES_ON, STOPS], ["[", ASKS_ADA], [BORN])
    found = run(hands)
    again = hands.asked(Generate, "reasoner")[1]
    assert [m.role for m in again.messages[-2:]] == ["assistant", "user"]
    assert again.messages[-2].text == "I think"
    assert found.parse_errors == {"reasoner_no_json": 1, "entities_broken_json": 1}


def test_it_retrieves_first_and_ends_later_where_no_json_ever_comes():
    hands = hand(["Hm.", "So."], ["?"], [BORN], found={None: (ADA,)})
    found = run(hands, max_retries=0)
    # The thought is the query; without a flag only the first round retrieves.
    assert [r.query for r in hands.asked(Retrieve)] == ["Hm."]
    assert [s.thought for s in found.steps] == ["Hm.", "So."]
    assert found.parse_errors == {"entities_no_json": 1, "reasoner_no_json": 2}


def test_an_answer_that_ends_too_early_is_counted():
    hands = hand([STOPS], reader=Generated("Lund lies in", "length"))
    assert run(hands).parse_errors == {"answer_truncated": 1}


def test_a_model_that_says_nothing_asks_the_question():
    hands = hand([Generated("", "length"), STOPS], [""], [BORN], found={None: (ADA,)})
    found = run(hands, max_retries=0)
    assert [r.query for r in hands.asked(Retrieve)] == [QUESTION]
    assert found.parse_errors == {"entities_no_json": 1, "reasoner_truncated": 1}


def test_queries_asked_before_fall_back_on_the_question_then_end_the_loop():
    hands = hand([GOES_ON] * 3, [ASKS_ADA] * 3, [BORN, "More."], found={None: (ADA,)})
    found = run(hands)
    asked = [r.query for r in hands.asked(Retrieve)]
    assert asked == ["Ada Moen", "birthplace of Ada Moen", QUESTION]
    assert len(found.steps) == 3 and found.steps[2].passages == ()
    assert found.parse_errors["repeated_query"] == 2


def test_entities_without_a_name_or_a_document_are_counted():
    asks = wants(("", "painters"), ("Osk Bay", "Osk Bay"))
    hands = hand([GOES_ON, STOPS], [asks], [BORN],
                 found={"Osk Bay": (NOISE,), None: (ADA,)})  # fmt: skip
    found = run(hands)
    assert found.steps[0].notes["queries"] == {"else": ["painters"], "Osk Bay": ["Osk Bay"]}
    assert found.parse_errors == {
        "entities_unnamed": 1, "entity_never_named": 1, "entity_without_documents": 1,
    }  # fmt: skip


# ------------------------------------------------------------------------------- small models


def test_small_models_choose_among_names_that_were_not_searched():
    hands = hand([STOPS, STOPS], [wants(("Ada Moen", "x y")), wants(("Lund", "Lund"))])
    found = run(hands, min_retrievals=2, max_steps=2, entities="named", summarizer="sentences",
                num_sentences=1, reader_format="chain")  # fmt: skip
    listed = [
        r.json_schema["properties"]["entities"] for r in hands.asked(Generate, "entity_identifier")
    ]
    allowed = [one["items"]["properties"]["entity"]["enum"] for one in listed]
    assert allowed == [["Ada Moen", "Lund", "Skane"], ["Lund", "Skane"]]
    assert [one["minItems"] for one in listed] == [3, 2]
    assert [r.query for r in hands.asked(Retrieve)] == ["Ada Moen", "x y", "Lund"]
    own = ("Ada Moen: Ada Moen was born in Lund.", "Ada Moen: She paints.")
    assert hands.asked(Rank)[1] == Rank(QUESTION, own, 1, "passages")
    # The next one goes on where the outline ends.
    assert hands.asked(Rank)[3].query == f"{QUESTION}\nknowledge sentences: {own[0]}"
    assert found.attempts[0].evidence == (own[0], "Lund: Lund is a town in Skane.")
    (read,) = hands.asked(Generate, "reader")
    assert "Sentences:\nAda Moen: Ada Moen was born" in prompt(read)
    assert "summarizer" not in DualragConfig(summarizer="sentences").needs.roles


def test_a_sentence_is_noted_once():
    plain = Passage("a", "Ada Moen", "Ada Moen was born in Lund.")
    hands = hand([GOES_ON, GOES_ON, STOPS], [ASKS_ADA, wants(("Lund", "Osk"))],
                 found={None: (plain,)})  # fmt: skip
    found = run(hands, summarizer="sentences")
    assert [step.notes["learnt"] for step in found.steps[:2]] == [
        {"Ada Moen": "Ada Moen: Ada Moen was born in Lund."}, {},
    ]  # fmt: skip


def test_where_no_name_is_left_the_thought_is_the_query():
    hands = hand([said("no capitals here", True), STOPS], (), [BORN], found={None: (ADA,)})
    program = dualrag(Question("q", "who was it?", ()), DualragConfig(entities="named"))
    hands.drive(program)
    assert hands.asked(Retrieve) == [Retrieve("no capitals here", 50)]


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
def test_settings_out_of_range_are_refused(settings, words):
    with pytest.raises(UserError, match=words):
        DualragConfig(**settings)


# ------------------------------------------------------------------------------ the case study


def test_the_papers_case_study():
    """Table 7: its entities, queries and answer; passages and thoughts are our own."""
    question = "Which film has the director who was born later, El Extraño Viaje or Love In Pawn?"
    viaje = Passage("v", "El extraño viaje", "A drama of 1964 by Fernando Fernán Gómez.")
    pawn = Passage("p", "Love in Pawn", "A comedy of 1953 that Charles Saunders directed.")
    lover = Passage("w", "A Lover in Pawn", "A silent drama of 1920 by Victor Sjöström.")
    gomez = Passage("g", "Fernando Fernán Gómez", "He was born on 28 August 1921.")
    around = Passage("r", "La vida alrededor", "A Spanish comedy of 1959.")
    saunders = Passage("s", "Charles Saunders (director)", "He was born on 8 April 1904.")
    first = said("Who directed either film, and when these two were born, is missing.", True)
    films = wants(
        ("El Extraño Viaje", "El Extraño Viaje director", "El Extraño Viaje director birth year"),
        ("Love In Pawn", "Love In Pawn director", "When was the director of Love In Pawn born"),
    )
    second = said(
        "Fernando Fernán Gómez and Charles Saunders: their birth years are missing.", True
    )
    people = wants(
        ("Fernando Fernán Gómez", "Fernando Fernán Gómez", "Fernando Fernán Gómez birth year"),
        ("Charles Saunders", "Charles Saunders birth year"),
    )
    last = said("1921 is later than 1904, so it is the film of Fernando Fernán Gómez.", False)
    summaries = [
        "El extraño viaje was directed by Fernando Fernán Gómez.",
        "Love in Pawn was directed by Charles Saunders.",
        "Fernando Fernán Gómez was born on 28 August 1921.",
        "Charles Saunders was born on 8 April 1904.",
    ]
    hands = Hand(
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
    found = hands.drive(dualrag(Question("q", question, ()), DualragConfig()))
    assert [len(s.passages) for s in found.steps] == [2, 4, 0]
    assert [r.query for r in hands.asked(Rank)] == [
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
    assert outline in prompt(hands.asked(Generate, "reader")[0])
    assert found.answer == "El Extraño Viaje" and found.parse_errors == {}
    assert found.passages[:4] == ("v", "p", "g", "s")
    assert set(found.passages[4:]) == {"w", "r"}


def test_the_preset_of_the_paper_is_the_methods_own():
    paper = dualrag_config.get_config("paper")
    assert DualragConfig(**task.plain(paper.dualrag)) == DualragConfig()
    ranker = paper.rankers.passages  # a score of 0 is its logit
    assert (ranker.kind, ranker.model) == ("cross_encoder", "BAAI/bge-reranker-v2-m3")
