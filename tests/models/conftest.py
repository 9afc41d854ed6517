"""The tiny model's parameters."""

import pytest

from tests.models.tiny import random_params


@pytest.fixture(scope="session")
def params():
    return random_params()
