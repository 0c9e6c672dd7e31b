"""The record of a run, and the same run again from its folder: to the bit, or refused, or with what differs said."""

import json
import sys
from unittest import mock

import pytest
import torch

from tests.training.tiny import config, documents, log, losses, stop_at
from unmask import Trainer
from unmask.cli import main
from unmask.errors import UserError
from unmask.runs import record
from unmask.training.trainer import Trainer as Again


@pytest.fixture
def source(tmp_path, monkeypatch):
    """A run of a relative path, trained in the folder `there`."""
    there = tmp_path / "there"
    there.mkdir()
    monkeypatch.chdir(there)
    write("data.jsonl")
    options = ["data.train=data.jsonl", "training.steps=4", "training.ema=0.9", "optimizer.name=muon"]
    Trainer(config=config("run", *options)).train()
    return there / "run"


def write(name, seed=0):
    with open(name, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(each) + "\n" for each in documents(seed=seed))


def starts(path):
    return json.loads((path / "run.json").read_text())["starts"]


def repeat(source, *overrides, out):
    return record.again(source, list(overrides), out)


def run(found, monkeypatch):
    """Train it; the messages that were given."""
    messages = []
    monkeypatch.setattr(Again, "message", lambda self, text: messages.append(text))
    Trainer(repeat=found).train()
    monkeypatch.undo()
    return messages


def test_what_a_run_was_started_with_is_written_down(source):
    (start,) = starts(source)
    assert start["versions"]["torch"] == torch.__version__ and start["versions"]["python"] in sys.version
    assert start["config"]["training"]["seed"] == 0 and start["config"]["optimizer"]["name"] == "muon"
    assert start["folder"] == str(source.parent) and start["command"] and start["processes"] == 1
    assert start["machine"]["threads"] == torch.get_num_threads() and start["machine"]["cpu"]
    assert start["exact"]["training.seed"] == 0 and len(start["exact"]["data.train"]) == 64
    assert start["git"]["folder"] is None


def test_every_start_of_a_run_is_recorded(tmp_path):
    Trainer(config=config(tmp_path), callbacks=[stop_at(2)]).train(documents())
    Trainer(config=config(tmp_path)).train(documents())
    Trainer(config=config(tmp_path)).train(documents())  # nothing was left to do
    assert [start["step"] for start in starts(tmp_path)] == [0, 2]


def test_the_repetition_is_the_same_to_the_bit(source, tmp_path, monkeypatch):
    """From another folder, with the paths of the first."""
    monkeypatch.chdir(tmp_path)
    found = repeat(source, out=tmp_path / "again")
    assert run(found, monkeypatch) == []
    assert losses(tmp_path / "again") == losses(source) and len(losses(source)) == 4
    norms = [[line["grad_norm"] for line in log(path)] for path in (source, tmp_path / "again")]
    assert norms[0] == norms[1]


def test_overrides_make_it_another_run(source, tmp_path, monkeypatch):
    found = repeat(source, "training.seed=3", "training.steps=2", out=tmp_path / "again")
    assert run(found, monkeypatch) == []
    assert losses(tmp_path / "again") != losses(source)[:2]
    assert repeat(source, out=None).config.checkpoint.path == str(source.with_name("run-again"))
    named = repeat(source, f"checkpoint.path={tmp_path / 'named'}", out=None)
    assert named.config.checkpoint.path == str(tmp_path / "named")


def test_a_record_of_an_earlier_version(source, tmp_path, monkeypatch):
    """It lacks options that are younger, names a package that nothing used, has described the model by a hash alone."""
    file = source / "run.json"
    tree = json.loads(file.read_text())
    exact = tree["starts"][-1]["exact"]
    assert exact["model"]["config"]["hidden_size"] == 32 and len(exact["model"]["shapes"]) == 64
    del exact["objective.confidence"], exact["data.parts_left_out"], exact["model"]["config"]["attention_bias"]
    tree["starts"][-1]["versions"]["liger-kernel"] = "0.6"
    file.write_text(json.dumps(tree))
    assert run(repeat(source, out=tmp_path / "first"), monkeypatch) == []
    exact["model"] = "0" * 64
    file.write_text(json.dumps(tree))
    messages = run(repeat(source, out=tmp_path / "second"), monkeypatch)
    assert messages == [f"{source} has no description of its model that could be compared; the bits may differ"]
    assert losses(tmp_path / "second") == losses(tmp_path / "first") == losses(source)
    exact["objective.confidence"] = 0.5
    file.write_text(json.dumps(tree))
    with pytest.raises(UserError, match=r"cannot be repeated: objective\.confidence=0\.0, but it was 0\.5"):
        Trainer(repeat=repeat(source, out=tmp_path / "third")).train()


