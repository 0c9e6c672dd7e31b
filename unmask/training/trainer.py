"""The trainer: the loop of a run. Its source gives a step's rows, its engine makes the update, and both are recorded.

Everything random is a function of (seed, step) or (seed, document): a resumed run repeats the uninterrupted one bit for
bit. What an update is, on any number of ranks, is in `unmask.engine`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, closing, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unmask.config import Config, ParallelConfig
from unmask.engine.engine import Engine
from unmask.engine.optim import schedules
from unmask.parallel import mesh
from unmask.runs import record as records
from unmask.runs.lock import alone_in
from unmask.runs.mending import mend
from unmask.runs.resume import changes
from unmask.runs.save import Best
from unmask.tracking import Record, Start
from unmask.tracking.jsonl import reached
from unmask.training import opening, setup
from unmask.training.arguments import configured, replaced, with_data
from unmask.training.callbacks import Callback, Function, adopted
from unmask.training.determinism import deterministic
from unmask.training.evaluate import Abandoned, evaluate, numbers
from unmask.training.journal import Journal
from unmask.training.profile import Profile
from unmask.training.saving import Saving
from unmask.training.signals import Ending
from unmask.training.source import Batch, Loader, Step, asked
from unmask.training.speed import Meter, of_ranks
from unmask.training.spikes import SpikeGuard
from unmask.training.summary import Summary

if TYPE_CHECKING:
    from unmask.evaluation.bound import Bound


class Trainer:
    """Trains a model, on one process or on as many as `parallel` asks for.

    Trainer("folder", checkpoint_path="runs/a").train(train_dataset="data/", epochs=1, batch_size=8), or
    Trainer(config=Config.load("run.yaml")).train(). Explicit arguments win over the config's.

    model_name: a folder with config.json, or a .gguf file; checkpoint_path: the run's folder, from which an earlier
    run is continued; callbacks: functions called after every step, or `unmask.Callback` objects; repeat: another run
    that this one does again (`record.again`). Bad input raises UserError, a sentence.
    """

    def __init__(
        self,
        model_name: str | Path | None = None,
        *,
        parallel_config: ParallelConfig | None = None,
        checkpoint_path: str | Path | None = None,
        config: Config | None = None,
        callbacks: Sequence[Callback | Function] = (),
        repeat: records.Repeat | None = None,
    ):
        if config is None and repeat is not None:
            config = repeat.config
        self.config = configured(config, model_name, parallel_config, checkpoint_path)
        self.callbacks, self.repeat = adopted(callbacks), repeat
        #: Why a launcher has started this run again.
        self.restarted: str | None = None

    def train(
        self,
        train_dataset: Any = None,
        val_dataset: Any = None,
        *,
        epochs: float | None = None,
        batch_size: int | None = None,
    ) -> Summary:
        """Train to the end, or until a signal, and save.

        train_dataset, val_dataset: a path, a list of texts or records, or a datasets.Dataset; train_dataset also a list
        of pathlib.Path or of {"path": ..., "weight": ...}, which are mixed, or a `Source` of rows; val_dataset also
        {name: any of these}; epochs: passes over the data (then config.training.steps does not count); batch_size:
        packs of data.pack_tokens tokens per update.
        """
        self.config = with_data(self.config, train_dataset, val_dataset, epochs, batch_size)
        with deterministic(self.config.training.deterministic):
            with mesh.started(self.config.parallel, setup.device_of(self.config)) as self.mesh:
                self._train(train_dataset, val_dataset)
        interrupted = self.ending.number if self._unfinished() else None
        return Summary(
            *(self.step, self.steps, self._loss, self.run.path, self.saving.last),
            *(interrupted, self._bounds),
        )

    @property
    def step(self) -> int:
        """Updates so far."""
        return self.engine.step

    def stop(self) -> None:
        """End the run after the step in progress; it is saved and can be continued."""
        self.ending.stop = True

    def set_steps(self, steps: int) -> None:
        """Change the length of the run; the schedules follow from the next step on."""
        self.steps = max(steps, self.step)
        # The epochs that the run was to have, left beside steps, would be refused in its config.yaml.
        self.config = self.run.config = replaced(self.config, "training", steps=self.steps, epochs=1.0)
        self._write_config()

    def message(self, text: str) -> None:
        """A sentence for whoever watches the run."""
        self.journal.message(text)

    # the beginning

    def _train(self, train_dataset: Any, val_dataset: Any) -> None:
        mesh = self.mesh
        self.run = mesh.together(lambda: setup.prepare(self.config, train_dataset, val_dataset))
        self.config, self.steps, self.objective = self.run.config, self.run.steps, self.run.objective
        mesh.agree(
            {**self.run.identity.exact(), **self.config.model_dump(mode="json", exclude={"training": {"device"}})}
        )
        # What may make this run another one than the one it repeats.
        notes = mesh.together(lambda: records.compare(self.repeat, self.run.identity, mesh.size))
        self._build()
        with ExitStack() as held:
            mesh.by_first(lambda: held.enter_context(alone_in(self.run.path)))
            resumed, self.objective = mesh.together(lambda: self.saving.resume(self.objective))
            changed = mesh.together(lambda: changes(resumed, self.config)) if resumed else []
            mesh.by_first(lambda: notes.extend(mend(self.run.path, self.step, self.config.log.every)))
            mesh.by_first(self._write_config)
            notes = [*([f"resuming from {resumed}", *changed] if resumed else []), *notes, *self.run.notes()]
            logged = reached(self.run.path / "log.jsonl") if mesh.first else {}
            start = Start(self.run.path, self.step, self.steps, self.config.model_dump(mode="json"), logged)
            for each in (self.ending, mesh.naming(), self.journal.open(start), self.checkpoints, closing(self.loader)):
                held.enter_context(each)
            self.journal.header(opening.header(self.run, self.step, mesh))
            for note in notes:
                self.message(note)
            self.journal.restart(self.step, self.steps, self.restarted or "")
            self._loop()
            self.profile.close(self.step, self.message)
            self.mesh.by_writers(self.checkpoints.wait)

    def _build(self) -> None:
        """The parts of a run that have a state of their own."""
        run, config = self.run, self.config
        first = opening.first(run) if config.parallel.pipeline_stages > 1 else None
        example = None if first is None else (first.objective, first.micro[0])
        self.engine = Engine(run.loaded, self.mesh, config, run.row_model, example)
        run.source.begin(self.engine)
        self.loader: Loader[Step, Batch] = Loader(lambda step: asked(run.source, step, self.engine.part))
        self.spikes = SpikeGuard(config.training.spike)
        self.meter = Meter(run.device, run.precision.dtype)
        self.profile = Profile(config.log.profile, run.path, self.mesh.rank, run.device)
        self.saving = Saving(run, self.engine, self.spikes)
        self.checkpoints = self.saving.checkpoints
        self.journal, self.ending = Journal(config.log, self.mesh), Ending(self.mesh)
        self._evaluated: int | None = None  # the step of the last evaluation
        self._loss: float | None = None
        self._bounds: dict[str, Bound] = {}

    def _write_config(self) -> None:
        fresh = self._loss is None and self.step < self.steps
        records.begin(self.run.identity, self.step, self.mesh.size if fresh else None)

    # the loop

    def _loop(self) -> None:
        if self._evaluation_due():
            self._evaluate()
        while self.step < self.steps and not self.ending.near:
            with self.profile.around(self.step, self.message):
                record = self._train_step()
            if self.spikes.sees(record["loss"]) and self._rolled_back(record["loss"]):
                if self._evaluation_due():  # as a resumed run does: the checkpoint is older than it
                    self._evaluate()
                continue
            if self.step % self.config.log.every == 0 or self.step == self.steps:
                measured = {**self.engine.levels.read(), **self.meter.read(), **of_ranks(self.engine)}
                record = self.journal.log(**{**record, **measured})
            for callback in self.callbacks:
                callback.on_step(self, record)
            self._agree()
            every = self.config.checkpoint.every
            if self.step == self.steps or self.ending.near or (every and self.step % every == 0):
                self._save()
            # Saved first: a run that dies while it evaluates repeats the evaluation, not the steps.
            if self._evaluation_due() and not self.ending.near:
                self._evaluate()
                if self.ending.near:
                    self._save_once()

    def _train_step(self) -> Record:
        """One update. A step whose loss or gradient is not finite changes no weight, but counts: data, noise and
        learning rate are functions of the step alone."""
        engine = self.engine
        self.meter.start()
        batch = self.loader.get(self._asked(self.step))
        if self.step + 1 < self.steps and self.run.source.ahead:
            self.loader.ahead(self._asked(self.step + 1))
        share = schedules.multiplier(self.config.schedule, self.step, self.steps)
        moving = self.objective.moving(self.step, self.steps)
        losses = engine.forward_backward(batch.objective, batch.micro)
        update = engine.update([share * rate for rate in engine.rates])
        self._loss = losses.loss

        self.meter.add(batch.tokens, losses.flops / self.mesh.size)
        scale = engine.scaler.get_scale() if engine.scaler.is_enabled() else None
        engine.guard.check(self.step, losses.loss, update.norm, batch.samples, scale)
        record = {"kind": "step", "step": self.step, "steps": self.steps, **batch.columns, "loss": losses.loss}
        record |= {"learning_rate": share * self.config.optimizer.learning_rate, "grad_norm": update.norm}
        record |= {**losses.metrics, "tokens": batch.tokens, **moving}
        if muon_rate := self.config.optimizer.muon_learning_rate:
            record["muon_learning_rate"] = share * muon_rate
        if engine.noise is not None:
            record["noise_scale"] = engine.noise.value
        if not update.made:
            why = "the gradient overflowed" if scale is not None else f"the gradient norm is {update.norm}"
            self.message(f"step {self.step}: {why}, so the update is skipped")
            record["skipped"] = True
        return record

    def _asked(self, step: int) -> Step:
        return Step(step, self.steps, self.spikes.offset, self.objective)

    def _agree(self) -> None:
        """All processes end after the same step, also where one could not write a checkpoint meanwhile."""
        if self.ending.agree(self.checkpoints.failed):
            self.mesh.by_writers(self.checkpoints.wait)

    def _unfinished(self) -> bool:
        """Steps are left, or the evaluation after the last."""
        return self.step < self.steps or (self._evaluation_due() and self._evaluated != self.step)

    # evaluation

    def _evaluation_due(self) -> bool:
        every = self.config.evaluation.every
        due = self.step == self.steps or (every > 0 and self.step > 0 and self.step % every == 0)
        return bool(self.run.validation) and due

    def _evaluate(self) -> None:
        """The likelihood bound on the validation packs; `clip: auto` then chooses its noise levels."""

        def watch(done: int, packs: int) -> None:
            self._agree()
            if self.ending.number is not None:
                raise Abandoned

        ema = self.engine.ema is not None and self.config.evaluation.ema
        try:
            with self.engine.averaged() if ema else nullcontext():
                self._bounds, self.objective = evaluate(self.run, self.engine, self.objective, self.steps, watch)
        except Abandoned:
            self.message(f"step {self.step}: evaluation given up; the continued run makes it")
            return
        self._evaluated = self.step
        columns = {**numbers(self._bounds), **({"ema": True} if ema else {})}
        record = self.journal.log("evaluation", self.step, self.steps, **columns)
        # One number for all processes: they must agree on whether it is the best.
        best, bound = self.checkpoints.best, self.mesh.largest([record["nats_per_token"]])[0]
        if self.config.checkpoint.best and (best is None or bound < best.bound):
            self._save_once()
            self.mesh.by_first(lambda: self.checkpoints.mark_best(Best(self.step, bound)))
            self.checkpoints.best = Best(self.step, bound)
        for callback in self.callbacks:
            callback.on_evaluation(self, record)
        self._agree()

    # checkpoints

    def _save(self) -> None:
        folder = self.saving.save(self.objective, self.steps)
        for callback in self.callbacks:
            callback.on_save(self, folder)
        self._agree()

    def _save_once(self) -> None:
        if not self.saving.current:
            self._save()

    def _rolled_back(self, loss: float) -> bool:
        """Go back to the last checkpoint and past the data since; False where there is none yet."""
        step, folder, limit = self.step, self.saving.last, self.spikes.limit
        if folder is None:
            self.message(f"step {step}: the loss jumped to {loss:.4g}, and there is no checkpoint to go back to")
            return False
        self.spikes.check(step, loss)
        self.objective = self.saving.go_back(folder, self.objective)
        rollbacks = self.spikes.rollbacks
        self.message(
            f"step {step}: the loss jumped to {loss:.4g} (limit {limit:.4g}): back at {folder.name}, past the data "
            f"since (rollback {rollbacks} of {self.config.training.spike.rollbacks})"
        )
        columns = {"from": step, "loss": loss, "limit": limit, "rollbacks": rollbacks}
        self.journal.log("rollback", self.step, self.steps, **columns)
        return True
