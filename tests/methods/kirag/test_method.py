"""KiRAG: the chain of triples, reading and settings."""

import dataclasses

import pytest

from cirag_jax.commands import task
from cirag_jax.commands.task import most_tokens
from cirag_jax.errors import UserError
from cirag_jax.methods.kirag.method import KiragConfig, kirag
from cirag_jax.methods.kirag.prompts import FINAL
from cirag_jax.runtime.requests import (
    Demonstrate,
    Extract,
    Generate,
    Generated,
    Needs,
    Rank,
    Retrieve,
)
from cirag_jax.triples.normalization import triple_key
from cirag_jax.types import Passage, Prediction, Question, Sentence, Triple
from configs.methods import kirag as kirag_config
from tests.methods.fakes import FakeHandlers, prompt

# The paper's example (Figures 1 and 2) in our words: the hamlet Kirton End is near Boston, and
# another Kirton also has a census.
CENSUS = "What did the 2001 census count in the city where Kirton End is located?"
HAMLET = Passage(
    "hamlet", "Kirton End", "Kirton End is a hamlet. It belongs to Boston in Lincolnshire."
)
DECOY = Passage(
    "decoy", "Kirton, Nottinghamshire", "Kirton is a village. The 2001 census counted 273."
)
CITY = Passage("city", "Boston", "Boston is a port. The 2001 census counted 35,124 in the town.")
KIND = Triple("Kirton End", "is a", "hamlet", "hamlet", 0)
PLACE = Triple("Kirton End", "location", "Boston", "hamlet", 1)
OTHER = Triple("Kirton", "population in 2001 census", "273", "decoy", 1)
PORT = Triple("Boston", "is a", "port", "city", 0)
COUNT = Triple("Boston", "population in 2001 census", "35,124", "city", 1)
FIRST, SECOND = "<Kirton End; location; Boston>", "<Boston; population in 2001 census; 35,124>"
SECOND_QUERY = f"{CENSUS}\nknowledge triples: {FIRST}."
THIRD_QUERY = f"{CENSUS}\nknowledge triples: {FIRST}. {SECOND}."
SCORES = {
    triple_key(OTHER): 0.7, triple_key(PLACE): 0.6, triple_key(KIND): 0.2,
    triple_key(COUNT): 0.5, triple_key(PORT): 0.1,
}  # fmt: skip
TRIPLES = {"hamlet": (KIND, PLACE), "decoy": (OTHER,), "city": (PORT, COUNT)}
PASSAGES = {CENSUS: (DECOY, HAMLET), SECOND_QUERY: (HAMLET, CITY), None: (CITY, HAMLET)}
FINAL_STEP = f" {FINAL}: 35,124."


def run(
    responses=(),
    answers=("35,124",),
    passages=None,
    demonstrated=(),
    triples=None,
    scores=None,
    **settings,
):
    texts = {"constructor": list(responses), "reader": list(answers)}
    fakes = FakeHandlers(
        passages or PASSAGES,
        TRIPLES if triples is None else triples,
        texts,
        scores or SCORES,
        demonstrated,
    )
    settings.setdefault("num_demonstrations", 0)
    return fakes, fakes.drive(kirag(Question("q", CENSUS, ()), KiragConfig(**settings)))


def chain_of(prediction: Prediction):
    return [unit for step in prediction.steps for unit in step.kept]


