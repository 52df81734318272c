"""KiRAG by hand."""

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
from tests.methods.by_hand import Hand, prompt

# The paper's Kirton End (its Figures 1 and 2), in our own words: the hamlet is near Boston, and
# another Kirton has a census of its own.
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
ALONG = f"{CENSUS}\nknowledge triples: {FIRST}."
WHOLE = f"{CENSUS}\nknowledge triples: {FIRST}. {SECOND}."
SCORES = {
    triple_key(OTHER): 0.7, triple_key(PLACE): 0.6, triple_key(KIND): 0.2,
    triple_key(COUNT): 0.5, triple_key(PORT): 0.1,
}  # fmt: skip
TRIPLES = {"hamlet": (KIND, PLACE), "decoy": (OTHER,), "city": (PORT, COUNT)}
FOUND = {CENSUS: (DECOY, HAMLET), ALONG: (HAMLET, CITY), None: (CITY, HAMLET)}
DONE = f" {FINAL}: 35,124."


def run(said=(), answers=("35,124",), found=None, shown=(), triples=None, scores=None, **settings):
    texts = {"constructor": list(said), "reader": list(answers)}
    hand = Hand(
        found or FOUND, TRIPLES if triples is None else triples, texts, scores or SCORES, shown
    )
    settings.setdefault("num_demonstrations", 0)
    return hand, hand.drive(kirag(Question("q", CENSUS, ()), KiragConfig(**settings)))


def chain_of(prediction: Prediction):
    return [unit for step in prediction.steps for unit in step.kept]


def test_kirton_end_step_by_step():
    said = [f" {FIRST}, {SECOND}.{DONE}", f", {SECOND}.{DONE}", f".{DONE}"]
    hand, found = run(said)
    steps = ["Retrieve", "Extract", "Rank", "constructor"]
    assert hand.kinds() == [*steps, *steps, "Retrieve", "Rank", "constructor", "reader"]
    # The decoy scores best, the constructor knows better; the chain then leads to the city.
    assert [r.query for r in hand.asked(Retrieve)] == [CENSUS, ALONG, WHOLE]
    assert [r.query for r in hand.asked(Rank)] == [CENSUS, ALONG, WHOLE]
    assert [[p.id for p in r.passages] for r in hand.asked(Extract)] == [
        ["decoy", "hamlet"], ["city"],
    ]  # fmt: skip
    assert chain_of(found) == [PLACE, COUNT]
    one, two, three = found.steps
    assert one.candidates == (OTHER, PLACE, KIND) and one.scores == (0.7, 0.6, 0.2)
    assert two.candidates == (PLACE, COUNT, KIND, PORT)  # of this step's passages alone
    assert (two.next_query, three.next_query) == (WHOLE, None)
    assert three.kept == () and three.thought == f"{FINAL} 35,124."
    thoughts = [prompt(r).rpartition("Thought:")[2] for r in hand.asked(Generate, "constructor")]
    assert thoughts == ["", f" {FIRST}", f" {FIRST}, {SECOND}"]
    assert all(r.continue_final for r in hand.asked(Generate, "constructor"))
    # D_q by the best candidate of each passage (section 3.3), and the reader's first three.
    assert found.passages == ("decoy", "hamlet", "city")
    assert found.attempts[0].evidence == tuple(
        f"{p.title}\n{p.text}" for p in (DECOY, HAMLET, CITY)
    )
    assert (found.answer, found.granularity, found.parse_errors) == ("35,124", "passage", {})
    assert found.triples[:2] == (PLACE, COUNT) and found.sentences[:2] == (
        ("hamlet", 1),
        ("city", 1),
    )


# -------------------------------------------------------------------------------------- the chain


def test_an_answer_ends_the_chain_only_as_its_next_step():
    said = [f" {FIRST}.{DONE}", f".{DONE}"]
    assert len(run(said)[1].steps) == 2
    _, found = run(said[:1], stop="text")  # the letter of the paper
    assert len(found.steps) == 1 and chain_of(found) == [PLACE]
    assert found.steps[0].next_query is None


def test_it_ends_after_l_steps():
    hand, found = run([f" {FIRST}", f", {SECOND}"], max_steps=2)
    assert len(found.steps) == 2 and found.steps[-1].next_query == WHOLE
    assert len(hand.asked(Retrieve)) == 2


