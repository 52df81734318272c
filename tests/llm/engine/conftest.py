"""An engine over a tiny model."""

import pytest

from tests import tiny_decoder
from tests.llm.engine.asking import make


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_decoder.folder(tmp_path_factory.mktemp("llama"), max_position_embeddings=512)


@pytest.fixture(scope="module")
def engine(folder):
    """Without reuse: every prompt is computed."""
    return make(folder, prefix_tokens=0)


@pytest.fixture()
def reusing(folder):
    return make(folder)