def test_kirag_example_of_the_paper_step_by_step():
    responses = [f" {FIRST}, {SECOND}.{FINAL_STEP}", f", {SECOND}.{FINAL_STEP}", f".{FINAL_STEP}"]
    fakes, result = run(responses)
    steps = ["Retrieve", "Extract", "Rank", "constructor"]
    assert fakes.kinds() == [*steps, *steps, "Retrieve", "Rank", "constructor", "reader"]
    # The decoy scores best, but the constructor selects the hamlet, which leads to the city.
    assert [r.query for r in fakes.received(Retrieve)] == [CENSUS, SECOND_QUERY, THIRD_QUERY]
    assert [r.query for r in fakes.received(Rank)] == [CENSUS, SECOND_QUERY, THIRD_QUERY]
    assert [[p.id for p in r.passages] for r in fakes.received(Extract)] == [
        ["decoy", "hamlet"], ["city"],
    ]  # fmt: skip
    assert chain_of(result) == [PLACE, COUNT]
    one, two, three = result.steps
    assert one.candidates == (OTHER, PLACE, KIND) and one.scores == (0.7, 0.6, 0.2)
    assert two.candidates == (PLACE, COUNT, KIND, PORT)  # From this step's passages only.
    assert (two.next_query, three.next_query) == (THIRD_QUERY, None)
    assert three.kept == () and three.thought == f"{FINAL} 35,124."
    thoughts = [
        prompt(r).rpartition("Thought:")[2] for r in fakes.received(Generate, "constructor")
    ]
    assert thoughts == ["", f" {FIRST}", f" {FIRST}, {SECOND}"]
    assert all(r.continue_final for r in fakes.received(Generate, "constructor"))
    # Passages are ranked by their best candidate (D_q, section 3.3); the reader reads three.
    assert result.passages == ("decoy", "hamlet", "city")
    assert result.attempts[0].evidence == tuple(
        f"{p.title}\n{p.text}" for p in (DECOY, HAMLET, CITY)
    )
    assert (result.answer, result.granularity, result.parse_errors) == ("35,124", "passage", {})
    assert result.triples[:2] == (PLACE, COUNT) and result.sentences[:2] == (
        ("hamlet", 1),
        ("city", 1),
    )


def test_stop_chain_needs_the_answer_as_next_step():
    responses = [f" {FIRST}.{FINAL_STEP}", f".{FINAL_STEP}"]
    assert len(run(responses)[1].steps) == 2
    _, result = run(responses[:1], stop="text")  # The paper's rule.
    assert len(result.steps) == 1 and chain_of(result) == [PLACE]
    assert result.steps[0].next_query is None


def test_max_steps_ends_the_chain():
    fakes, result = run([f" {FIRST}", f", {SECOND}"], max_steps=2)
    assert len(result.steps) == 2 and result.steps[-1].next_query == THIRD_QUERY
    assert len(fakes.received(Retrieve)) == 2


def test_construct_unknown_triple_ends_the_chain():
    _, result = run([" <Kirton End; near; Paris>"])
    assert chain_of(result) == [] and len(result.steps) == 1
    assert result.parse_errors == {"not_a_candidate": 1}
    assert result.answer == "35,124" and result.passages == ("decoy", "hamlet")


def test_match_cutoff_takes_similar_candidate():
    near = " <Kirton End; located in; Boston>"
    assert chain_of(run([near])[1]) == []
    assert chain_of(run([near, FINAL_STEP], match_cutoff=0.8)[1]) == [PLACE]


def test_prefilled_opening_is_requested_again():
    responses = ["It lies near Boston.", "Kirton End; location; Boston>", FINAL_STEP]
    fakes, result = run(responses, prefilled_opening=True)
    assert chain_of(result) == [PLACE]
    assert prompt(fakes.received(Generate, "constructor")[1]).endswith("Thought: <")
    assert result.parse_errors == {"asked_again": 1, "no_unit": 1}


def test_append_best_replaces_missing_candidate():
    responses = ["It lies near Boston.", f", {FIRST}", "Who knows?"]
    fakes, result = run(responses, append_best=True, max_steps=3)
    # The decoy, the constructor's choice, then the best new one: COUNT has 0.5, KIND 0.2.
    assert chain_of(result) == [OTHER, PLACE, COUNT]
    assert result.steps[0].response == "It lies near Boston."
    # An answer after an invented triple is ignored. A response with only an answer ends the chain.
    responses = [f" <Kirton End; in; Paris>.{FINAL_STEP}", FINAL_STEP]
    assert chain_of(run(responses, append_best=True)[1]) == [OTHER]
    assert chain_of(run(responses[:1])[1]) == []
    assert len(run([FINAL_STEP], append_best=True)[1].steps) == 1


