"""BERTScore, compared with its formula over the hidden states of transformers."""

import pytest

from cirag_jax.errors import UserError
from cirag_jax.evaluation import metrics
from cirag_jax.evaluation.scoring import AnsweredQuestion, Scoring
from cirag_jax.models.io.workdir import open_encoder
from cirag_jax.retrieval.token_vectors import token_vectors
from cirag_jax.types import Prediction, Question
from tests import tiny


def test_bertscore_equals_transformers(tmp_path, one_device):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    folder = tiny.model_folder(tmp_path / "encoder")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder).eval()

    def vectors(text):
        inputs = tokenizer(text, return_tensors="pt")
        with torch.no_grad():
            hidden = model(**inputs).last_hidden_state[0, 1:-1]  # without [CLS] and [SEP]
        return torch.nn.functional.normalize(hidden, dim=-1)

    def f1(answer, gold):
        cosine = vectors(answer) @ vectors(gold).T
        precision, recall = cosine.max(1).values.mean(), cosine.max(0).values.mean()
        return float(2 * precision * recall / (precision + recall))

    encoder, _ = open_encoder(str(folder))
    scoring = Scoring(token_vectors=lambda texts: token_vectors(encoder, texts))
    golds, answers = ("saint potter", "the film of a potter"), ["the potter", "saint potter", ""]
    answered = [
        AnsweredQuestion(Question("q", "Who?", golds), Prediction(answer, "passage"))
        for answer in answers
    ]
    answered.append(AnsweredQuestion(Question("r", "Who?", ()), None))
    ratio = metrics.measure(answered, scoring, ["bertscore"])["bertscore"]
    best = max(f1(answers[0], gold) for gold in golds)
    assert ratio.top_Q.tolist() == pytest.approx([best, 1, 0, 0], abs=1e-5)
    assert ratio.bottom_Q.tolist() == [1, 1, 1, 0] and best < 0.999
    assert metrics.title("bertscore") == "BERTScore"


def test_bertscore_without_an_encoder_is_refused():
    with pytest.raises(UserError, match="bertscore, which needs an encoder: .*config.bertscore="):
        metrics.check(["answers", "bertscore"])
    metrics.check(["answers", "bertscore"], "FOLDER")