def test_what_is_no_candidate_is_dropped_counted_and_ends_the_chain():
    _, found = run([" <Kirton End; near; Paris>"])
    assert chain_of(found) == [] and len(found.steps) == 1
    assert found.parse_errors == {"not_a_candidate": 1}
    assert found.answer == "35,124" and found.passages == ("decoy", "hamlet")


def test_the_closest_candidate_is_taken_for_it():
    near = " <Kirton End; located in; Boston>"
    assert chain_of(run([near])[1]) == []
    assert chain_of(run([near, DONE], match_cutoff=0.8)[1]) == [PLACE]


def test_a_lost_constructor_is_asked_again_with_the_next_triple_begun():
    said = ["It lies near Boston.", "Kirton End; location; Boston>", DONE]
    hand, found = run(said, prefilled_opening=True)
    assert chain_of(found) == [PLACE]
    assert prompt(hand.asked(Generate, "constructor")[1]).endswith("Thought: <")
    assert found.parse_errors == {"asked_again": 1, "no_unit": 1}


def test_the_aligners_best_takes_the_place_of_nothing():
    said = ["It lies near Boston.", f", {FIRST}", "Who knows?"]
    hand, found = run(said, append_best=True, max_steps=3)
    # The decoy, the constructor's own, then the best one that is new: COUNT is 0.5, KIND 0.2.
    assert chain_of(found) == [OTHER, PLACE, COUNT]
    assert found.steps[0].response == "It lies near Boston."
    # An answer after an invented triple is none; alone it ends the chain.
    said = [f" <Kirton End; in; Paris>.{DONE}", DONE]
    assert chain_of(run(said, append_best=True)[1]) == [OTHER]
    assert chain_of(run(said[:1])[1]) == []
    assert len(run([DONE], append_best=True)[1].steps) == 1


def test_without_the_constructor_the_best_new_unit_is_appended():
    hand, found = run(use_constructor=False, max_steps=9)
    assert not hand.asked(Generate, "constructor")
    first = f"{CENSUS}\nknowledge triples: <Kirton; population in 2001 census; 273>."
    assert hand.asked(Retrieve)[1].query == first
    # Each step's own passages are the city and the hamlet from the second on.
    assert chain_of(found) == [OTHER, PLACE, COUNT, KIND, PORT]
    assert len(found.steps) == 6 and found.steps[-1].next_query is None  # nothing new is left


def test_without_the_aligner_the_constructor_sees_every_triple():
    hand, found = run([f" {FIRST}", f", {SECOND}", DONE], use_aligner=False)
    assert not hand.asked(Rank)
    assert found.steps[0].candidates == (OTHER, KIND, PLACE)  # as the passages have them
    assert found.passages == ("hamlet", "city", "decoy")  # no scores: the chain comes first


def test_the_aligner_passes_on_n_candidates():
    _, found = run([DONE], num_candidates=2)
    assert found.steps[0].candidates == (OTHER, PLACE)
    assert len(run([DONE], num_candidates=0)[1].steps[0].candidates) == 3


def test_triples_that_say_the_same_count_for_all_their_passages():
    same = Triple(*PLACE[:3], "city", 0)
    _, found = run(
        [f" {FIRST}", DONE],
        found={None: (HAMLET, DECOY, CITY)},
        triples={"hamlet": (PLACE,), "decoy": (OTHER,), "city": (same,)},
        scores={triple_key(PLACE): 0.6, triple_key(OTHER): 0.3},
    )
    assert found.steps[0].candidates == (PLACE, OTHER)
    assert found.passages == ("hamlet", "city", "decoy")


def test_passages_without_candidates_come_last():
    _, found = run([DONE], found={None: (DECOY, CITY)}, triples={"city": (PORT,)})
    assert found.passages == ("city", "decoy")


def test_passages_without_triples_are_counted_once():
    _, found = run([f" {FIRST}", DONE], triples={"hamlet": (PLACE,), "city": (), "decoy": None})
    assert found.parse_errors == {"passage_not_extracted": 1, "passage_without_triples": 1}


def test_no_candidate_at_all_ends_the_chain():
    _, found = run([" <a; b; c>"], triples={}, prefilled_opening=True, append_best=True)
    assert len(found.steps) == 1 and found.passages == ("decoy", "hamlet")


# ----------------------------------------------------------------------- units other than triples


