"""The trainer: a batch, its rows, forward and backward, a clipped update, and what is written down about it.

Everything random is a function of (seed, step) or (seed, document): a resumed run repeats the uninterrupted one bit for
bit. The gradient of a batch, on any number of ranks, is in `unmask.engine.gradients`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from unmask import tracking
from unmask.config import Config, ParallelConfig, rules
from unmask.config.rules import Known
from unmask.engine import activations, optimizers, schedules
from unmask.engine.ema import Ema
from unmask.engine.gradients import Gradients
from unmask.engine.guards import FiniteGuard
from unmask.engine.levels import LevelLosses
from unmask.engine.mask_noise import MaskNoise
from unmask.engine.masters import masters
from unmask.engine.noise_scale import NoiseScale
from unmask.engine.offload import Offload, Streams
from unmask.engine.scaling import SharedScaler
from unmask.errors import UserError, as_path
from unmask.evaluation import shared
from unmask.files import write_whole
from unmask.models import routing
from unmask.models.decoder import decoder_layers
from unmask.objectives.base import needs_mask
from unmask.parallel import apply, mesh, shard
from unmask.parallel import replicas as data
from unmask.parallel.pipeline import Pipeline
from unmask.parallel.stages import layout_of, resolved
from unmask.processes import launched
from unmask.rows import Document, Rows
from unmask.runs import folder as layout
from unmask.runs import record as records
from unmask.runs.lock import alone_in
from unmask.runs.mending import mend
from unmask.runs.resume import changes, continued
from unmask.runs.save import Best, Checkpoints
from unmask.tracking import Record, Start, Tracker, console
from unmask.tracking.jsonl import reached
from unmask.training import opening, setup
from unmask.training.batches import grouped, micro_batches
from unmask.training.callbacks import Callback, Function, adopted
from unmask.training.determinism import deterministic
from unmask.training.evaluate import evaluate, numbers
from unmask.training.loader import Loader
from unmask.training.profile import Profile
from unmask.training.signals import Interrupt
from unmask.training.speed import Meter, memory
from unmask.training.spikes import SpikeGuard
from unmask.training.summary import Summary

if TYPE_CHECKING:
    from unmask.evaluation.bound import Bound
    from unmask.objectives import Objective

#: How to make what `Trainer` takes.
MAKE_ONE: dict[type, str] = {
    Config: "make one with Config.load(path) or Config.parse({...})",
    ParallelConfig: "write ParallelConfig(...)",
}


class _Abandoned(Exception):
    """A signal came during an evaluation, which the resumed run repeats."""


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
        for name, value, kind in (("config", config, Config), ("parallel_config", parallel_config, ParallelConfig)):
            if value is not None and not isinstance(value, kind):
                raise UserError(f"Trainer: {name} is a {kind.__name__}, not {value!r}; {MAKE_ONE[kind]}")
        if model_name is not None:
            model_name = as_path(model_name, "a model (model_name)")
        if checkpoint_path is not None:
            checkpoint_path = str(checkpoint_path and as_path(checkpoint_path, "a run (checkpoint_path)"))
        self.callbacks = adopted(callbacks)
        self.repeat = repeat
        #: Why a launcher has started this run again.
        self.restarted: str | None = None
        config = config or (Config() if repeat is None else repeat.config)
        self.config = _replaced(config, "checkpoint", path=checkpoint_path)
        if model_name is not None:
            self.config = _replaced(self.config, "model", name=str(model_name))
            self.config.model.config = None
        if parallel_config is not None:
            self.config = self.config.model_copy(update={"parallel": parallel_config})
        rules.check(Known(parallel=self.config.parallel))

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
        of pathlib.Path or of {"path": ..., "weight": ...}, which are mixed; val_dataset also {name: any of these};
        epochs: passes over the data (then config.training.steps does not count); batch_size: packs of data.pack_tokens
        tokens per update.
        """
        self._configure(train_dataset, val_dataset, epochs, batch_size)
        with deterministic(self.config.training.deterministic):
            with mesh.started(self.config.parallel, setup.device_of(self.config)) as self.mesh:
                self._train(train_dataset, val_dataset)
        return Summary(
            step=self.step,
            steps=self.steps,
            loss=self._loss,
            path=self.run.path,
            checkpoint=self._saved,
            interrupted=self._signal if self._unfinished() else None,
            validations=self._bounds,
        )

    def _train(self, train_dataset: Any, val_dataset: Any) -> None:
        self.run = self.mesh.together(lambda: setup.prepare(self.config, train_dataset, val_dataset))
        self.config = self.run.config
        self.mesh.agree(
            {**self.run.identity.exact(), **self.config.model_dump(mode="json", exclude={"training": {"device"}})}
        )
        notes = self.mesh.together(self._compare)
        self._build()
        with ExitStack() as held:
            self.mesh.by_first(lambda: held.enter_context(alone_in(self.run.path)))
            resumed = self.mesh.together(self._resume)
            changed = self.mesh.together(lambda: changes(resumed, self.config)) if resumed else []
            self.mesh.by_first(lambda: notes.extend(mend(self.run.path, self.step, self.config.log.every)))
            self.mesh.by_first(self._write_config)
            self._run([*([f"going on from {resumed}", *changed] if resumed else []), *notes])

    def _compare(self) -> list[str]:
        """What may make this run another one than the one it repeats."""
        return [] if self.repeat is None else records.compare(self.repeat, self.run.identity, self.mesh.size)

    def _run(self, notes: list[str]) -> None:
        with ExitStack() as held:
            self._interrupt = held.enter_context(Interrupt())
            for each in (self.mesh.naming(), self._tracking(), self.checkpoints, closing(self.loader)):
                held.enter_context(each)
            console.tell(self._trackers, opening.header(self.run, self.step, self.mesh))
            for note in [*notes, *self.run.notes()]:
                self.message(note)
            self._log_restart()
            self._loop()
            self.profile.close(self.step, self.message)
            self._by_writers(self.checkpoints.wait)

    def stop(self) -> None:
        """End the run after the step in progress; it is saved and can be continued."""
        self._stopping = True

    def set_steps(self, steps: int) -> None:
        """Change the length of the run; the schedules follow from the next step on."""
        self.steps = max(steps, self.step)
        # The epochs that the run was to have, left beside steps, would be refused in its config.yaml.
        self.config = self.run.config = _replaced(self.config, "training", steps=self.steps, epochs=1.0)
        self._write_config()

    def message(self, text: str) -> None:
        """A sentence for whoever watches the run."""
        for tracker in self._trackers:
            tracker.message(text)

    # setup

    def _configure(self, train: Any, validation: Any, epochs: float | None, batch_size: int | None) -> None:
        self.config = _replaced(self.config, "training", epochs=epochs, batch_size=batch_size)
        if epochs is not None:
            self.config.training.steps = None
        paths = {"train": train, "validation": validation}
        found = {key: setup.paths_of(value) for key, value in paths.items()}
        named: dict[str, Any] = {key: value for key, value in found.items() if value is not None}
        if isinstance(validation, dict) and all(isinstance(value, str | Path) for value in validation.values()):
            named["validation"] = {name: str(value) for name, value in validation.items()}
        parsed = Config.parse(
            _replaced(self.config, "data", **named).model_dump(warnings=False), "arguments of Trainer"
        )
        self.config = resolved(parsed)

    def _build(self) -> None:
        """The parts of a run that have a state of their own."""
        run, training = self.run, self.config.training
        self.step, self.steps = 0, run.steps
        groups = optimizers.named_groups(run.model)
        self.objective: Objective = run.objective
        self._parallelise()
        self.optimizer = optimizers.build(run.model, self.config.optimizer)
        self._peaks = [group.get("lr", self.config.optimizer.learning_rate) for group in self.optimizer.param_groups]
        self.ema = Ema(run.model, training.ema, masters(self.optimizer)) if training.ema else None
        half = training.precision == "fp16"
        if not self.mesh.divided:
            self.scaler = torch.amp.GradScaler(run.device.type, enabled=half)
        else:
            self.scaler = SharedScaler(run.device.type, self.mesh.group, enabled=half)
        self.guard, self.spikes = FiniteGuard(), SpikeGuard(training.spike)
        self.levels = LevelLosses(self.config.log.levels)
        self.noise = NoiseScale() if self.config.log.noise_scale and rules.unmeasured(self.config) is None else None
        # Of one micro-batch a replica, the gradient of a part of the step is what goes into the sum.
        single = training.batch_size == training.micro_batch * self.mesh.sizes["replicate"]
        data.measure(self.module, self.noise is not None and single)
        passes = -(-training.batch_size // (training.micro_batch * self.mesh.part[1]))
        self.gradients = Gradients(
            *(run.row_model, self.mesh, self.module, run.arithmetic, passes),
            *(self.scaler, self.levels, self.noise),
        )
        self.meter = Meter(run.device, run.dtype)
        self.loader = Loader(self._load)
        self.profile = Profile(self.config.log.profile, run.path, self.mesh.rank, run.device)
        self.checkpoints = Checkpoints(
            *(run.path, run.model, self.optimizer, self.config.checkpoint, self.ema),
            mesh=self.mesh if self.mesh.divided else None,
            groups=groups,
        )
        self._trackers: list[Tracker] = tracking.build(self.config.log, self.message) if self.mesh.first else []
        self._stopping = False
        self._signal: int | None = None
        self._evaluated: int | None = None  # the step of the last evaluation
        self._loss: float | None = None
        self._saved: Path | None = None
        self._bounds: dict[str, Bound] = {}

    def _parallelise(self) -> None:
        """`module`, which a step calls. First of all: FSDP2 puts other parameters in place of the model's."""
        run, training = self.run, self.config.training
        self._mask_noise = None
        if self.config.model.mask_noise_steps:
            embedding, mask = run.model.get_input_embeddings(), needs_mask(run.objective)
            steps = self.config.model.mask_noise_steps
            self._mask_noise = MaskNoise(embedding, mask, steps, training.seed)
        away = Offload(Streams(run.device)) if training.offload_activations else None
        activations.apply(run.model, training.checkpointing, away)
        if self.config.model.compile:
            for layer in decoder_layers(run.model):
                layer.compile(fullgraph=True)
        elif self.mesh.sizes["pipeline"] == 1:
            group = None if self.mesh.axis is None else self.mesh.axis.wire.groups[0]
            run.row_model.routing = routing.watch(
                run.model, self.config.model.balance_loss, self.config.model.z_loss, group
            )
        self.module: Any
        pipe = self._pipe() if self.mesh.sizes["pipeline"] > 1 else None
        self.module, self.block_axis = apply.parallelise(
            run.row_model, self.mesh, self.config.parallel, run.dtype, pipe
        )
        self.mesh.together(run.fill)

    def _pipe(self) -> apply.Pipe:
        """Where the layers go: as the config says, or by what rank 0 has measured."""
        parallel, found = self.config.parallel, None
        if self.mesh.first and parallel.stage_layers is None:
            found = setup.balanced(self.run)
        layers = parallel.stage_layers or self.mesh.gathered(found)[0]
        return apply.Pipe(layout_of(parallel, layers), self.run.arithmetic)

    def _write_config(self) -> None:
        try:
            self.run.path.mkdir(parents=True, exist_ok=True)
            write_whole(self.run.path / "config.yaml", self.config.dump())
            if self._loss is None and self.step < self.steps:
                records.write(self.run.identity, self.step, self.mesh.size)
        except OSError as error:
            raise UserError(f"checkpoint.path={self.run.path}: cannot be written: {error.strerror}") from None

    @contextmanager
    def _tracking(self) -> Iterator[None]:
        logged = reached(self.run.path / "log.jsonl") if self.mesh.first else {}
        start = Start(self.run.path, self.step, self.steps, self.config.model_dump(mode="json"), logged)
        try:
            for tracker in self._trackers:
                tracker.start(start)
            yield
        finally:
            for tracker in self._trackers:
                tracker.close()

    # the loop

    def _loop(self) -> None:
        if self._evaluation_due():
            self._evaluate()
        while self.step < self.steps and not self._ending():
            with self.profile.around(self.step, self.message):
                record = self._train_step()
            if self.spikes.sees(record["loss"]) and self._rolled_back(record["loss"]):
                if self._evaluation_due():  # as a resumed run does: the checkpoint is older than it
                    self._evaluate()
                continue
            if self.step % self.config.log.every == 0 or self.step == self.steps:
                record |= {**self.levels.read(), **self.meter.read(), **self._ranks(), "time": time.time()}
                self._log(record)
            for callback in self.callbacks:
                callback.on_step(self, record)
            self._agree_on_signal()
            every = self.config.checkpoint.every
            if self.step == self.steps or self._ending() or (every and self.step % every == 0):
                self._save()
            # Saved first: a run that dies while it evaluates repeats the evaluation, not the steps.
            if self._evaluation_due() and not self._ending():
                self._evaluate()
                if self._ending():
                    self._save_once()

    def _train_step(self) -> Record:
        """One update. A step whose loss or gradient is not finite changes no weight, but counts: data, noise and
        learning rate are functions of the step alone."""
        run, training = self.run, self.config.training
        self.meter.start()
        batch, objective, micro = self.loader.get((self.step, self.steps, self.spikes.offset, self.objective))
        if self.step + 1 < self.steps:
            self.loader.ahead((self.step + 1, self.steps, self.spikes.offset, self.objective))
        noisy = needs_mask(objective) if objective.places_mask else None
        self.levels.start(micro, grouped(batch, training.micro_batch, self._part), noisy)
        share = schedules.multiplier(self.config.schedule, self.step, self.steps)
        for group, peak in zip(self.optimizer.param_groups, self._peaks, strict=True):
            group["lr"] = share * peak
        if self._mask_noise is not None:
            self._mask_noise.at(self.step)

        self.module.train()
        loss, metrics = self._forward_backward(objective, micro)
        self.scaler.unscale_(self.optimizer)
        norm = self.gradients.clip(training.clip)
        update = self.guard.allows(loss, norm, overflow_is_scale=self.scaler.is_enabled())
        if update:
            self._update(norm)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self._loss = loss

        tokens = sum(len(document) for pack in batch for document in pack)
        self.meter.add(tokens, metrics.pop("flops") / self.mesh.size)
        scale = self.scaler.get_scale() if self.scaler.is_enabled() else None
        self.guard.check(self.step, loss, norm, [document.sample for pack in batch for document in pack], scale)
        record = {
            "kind": "step",
            "step": self.step,
            "steps": self.steps,
            "epoch": (self.step + self.spikes.offset) * training.batch_size / len(run.packs),
            "loss": loss,
            "learning_rate": share * self.config.optimizer.learning_rate,
            "grad_norm": norm,
            **metrics,
            "tokens": tokens,
            **self.objective.moving(self.step - 1, self.steps),
        }
        record |= run.packs.tokens_of(batch)
        if own_rate := self.config.optimizer.muon_learning_rate:
            record["muon_learning_rate"] = share * own_rate
        if self.noise is not None:
            record["noise_scale"] = self.noise.value
        return record if update else record | self._skipped(norm)

    def _load(self, key: tuple[int, int, int, Objective]) -> tuple[list[list[Document]], Objective, list[Rows]]:
        """(packs, the objective as it stands, this replica's rows) of step `step` of `steps`, a function of the key."""
        step, steps, offset, objective = key
        batch, training = self.run.sampler.batch(step + offset), self.config.training
        present = objective.at(step, steps)
        return batch, present, micro_batches(present, batch, training.seed, training.micro_batch, self._part)

    @property
    def _part(self) -> tuple[int, int]:
        """(r, R): this process computes part r of R of a batch."""
        return self.mesh.part

    def _update(self, norm: float) -> None:
        """The optimiser's step, and what follows the weights and the gradient."""
        self.scaler.step(self.optimizer)
        if self.ema is not None:
            self.ema.update(self.step)
        if self.noise is not None:
            self.noise.update(norm, self.config.training.batch_size)

    def _forward_backward(self, objective: Objective, micro: list[Rows]) -> tuple[float, dict[str, float]]:
        return self.gradients.accumulate(objective, micro)

    def _skipped(self, norm: float) -> Record:
        why = "the gradient overflowed" if self.scaler.is_enabled() else f"the gradient norm is {norm}"
        self.message(f"step {self.step}: {why}, so the update is skipped")
        return {"skipped": True}

    def _log_restart(self) -> None:
        """That a launcher has started the run again by itself; it has said so to the user."""
        restarts, limit = launched.restarts()
        if restarts:
            record = {"kind": "restart", "step": self.step, "steps": self.steps, "restarts": restarts, "limit": limit}
            self._log(record | {"reason": self.restarted or "", "time": time.time()})

    def _log(self, record: Record) -> None:
        for tracker in self._trackers:
            tracker.log(record)

    def _ranks(self) -> Record:
        """What each rank did since the last reading, in lists by rank; nothing for one process."""
        if self.mesh.size == 1:
            return {}
        sent, waited = self.mesh.traffic.read()
        mine = {"rank_sent": sent, "rank_waited": waited, "rank_memory": memory(self.run.device)}
        if self.block_axis is not None:
            mine |= self.block_axis.read()
        if isinstance(self.module, Pipeline):
            mine |= self.module.read()
        everyone = self.mesh.gathered(mine)
        return {key: [theirs[key] for theirs in everyone] for key in mine}

    def _agree_on_signal(self) -> None:
        """A signal that one process received ends the run on all of them, after the same step; so does a checkpoint
        that could not be written meanwhile."""
        mine = [self._stopping, self._interrupt.signal or 0, self.checkpoints.failed]
        stop, number, failed = self.mesh.largest([float(value) for value in mine])
        self._stopping, self._signal = bool(stop), int(number) or None
        if failed:
            self._by_writers(self.checkpoints.wait)

    def _ending(self) -> bool:
        if self.mesh.size == 1:
            self._signal = self._interrupt.signal
        return self._stopping or self._signal is not None

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
            self._agree_on_signal()
            if self._signal is not None:
                raise _Abandoned

        averaged = self.ema is not None and self.config.evaluation.ema
        try:
            with self.ema.applied() if self.ema is not None and averaged else nullcontext():
                try:
                    self._bounds, self.objective = evaluate(
                        *(self.run, self.objective, self.step, self.steps, watch, shared(self.mesh)),
                        self.module if isinstance(self.module, Pipeline) else None,
                    )
                finally:
                    shard.rest(self.module)
        except _Abandoned:
            self.message(f"step {self.step}: evaluation given up; the continued run makes it")
            return
        self._evaluated = self.step
        record = {"kind": "evaluation", "step": self.step, "steps": self.steps, **numbers(self._bounds)}
        record |= ({"ema": True} if averaged else {}) | {"time": time.time()}
        self._log(record)
        # One number for all processes: they must agree on whether it is the best.
        best, bound = self.checkpoints.best, self.mesh.largest([record["nats_per_token"]])[0]
        if self.config.checkpoint.best and (best is None or bound < best.bound):
            self._save_once()
            self.mesh.by_first(lambda: self.checkpoints.mark_best(Best(self.step, bound)))
            self.checkpoints.best = Best(self.step, bound)
        for callback in self.callbacks:
            callback.on_evaluation(self, record)
        self._agree_on_signal()

    # checkpoints

    def _save(self) -> None:
        state = {
            "steps": self.steps,
            "objective": self.objective.model_dump(mode="json"),
            "streak": self.guard.streak,
            "overflows": self.guard.overflows,
            "exact": self.run.identity.exact(),
            **{name: part.state_dict() for name, part in self._parts().items()},
        }
        config, tokenizer = self.config.dump(), self.run.tokenizer
        self._by_writers(lambda: self.checkpoints.save(self.step, state, config, tokenizer))
        self._saved = layout.step_folder(self.run.path, self.step)
        for callback in self.callbacks:
            callback.on_save(self, self._saved)
        self._agree_on_signal()

    def _by_writers(self, action: Callable[[], Any]) -> None:
        """Done by the first process, where it holds the whole model, else by all."""
        if not self.mesh.divided:
            self.mesh.by_first(action)
        else:
            self.mesh.together(action)

    def _save_once(self) -> None:
        if self._saved != layout.step_folder(self.run.path, self.step):
            self._save()

    def _parts(self) -> dict[str, Any]:
        """What has a state of its own, by its name in state.json."""
        parts = {"scaler": self.scaler, "spikes": self.spikes, "levels": self.levels}
        return parts if self.noise is None else {**parts, "noise_scale": self.noise}

    def _resume(self) -> Path | None:
        """Take up the newest checkpoint (or checkpoint.step) of this run's folder, if there is one."""
        folder = continued(self.run.identity)
        if folder is not None:
            self._restore(folder)
        return folder

    def _restore(self, folder: Path) -> None:
        """Everything as it was when the checkpoint was made."""
        state = self.checkpoints.load(folder)
        self.step, self._saved = state["step"], folder
        with layout.taking_up(folder):
            self.objective = type(self.objective)(**state["objective"], **self.objective.bound())
            self.guard = FiniteGuard(state.get("streak", 0), state.get("overflows", 0))
            for name, part in self._parts().items():
                if state.get(name):  # what was switched on since begins anew
                    part.load_state_dict(state[name])

    def _rolled_back(self, loss: float) -> bool:
        """Go back to the last checkpoint and past the data since; False where there is none yet."""
        if self._saved is None:
            self.message(f"step {self.step}: the loss jumped to {loss:.4g}, and there is no checkpoint to go back to")
            return False
        self.spikes.check(self.step, loss)
        self._by_writers(self.checkpoints.wait)
        step, batches = self.step, self.step + self.spikes.offset
        limit, rollbacks = self.spikes.limit, self.spikes.rollbacks + 1
        folder = self._saved
        self.mesh.together(lambda: self._restore(folder))
        self.spikes.rollbacks, self.spikes.offset = rollbacks, batches - self.step
        self.message(
            f"step {step}: the loss jumped to {loss:.4g} (limit {limit:.4g}): back at {folder.name}, past the data "
            f"since (rollback {rollbacks} of {self.config.training.spike.rollbacks})"
        )
        record = {
            "kind": "rollback",
            "step": self.step,
            "steps": self.steps,
            "from": step,
            "loss": loss,
            "limit": limit,
        }
        self._log(record | {"rollbacks": rollbacks, "time": time.time()})
        return True


def _replaced(config: Config, section: str, **values: Any) -> Config:
    """A copy of the config in which the values that are not None replace the section's."""
    given = {key: value for key, value in values.items() if value is not None}
    return config.model_copy(update={section: getattr(config, section).model_copy(update=given)})