def test_no_constructor_appends_best_new_unit():
    fakes, result = run(use_constructor=False, max_steps=9)
    assert not fakes.received(Generate, "constructor")
    first = f"{CENSUS}\nknowledge triples: <Kirton; population in 2001 census; 273>."
    assert fakes.received(Retrieve)[1].query == first
    # From the second step on, the passages are the city and the hamlet.
    assert chain_of(result) == [OTHER, PLACE, COUNT, KIND, PORT]
    assert len(result.steps) == 6 and result.steps[-1].next_query is None  # No new unit is left.


def test_no_aligner_shows_every_triple():
    fakes, result = run([f" {FIRST}", f", {SECOND}", FINAL_STEP], use_aligner=False)
    assert not fakes.received(Rank)
    assert result.steps[0].candidates == (OTHER, KIND, PLACE)  # In passage order.
    assert result.passages == ("hamlet", "city", "decoy")  # Without scores the chain comes first.


def test_num_candidates_limits_the_aligner():
    _, result = run([FINAL_STEP], num_candidates=2)
    assert result.steps[0].candidates == (OTHER, PLACE)
    assert len(run([FINAL_STEP], num_candidates=0)[1].steps[0].candidates) == 3


def test_align_equal_triples_count_for_all_passages():
    same = Triple(*PLACE[:3], "city", 0)
    _, result = run(
        [f" {FIRST}", FINAL_STEP],
        passages={None: (HAMLET, DECOY, CITY)},
        triples={"hamlet": (PLACE,), "decoy": (OTHER,), "city": (same,)},
        scores={triple_key(PLACE): 0.6, triple_key(OTHER): 0.3},
    )
    assert result.steps[0].candidates == (PLACE, OTHER)
    assert result.passages == ("hamlet", "city", "decoy")


def test_ranked_passages_without_candidates_come_last():
    _, result = run([FINAL_STEP], passages={None: (DECOY, CITY)}, triples={"city": (PORT,)})
    assert result.passages == ("city", "decoy")


def test_decompose_passages_without_triples_are_counted_once():
    _, result = run(
        [f" {FIRST}", FINAL_STEP], triples={"hamlet": (PLACE,), "city": (), "decoy": None}
    )
    assert result.parse_errors == {"passage_not_extracted": 1, "passage_without_triples": 1}


def test_construct_no_candidates_ends_the_chain():
    _, result = run([" <a; b; c>"], triples={}, prefilled_opening=True, append_best=True)
    assert len(result.steps) == 1 and result.passages == ("decoy", "hamlet")


def test_units_sentence_and_passage_need_no_extraction():
    line = "Kirton End: It belongs to Boston in Lincolnshire."
    fakes, result = run([f"{line}\n", f"{FINAL}: 35,124."], scores={line: 0.9}, units="sentence")
    assert not fakes.received(Extract)
    assert chain_of(result) == [Sentence("hamlet", 1)]
    assert result.steps[1].query == f"{CENSUS}\nknowledge sentences: {line}"
    assert result.passages[0] == "hamlet"
    whole = f"Kirton End. {HAMLET.text}"
    _, result = run([f"{whole}\n", f"{FINAL}: 35,124."], scores={whole: 0.9}, units="passage")
    assert chain_of(result) == ["hamlet"] and result.passages[0] == "hamlet"
    assert result.sentences == () and result.triples == ()


def test_retriever_query_last_has_only_the_last_unit():
    fakes, _ = run(
        [f" {FIRST}", f", {SECOND}", FINAL_STEP],
        retriever_query="last",
        passages={None: (HAMLET, CITY)},
    )
    assert [r.query for r in fakes.received(Retrieve)] == [
        CENSUS, f"{CENSUS} {FIRST}", f"{CENSUS} {SECOND}",
    ]  # fmt: skip
    assert [r.query for r in fakes.received(Rank)] == [CENSUS, SECOND_QUERY, THIRD_QUERY]


