"""The page of a step's rollouts: what it marks, and hostile texts."""

from cirag_jax.llm.types import Generate, Generated, Message, Token
from cirag_jax.reports import rollouts
from cirag_jax.runtime.records import Generation, RequestKey
from cirag_jax.types import Passage, Prediction, Question, Step

HOSTILE = '<script>alert("x")</script>'


def shown(tokens, answer="Oslo"):
    request = Generate((Message("user", f"Read this: {HOSTILE}"),), "reader")
    response = Generated("text", "stop", tokens=tokens)
    turn = Generation(RequestKey("q#0", 0), request, response)
    question = Question("q", f"Where? {HOSTILE}", ("Oslo",))
    prediction = Prediction(answer, "passage", steps=(Step(HOSTILE, ("p", "unknown")),))
    return rollouts.ShownRollout(question, prediction, {"em": 1.0, HOSTILE: 0.25}, [turn])


def test_page_marks_sampled_tokens_by_probability(tmp_path):
    probabilities = zip("abcd", (-3, -1, -0.2, 0), strict=True)
    tokens = [Token(text, i, p) for i, (text, p) in enumerate(probabilities)]
    failed = shown([])._replace(prediction=None, error="too long")
    passages = {"p": Passage("p", "A title", "text")}
    rollouts.write_page(tmp_path / "r.html", "Step 1", [shown(tokens), failed], passages)
    page = (tmp_path / "r.html").read_text("utf-8")
    for text, darkness in zip("abcd", (3, 2, 1, 0), strict=True):
        assert f'<span class="p{darkness}">{text}</span>' in page
    assert page.count('<div class="rollout">') == 2 and page.count("<section>") == 1
    assert "A title · unknown" in page and "failed: too long" in page


def test_page_escapes_hostile_texts(tmp_path):
    page = tmp_path / "r.html"
    rollouts.write_page(page, HOSTILE, [shown([Token(HOSTILE, 1, -1.0)], HOSTILE)], {})
    html = page.read_text("utf-8")
    assert "<script" not in html and html.count("&lt;script&gt;") >= 6
