"""A browser that all tests of the pages share."""

import pytest

from tests.reports.browser import headless


@pytest.fixture(scope="session")
def page(tmp_path_factory):
    with headless(tmp_path_factory.mktemp("chromium")) as tab:
        yield tab
