"""Loss spikes: what counts as one, where the run goes on, and that a resumed run answers it in the same way."""

import math

import pytest
import torch

from tests.training.tiny import log, losses, train, weights
from unmask.config import SpikeConfig
from unmask.engine.engine import Engine
from unmask.errors import UserError
from unmask.training.source import Packs
from unmask.training.spikes import SpikeGuard
from unmask.training.trainer import Trainer


def test_a_spike_exceeds_a_multiple_of_the_median():
    guard = SpikeGuard(SpikeConfig(factor=2, window=3))
    assert [guard.sees(loss) for loss in (9.0, 1.0, 2.0)] == [False] * 3  # the window fills
    assert guard.limit == 4.0  # the median of 9, 1, 2
    assert not guard.sees(4.0) and guard.sees(4.1) and not guard.sees(math.nan)
    assert list(guard.losses) == [1.0, 2.0, 4.0]


def test_none_is_looked_for_unless_asked():
    guard = SpikeGuard(SpikeConfig())
    assert not any(guard.sees(loss) for loss in [1.0] * 200 + [1e9])
    assert not guard.losses


OPTIONS = ["training.spike.factor=3", "training.spike.window=3", "checkpoint.every=2", "training.steps=9"]


def jump(monkeypatch, batches, by=10.0):
    """Make the reported loss of these batches (numbered from 0) `by` times larger; returns the batches trained on."""
    seen = []
    forward, batch = Engine.forward_backward, Packs.batch
    asked = {}

    def given(self, step, part=(0, 1)):
        asked[step.number] = step.number + step.skipped
        return batch(self, step, part)

    def jumping(self, objective, micro):
        losses = forward(self, objective, micro)
        seen.append(asked[self.step])
        return losses._replace(loss=losses.loss * (by if seen[-1] in batches else 1.0))

    monkeypatch.setattr(Packs, "batch", given)
    monkeypatch.setattr(Engine, "forward_backward", jumping)
    return seen


def test_the_run_goes_back_and_past_the_data(tmp_path, monkeypatch):
    """The spike of batch 5 (step 6) leads back to step 4, which goes on with batch 6."""
    seen = jump(monkeypatch, {5})
    messages = []
    monkeypatch.setattr(Trainer, "message", lambda self, text: messages.append(text))
    trainer = train(tmp_path, *OPTIONS)
    assert seen == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    assert (trainer.summary.step, trainer.spikes.offset, trainer.spikes.rollbacks) == (9, 2, 1)
    assert "step 6: the loss jumped to" in messages[0] and "back at step-00000004" in messages[0]
    steps = [(record["kind"], record["step"]) for record in log(tmp_path)]
    assert steps == [*[("step", k) for k in range(1, 5)], ("rollback", 4), *[("step", k) for k in range(5, 10)]]
    rollback = log(tmp_path)[4]
    assert rollback["from"] == 6 and rollback["loss"] > rollback["limit"]
    epochs = [record["epoch"] for record in log(tmp_path) if record["kind"] == "step"]
    assert epochs[4] - epochs[3] == pytest.approx(3 * epochs[0])


def test_weights_are_those_of_a_run_that_never_saw_the_spike(tmp_path, monkeypatch):
    """The same steps on batches 0 to 3 and 6 to 10."""
    jump(monkeypatch, {5})
    trainer = train(tmp_path / "spike", *OPTIONS)
    monkeypatch.undo()

    def skip(trainer, record):
        trainer.spikes.offset = 2 if record["step"] >= 4 else 0

    plain = train(tmp_path / "plain", "training.steps=9", callbacks=[skip])
    for name, weight in weights(plain).items():
        assert torch.equal(weight, weights(trainer)[name]), name
    assert losses(tmp_path / "plain") == losses(tmp_path / "spike")


@pytest.mark.parametrize("stop", [5, 7])
def test_a_resume_after_it_is_exact(tmp_path, monkeypatch, stop):
    """Stopped before the spike's step comes again, or after: bits and log are those of the uninterrupted run."""
    jump(monkeypatch, {5})
    whole = train(tmp_path / "whole", *OPTIONS)

    def once_back(trainer, record):
        if record["step"] == stop and trainer.spikes.rollbacks:
            trainer.stop()

    train(tmp_path / "halves", *OPTIONS, callbacks=[once_back])
    rest = train(tmp_path / "halves", *OPTIONS)
    assert_same(tmp_path, whole, rest)


def test_a_run_that_died_after_it_meets_it_again(tmp_path, monkeypatch):
    """The checkpoint it went back to knows nothing of the spike: the resumed run makes the same rollback."""
    jump(monkeypatch, {5})
    whole = train(tmp_path / "whole", *OPTIONS)

    def die(trainer, record):
        if record["step"] == 5 and trainer.spikes.rollbacks:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "halves", *OPTIONS, callbacks=[die])
    assert_same(tmp_path, whole, train(tmp_path / "halves", *OPTIONS))


def assert_same(path, whole, rest):
    for name, weight in weights(whole).items():
        assert torch.equal(weight, weights(rest)[name]), name
    assert losses(path / "whole") == losses(path / "halves")
    kinds = [[(record["kind"], record["step"]) for record in log(path / name)] for name in ("whole", "halves")]
    assert kinds[0] == kinds[1]
    assert whole.spikes.state_dict() == rest.spikes.state_dict()


def test_the_number_of_rollbacks_is_bounded(tmp_path, monkeypatch):
    jump(monkeypatch, set(range(5, 99)))
    with pytest.raises(
        UserError, match="step 5: .*above 3 times the median of the last 3, .* went back 2 times already"
    ):
        train(tmp_path, *OPTIONS, "training.spike.rollbacks=2")
    assert sorted(entry.name for entry in tmp_path.glob("step-*")) == ["step-00000002", "step-00000004"]


def test_without_a_checkpoint_it_is_said(tmp_path, monkeypatch):
    jump(monkeypatch, {3})
    messages = []
    monkeypatch.setattr(Trainer, "message", lambda self, text: messages.append(text))
    train(tmp_path, *OPTIONS, "checkpoint.every=8", "training.steps=5")
    assert len(messages) == 1 and "there is no checkpoint to go back to" in messages[0]
