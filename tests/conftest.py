"""Fixtures that all tests share."""

from pathlib import Path

import pytest

from wgattn.errors import ModelNotFound
from wgattn.llm.gguf import find_model


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The demo model's file. A test that needs it fails without it: a skip would pass for a success."""
    try:
        return find_model("smollm2")
    except ModelNotFound as error:
        pytest.fail(str(error))
