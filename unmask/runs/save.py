"""Writing a run's checkpoints, and taking a run up from one (the layout is in `unmask.runs.folder`).

A checkpoint appears whole or not at all: it is written to a hidden folder, summed, flushed to the disk and renamed.
Tensors go through torch DCP, so that a later run may load them on another number of ranks. In the background a thread
does the same from a copy in memory: training waits for the copy only.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, cast

import torch

from unmask.config import CheckpointConfig
from unmask.endings import passing
from unmask.engine.engine import Engine
from unmask.engine.state import tensors, without_absent
from unmask.errors import UserError, disk_refusal
from unmask.files import replacing
from unmask.runs import distcp
from unmask.runs import folder as layout


class Best(NamedTuple):
    """The lowest bound of a run, in nats per token, and the step that had it."""

    step: int
    bound: float


class Checkpoints:
    """The checkpoints of one run: `save` and `load` the model, EMA weights, optimiser, random state and a JSON state.

    Of a model that is divided over processes all of them save and load, each what it holds, and the first writes the
    rest; else one process holds everything, and does so alone.

    `with checkpoints:` waits for one that is being written when the block ends by anything but a second signal.
    """

    def __init__(self, run: Path, engine: Engine, config: CheckpointConfig | None = None):
        self.run, self.engine = run, engine
        self.mesh = engine.mesh if engine.mesh.divided else None
        self.config = config or CheckpointConfig()
        self.best: Best | None = None
        self._writer: threading.Thread | None = None
        self._error: Exception | None = None
        self._stager: Any = None

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._writer is not None and (kind is None or issubclass(kind, Exception)):
            self._writer.join()

    def save(self, step: int, state: dict[str, Any], config: str, tokenizer: Any = None) -> Path:
        """Write the checkpoint of `step`; returns its folder. UserError when the disk does not take it.

        In the background that error comes from the next `save` or `wait`, and `failed` tells of it before.
        """
        self.wait()
        held = self.engine.state_dict()
        text = json.dumps({"step": step, "best": self.best, **held.pop("engine"), **state}, indent=1)
        if self.mesh is None:
            self._make_room(step)
        else:
            self.mesh.by_first(lambda: self._make_room(step))
        if not self.config.asynchronous:
            self._write(step, held, text, config, tokenizer)
        else:
            copied = self._copied(held)
            self._begin(lambda: self._write(step, copied, text, config, tokenizer))
        return layout.step_folder(self.run, step)

    @property
    def failed(self) -> bool:
        """Whether the last checkpoint that went to the background could not be written."""
        return self._error is not None

    def wait(self) -> None:
        """Until nothing is being written; raises what went wrong with it."""
        if self._writer is not None:
            self._writer.join()
            self._writer = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _copied(self, tensors: dict[str, Any]) -> dict[str, Any]:
        """A copy in the CPU's memory, on a CPU too: the step that follows changes the live tensors.

        It is in buffers that stay from one checkpoint to the next, and that are pinned where there is a GPU.
        """
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        if self._stager is None:
            gpu = torch.cuda.is_available()
            self._stager = DefaultStager(
                StagingOptions(
                    use_pinned_memory=gpu, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=gpu
                )
            )
        return cast(dict[str, Any], self._stager.stage(tensors))

    def _begin(self, write: Callable[[], None]) -> None:
        def work() -> None:
            try:
                write()
            except Exception as error:
                self._error = error

        # A daemon: a second signal ends the process at once, and leaves a hidden folder that the next save sweeps away.
        self._writer = threading.Thread(target=work, name="checkpoint", daemon=True)
        self._writer.start()

    def _make_room(self, step: int) -> None:
        """An empty hidden folder for the checkpoint of `step`."""
        final, temporary = self._folders(step)
        with _disk(final, temporary):
            for left in self.run.glob(".step-*.tmp"):  # of a process that was killed
                _remove(left)
            temporary.mkdir(parents=True)

    def _folders(self, step: int) -> tuple[Path, Path]:
        """(where a checkpoint will be, where it is written)."""
        final = layout.step_folder(self.run, step)
        return final, self.run / f".{final.name}.tmp"

    def _write(self, step: int, tensors: dict[str, Any], state: str, config: str, tokenizer: Any) -> None:
        final, temporary = self._folders(step)
        with _disk(final, temporary):
            self._write_tensors(temporary, tensors)  # back when all processes have written theirs
            if self.mesh is not None and not self.mesh.first:
                return
            self.engine.model.config.save_pretrained(temporary / "hf")
            # As it was read: what is not valid in it is no reason to lose a checkpoint.
            generation = self.engine.model.generation_config.to_json_string()
            (temporary / "hf" / "generation_config.json").write_text(generation, encoding="utf-8")
            if tokenizer is not None:
                tokenizer.save_pretrained(temporary / "hf")
            (temporary / "config.yaml").write_text(config, encoding="utf-8")
            (temporary / "state.json").write_text(state, encoding="utf-8")
            manifest = {"format": 1, "step": step, "files": layout.describe(temporary)}
            (temporary / layout.MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
            for path in (*temporary.rglob("*"), temporary):
                _flush(path)
            self._set_aside(step)
            os.replace(temporary, final)
            _flush(self.run)
        self._forget_old()
        self._link_best()

    def mark_best(self, best: Best) -> None:
        """`best`, whose checkpoint has been saved, is the lowest bound so far."""
        self.wait()
        self.best = best
        self._link_best()

    def load(self, folder: Path) -> dict[str, Any]:
        """Verify `folder`, restore the engine from it in place and return its JSON state.

        The optimiser's settings stay the config's. EMA weights and masters that it lacks start from the weights.
        """
        layout.verify(folder)
        table = distcp.contents(folder)
        saved = without_absent(tensors(self.engine), table.names)
        distcp.load(saved, folder, table)
        plain = layout.state_of(folder)
        with layout.taking_up(folder):
            self.engine.load_state_dict({**saved, "engine": plain})
        self.best = Best(*plain["best"]) if plain.get("best") else None
        return plain

    def _write_tensors(self, folder: Path, tensors: dict[str, Any]) -> None:
        import torch.distributed.checkpoint as dcp

        group = None if self.mesh is None else self.mesh.saving
        with passing():
            dcp.save(tensors, checkpoint_id=folder, process_group=group, no_dist=self.mesh is None)

    def _set_aside(self, step: int) -> None:
        """Checkpoints at or after `step` belong to a history this run left when it went on from an earlier one."""
        for later in layout.saved_steps(self.run):
            if later >= step:
                folder = layout.step_folder(self.run, later)
                aside = folder.with_name(folder.name + ".replaced")
                _remove(aside)
                os.replace(folder, aside)

    def _forget_old(self) -> None:
        steps = layout.saved_steps(self.run)
        for step in steps[: -self.config.keep] if self.config.keep else []:
            if self.best is not None and step == self.best.step:
                continue
            # Renamed first: a half-deleted folder must not look like a checkpoint.
            folder = layout.step_folder(self.run, step)
            doomed = folder.with_name(f".{folder.name}.tmp")
            os.replace(folder, doomed)
            _remove(doomed)

    def _link_best(self) -> None:
        """Point `best` to the best checkpoint; where there is none (any more) the link goes."""
        link = self.run / layout.BEST
        target = None if self.best is None else layout.step_folder(self.run, self.best.step)
        if target is None or not target.is_dir():
            link.unlink(missing_ok=True)
            return
        with replacing(link) as temporary:
            temporary.symlink_to(target.name)


def _remove(folder: Path) -> None:
    """A folder with what is in it; of a link the link alone."""
    if folder.is_symlink():
        folder.unlink()
    else:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _disk(final: Path, temporary: Path) -> Iterator[None]:
    """Turn what the disk refuses into one sentence, and leave no half-written folder."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except BaseException as error:  # CheckpointException is no Exception
        shutil.rmtree(temporary, ignore_errors=True)
        if not isinstance(error, RuntimeError | CheckpointException) and disk_refusal(error) is None:
            raise
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
    if refusal := disk_refusal(error):
        return refusal
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def _flush(path: Path) -> None:
    """Make a file last or, of a folder, the names in it: POSIX flushes both alike."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
