"""CIRAG on the paper's case study (Table 9)."""

from cirag_jax.methods.cirag.method import cirag
from cirag_jax.methods.cirag.settings import CiragConfig
from cirag_jax.runtime.requests import Extract, Generate, Retrieve
from cirag_jax.types import Passage, Question, Triple
from tests.methods.fakes import FakeHandlers, decision


def test_cirag_case_study_matches_the_paper():
    """Triples, queries and the answer are the paper's; passages and thoughts are invented."""
    question = (
        "Which film has the director who is older, God's Gift To Women or Aldri Annet Enn Bråk?"
    )
    birth_years = "What are the birth years of Michael Curtiz and Edith Carlmar?"
    gift = Passage(
        "g",
        "God's Gift to Women",
        "God's Gift to Women is a romantic musical comedy film. Michael Curtiz directed it.",
    )
    noise = Passage("n", "Aldri annet enn bråk", "Edith Carlmar directed Aldri annet enn bråk.")
    milne = Passage("m", "Dan Milne", "Dan Milne acts and directs in Britain.")
    carlmar = Passage(
        "e",
        "Edith Carlmar",
        "Edith Carlmar was born on 15 November 1911. She started Carlmar Film A/S. "
        "She is also known as Edith Mary Johanne Mathiesen.",
    )
    curtiz = Passage("k", "Michael Curtiz", "Michael Curtiz was born on December 24, 1886.")
    film = Triple("God's Gift to Women", "directed by", "Michael Curtiz", "g", 1)
    kind = Triple("God's Gift to Women", "is a", "romantic musical comedy film", "g", 0)
    trouble = Triple("Aldri annet enn bråk", "directed by", "Edith Carlmar", "n", 0)
    started = Triple("Edith Carlmar", "started", "Carlmar Film A/S", "e", 1)
    known = Triple("Edith Carlmar", "is also known as", "Edith Mary Johanne Mathiesen", "e", 2)
    edith = Triple("Edith Carlmar", "born on", "15 November 1911", "e", 0)
    michael = Triple("Michael Curtiz", "born on", "December 24, 1886", "k", 0)
    directed = (
        '["god s gift to women", "directed by", "michael curtiz"]',
        '["aldri annet enn br k", "directed by", "edith carlmar"]',
    )
    born = (
        '["edith carlmar", "born on", "15 november 1911"]',
        '["michael curtiz", "born on", "december 24 1886"]',
    )
    first = decision("Both directors are named; when they were born is not.",
                     f'{{"fact": [{", ".join(directed)}]}}', birth_years)  # fmt: skip
    second = decision("Both dates are here, and 1886 comes before 1911.",
                      f'{{"fact": [{", ".join(born)}]}}', "<no question>")  # fmt: skip
    reading = (
        "Thought: Curtiz was born 25 years before Carlmar, so his film it is.\n"
        "Answer: God's Gift To Women"
    )
    fakes = FakeHandlers(
        passages={question: (gift, noise, milne), birth_years: (carlmar, curtiz)},
        triples={
            "g": (kind, film),
            "n": (trouble,),
            "m": (),
            "e": (started, known, edith),
            "k": (michael,),
        },  # fmt: skip
        texts={"integrator": [first, second], "reader": [reading]},
        scores={
            ("god s gift to women", "directed by", "michael curtiz"): 0.9,
            ("aldri annet enn br k", "directed by", "edith carlmar"): 0.8,
            ("god s gift to women", "is a", "romantic musical comedy film"): 0.7,
            ("edith carlmar", "started", "carlmar film a s"): 0.6,
            ("edith carlmar", "is also known as", "edith mary johanne mathiesen"): 0.5,
            ("edith carlmar", "born on", "15 november 1911"): 0.4,
            ("michael curtiz", "born on", "december 24 1886"): 0.3,
        },
    )
    result = fakes.drive(cirag(Question("q", question, ()), CiragConfig()))

    assert fakes.kinds() == [*("Retrieve", "Extract", "Rank", "integrator") * 2, "reader"]
    assert [r.query for r in fakes.received(Retrieve)] == [question, birth_years]
    assert [p.title for p in fakes.received(Extract)[0].passages] == [
        "God's Gift to Women", "Aldri annet enn bråk", "Dan Milne",
    ]  # fmt: skip
    one, two = result.steps
    assert one.candidates == (film, trouble, kind) and one.kept == (film, trouble)
    assert one.next_query == birth_years == two.query
    assert two.candidates == (started, known, edith, michael) and two.kept == (edith, michael)
    assert two.next_query is None
    # The integrator's prompt has the candidates in the paper's normal form and order.
    shown = [r.messages[-1].observation for r in fakes.received(Generate, "integrator")]
    kind_shown = '["god s gift to women", "is a", "romantic musical comedy film"]'
    assert ", ".join([*directed, kind_shown]) in shown[0]
    assert (
        '["edith carlmar", "started", "carlmar film a s"], '
        '["edith carlmar", "is also known as", "edith mary johanne mathiesen"], ' + ", ".join(born)
    ) in shown[1]
    # The pool of triples, and the granularity that answers.
    assert result.attempts[0].evidence == (
        "('god s gift to women', 'directed by', 'michael curtiz')",
        "('aldri annet enn br k', 'directed by', 'edith carlmar')",
        "('edith carlmar', 'born on', '15 november 1911')",
        "('michael curtiz', 'born on', 'december 24 1886')",
    )
    assert len(result.attempts) == 1 and result.granularity == "triple"
    assert result.answer == "God's Gift To Women"
    assert result.triples == (film, trouble, edith, michael, kind, started, known)
    assert result.passages == ("g", "n", "e", "k", "m")
    assert result.parse_errors == {"passage_without_triples": 1}