def test_sentences_and_passages_need_no_extraction():
    line = "Kirton End: It belongs to Boston in Lincolnshire."
    hand, found = run([f"{line}\n", f"{FINAL}: 35,124."], scores={line: 0.9}, units="sentence")
    assert not hand.asked(Extract)
    assert chain_of(found) == [Sentence("hamlet", 1)]
    assert found.steps[1].query == f"{CENSUS}\nknowledge sentences: {line}"
    assert found.passages[0] == "hamlet"
    whole = f"Kirton End. {HAMLET.text}"
    _, found = run([f"{whole}\n", f"{FINAL}: 35,124."], scores={whole: 0.9}, units="passage")
    assert chain_of(found) == ["hamlet"] and found.passages[0] == "hamlet"
    assert found.sentences == () and found.triples == ()


# ------------------------------------------------------------------------------ the released code


def test_the_retrievers_query_may_be_the_last_unit_alone():
    hand, _ = run(
        [f" {FIRST}", f", {SECOND}", DONE], retriever_query="last", found={None: (HAMLET, CITY)}
    )
    assert [r.query for r in hand.asked(Retrieve)] == [
        CENSUS, f"{CENSUS} {FIRST}", f"{CENSUS} {SECOND}",
    ]  # fmt: skip
    assert [r.query for r in hand.asked(Rank)] == [CENSUS, ALONG, WHOLE]


def test_units_of_earlier_passages_may_stay_candidates():
    said = [f" {FIRST}", DONE]
    _, found = run(said, accumulate=True)
    assert OTHER in found.steps[1].candidates
    assert OTHER not in run(said)[1].steps[1].candidates


def test_the_constructor_may_see_the_pool_of_all_steps():
    _, found = run([f" {FIRST}", DONE], pool_size=4, num_candidates=2)
    assert found.steps[0].candidates == (OTHER, PLACE)
    assert found.steps[1].candidates == (OTHER, PLACE, COUNT)  # the decoy is step one's alone
    assert len(run([f" {FIRST}", DONE], pool_size=2)[1].steps[1].candidates) == 2


def test_an_empty_chain_may_be_written_out():
    hand, _ = run([f" {FIRST}", DONE], list_when_empty=True)
    assert [r.query for r in hand.asked(Rank)] == [f"{CENSUS}\nknowledge triples: .", ALONG]
    assert hand.asked(Retrieve)[0].query == CENSUS


def test_the_chain_may_grow_by_whatever_was_written():
    code = {"as_written": True, "stop": "empty"}
    near = "<Kirton End; its location; Boston>"
    hand, found = run([f" {near}", "Nobody knows that. Yes.", f" {DONE}", " "], **code)
    assert [r.query for r in hand.asked(Rank)] == [
        CENSUS,
        f"{CENSUS}\nknowledge triples: {near}.",
        f"{CENSUS}\nknowledge triples: {near}. Nobody knows that.",
        f"{CENSUS}\nknowledge triples: {near}. Nobody knows that. {FINAL}: 35,124.",
    ]
    said = prompt(hand.asked(Generate, "constructor")[2])
    assert f"{near}, Nobody knows that." in said and "<Nobody" not in said
    # By its words the first is a unit of the pool; the others are none.
    assert chain_of(found) == [PLACE]
    assert [s.notes for s in found.steps] == [
        {}, {"written": "Nobody knows that."}, {"written": f"{FINAL}: 35,124."}, {},
    ]  # fmt: skip
    assert found.steps[-1].next_query is None
    assert len(run([f" {near}", DONE], as_written=True)[1].steps) == 2


def test_the_chosen_and_the_answering_unit_may_be_raised():
    said = [f" {FIRST}", f", {SECOND}", DONE]
    plain, raised = run(said)[1], run(said, boost=0.5)[1]
    assert plain.passages == ("decoy", "hamlet", "city")
    # 0.6 + 0.5 for the hamlet; 0.5 + 0.5, and as the answer + 0.5, for the city.
    assert raised.passages == ("city", "hamlet", "decoy")
    # Neither "yes" nor an answer that no unit has as a word is looked for.
    for answer in ("yes", "Rome", "27"):
        ends = f" {FINAL}: {answer}."
        assert run([f" {FIRST}", ends], boost=0.5)[1].passages[0] == "hamlet"
    said = [f" {FIRST}", f"{FINAL}: 273.", ""]
    written = run(said, boost=0.5, as_written=True, stop="empty")[1]
    assert written.passages[0] == "decoy"  # 0.7 + 0.5


def test_the_chains_passages_may_come_first():
    _, found = run([f" {FIRST}", f", {SECOND}", DONE], ranking="chain")
    assert found.passages == ("hamlet", "city", "decoy")


