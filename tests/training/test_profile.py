"""torch's profiler on request: which steps it sees, what it leaves in the run's folder, and what is refused."""

import json

import pytest

from tests.training.tiny import stop_at, train
from unmask.errors import UserError
from unmask.training.trainer import Trainer

OPTIONS = ["log.profile.start=1", "log.profile.steps=2", "training.steps=4"]


def trace(path):
    return json.loads((path / "profile" / "trace-rank-0.json").read_text())["traceEvents"]


def test_a_trace_of_the_steps_that_were_asked_for(tmp_path, monkeypatch):
    messages = []
    monkeypatch.setattr(Trainer, "message", lambda self, text: messages.append(text))
    train(tmp_path, *OPTIONS)
    names = [event["name"] for event in trace(tmp_path)]
    assert sum("Optimizer.step" in name for name in names) == 2
    assert any("unmask::attend" in name for name in names) and "[memory]" not in names
    assert messages == [f"profile of steps 2 to 3: {tmp_path / 'profile'}"]
    assert [entry.name for entry in (tmp_path / "profile").iterdir()] == ["trace-rank-0.json"]


def test_memory_of_a_cpu_is_the_profilers(tmp_path):
    train(tmp_path, *OPTIONS, "log.profile.memory=true")
    assert "[memory]" in [event["name"] for event in trace(tmp_path)]
    table = (tmp_path / "profile" / "memory-rank-0.txt").read_text()
    assert "Self CPU Mem" in table and "aten::mm" in table


def test_a_run_that_ends_early_leaves_what_was_seen(tmp_path):
    train(tmp_path, *OPTIONS, callbacks=[stop_at(2)])
    assert sum("Optimizer.step" in event["name"] for event in trace(tmp_path)) == 1


@pytest.mark.parametrize(
    "options, sentence",
    [
        (["log.profile.steps=4", "log.profile.start=1"], "log.profile covers steps 2 to 5, and the run has 4"),
        (["log.profile.memory=true"], "nothing is profiled with log.profile.steps=0"),
    ],
)
def test_what_would_watch_nothing_is_refused(tmp_path, options, sentence):
    with pytest.raises(UserError) as error:
        train(tmp_path / "run", *options)
    assert sentence in str(error.value)
