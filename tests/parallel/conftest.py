"""One group of worker processes for each number of ranks, shared by all tests of a session."""

import pytest

from tests.parallel.workers import Workers


@pytest.fixture(scope="session")
def workers():
    made = {}

    def of(size):
        if size not in made:
            made[size] = Workers(size)
        return made[size]

    yield of
    for group in made.values():
        group.close()