def test_accumulate_keeps_units_of_earlier_passages():
    responses = [f" {FIRST}", FINAL_STEP]
    _, result = run(responses, accumulate=True)
    assert OTHER in result.steps[1].candidates
    assert OTHER not in run(responses)[1].steps[1].candidates


def test_pool_size_shows_candidates_of_all_steps():
    _, result = run([f" {FIRST}", FINAL_STEP], pool_size=4, num_candidates=2)
    assert result.steps[0].candidates == (OTHER, PLACE)
    assert result.steps[1].candidates == (OTHER, PLACE, COUNT)  # Only step one has the decoy.
    assert len(run([f" {FIRST}", FINAL_STEP], pool_size=2)[1].steps[1].candidates) == 2


def test_list_when_empty_writes_an_empty_list():
    fakes, _ = run([f" {FIRST}", FINAL_STEP], list_when_empty=True)
    assert [r.query for r in fakes.received(Rank)] == [
        f"{CENSUS}\nknowledge triples: .",
        SECOND_QUERY,
    ]
    assert fakes.received(Retrieve)[0].query == CENSUS


def test_as_written_appends_any_text():
    code = {"as_written": True, "stop": "empty"}
    near = "<Kirton End; its location; Boston>"
    fakes, result = run([f" {near}", "Nobody knows that. Yes.", f" {FINAL_STEP}", " "], **code)
    assert [r.query for r in fakes.received(Rank)] == [
        CENSUS,
        f"{CENSUS}\nknowledge triples: {near}.",
        f"{CENSUS}\nknowledge triples: {near}. Nobody knows that.",
        f"{CENSUS}\nknowledge triples: {near}. Nobody knows that. {FINAL}: 35,124.",
    ]
    responses = prompt(fakes.received(Generate, "constructor")[2])
    assert f"{near}, Nobody knows that." in responses and "<Nobody" not in responses
    # Only the first text matches a unit of the pool.
    assert chain_of(result) == [PLACE]
    assert [s.notes for s in result.steps] == [
        {}, {"written": "Nobody knows that."}, {"written": f"{FINAL}: 35,124."}, {},
    ]  # fmt: skip
    assert result.steps[-1].next_query is None
    assert len(run([f" {near}", FINAL_STEP], as_written=True)[1].steps) == 2


def test_boost_raises_chosen_and_answering_units():
    responses = [f" {FIRST}", f", {SECOND}", FINAL_STEP]
    plain, raised = run(responses)[1], run(responses, boost=0.5)[1]
    assert plain.passages == ("decoy", "hamlet", "city")
    # The hamlet has 0.6 + 0.5; the city 0.5 + 0.5, and + 0.5 for the answer.
    assert raised.passages == ("city", "hamlet", "decoy")
    # An answer of yes, or one that no unit contains, raises no score.
    for answer in ("yes", "Rome", "27"):
        ends = f" {FINAL}: {answer}."
        assert run([f" {FIRST}", ends], boost=0.5)[1].passages[0] == "hamlet"
    responses = [f" {FIRST}", f"{FINAL}: 273.", ""]
    written = run(responses, boost=0.5, as_written=True, stop="empty")[1]
    assert written.passages[0] == "decoy"  # 0.7 + 0.5


def test_boost_in_code_follows_natural_completions():
    """A completion continues the chain with a period; plain sentences are no triples (B4, B5)."""
    code = {"boost": 0.5, "as_written": True, "stop": "empty", "retriever_query": "last"}
    fakes, answered = run([f" {FIRST}", f". {FINAL}: 273.", " "], **code)
    assert fakes.received(Retrieve)[-1].query.endswith(f"{FINAL}: 273.")
    assert answered.passages[0] == "decoy"  # 0.7 + 0.5
    words = FIRST.strip("<>").replace(";", "")
    for text, best in ((FIRST, "hamlet"), (words, "decoy")):
        assert run([f" {text}", ""], **code)[1].passages[0] == best


