"""Fixtures for engines with a tiny model."""

import pytest

from tests import tiny_decoder
from tests.llm.engine.engines import open_engine


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_decoder.folder(tmp_path_factory.mktemp("llama"), max_position_embeddings=512)


@pytest.fixture(scope="module")
def engine(folder):
    """An engine that does not reuse prefixes."""
    return open_engine(folder, prefix_tokens=0)


@pytest.fixture()
def caching_engine(folder):
    return open_engine(folder)
