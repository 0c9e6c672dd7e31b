"""Checkpoints in the background: of the step they belong to, whole or not at all, and their failures are told."""

import os
import resource
import signal
import threading
import time

import pytest
import torch

from tests.parallel.processes import Launched, write_config
from tests.training.tiny import losses, stop_at, train, weights
from unmask import Config, Trainer
from unmask.errors import UserError
from unmask.runs import folder as layout
from unmask.runs.save import Checkpoints

OPTIONS = ["checkpoint.asynchronous=true", "checkpoint.every=2"]


@pytest.fixture
def gate(monkeypatch):
    """Writers wait for this event once they have begun; `gate.begun` is set when one has."""
    gate = threading.Event()
    gate.begun = threading.Event()
    write = Checkpoints._write_tensors

    def slow(self, folder, tensors):
        gate.begun.set()
        assert gate.wait(30)
        write(self, folder, tensors)

    monkeypatch.setattr(Checkpoints, "_write_tensors", slow)
    return gate


def test_it_holds_the_weights_of_its_step_though_training_went_on(tmp_path, gate):
    seen = {}

    def after(trainer, record):
        seen[record["step"]] = weights(trainer)
        if record["step"] == 3:  # step 2 is still being written
            assert layout.saved_steps(tmp_path) == []
            assert [entry.name for entry in tmp_path.glob(".step-*")] == [".step-00000002.tmp"]
            gate.set()

    train(tmp_path, *OPTIONS, callbacks=[after])
    assert layout.saved_steps(tmp_path) == [2, 4]
    again = train(tmp_path / "again", "training.steps=4", callbacks=[stop_at(2)])
    for name, weight in weights(again).items():
        assert torch.equal(seen[2][name], weight)
    rest = train(tmp_path, *OPTIONS, "checkpoint.step=2", "training.steps=4")
    assert all(torch.equal(weight, seen[4][name]) for name, weight in weights(rest).items())


def test_a_signal_waits_for_it(tmp_path, gate):
    def end(trainer, record):
        if record["step"] == 3:
            os.kill(os.getpid(), signal.SIGTERM)
            threading.Timer(0.3, gate.set).start()

    trainer = train(tmp_path, *OPTIONS, callbacks=[end], data=None)
    assert trainer.summary.interrupted == signal.SIGTERM
    assert layout.saved_steps(tmp_path) == [2, 3]
    for step in (2, 3):
        layout.verify(layout.step_folder(tmp_path, step))


def test_an_error_elsewhere_waits_for_it(tmp_path, gate):
    def fail(trainer, record):
        if record["step"] == 3:
            threading.Timer(0.3, gate.set).start()
            raise UserError("something else")

    with pytest.raises(UserError, match="something else"):
        train(tmp_path, *OPTIONS, callbacks=[fail])
    assert layout.saved_steps(tmp_path) == [2]


def test_a_second_signal_does_not(tmp_path, gate):
    def leave(trainer, record):
        if record["step"] == 3:
            raise SystemExit(143)

    with pytest.raises(SystemExit):
        train(tmp_path, *OPTIONS, callbacks=[leave])
    assert layout.saved_steps(tmp_path) == []
    gate.set()
    for thread in threading.enumerate():
        if thread.name == "checkpoint":
            thread.join(30)


def test_what_fails_in_the_background_ends_the_run_in_a_sentence(tmp_path, monkeypatch):
    write = Checkpoints._write_tensors

    def full(self, folder, tensors):
        write(self, folder, tensors)
        if "04" in folder.name:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(Checkpoints, "_write_tensors", full)
    step = []

    def slow(trainer, record):
        step.append(record["step"])
        if record["step"] > 4:
            over = time.monotonic() + 10
            while not trainer.checkpoints.failed and time.monotonic() < over:
                time.sleep(0.01)

    with pytest.raises(
        UserError, match="step-00000004: the checkpoint could not be written: No space .*step 2 is intact"
    ):
        train(tmp_path, *OPTIONS, "training.steps=50", callbacks=[slow])
    assert step[-1] == 5  # told at the next step, not at the next save
    assert layout.saved_steps(tmp_path) == [2] and not list(tmp_path.glob(".step-*"))
    layout.verify(layout.step_folder(tmp_path, 2))


def test_a_kill_while_it_is_written_harms_nothing(tmp_path):
    """SIGKILL as soon as a hidden folder is seen: what has a name is whole, and the same command goes on from it."""
    settings = write_config(tmp_path, "checkpoint.asynchronous=true", "checkpoint.every=1", "checkpoint.keep=3")
    with Launched(settings, 1, "training.steps=5000") as launched:
        launched.until(5)
        over = time.monotonic() + 60
        while not list(launched.run.glob(".step-*.tmp")) and time.monotonic() < over:
            time.sleep(0.001)
        launched.processes[0].kill()
        launched.processes[0].wait()
    saved = layout.saved_steps(launched.run)
    assert len(saved) >= 3
    for step in saved:
        layout.verify(layout.step_folder(launched.run, step))
    config = Config.load(settings, [f"training.steps={saved[-1] + 2}", "log.console=none"])
    assert Trainer(config=config).train().step == saved[-1] + 2
    assert not list(launched.run.glob(".step-*"))


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_disk_that_takes_no_more(tmp_path, asynchronous):
    """From step 3 on the system refuses files of more than 64 kB: the run goes on from the older checkpoint."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(trainer, record):
        if record["step"] == 3:
            trainer.checkpoints.wait()
            resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, limits[1]))

    options = [f"checkpoint.asynchronous={asynchronous}", "checkpoint.every=2"]
    try:
        with pytest.raises(UserError, match="step-00000004: the checkpoint could not be written: .*step 2 is intact"):
            train(tmp_path, *options, callbacks=[fill])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert layout.saved_steps(tmp_path) == [2] and not list(tmp_path.glob(".step-*"))
    assert train(tmp_path, *options).summary.step == 4
    assert [step for step, _ in losses(tmp_path)] == [1, 2, 3, 4]