def test_ranking_chain_puts_its_passages_first():
    _, result = run([f" {FIRST}", f", {SECOND}", FINAL_STEP], ranking="chain")
    assert result.passages == ("hamlet", "city", "decoy")


def test_demonstrate_most_similar_question_comes_last():
    def question(name, evidences):
        return Question(name, f"Question {name}?", ("x",), supporting=("p",), evidences=evidences)

    shown = [
        question("a", (("a", "b", "c"),)),
        question("b", None),
        question("c", (("d", "e", "f"),)),
    ]
    fakes, _ = run([FINAL_STEP], demonstrated=shown, num_demonstrations=2)
    assert fakes.requests[0] == Demonstrate(CENSUS, 8)
    responses = prompt(fakes.received(Generate, "constructor")[0])
    assert (
        0 < responses.index("Question c?") < responses.index("Question a?")
        and "Question b?" not in responses
    )
    assert "Mira Solheim" not in responses
    # Without annotated chains the worked example is shown.
    fakes, _ = run([FINAL_STEP], demonstrated=shown[1:2], num_demonstrations=2)
    assert "Mira Solheim" in prompt(fakes.received(Generate, "constructor")[0])


def test_continues_off_puts_chain_in_user_turn():
    fakes, _ = run([f" {FIRST}", FINAL_STEP], continues=False)
    request = fakes.received(Generate, "constructor")[1]
    assert request.messages[-1].role == "user" and not request.continue_final
    assert request.messages[-1].text.endswith(f"Thought: {FIRST}")


def test_reader_format_selects_the_prompt():
    fakes, result = run([FINAL_STEP], ["The answer is: 273."], num_read=1)
    assert "Kirton End is a hamlet" not in prompt(fakes.received(Generate, "reader")[0])
    assert result.answer == "273"
    fakes, result = run([FINAL_STEP], ["a; b; c\nAnswer: 273"], reader_format="chain")
    assert result.answer == "273" and result.granularity == "passage"
    assert "head; relation; tail" in prompt(fakes.received(Generate, "reader")[0])
    _, result = run([FINAL_STEP], ["\n"])
    assert (result.answer, result.granularity) == ("", "default")
    assert result.parse_errors == {"answer_empty": 1}


def test_reader_nothing_ends_with_retrieval():
    fakes, result = run([FINAL_STEP], [], reader="nothing")
    assert (result.answer, result.attempts) == ("", ()) and result.passages == ("decoy", "hamlet")


def test_reader_cascade_reads_the_chain():
    responses = [f" {FIRST}", f", {SECOND}", FINAL_STEP]
    refuses, tells = "Thought: no.\nAnswer: Unanswerable", "Thought: so.\nAnswer: 35,124"
    cascade = {"reader": "cascade", "reader_format": "thought"}
    _, result = run(responses, [refuses, tells], **cascade)
    assert [a.granularity for a in result.attempts] == ["triple", "sentence"]
    assert result.attempts[0].evidence == (
        "('kirton end', 'location', 'boston')",
        "('boston', 'population in 2001 census', '35 124')",
    )
    assert (result.answer, result.granularity) == ("35,124", "sentence")
    # Without a chain the best passages are read.
    _, result = run([FINAL_STEP], [tells], num_read=1, **cascade)
    assert [a.evidence for a in result.attempts] == [(), (), (f"{DECOY.title}\n{DECOY.text}",)]
    # All refuse, so the answer is forced.
    _, result = run(responses, [refuses, refuses, refuses, "Answer: 7"], **cascade)
    assert (result.answer, result.granularity) == ("7", "default")
    _, result = run(
        [f"Kirton End. {HAMLET.text}\n", f"{FINAL} x"], [tells], units="passage", **cascade
    )
    assert [a.granularity for a in result.attempts] == ["passage"]


