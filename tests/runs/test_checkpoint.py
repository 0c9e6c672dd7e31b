"""Checkpoints: bit-exact resumption, written whole or not at all, refused when altered or when the run is another."""

import errno
import json
import resource
import shutil

import pytest
import torch

from tests.training.tiny import documents, log, losses, stop_at, train, weights
from unmask.cli import say
from unmask.errors import UserError
from unmask.runs import folder as layout
from unmask.runs.save import Checkpoints


def state(trainer):
    """Every tensor of the optimiser, by parameter name and key."""
    names = {id(parameter): name for name, parameter in trainer.run.model.named_parameters()}
    return {
        (names[id(parameter)], key): value.clone()
        for parameter, entries in trainer.engine.optimizer.state.items()
        for key, value in entries.items()
    }


def assert_equal(ours, theirs):
    assert ours.keys() == theirs.keys()
    for key, value in ours.items():
        assert torch.equal(value, theirs[key]), key


@pytest.mark.parametrize(
    "options, objective",
    [
        ([], {"name": "block_diffusion", "block_size": 8, "clip": "auto"}),
        (["training.precision=fp16", "training.batch_size=4", "model.mask_noise_steps=15"], {"name": "mdlm"}),
        (
            ["training.ema=0.9", "checkpoint.asynchronous=true", "checkpoint.every=3", "log.every=1"],
            {
                "name": "block_diffusion",
                "block_schedule": [{"until": 0.4, "size": 4}, {"until": 15, "size": "full"}, {"size": 8}],
            },
        ),
    ],
)
def test_ten_and_ten_steps_are_twenty(tmp_path, options, objective):
    """Weights, optimiser, objective, loss scale, random state and every logged number but time."""
    settings = ["training.steps=20", "evaluation.every=5", "evaluation.packs=2", *options]
    held_out = documents(4, seed=1)
    whole = train(tmp_path / "whole", *settings, objective=objective, validation=held_out)
    drawn = torch.get_rng_state()
    half = train(tmp_path / "halves", *settings, objective=objective, validation=held_out, callbacks=[stop_at(10)])
    assert (half.summary.step, half.summary.interrupted) == (10, None)
    torch.manual_seed(99)
    rest = train(tmp_path / "halves", *settings, objective=objective, validation=held_out)
    assert rest.summary.step == 20

    assert_equal(weights(whole), weights(rest))
    assert_equal(state(whole), state(rest))
    assert len(state(whole)) == 3 * len(weights(whole))
    assert whole.objective == rest.objective and whole.engine.scaler.state_dict() == rest.engine.scaler.state_dict()
    assert torch.equal(drawn, torch.get_rng_state())
    timed = {"time", "tokens_per_second", "mfu", "memory"}
    strip = [[{k: v for k, v in r.items() if k not in timed} for r in log(tmp_path / n)] for n in ("whole", "halves")]
    assert strip[0] == strip[1] and len(strip[0]) == 24
    if "block_schedule" in objective:
        sizes = [record["block_size"] for record in strip[0] if record["kind"] == "step"]
        assert sizes == [4] * 8 + ["full"] * 7 + [8] * 5


def test_a_finished_run_has_nothing_left_to_do(tmp_path):
    first = train(tmp_path)
    again = train(tmp_path)
    assert again.summary.loss is None and again.summary.checkpoint == first.summary.checkpoint
    assert "complete at step 4" in say.summary(again.summary.facts(), "unmask train")
    assert len(losses(tmp_path)) == 4


def test_a_finished_run_can_be_lengthened(tmp_path):
    train(tmp_path, "training.steps=2")
    train(tmp_path, "training.steps=4")
    assert [step for step, _ in losses(tmp_path)] == [1, 2, 3, 4]


def test_only_the_newest_are_kept(tmp_path):
    train(tmp_path, "training.steps=5", "checkpoint.every=1", "checkpoint.keep=2")
    assert layout.saved_steps(tmp_path) == [4, 5]
    assert {entry.name for entry in tmp_path.iterdir()} == {
        "step-00000004",
        "step-00000005",
        "log.jsonl",
        "config.yaml",
        "run.json",
    }


def test_an_earlier_checkpoint_is_used_when_asked_for(tmp_path):
    options = ["checkpoint.every=1", "checkpoint.keep=0"]
    train(tmp_path, *options)
    before = losses(tmp_path)
    trainer = train(tmp_path, *options, "checkpoint.step=2")
    assert trainer.summary.step == 4 and losses(tmp_path) == before
    # The history that was left is set aside, not deleted.
    assert layout.saved_steps(tmp_path) == [1, 2, 3, 4]
    assert {entry.name for entry in tmp_path.glob("*.replaced")} == {"step-00000003.replaced", "step-00000004.replaced"}
    with pytest.raises(UserError, match="no checkpoint of step 9; it has 1, 2, 3, 4"):
        train(tmp_path, "checkpoint.step=9")


