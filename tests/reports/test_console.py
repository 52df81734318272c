import dataclasses
import unicodedata

from hypothesis import given, settings
from hypothesis import strategies as st

from cirag_jax.reports import console
from cirag_jax.types import Attempt, Passage, Prediction, Sentence, Step, Triple
from tests.reports import made_up

SHOWN = console.render(made_up.PREDICTION, made_up.PASSAGES)


def test_render_answer_evidence_and_steps():
    lines = SHOWN.splitlines()
    assert lines[0] == "Answer: Orlin County"
    assert lines[1].strip() == "from sentence evidence, after refusals from triple"
    place = lines.index("Evidence")
    assert lines[place + 1 : place + 4] == [
        "   1. <The Lantern Road; was directed by; Ilse Varga>",
        f"      in The Lantern Road, sentence 2: {made_up.sentence('p-lantern', 1)}",
        "   2. <Ilse Varga; grew up in; Tarnow Bay>",
    ]
    assert "Step 2: Where did Ilse Varga grow up?" in lines
    assert "  found   Ilse Varga; The Lantern Road" in lines
    assert "  thought The town is known now; its county is not." in lines
    assert "  next    Which county is Tarnow Bay in?" in lines
    assert lines[-1] == "Parse errors: passage_without_triples 2"
    assert all(len(line) <= console.WIDTH for line in lines)


def test_render_quotes_a_sentence_once():
    first = Triple("Tarnow Bay", "has", "a lighthouse", "p-bay", 1)
    step = Step("?", ("p-bay",), (made_up.SEAT, first), (0.2, 0.1), "", (made_up.SEAT, first))
    shown = console.render(Prediction("Orlin", "triple", steps=(step,)), made_up.PASSAGES)
    assert shown.count(made_up.sentence("p-bay", 1)) == 1
    assert "      in Tarnow Bay, sentence 2 (quoted above)" in shown.splitlines()


def test_render_without_kept_facts_lists_passages():
    """Passages are listed for NativeRAG, which keeps neither sentences nor triples."""
    step = Step("Who?", tuple(f"p{i}" for i in range(12)), (made_up.SEAT,), (0.5,))
    attempt = Attempt("passage", ("text",), "Nobody", "Nobody", True)
    prediction = Prediction(
        "Nobody", "passage", ("p-bay", "gone"), steps=(step,), attempts=(attempt,)
    )
    shown = console.render(prediction, made_up.PASSAGES).splitlines()
    assert shown[1].strip() == "from passage evidence"
    assert shown[3:6] == ["Evidence", "   1. Tarnow Bay", "   2. gone"]
    assert "  found   p0; p1; p2; p3; p4; p5; p6; p7; p8; p9; 2 more" in shown
    assert "  kept    none of 1 candidates" in shown
    sentences = dataclasses.replace(prediction, sentences=(("p-ferry", 1), ("gone", 0)))
    shown = console.render(sentences, made_up.PASSAGES).splitlines()
    assert shown[4:6] == [
        "   1. in Night ferries, sentence 2: They carry mail.",
        "   2. gone, sentence 1",
    ]


def test_render_step_with_queries_units_and_notes():
    kept = (Sentence("p-ferry", 1), "p-bay", Sentence("gone", 0))
    step = Step(
        "Who?", ("p-bay",), kept, (0.3, 0.2, 0.1), "", kept, None, "", ("And where?",),
        {"plan": ["first", {"n_eff": 1.5}]},
    )  # fmt: skip
    shown = console.render(Prediction("x", "passage", steps=(step,)), made_up.PASSAGES).splitlines()
    assert "  also    And where?" in shown and '  note    plan: ["first", {"n_eff": 1.5}]' in shown
    place = shown.index("Evidence")
    assert shown[place + 1 : place + 4] == [
        "   1. in Night ferries, sentence 2: They carry mail.",
        "   2. Tarnow Bay",
        "   3. gone, sentence 1",
    ]


def test_render_answer_without_evidence():
    alone = Attempt("default", (), "Nobody", "Nobody", True)
    shown = console.render(Prediction("Nobody", "default", attempts=(alone,)), {})
    assert "from the reader, without evidence" in shown and "refused" not in shown


def test_render_empty_prediction():
    shown = console.render(Prediction("", "default"), {})
    assert shown.splitlines()[0] == "Answer: (none)"
    assert (
        "        the evidence does not state an answer" in shown.splitlines()
        and "Evidence\n  (none)" in shown
    )


def test_render_empty_answer_from_passages():
    refused = Attempt("passage", ("Tarnow lies at the bay.",), "?", "", False)
    shown = console.render(Prediction("", "passage", attempts=(refused,)), {}).splitlines()
    assert shown[:2] == ["Answer: (none)", "        the evidence does not state an answer"]


def test_render_refused_question_with_an_answer_names_the_refusals():
    attempts = (Attempt("sentence", (), "?", "", False), Attempt("passage", (), "?", "", False))
    shown = console.render(Prediction("Nobody", "default", attempts=attempts), {})
    assert "        last output, after refusals from sentence and passage evidence" in shown


def test_render_spells_out_escape_sequences():
    assert console.plain("a\x1b[2Jb\x07\x9bc") == "a\\x1b[2Jb\\x07\\x9bc"
    assert console.plain("x\u202egnp\u2066\ud800\ufeff") == "x\\u202egnp\\u2066\\ud800\\ufeff"
    assert console.plain("one\r\ntwo\u2028three\tfour") == "one two three four"
    assert console.plain("می‌خواهم 👩‍🚒 é") == "می‌خواهم 👩‍🚒 é"


@settings(max_examples=100, deadline=None)
@given(st.text(st.characters(), max_size=150))
def test_render_has_no_control_characters(text):
    triple = Triple(text, text, text, "p", 0)
    kept, notes = (triple, text, Sentence("p", 0)), {text: [text]}
    step = Step(text, ("p", text), (triple,), (0.1,), text, kept, text, text, (text,), notes)
    attempt = Attempt("triple", (text,), text, text, True)
    prediction = Prediction(
        text, "triple", ("p",), (("p", 0),), (triple,), (step,), (attempt,), {text: 1}
    )
    shown = console.render(prediction, {"p": Passage("p", text, text, (text,))})
    for char in shown.replace("\n", ""):
        is_joiner = char in "\u200c\u200d"
        assert is_joiner or not unicodedata.category(char).startswith("C"), hex(ord(char))
    assert not set(shown) & set("\u2028\u2029\x85")
    shown.encode("utf-8")
    assert max(map(len, shown.split("\n"))) <= console.WIDTH
    # Every line starts with a label or an indent, so wrapped text cannot imitate one.
    labels = ("Answer: ", "Evidence", "Step 1: ", "Parse errors: ", " ", "")
    assert all(line.startswith(labels[:-1]) or not line for line in shown.split("\n"))
