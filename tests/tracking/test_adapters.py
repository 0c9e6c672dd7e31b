"""TensorBoard, Trackio, W&B and MLflow: what their own readers find is what the log holds, after a resume too."""

import json
import os
import sqlite3
import struct
import time

import pytest
from tensorboard.summary.writer import event_file_writer

from tests.training.tiny import documents, stop_at, train
from unmask.config import LogConfig
from unmask.errors import UserError
from unmask.tracking import Start, background, build, check, trackers
from unmask.tracking.following import numbers
from unmask.tracking.jsonl import reached, read

NAMES = ("tensorboard", "trackio", "wandb", "mlflow")


@pytest.fixture(scope="module", autouse=True)
def offline(tmp_path_factory):
    """Trackio's database in a folder of the tests; it reads the variable when it is first imported."""
    folder = tmp_path_factory.mktemp("trackio")
    os.environ["TRACKIO_DIR"] = str(folder)
    yield folder
    del os.environ["TRACKIO_DIR"]


def tensorboard(run):
    from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"tensors": 0}).Reload()
    return {(tag, event.step): [make_ndarray(event.tensor_proto).item()]
            for tag in events.Tags()["tensors"] for event in events.Tensors(tag)}  # fmt: skip


def trackio(run):
    from trackio.sqlite_storage import SQLiteStorage

    key = json.loads((run / "trackers.json").read_text())["trackio"]
    found = {}
    for log in SQLiteStorage.get_logs("unmask", f"{run.name}-{key[:6]}"):
        for name, value in log.items():
            if "/" in name:
                found.setdefault((name, log["step"]), []).append(value)
    return found


def wandb(run):
    """Every history record of the run's offline files, in order."""
    import wandb as library
    from wandb.proto.wandb_internal_pb2 import Record

    library.teardown()  # as a program's end does: its service then has written everything
    key = json.loads((run / "trackers.json").read_text())["wandb"]
    files = sorted(run.glob(f"wandb/offline-run-*-{key}*/run-{key}.wandb"))
    assert files
    found = {}
    for file in files:
        for data in leveldb_records(file.read_bytes()):
            record = Record()
            record.ParseFromString(data)
            items = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            for name, value in items.items():
                if not name.startswith("_") and name != "step":
                    found.setdefault((name, items["step"]), []).append(value)
    return found


def leveldb_records(data):
    """The records of a file in LevelDB's log format, which W&B writes behind seven bytes of its own."""
    position, parts = 7, []
    while position + 7 <= len(data):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + 7])
        parts.append(data[position + 7 : position + 7 + length])
        position += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield b"".join(parts)
            parts = []


def mlflow(run):
    from mlflow import MlflowClient

    key = json.loads((run / "trackers.json").read_text())["mlflow"]
    client = MlflowClient(f"sqlite:///{run / 'mlflow.db'}")
    found = {}
    for name in client.get_run(key).data.metrics:
        for metric in client.get_metric_history(key, name):
            found.setdefault((name, metric.step), []).append(metric.value)
    return found


READERS = {"tensorboard": tensorboard, "trackio": trackio, "wandb": wandb, "mlflow": mlflow}


def logged(run):
    """(name, step) -> [value] of all numbers in the log."""
    return {(name, record["step"]): [value] for record in read(run / "log.jsonl")
            for name, value in numbers(record).items() if record["kind"] != "rollback"}  # fmt: skip


def same(found, run):
    wanted = logged(run)
    assert found.keys() == wanted.keys()
    for key, values in wanted.items():
        assert found[key] == values, key


@pytest.fixture(scope="module")
def resumed(tmp_path_factory):
    """A run of six steps with evaluations, stopped after the third, on which one falls; and its ids at the stop."""
    path = tmp_path_factory.mktemp("runs") / "first"
    settings = [f"log.trackers=[{', '.join(NAMES)}]", "training.steps=6", "evaluation.every=3", "evaluation.packs=1"]
    held_out = documents(3, seed=1)
    train(path, *settings, validation=held_out, callbacks=[stop_at(3)])
    before = (path / "trackers.json").read_text()
    train(path, *settings, validation=held_out)
    return path, before


def test_the_run_that_is_compared(resumed):
    path, before = resumed
    assert [(record["kind"], record["step"]) for record in read(path / "log.jsonl")] == [
        *(("step", step) for step in (1, 2, 3)), ("evaluation", 3), *(("step", step) for step in (4, 5, 6)),
        ("evaluation", 6),
    ]  # fmt: skip
    assert (path / "trackers.json").read_text() == before
    assert set(json.loads(before)) == {"trackio", "wandb", "mlflow"}  # TensorBoard's folder is its identity


@pytest.mark.parametrize("name", NAMES)
def test_what_is_read_back_is_the_log(resumed, name):
    same(READERS[name](resumed[0]), resumed[0])


def step(number, loss=1.0):
    return {"kind": "step", "step": number, "steps": 9, "loss": loss, "skipped": True, "time": 1e9 + number}


def follow(path, names, start, records, **config):
    """A session of a run that goes on after `start`; returns what the trackers said."""
    said = []
    path.mkdir(exist_ok=True)
    made = build(LogConfig(trackers=names, console="none"), said.append)
    begin = Start(path, start, 9, {"log": {"console": "none"}, **config}, reached(path / "log.jsonl"))
    for tracker in made:
        tracker.start(begin)
    for record in records:
        for tracker in made:
            tracker.log(record)
    for tracker in made:
        tracker.close()
    return said