@pytest.mark.parametrize("name", ["__0_0.distcp", "state.json", "hf/config.json", "manifest.json"])
@pytest.mark.parametrize("damage", ["truncated", "altered", "missing"])
def test_a_damaged_checkpoint_is_refused_and_named(tmp_path, name, damage):
    train(tmp_path, "checkpoint.every=2")
    path = tmp_path / "step-00000004" / name
    content = bytearray(path.read_bytes())
    if damage == "missing":
        path.unlink()
    elif damage == "truncated":
        path.write_bytes(content[:-7])
    else:
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    if (name, damage) == ("manifest.json", "altered"):
        path.write_text(json.dumps({"files": {"state.json": {"bytes": 1, "sha256": "0"}}}))
    with pytest.raises(UserError, match="step-00000004.*checkpoint.step=2") as caught:
        train(tmp_path, "training.steps=6")
    assert "\n" not in str(caught.value)
    assert (str(path) in str(caught.value)) or name == "manifest.json"
    assert train(tmp_path, "training.steps=6", "checkpoint.step=2").summary.step == 6


@pytest.mark.parametrize("failure", [OSError(errno.ENOSPC, "No space left on device"), RuntimeError("short write")])
def test_a_save_that_fails_leaves_the_earlier_checkpoint(tmp_path, monkeypatch, failure):
    write = Checkpoints._write_tensors

    def fails_at_step_four(self, folder, tensors):
        write(self, folder, tensors)
        if "04" in folder.name:
            (folder / "__0_0.distcp").write_bytes(b"half")
            raise failure

    monkeypatch.setattr(Checkpoints, "_write_tensors", fails_at_step_four)
    with pytest.raises(UserError, match="step-00000004: the checkpoint could not be written: .*step 2 is intact"):
        train(tmp_path, "checkpoint.every=2")
    assert {entry.name for entry in tmp_path.iterdir()} == {"step-00000002", "log.jsonl", "config.yaml", "run.json"}
    monkeypatch.undo()
    resumed = train(tmp_path, "checkpoint.every=2")
    assert resumed.summary.step == 4 and len(losses(tmp_path)) == 4


def test_a_disk_that_takes_a_part(tmp_path):
    train(tmp_path, "training.steps=2")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(UserError, match="could not be written: .*(File too large|it is full).*step 2 is intact"):
            train(tmp_path, "training.steps=4")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert train(tmp_path, "training.steps=4").summary.step == 4


def test_a_killed_save_is_swept_away(tmp_path):
    train(tmp_path, "training.steps=2")
    shutil.copytree(tmp_path / "step-00000002", tmp_path / ".step-00000003.tmp")
    assert layout.newest(tmp_path).name == "step-00000002"
    train(tmp_path, "training.steps=4")
    assert not list(tmp_path.glob(".step*"))


@pytest.mark.parametrize(
    "options, objective, sentence",
    [
        (["training.seed=1"], None, "training.seed=1, but it was 0"),
        (["training.batch_size=4"], None, "training.batch_size=4, but it was 2"),
        (["data.pack_tokens=64"], None, "data.pack_tokens=64, but it was 128"),
        (["optimizer.name=plain_sgd"], None, "optimizer.name=plain_sgd, but it was adamw"),
        ([], {"name": "block_diffusion", "block_size": 4}, "objective.block_size=4, but it was 8"),
        ([], {"name": "mdlm"}, "objective.name=mdlm, but it was block_diffusion"),
        (["model.config.hidden_size=16"], None, "model.config.hidden_size=16, but it was 32"),
    ],
)
def test_another_run_is_refused_by_the_key_that_differs(tmp_path, options, objective, sentence):
    train(tmp_path, "training.steps=2")
    with pytest.raises(UserError, match=f"step-00000002 cannot be continued exactly: {sentence}"):
        train(tmp_path, "training.steps=4", *options, objective=objective)


def test_other_data_are_refused(tmp_path):
    train(tmp_path, "training.steps=2")
    with pytest.raises(UserError, match="data.train is not what it was"):
        train(tmp_path, "training.steps=4", data=documents(seed=5))


def test_a_run_is_not_overwritten(tmp_path):
    train(tmp_path, "training.steps=2")
    with pytest.raises(UserError, match="holds a run already"):
        train(tmp_path, "checkpoint.resume=false")
