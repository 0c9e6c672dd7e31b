"""One group of worker processes for each number of ranks, shared by all tests of a session."""

import pytest

from tests.parallel.trainer_cases import train
from tests.parallel.workers import Workers


@pytest.fixture(scope="session")
def workers():
    made = {}

    def of(size):
        if size not in made or not made[size].up:
            made[size] = Workers(size)
        return made[size]

    yield of
    for group in made.values():
        group.close()


@pytest.fixture(scope="session")
def alone(tmp_path_factory):
    """The run of a case on one process; made once for all cases that share it."""
    made = {}

    def of(case):
        if case.alone() not in made:
            made[case.alone()] = train(case.alone(), str(tmp_path_factory.mktemp("alone")))
        return made[case.alone()]

    return of
