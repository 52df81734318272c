"""A question about where Ada Moen was born, with passages, triples and responses, for CIRAG."""

from cirag_jax.methods.cirag.method import cirag
from cirag_jax.methods.cirag.settings import CiragConfig
from cirag_jax.types import Passage, Question, Triple
from tests.methods.fakes import FakeHandlers, decision

QUESTION = "In which province was Ada Moen born?"
NEXT = "In which province is Lund?"

ADA = Passage("a", "Ada Moen", "Ada Moen was born in Lund. She paints.", None)
LUND = Passage("b", "Lund", "Lund is in Skane. It has a cathedral.", None)
OTHER = Passage("c", "Kiruna", "Kiruna has a mine.", ("Kiruna has a mine.",))

BORN = Triple("Ada Moen", "born in", "Lund", "a", 0)
PAINTS = Triple("Ada Moen", "is", "painter", "a", 1)
PLACE = Triple("Lund", "in", "Skåne", "b", 0)
CHURCH = Triple("Lund", "has", "cathedral", "b", 1)
MINE = Triple("Kiruna", "has", "mine", "c", 0)

FACT_BORN = '{"fact": [["ada moen", "born in", "lund"]]}'
FACT_PLACE = '{"fact": [["lund", "in", "sk ne"]]}'
NO_FACT = '{"fact": []}'
CONTINUE = decision("Lund is her town.", FACT_BORN, NEXT)
FINAL = decision("Lund is in Skane.", FACT_PLACE, "<no question>")
FINAL_BORN = decision("Enough.", FACT_BORN, "<no question>")
REFUSAL = "Thought: nothing says so.\nAnswer: Unanswerable"
ANSWER = "Thought: it follows.\nAnswer: Skane"

SCORES = {
    ("ada moen", "born in", "lund"): 0.9,
    ("lund", "in", "sk ne"): 0.8,
    ("ada moen", "is", "painter"): 0.3,
    ("lund", "has", "cathedral"): 0.2,
    ("kiruna", "has", "mine"): 0.1,
}


def fake(integrator=(), reader=(), **fields):
    """Returns handlers: the question retrieves Ada and Kiruna, other queries Lund and Ada."""
    defaults = {
        "passages": {QUESTION: (ADA, OTHER), None: (LUND, ADA)},
        "triples": {"a": (BORN, PAINTS), "b": (PLACE, CHURCH), "c": (MINE,)},
        "texts": {"integrator": list(integrator), "reader": list(reader)},
        "scores": SCORES,
    }
    return FakeHandlers(**{**defaults, **fields})


def run(fakes, **settings):
    return fakes.drive(cirag(Question("q", QUESTION, ()), CiragConfig(**settings)))