# --------------------------------------------------------------------------- prompts and reading


def test_similar_questions_with_a_chain_are_demonstrated_the_most_similar_last():
    def question(name, evidences):
        return Question(name, f"Question {name}?", ("x",), supporting=("p",), evidences=evidences)

    shown = [
        question("a", (("a", "b", "c"),)),
        question("b", None),
        question("c", (("d", "e", "f"),)),
    ]
    hand, _ = run([DONE], shown=shown, num_demonstrations=2)
    assert hand.requests[0] == Demonstrate(CENSUS, 8)
    said = prompt(hand.asked(Generate, "constructor")[0])
    assert 0 < said.index("Question c?") < said.index("Question a?") and "Question b?" not in said
    assert "Mira Solheim" not in said
    # Where none has a chain, the worked example stands in.
    hand, _ = run([DONE], shown=shown[1:2], num_demonstrations=2)
    assert "Mira Solheim" in prompt(hand.asked(Generate, "constructor")[0])


def test_the_chain_can_end_the_users_turn():
    hand, _ = run([f" {FIRST}", DONE], continues=False)
    request = hand.asked(Generate, "constructor")[1]
    assert request.messages[-1].role == "user" and not request.continue_final
    assert request.messages[-1].text.endswith(f"Thought: {FIRST}")


def test_the_reader_reads_k_passages_in_its_own_format_or_a_trained_ones():
    hand, found = run([DONE], ["The answer is: 273."], num_read=1)
    assert "Kirton End is a hamlet" not in prompt(hand.asked(Generate, "reader")[0])
    assert found.answer == "273"
    hand, found = run([DONE], ["a; b; c\nAnswer: 273"], reader_format="chain")
    assert found.answer == "273" and found.granularity == "passage"
    assert "head; relation; tail" in prompt(hand.asked(Generate, "reader")[0])
    _, found = run([DONE], ["\n"])
    assert (found.answer, found.granularity) == ("", "default")
    assert found.parse_errors == {"answer_empty": 1}


def test_it_may_end_with_retrieval():
    hand, found = run([DONE], [], reader="nothing")
    assert (found.answer, found.attempts) == ("", ()) and found.passages == ("decoy", "hamlet")


def test_cirags_cascade_may_be_the_reader():
    said = [f" {FIRST}", f", {SECOND}", DONE]
    refuses, tells = "Thought: no.\nAnswer: Unanswerable", "Thought: so.\nAnswer: 35,124"
    cascade = {"reader": "cascade", "reader_format": "thought"}
    _, found = run(said, [refuses, tells], **cascade)
    assert [a.granularity for a in found.attempts] == ["triple", "sentence"]
    assert found.attempts[0].evidence == (
        "('kirton end', 'location', 'boston')",
        "('boston', 'population in 2001 census', '35 124')",
    )
    assert (found.answer, found.granularity) == ("35,124", "sentence")
    # An empty chain leaves the passages ranked first.
    _, found = run([DONE], [tells], num_read=1, **cascade)
    assert [a.evidence for a in found.attempts] == [(), (), (f"{DECOY.title}\n{DECOY.text}",)]
    # Forced, where all refuse.
    _, found = run(said, [refuses, refuses, refuses, "Answer: 7"], **cascade)
    assert (found.answer, found.granularity) == ("7", "default")
    _, found = run(
        [f"Kirton End. {HAMLET.text}\n", f"{FINAL} x"], [tells], units="passage", **cascade
    )
    assert [a.granularity for a in found.attempts] == ["passage"]


# ------------------------------------------------------------------------------------ the switches


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
def test_a_switch_opens_what_it_names_and_nothing_else(settings, changes):
    whole = Needs(
        roles=("constructor", "reader"),
        abilities={"constructor": ("continue_final",)},
        rankers=("aligner",),
        units="triple",
        triples=True,
        demonstrations=True,
    )
    assert KiragConfig(**settings).needs == dataclasses.replace(whole, **changes)


def test_the_presets_are_what_paper_and_code_say():
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
    ("settings", "said"),
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
        ({"granularities": ("triple",), "units": "sentence"}, "leaves the cascade nothing"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings, said):
    with pytest.raises(UserError, match=said):
        KiragConfig(**settings)


def test_a_response_that_was_cut_off_is_matched_by_its_beginning():
    _, found = run([Generated(" <Kirton End; loc", "length"), DONE])
    assert chain_of(found) == [PLACE]
