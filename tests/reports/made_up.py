"""An invented run: a complete question, and journals with many similar questions."""

import dataclasses
import json
import pathlib
import re

from cirag_jax.llm.types import Usage
from cirag_jax.runtime import codec
from cirag_jax.runtime.records import RequestKey
from cirag_jax.runtime.requests import Generate, Generated, Retrieve, Retrieved
from cirag_jax.runtime.store import Journal
from cirag_jax.types import Attempt, Passage, Prediction, Question, Step, Triple

PASSAGES = {
    p.id: p
    for p in (
        Passage(
            "p-lantern",
            "The Lantern Road",
            "",
            (
                "The Lantern Road is a 1931 film about a night ferry.",
                "It was directed by Ilse Varga, her second work with sound.",
                "The negative burned in 1944; two reels survive.",
            ),
        ),
        Passage(
            "p-varga",
            "Ilse Varga",
            "",
            (
                "Ilse Varga (3 May 1898 - 11 June 1970) made nine films.",
                "She grew up in Tarnow Bay, where her father kept the lighthouse.",
                "Her papers are at the town library.",
            ),
        ),
        Passage(
            "p-bay",
            "Tarnow Bay",
            "",
            (
                "Tarnow Bay is a fishing town of 4,000 people.",
                "It is the seat of Orlin County and has a lighthouse of 1874.",
                "A ferry leaves every morning.",
            ),
        ),
        Passage("p-ferry", "Night ferries", "Night ferries run in winter. They carry mail."),
        Passage("p-other", "The Lantern Road (song)", "A song of 1962. It has four verses."),
    )
}


def sentence(passage_id, index):
    """Returns a sentence of one of `PASSAGES`."""
    return (PASSAGES[passage_id].sentences or ())[index]


DIRECTED = Triple("The Lantern Road", "was directed by", "Ilse Varga", "p-lantern", 1)
GREW_UP = Triple("Ilse Varga", "grew up in", "Tarnow Bay", "p-varga", 1)
SEAT = Triple("Tarnow Bay", "is the seat of", "Orlin County", "p-bay", 1)
ABOUT = Triple("The Lantern Road", "is about", "a night ferry", "p-lantern", 0)
MADE = Triple("Ilse Varga", "made", "nine films", "p-varga", 0)
POPULATION = Triple("Tarnow Bay", "has population", "4,000", "p-bay", 0)

QUESTION = Question(
    "made-up-1",
    "In which county did the director of The Lantern Road grow up?",
    ("Orlin County", "Orlin"),
    type="compositional",
    hops=3,
    supporting=("p-lantern", "p-varga", "p-bay", "p-lost"),
    supporting_sentences=(("p-lantern", 1), ("p-varga", 1), ("p-bay", 1)),
    evidences=(
        ("The Lantern Road", "director", "Ilse Varga"),
        ("Ilse Varga", "place of residence", "Tarnow Bay"),
        ("Orlin County", "capital", "Tarnow Bay"),
    ),
)
PREDICTION = Prediction(
    "Orlin County",
    "sentence",
    ("p-lantern", "p-varga", "p-bay", "p-ferry", "p-other"),
    (("p-lantern", 1), ("p-varga", 1), ("p-bay", 1)),
    (DIRECTED, GREW_UP, SEAT, ABOUT, MADE, POPULATION),
    (
        Step(
            QUESTION.question,
            ("p-lantern", "p-other", "p-ferry"),
            (DIRECTED, ABOUT),
            (0.8124, 0.4417),
            "One fact names the director. Where she grew up is still missing.",
            (DIRECTED,),
            "Where did Ilse Varga grow up?",
            '[[## thought ##]]\nOne fact names ...\n[[## fact_after_filter ##]]\n{"fact": []}',
        ),
        Step(
            "Where did Ilse Varga grow up?",
            ("p-varga", "p-lantern"),
            (GREW_UP, MADE, DIRECTED),
            (0.7732, 0.3301, 0.2954),
            "The town is known now; its county is not.",
            (GREW_UP,),
            "Which county is Tarnow Bay in?",
        ),
        Step(
            "Which county is Tarnow Bay in?",
            ("p-bay", "p-varga"),
            (SEAT, POPULATION, GREW_UP),
            (0.6908, 0.5127, 0.4405),
            "All hops are covered: film, director, town, county.",
            (SEAT,),
            None,
        ),
    ),
    (
        Attempt(
            "triple",
            ("('the lantern road', 'was directed by', 'ilse varga')",),
            "Thought: a seat need not be inside. Answer: Unanswerable",
            "Unanswerable",
            False,
        ),
        Attempt(
            "sentence",
            ("Tarnow Bay: It is the seat of Orlin County and has a lighthouse of 1874.",),
            "Thought: the seat lies in its county. Answer: Orlin County",
            "Orlin County",
            True,
        ),
    ),
    {"passage_without_triples": 2},
)