@pytest.mark.parametrize("name", NAMES)
def test_after_a_crash_no_step_is_missing_and_none_there_twice(tmp_path, name):
    """The tracker is behind the log (it was named later), then ahead of the checkpoint that the run goes on from."""
    run = tmp_path / name
    follow(run, [], 0, [step(1), step(2)])
    assert follow(run, [name], 2, [step(3), step(4), step(5)]) == []
    same(READERS[name](run), run)
    assert follow(run, [name], 3, [step(4), step(5), step(6)]) == []
    same(READERS[name](run), run)
    assert max(at for _, at in READERS[name](run)) == 6


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("start", "config"), [(0, {}), (2, {"checkpoint": {"step": 2}})], ids=["over", "back"])
def test_a_run_that_starts_over_or_goes_back_is_a_new_one_there(tmp_path, name, start, config):
    run = tmp_path / "run"
    follow(run, [name], 0, [step(1), step(2), step(3)])
    follow(run, [name], start, [step(number, loss=2.0) for number in range(start + 1, 4)], **config)
    same(READERS[name](run), run)
    assert READERS[name](run)["train/loss", 3] == [2.0]


@pytest.mark.parametrize("name", ["tensorboard", "trackio", "wandb"])
def test_after_a_rollback_the_tracker_has_the_history_that_counts(tmp_path, name, monkeypatch):
    """TensorBoard names its files by second, process and a counter, here 9 and 10, and reads them by name."""
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(9))
    run = tmp_path / "run"
    back = {"kind": "rollback", "step": 1, "steps": 9, "from": 3, "time": 1e9}
    records = [step(1), step(2), step(3), back, step(2, loss=2.0), step(3, loss=3.0)]
    assert follow(run, [name], 0, records) == []
    same(READERS[name](run), run)
    assert READERS[name](run)["train/loss", 2] == [2.0]


class Broken:
    """Takes two records and no more."""

    def __init__(self):
        self.taken = 0

    def start(self, run):
        assert run.steps == 6

    def log(self, record):
        self.taken += 1
        if self.taken > 2:
            raise OSError(28, "No space left on device")

    def message(self, text):
        raise AssertionError("not reached: nothing is said in this run")

    def close(self):
        raise AssertionError("not reached: a tracker that failed is left alone")


def test_a_tracker_that_fails_is_told_once_and_the_training_goes_on(tmp_path, capsys):
    trackers.add("broken", Broken)
    path = tmp_path / "run"
    trainer = train(path, "log.trackers=[broken]", "log.console=plain", "training.steps=6")
    assert trainer.summary.step == 6 and [record["step"] for record in read(path / "log.jsonl")] == list(range(1, 7))
    told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("the tracker")]
    assert told == [
        "the tracker broken failed and is switched off (OSError: [Errno 28] No space left on device); the log continues"
    ]


def test_a_tracker_that_hangs_does_not_hold_up_the_end_for_ever(tmp_path, monkeypatch):
    class Hanging(Broken):
        def start(self, run):
            time.sleep(60)

    monkeypatch.setattr(background, "PATIENCE", 0.2)
    trackers.add("hanging", Hanging)
    began = time.monotonic()
    said = follow(tmp_path / "run", ["hanging"], 0, [step(1)])
    assert time.monotonic() - began < 10
    assert said == [
        "the tracker hanging failed and is switched off (TimeoutError: no answer for 0.2 s); the log continues"
    ]


def test_a_database_that_is_lost_on_the_way(tmp_path):
    run = tmp_path / "run"
    follow(run, ["mlflow"], 0, [step(1)])
    with sqlite3.connect(run / "mlflow.db") as database:
        database.execute("DROP TABLE metrics")
    said = follow(run, ["mlflow"], 1, [step(2), step(3)])
    assert len(said) == 1 and said[0].startswith("the tracker mlflow failed and is switched off (")
    assert [record["step"] for record in read(run / "log.jsonl")] == [1, 2, 3]


@pytest.mark.parametrize(
    ("log", "sentence"),
    [
        ({"trackers": ["wanbd"]}, "unknown tracker 'wanbd' (did you mean 'wandb'?)"),
        ({"trackers": ["jsonl"]}, "log.trackers: jsonl is always there: leave it out"),
        ({"trackers": ["mlflow", "mlflow"]}, "log.trackers names mlflow twice"),
        ({"options": {"wandb": {}}}, "log.options.wandb has no effect: name wandb in log.trackers, or leave it out"),
        (
            {"trackers": ["wandb"], "options": {"wandb": {"projekt": "x"}}},
            "log.options.wandb: unknown key 'projekt' (did you mean 'project'?)",
        ),
        ({"trackers": ["wandb"], "options": {"wandb": {"mode": "on"}}}, "log.options.wandb: mode='on': "),
    ],
)
def test_mistakes_are_refused(log, sentence):
    with pytest.raises(UserError) as error:
        check(LogConfig(**log))
    assert sentence in str(error.value) and "\n" not in str(error.value)


def test_a_missing_package_is_one_sentence_with_its_command(monkeypatch):
    from unmask.tracking import following

    monkeypatch.setattr(following, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"wandb is not installed: pip install 'unmask\[wandb\]', or leave it out"):
        check(LogConfig(trackers=["wandb"]))


def test_numbers_have_names():
    record = {"kind": "step", "step": 3, "loss": 2.0, "mfu": None, "skipped": True, "time": 1.0,
              "rank_memory": [5, 7], "rank_sent": [{"gradients": 1}, {"gradients": 2}]}  # fmt: skip
    assert numbers(record) == {
        "train/loss": 2.0, "train/skipped": 1.0, "rank 0/memory": 5.0, "rank 1/memory": 7.0,
        "rank 0/sent gradients": 1.0, "rank 1/sent gradients": 2.0,
    }  # fmt: skip
    assert numbers({"kind": "evaluation", "step": 3, "nats_per_token": 2.5}) == {"validation/nats_per_token": 2.5}
