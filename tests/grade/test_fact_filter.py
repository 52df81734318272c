"""Sentences selected by a classifier, compared with the pipeline of transformers."""

import pytest
import transformers

from cirag_jax.errors import UserError
from cirag_jax.grade.claims import ClaimSettings
from cirag_jax.grade.fact_filter import find_facts
from tests.grade.classifier import write_classifier
from tests.models.test_cross_encoder import _folder

SENTENCES = ["a b.", "a b!", "who was born", "!", "a" * 511 + "!", "a" * 511 + " !", "a b."]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(write_classifier(tmp_path_factory.mktemp("facts")))


def test_find_facts_equals_pipeline_of_transformers(folder):
    """Only 512 characters of a sentence are read, as in the released code."""
    classify = transformers.pipeline("text-classification", folder, device=-1)
    labels = [row["label"] for row in classify([sentence[:512] for sentence in SENTENCES])]
    wanted = [index for index, label in enumerate(labels) if label == "LABEL_1"]
    assert find_facts(SENTENCES, ClaimSettings(classifier=folder)) == wanted == [0, 2, 5, 6]
    opinions = find_facts(SENTENCES, ClaimSettings(classifier=folder, label="LABEL_0"))
    assert opinions == [1, 3, 4]


def test_find_facts_label_has_a_name(tmp_path):
    folder = str(write_classifier(tmp_path, ("opinion", "fact")))
    assert find_facts(SENTENCES, ClaimSettings(classifier=folder, label="fact")) == [0, 2, 5, 6]
    with pytest.raises(UserError, match=r"has 2 labels \(opinion, fact\), but not 'LABEL_1'"):
        find_facts(SENTENCES, ClaimSettings(classifier=folder))


def test_find_facts_reranker_is_refused(tmp_path):
    folder = str(_folder(tmp_path, "xlm-roberta"))
    with pytest.raises(UserError, match="has one label, so label 'LABEL_1' cannot be chosen"):
        find_facts(SENTENCES, ClaimSettings(classifier=folder))