def write_journal(path, pairs, passages=PASSAGES, failed=(), **settings):
    """Writes a journal with ``pairs`` of question and prediction (None if unfinished).

    ``failed`` are questions that end with an error. ``settings`` are the settings of the run.
    """
    with Journal(path, {"method": "cirag", **settings}) as book:
        for place, (question, prediction) in enumerate(pairs):
            book.open_program(question.id, place, json.loads(_json(question)))
            result = Retrieved(tuple(passages.values()), tuple(0.5 for _ in passages))
            book.record(RequestKey(question.id, 0), Retrieve(question.question, 10), result)
            requests = Generate((), "reader")
            said = Generated("...", "stop", Usage(900, 640, 31))
            book.record(RequestKey(question.id, 1), requests, said)
            if prediction is not None:
                outcome = codec.encode(prediction)
                book.close_program(question.id, outcome, None, 2.5)
            elif question in failed:
                book.close_program(question.id, None, "the server closed the connection", 0.5)
    return pathlib.Path(path)


def _json(question):
    return codec.dump(dataclasses.asdict(question))


def many(count):
    """Returns ``count`` questions with predictions; every third answer is wrong."""
    pairs = []
    for index in range(count):
        wrong = index % 3 == 2
        question = dataclasses.replace(
            QUESTION, id=f"made-up-{index + 1}", question=f"{QUESTION.question} ({index + 1})"
        )
        prediction = PREDICTION
        if wrong:
            prediction = dataclasses.replace(
                PREDICTION, answer="Ferry County", granularity="default"
            )
        pairs.append((question, prediction))
    return pairs


def hostile(text):
    """Returns a question whose displayed fields are all ``text``."""
    triple = Triple(text, text, text, f"passage {text}", 1)
    step = Step(text, (triple.passage_id,), (triple,), (0.5,), text, (triple,), text, text)
    attempt = Attempt("triple", (text,), text, text, True)
    prediction = Prediction(
        text, "triple", (triple.passage_id,), ((triple.passage_id, 1),), (triple,), (step, step),
        (attempt,), {text: 1},
    )  # fmt: skip
    passage = Passage(triple.passage_id, text, text, (text, f"2nd {text}"))
    question = dataclasses.replace(
        QUESTION,
        id=text,
        question=text,
        answers=(text,),
        type=text,
        supporting=(passage.id, f"lost {text}"),
        evidences=((text, text, text),),
    )
    return question, prediction, passage


OWN = "document.title='owned';window.owned=1"
# Hostile texts, and how the page must show them.
HOSTILE = {
    f"<script>{OWN}</script>": None,
    f"</script><script>{OWN}</script>": None,
    f"</title></textarea></style></noscript><script>{OWN}</script>": None,
    f'<img src=x onerror="{OWN}">': None,
    f'"><svg onload={OWN}>': None,
    f"' onmouseover='{OWN}' autofocus onfocus='{OWN}": None,
    "<!--<script>": None,
    f"]}}]}};{OWN};//": None,
    f"javascript:{OWN}": None,
    f'<a href="javascript:{OWN}">x</a>': None,
    f'<iframe srcdoc="<script>parent.{OWN}</script>">': None,
    '<meta http-equiv="refresh" content="0;url=https://example.org">': None,
    '<link rel=stylesheet href="https://example.org/x.css">': None,
    "&lt;b&gt; &amp;": None,
    "{{script}} {{data}}": None,
    "__proto__": None,
    f"a\u2028{OWN}\u2029b": f"a\\u2028{OWN}\\u2029b",
    "half \ud800 pair \udc00": "half \\ud800 pair \\udc00",
    "nul \x00 escape \x1b[31m": "nul \\u0000 escape \\u001b[31m",
    "reversed \u202egnp.exe": "reversed \\u202egnp.exe",
}


def blocks(path):
    """Returns the data blocks of a page, parsed as a browser would parse them."""
    result = re.findall(
        r'<script type="application/json" id="(\w+)">(.*?)</script>', path.read_text("utf-8"), re.S
    )
    return {name: json.loads(text) for name, text in result}