@pytest.mark.parametrize(
    ("settings", "changes"),
    [
        ({}, {}),
        (
            {"use_constructor": False},
            {"roles": ("reader",), "abilities": {}, "demonstrations": False},
        ),
        ({"use_aligner": False}, {"rankers": (), "units": None}),
        (
            {"units": "sentence"},
            {"units": "sentence", "triples": False, "demonstrations": False},
        ),
        ({"num_demonstrations": 0}, {"demonstrations": False}),
        ({"continues": False}, {"abilities": {}}),
        ({"reader": "nothing"}, {"roles": ("constructor",)}),
        ({"boost": 0.5, "accumulate": True, "stop": "empty"}, {}),
    ],
)  # fmt: skip
def test_needs_follow_the_settings(settings, changes):
    whole = Needs(
        roles=("constructor", "reader"),
        abilities={"constructor": ("continue_final",)},
        rankers=("aligner",),
        units="triple",
        triples=True,
        demonstrations=True,
    )
    assert KiragConfig(**settings).needs == dataclasses.replace(whole, **changes)


def test_presets_match_paper_and_code():
    paper, code, small = (kirag_config.get_config(name) for name in ("paper", "code", "small"))
    assert KiragConfig(**task.plain(paper.kirag)) == KiragConfig()
    changed = {k: v for k, v in code.kirag.items() if v != paper.kirag[k]}
    assert changed == {
        "retriever_query": "last", "accumulate": True, "pool_size": 100, "list_when_empty": True,
        "as_written": True, "stop": "empty", "boost": 0.5,
    }  # fmt: skip
    for config in (paper, code):
        assert config.encoder.model == "intfloat/e5-large-v2"
        assert (config.constructor.max_tokens, most_tokens(config, "reader")) == (64, 32)
        aligner, encoder = config.rankers.aligner, config.encoder
        assert (aligner.kind, aligner.triple_text) == ("aligner", "angle")
        assert (aligner.query_max_length, aligner.passage_max_length) == (256, 128)
        assert (encoder.query_max_length, encoder.passage_max_length) == (512, 512)
    assert not KiragConfig(**task.plain(small.kirag)).needs.triples


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"units": "word"}, "units='word' is not one of triple, sentence, passage"),
        ({"stop": "soon"}, "stop='soon' is not one of chain, text, empty"),
        ({"reader": "me"}, "reader='me' is not one of passages, cascade, nothing"),
        ({"ranking": "best"}, "ranking='best'"),
        ({"retriever_query": "all"}, "retriever_query='all'"),
        ({"normalization": "utf"}, "normalization='utf'"),
        ({"max_steps": 0}, "max_steps=0 must be at least 1"),
        ({"boost": -1}, "boost=-1 must not be negative"),
        ({"answer_tokens": -1}, "answer_tokens=-1 must not be negative"),
        ({"match_cutoff": 2.0}, "match_cutoff=2.0 must lie between 0 and 1"),
        ({"use_aligner": False, "use_constructor": False}, "use_aligner=false needs"),
        ({"use_aligner": False, "append_best": True}, "use_aligner=false needs"),
        ({"reader_format": "long"}, "reader_format='long'"),
        ({"reader": "cascade"}, "reader=cascade needs reader_format=thought, chain or brief"),
        (
            {"granularities": ("triple",), "units": "sentence"},
            "no granularity that the cascade can",
        ),
    ],
)
def test_kirag_config_invalid_settings_are_refused(settings, message):
    with pytest.raises(UserError, match=message):
        KiragConfig(**settings)


def test_construct_truncated_response_matches_prefix():
    _, result = run([Generated(" <Kirton End; loc", "length"), FINAL_STEP])
    assert chain_of(result) == [PLACE]