def test_data_that_moved(source, tmp_path, monkeypatch):
    data = source.parent / "data.jsonl"
    data.rename(tmp_path / "moved.jsonl")
    with pytest.raises(UserError, match="run: data.train=data.jsonl is no longer there; say where .* data.train=PATH"):
        repeat(source, out=tmp_path / "again")
    found = repeat(source, f"data.train={tmp_path / 'moved.jsonl'}", out=tmp_path / "again")
    assert run(found, monkeypatch) == []
    assert losses(tmp_path / "again") == losses(source)


def test_data_that_changed(source, tmp_path, monkeypatch):
    write("data.jsonl", seed=9)
    with pytest.raises(UserError, match="run cannot be repeated: data.train is not what it was"):
        Trainer(repeat=repeat(source, out=tmp_path / "again")).train()
    assert not (tmp_path / "again").exists()
    found = repeat(source, "data.train=data.jsonl", out=tmp_path / "again")
    assert run(found, monkeypatch) == [f"data.train holds other data than {source} was trained on"]


def test_other_versions_and_machines_are_told(source, tmp_path, monkeypatch):
    with mock.patch.object(record, "versions", lambda: {**found, "torch": "9.0"}):
        found = starts(source)[0]["versions"]
        threads = mock.patch.object(torch, "get_num_threads", lambda: 77)
        with threads:
            messages = run(repeat(source, out=tmp_path / "again"), monkeypatch)
    assert messages[0] == (f"not the versions of {source}: torch 9.0 (then {torch.__version__}); the bits may differ")
    assert "threads 77 (then" in messages[1] and len(messages) == 2


def test_what_cannot_be_repeated_is_refused(tmp_path, source):
    with pytest.raises(UserError, match="nowhere: holds no run that can be repeated: there is no run.json in it"):
        repeat(tmp_path / "nowhere", out=None)
    with pytest.raises(UserError, match="is the run to repeat; name another folder with --out"):
        repeat(source, out=source)
    Trainer(config=config(tmp_path / "python")).train(documents())
    with pytest.raises(UserError, match="python: its training data were handed over in Python"):
        repeat(tmp_path / "python", out=None)
    (source / "run.json").write_text("{")
    with pytest.raises(UserError, match="run.json: cannot be read as JSON"):
        repeat(source, out=None)


def test_settings_that_changed_on_the_way_are_told(source, tmp_path, monkeypatch):
    options = ["data.train=data.jsonl", "training.ema=0.9", "optimizer.name=muon"]
    Trainer(config=config("run", *options, "training.steps=5")).train()
    messages = run(repeat(source, out=tmp_path / "again"), monkeypatch)
    assert messages == [f"the settings of {source} changed on its way; repeated are the last ones"]


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--from", "run", "--out", "again"], "trained 4 steps"),
        (["--from", "run", "training.steps=2", "training.seed=1"], "trained 2 steps"),
        (["--from", "run", "other.yaml"], "give a config file (other.yaml) or --from run, not both"),
        ([], "give a config file, or --from RUN to do a run again"),
        (["other.yaml", "--out", "again"], "--out goes with --from"),
        (["--from", "run", "--dry-run"], "parameters"),
    ],
)
def test_the_command(source, capsys, arguments, said):
    with mock.patch.object(sys, "argv", ["unmask", "train", *arguments]):
        try:
            main()
        except SystemExit as exit:
            assert exit.code in (0, 2)
    printed = capsys.readouterr()
    assert said in printed.out + printed.err
