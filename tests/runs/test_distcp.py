"""A checkpoint that another person made: its table of contents and its values run no code, and lead nowhere else."""

import io
import json
import os
import pickle
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata

from tests.training.tiny import config, documents, train
from unmask.errors import UserError
from unmask.evaluation.evaluate import evaluate
from unmask.export import export
from unmask.runs import distcp
from unmask.runs import folder as checkpoints
from unmask.runs.open import open_model
from unmask.training.trainer import Trainer


class Call:
    """Pickled, a call of os.mkdir."""

    def __init__(self, made: Path):
        self.made = made

    def __reduce__(self):
        return os.mkdir, (str(self.made),)


@pytest.fixture
def step(tmp_path: Path) -> Path:
    train(tmp_path / "run", "training.steps=1", "training.ema=0.5")
    return tmp_path / "run" / "step-00000001"


def sign(folder: Path) -> None:
    """Make the manifest fit what the folder holds now."""
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"] = checkpoints.describe(folder)
    (folder / "manifest.json").write_text(json.dumps(manifest))


def go_on(run: Path) -> None:
    Trainer(config=config(run, "training.steps=2", "training.ema=0.5")).train(documents())


READERS = {
    "load": lambda run: open_model(run),
    "average": lambda run: open_model(run / "ema"),
    "evaluate": lambda run: evaluate(run, documents()),
    "export": lambda run: export(run, run.parent / "exported"),
    "train": go_on,
}


@pytest.mark.parametrize("hidden", [False, True], ids=["whole", "inside"])
def test_a_table_of_contents_calls_nothing(step: Path, tmp_path: Path, hidden: bool) -> None:
    table: object = Call(tmp_path / "made")
    if hidden:
        table = pickle.loads((step / ".metadata").read_bytes())
        table.storage_meta.modules.append(Call(tmp_path / "made"))  # type: ignore[attr-defined]
    (step / ".metadata").write_bytes(pickle.dumps(table))
    sign(step)
    for read in READERS.values():
        with pytest.raises(
            UserError, match=r"\.metadata: names (posix|os|nt)\.mkdir, which could run code: it was not"
        ):
            read(step.parent)
    assert not (tmp_path / "made").exists()
    pickle.loads((step / ".metadata").read_bytes())  # as DCP's own reader does
    assert (tmp_path / "made").exists()


def test_a_value_calls_nothing(step: Path, tmp_path: Path) -> None:
    """A value that is no tensor lies in a data file, as a pickle of its own."""
    stream = io.BytesIO()
    torch.save(Call(tmp_path / "made"), stream)
    (step / "more.distcp").write_bytes(stream.getvalue())
    table = pickle.loads((step / ".metadata").read_bytes())
    place = next(value for key, value in table.storage_data.items() if key.fqn == "optimizer.param_groups.0.lr")
    place.relative_path, place.offset, place.length = "more.distcp", 0, len(stream.getvalue())
    (step / ".metadata").write_bytes(pickle.dumps(table))
    sign(step)
    with pytest.raises(UserError, match=r"^optimizer\.param_groups\.0\.lr in the checkpoint is no plain value"):
        go_on(step.parent)
    assert not (tmp_path / "made").exists()
    open_model(step.parent)  # which reads the weights only


def test_how_the_optimiser_computes_is_not_the_checkpoint_s(step: Path) -> None:
    """Else a checkpoint could turn the descent round, or bring a setting of another kind."""
    table = pickle.loads((step / ".metadata").read_bytes())
    for key, value in (("maximize", True), ("amsgrad", "x"), ("capturable", torch.ones(2))):
        stream = io.BytesIO()
        torch.save(value, stream)
        (step / f"{key}.distcp").write_bytes(stream.getvalue())
        for index, place in table.storage_data.items():
            if index.fqn.startswith("optimizer.param_groups.") and index.fqn.endswith(f".{key}"):
                place.relative_path, place.offset, place.length = f"{key}.distcp", 0, len(stream.getvalue())
    (step / ".metadata").write_bytes(pickle.dumps(table))
    sign(step)
    trainer = Trainer(config=config(step.parent, "training.steps=2", "training.ema=0.5"))
    trainer.train(documents())
    for group in trainer.engine.optimizer.param_groups:
        assert (group["maximize"], group["amsgrad"], group["capturable"]) == (False, False, False)


def test_a_table_that_would_fill_the_memory_is_refused(step: Path) -> None:
    (step / ".metadata").write_bytes(b"\x80\x04K\x01r" + (200_000_000).to_bytes(4, "little") + b".")
    sign(step)
    with pytest.raises(UserError, match="keeps a value under the number 200000000"):
        open_model(step)


def test_files_are_those_of_the_folder(step: Path) -> None:
    table = pickle.loads((step / ".metadata").read_bytes())
    for place in table.storage_data.values():
        place.relative_path = f"../{step.name}/{place.relative_path}"
    (step / ".metadata").write_bytes(pickle.dumps(table))
    sign(step)
    with pytest.raises(UserError, match=r"names a file outside the folder \(\.\./step-00000001/__0_0\.distcp\)"):
        open_model(step)


def test_the_table_is_what_dcp_reads(step: Path) -> None:
    ours, theirs = distcp.contents(step).metadata, FileSystemReader(step).read_metadata()
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert ours.storage_data == theirs.storage_data and ours.planner_data == theirs.planner_data


def test_damage_is_one_sentence(step: Path) -> None:
    """Every byte of a small table altered, and tables of another shape."""
    path, own = step / ".metadata", (step / ".metadata").read_bytes()
    shapes = [[], {}, None, Metadata({}), Metadata({"a": 1}, {}, {}), Metadata([], {}, {}), Metadata({}, {}, {"a": 1})]
    tables = [pickle.dumps(shape) for shape in shapes] + [b"", own[:-1], own[: len(own) // 2]]
    tables += [own[:at] + bytes([own[at] ^ 0x5A]) + own[at + 1 :] for at in range(0, len(own), len(own) // 150)]
    refused = 0
    for table in tables:
        path.write_bytes(table)
        try:
            distcp.contents(step)
        except UserError as error:
            assert str(error).startswith(f"{path}: ") and "\n" not in str(error)
            refused += 1
    assert refused > 100


def test_what_does_not_fit_is_one_sentence(step: Path) -> None:
    for wanted in ({"model": {"other": torch.zeros(2)}}, {"model": {"model.norm.weight": torch.zeros(7)}}):
        with pytest.raises(
            UserError, match=r"step-00000001: its tensors cannot be read \(.*\); take another checkpoint"
        ):
            distcp.load(wanted, step)
