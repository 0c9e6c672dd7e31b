"""What callbacks see of a run, and that one can end it."""

import pytest

from tests.training.tiny import documents, log, losses, train
from unmask import Callback, Trainer, UserError


class Seen(Callback):
    """stop: the event at which the run is ended."""

    def __init__(self, stop=None):
        self.stop, self.seen = stop, []

    def saw(self, trainer, *event):
        self.seen.append(event)
        if event == self.stop:
            trainer.stop()

    def on_step(self, trainer, record):
        self.saw(trainer, "step", record["step"])

    def on_evaluation(self, trainer, record):
        assert record["nats_per_token"] > 0 and record["standard_error"] > 0
        self.saw(trainer, "evaluation", record["step"])

    def on_save(self, trainer, folder):
        assert (folder / "manifest.json").exists()
        self.saw(trainer, "save", folder.name)


OPTIONS = ["evaluation.every=2", "checkpoint.every=3"]


def test_every_event_in_order(tmp_path):
    steps = []
    seen = Seen()
    train(tmp_path, *OPTIONS, callbacks=[seen, lambda trainer, record: steps.append(record["step"])],
          validation=documents(4))  # fmt: skip
    assert steps == [1, 2, 3, 4]
    assert seen.seen == [
        *(("step", 1), ("step", 2), ("evaluation", 2), ("step", 3), ("save", "step-00000003")),
        *(("step", 4), ("save", "step-00000004"), ("evaluation", 4)),
    ]


@pytest.mark.parametrize("stop", [("evaluation", 2), ("save", "step-00000003")])
def test_an_event_may_end_the_run_which_then_goes_on(stop, tmp_path):
    held_out = documents(4)
    train(tmp_path / "once", *OPTIONS, validation=held_out)
    ended = train(tmp_path / "twice", *OPTIONS, callbacks=[Seen(stop)], validation=held_out)
    assert ended.step == int(str(stop[1])[-1]) and ended.summary.checkpoint.name.endswith(str(ended.step))
    train(tmp_path / "twice", *OPTIONS, validation=held_out)
    assert losses(tmp_path / "twice") == losses(tmp_path / "once")
    both = [[(each["step"], each["nats_per_token"]) for each in log(tmp_path / name) if each["kind"] == "evaluation"]
            for name in ("once", "twice")]  # fmt: skip
    assert both[0] == both[1]


@pytest.mark.parametrize("wrong", [[3], [Seen], print])
def test_what_is_no_callback_is_refused(wrong):
    with pytest.raises(UserError, match="callbacks is a list of functions and unmask.Callback objects"):
        Trainer(callbacks=wrong)
