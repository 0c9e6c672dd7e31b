"""Writing a run's checkpoints, and taking a run up from one (the layout is in `unmask.models.checkpoints`).

A checkpoint appears whole or not at all: it is written to a hidden folder, summed, flushed to the disk and renamed.
Tensors go through torch DCP, so that a later run may load them on another number of ranks.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from unmask.errors import UserError
from unmask.models import checkpoints as layout


class Checkpoints:
    """The checkpoints of one run: `save` and `load` the model, optimiser, random state and a JSON state."""

    def __init__(self, run: Path, model: Any, optimizer: torch.optim.Optimizer, keep: int = 2):
        self.run, self.model, self.optimizer, self.keep = run, model, optimizer, keep

    def save(self, step: int, state: dict[str, Any], config: str, tokenizer: Any = None) -> Path:
        """Write the checkpoint of `step`; returns its folder. UserError when the disk does not take it."""
        final = layout.step_folder(self.run, step)
        temporary = self.run / f".{final.name}.tmp"
        with _disk(final, temporary):
            for left in self.run.glob(".step-*.tmp"):  # of a process that was killed
                shutil.rmtree(left)
            temporary.mkdir(parents=True)
            self._write_tensors(temporary)
            self.model.config.save_pretrained(temporary / "hf")
            if tokenizer is not None:
                tokenizer.save_pretrained(temporary / "hf")
            (temporary / "config.yaml").write_text(config, encoding="utf-8")
            (temporary / "state.json").write_text(json.dumps({"step": step, **state}, indent=1), encoding="utf-8")
            manifest = {"format": 1, "step": step, "files": layout.describe(temporary)}
            (temporary / layout.MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
            _flush(temporary)
            self._set_aside(step)
            os.replace(temporary, final)
            _flush_folder(self.run)
        self._forget_old()
        return final

    def load(self, folder: Path) -> dict[str, Any]:
        """Verify `folder`, restore everything from it in place and return its JSON state."""
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

        layout.verify(folder)
        saved = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
        state = self._tensors()
        state["random"] = {name: value for name, value in state["random"].items() if f"random.{name}" in saved}
        with layout.single_process():
            dcp.load(state, checkpoint_id=folder, no_dist=True)
        set_optimizer_state_dict(self.model, self.optimizer, state["optimizer"])
        torch.set_rng_state(state["random"]["cpu"])
        if "cuda" in state["random"]:
            torch.cuda.set_rng_state(state["random"]["cuda"])
        return layout.state_of(folder)

    def _tensors(self) -> dict[str, Any]:
        """What DCP saves, and fills in place when it loads: model and optimiser tensors are the live ones."""
        from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

        random = {"cpu": torch.get_rng_state()}
        if torch.cuda.is_available():
            random["cuda"] = torch.cuda.get_rng_state()
        optimizer = get_optimizer_state_dict(self.model, self.optimizer)
        return {"model": layout.weights(self.model), "optimizer": optimizer, "random": random}

    def _write_tensors(self, folder: Path) -> None:
        import torch.distributed.checkpoint as dcp

        with layout.single_process():
            dcp.save(self._tensors(), checkpoint_id=folder, no_dist=True)

    def _set_aside(self, step: int) -> None:
        """Checkpoints at or after `step` belong to a history this run left when it went on from an earlier one."""
        for later in layout.saved_steps(self.run):
            if later >= step:
                folder = layout.step_folder(self.run, later)
                aside = folder.with_name(folder.name + ".replaced")
                shutil.rmtree(aside, ignore_errors=True)
                os.replace(folder, aside)

    def _forget_old(self) -> None:
        steps = layout.saved_steps(self.run)
        for step in steps[: -self.keep] if self.keep else []:
            # Renamed first: a half-deleted folder must not look like a checkpoint.
            folder = layout.step_folder(self.run, step)
            doomed = folder.with_name(f".{folder.name}.tmp")
            os.replace(folder, doomed)
            shutil.rmtree(doomed, ignore_errors=True)


@contextmanager
def _disk(final: Path, temporary: Path) -> Iterator[None]:
    """Turn what the disk refuses into one sentence, and leave no half-written folder."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except (OSError, RuntimeError, CheckpointException) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        steps = layout.saved_steps(final.parent)
        intact = f"the checkpoint of step {steps[-1]} is intact" if steps else "there is no earlier checkpoint"
        raise UserError(
            f"{final}: the checkpoint could not be written: {_cause(error)}; {intact}: "
            f"make room (or set checkpoint.path elsewhere) and run again"
        ) from error


def _cause(error: BaseException) -> str:
    """The first line of the exception that DCP wraps."""
    failures = getattr(error, "failures", None)
    if failures:
        wrapped = next(iter(failures.values()))
        error = wrapped[0] if isinstance(wrapped, tuple) else wrapped
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def _flush(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    for path in [*(p for p in folder.rglob("*") if p.is_dir()), folder]:
        _flush_folder(path)


def _flush_folder(folder: Path) -> None:
    """Make a rename last: on POSIX the folder itself is flushed."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
