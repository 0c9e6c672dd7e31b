"""Data made ahead are the data that would have been made at the time."""

from __future__ import annotations

import threading

import pytest

from tests.training.tiny import config, train, weights
from unmask import Trainer
from unmask.errors import UserError
from unmask.training.source import Loader, Source


def test_what_was_made_ahead_is_taken_once_and_only_for_its_key() -> None:
    made: list[tuple[int, bool]] = []

    def make(key: int) -> int:
        made.append((key, threading.current_thread() is threading.main_thread()))
        return key * key

    loader = Loader(make)
    assert loader.get(1) == 1
    loader.ahead(2)
    assert loader.get(2) == 4
    loader.ahead(3)
    assert loader.get(5) == 25 and loader.get(3) == 9
    loader.close()
    assert made[:2] == [(1, True), (2, False)] and {(5, True), (3, True)} < set(made)
    assert loader.waited > 0


def test_a_mistake_found_ahead_is_told_in_its_turn() -> None:
    def make(key: int) -> int:
        raise UserError(f"no {key}")

    loader = Loader(make)
    loader.ahead(1)
    with pytest.raises(UserError, match="no 1"):
        loader.get(1)
    loader.close()


@pytest.mark.parametrize("ahead", [True, False])
def test_a_source_that_gives_no_batch_is_told_so(tmp_path, ahead) -> None:
    class Mine(Source):
        def batch(self, step, part=(0, 1)):
            return []

    Mine.ahead = ahead
    with pytest.raises(UserError, match="Mine.batch returned a list: it has to return a Batch"):
        Trainer(config=config(tmp_path, "training.steps=1")).train(Mine())


@pytest.mark.parametrize("objective", ["block_diffusion", "mdlm"])
def test_a_run_is_the_same_without(tmp_path, objective, monkeypatch) -> None:
    ahead = train(tmp_path / "ahead", objective={"name": objective})
    monkeypatch.setattr(Loader, "ahead", lambda self, key: None)
    plain = train(tmp_path / "plain", objective={"name": objective})
    for name, weight in weights(ahead).items():
        assert weight.equal(weights(plain)[name])
