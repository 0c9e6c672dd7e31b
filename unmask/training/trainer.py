"""The trainer: a batch, its rows, forward and backward, a clipped update, and what is written down about it.

The loss of a step is sum(weight * nll) / sum(count) over all its packs: the counts are known from the rows before the
first backward pass, so accumulation, and later any number of ranks, gives the gradient of the whole batch. Everything
random is a function of (seed, step) or (seed, document): a resumed run repeats the uninterrupted one bit for bit.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from unmask import tracking
from unmask.config import Config, ParallelConfig
from unmask.errors import UserError, as_path
from unmask.models import checkpoints as layout
from unmask.models.check import decoder_layers
from unmask.objectives.base import needs_mask
from unmask.parallel import apply, data, mesh
from unmask.rows import Document, Rows, flops
from unmask.tracking import Record, Start, Tracker
from unmask.tracking.jsonl import reached
from unmask.training import activations, optimizers, schedules, setup
from unmask.training.checkpoint import Checkpoints
from unmask.training.evaluate import evaluate
from unmask.training.guards import FiniteGuard
from unmask.training.lock import alone_in
from unmask.training.mask_noise import MaskNoise
from unmask.training.signals import Interrupt
from unmask.training.speed import Meter, memory

if TYPE_CHECKING:
    from unmask.evaluation.bound import Bound
    from unmask.objectives import Objective

#: Called after every step with the trainer and the step's record; it may call `trainer.stop()`, `trainer.message(...)`.
Callback = Callable[["Trainer", Record], None]


@dataclass(frozen=True)
class Summary:
    """How a run ended. loss: of the last step; interrupted: the number of the signal that ended it, if one did."""

    step: int
    steps: int
    loss: float | None
    path: Path
    checkpoint: Path | None
    interrupted: int | None = None
    validation: Bound | None = None

    def facts(self) -> dict[str, Any]:
        """The summary as plain values, for JSON."""
        bound = self.validation
        return {
            "step": self.step,
            "steps": self.steps,
            "loss": self.loss if self.loss is not None and math.isfinite(self.loss) else None,
            "path": str(self.path),
            "checkpoint": self.checkpoint and str(self.checkpoint),
            "interrupted": self.interrupted,
            "nats_per_token": bound and bound.nats_per_token,
            "standard_error": bound and bound.standard_error,
        }

    def sentence(self, again: str) -> str:
        """What a person wants to know at the end; `again` is the command that continues an interrupted run."""
        if self.interrupted is not None:
            saved = f"saved {self.checkpoint}" if self.checkpoint else "nothing was trained yet"
            return f"stopped at step {self.step} of {self.steps}: {saved}; continue with: {again}"
        if self.loss is None:
            return f"{self.path} is complete at step {self.step}: {self.checkpoint}"
        return f"trained {self.step} steps, loss {self.loss:.4f}: {self.checkpoint}"


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
    run is continued; callbacks: called after every step. Bad input raises UserError, a sentence.
    """

    def __init__(
        self,
        model_name: str | Path | None = None,
        *,
        parallel_config: ParallelConfig | None = None,
        checkpoint_path: str | Path | None = None,
        config: Config | None = None,
        callbacks: Sequence[Callback] = (),
    ):
        for name, value, kind in (("config", config, Config), ("parallel_config", parallel_config, ParallelConfig)):
            if value is not None and not isinstance(value, kind):
                raise UserError(f"Trainer: {name} is a {kind.__name__}, not {value!r}; {MAKE_ONE[kind]}")
        if model_name is not None:
            model_name = as_path(model_name, "a model (model_name)")
        if checkpoint_path is not None:
            checkpoint_path = str(checkpoint_path and as_path(checkpoint_path, "a run (checkpoint_path)"))
        if not isinstance(callbacks, Sequence) or not all(map(callable, callbacks)):
            raise UserError(f"Trainer: callbacks is a list of functions, not {callbacks!r}")
        self.config = _replaced(config or Config(), "checkpoint", path=checkpoint_path)
        if model_name is not None:
            self.config = _replaced(self.config, "model", name=str(model_name))
            self.config.model.config = None
        if parallel_config is not None:
            self.config = self.config.model_copy(update={"parallel": parallel_config})
        self.config.parallel.refuse_unsupported()
        self.callbacks = list(callbacks)

    def train(
        self,
        train_dataset: Any = None,
        val_dataset: Any = None,
        *,
        epochs: float | None = None,
        batch_size: int | None = None,
    ) -> Summary:
        """Train to the end, or until a signal, and save.

        train_dataset, val_dataset: a path, a list of texts or records, or a datasets.Dataset; epochs: passes over the
        data (then config.training.steps does not count); batch_size: packs of data.pack_tokens tokens per update.
        """
        self._configure(train_dataset, val_dataset, epochs, batch_size)
        with mesh.started(self.config.parallel, setup.device_of(self.config)) as self.mesh:
            self._train(train_dataset, val_dataset)
        return Summary(
            step=self.step,
            steps=self.steps,
            loss=self._loss,
            path=self.run.path,
            checkpoint=self._saved,
            interrupted=self._signal if self._unfinished() else None,
            validation=self._bound,
        )

    def _train(self, train_dataset: Any, val_dataset: Any) -> None:
        self.run = self.mesh.together(lambda: setup.prepare(self.config, train_dataset, val_dataset))
        self.mesh.agree(
            {**self.run.fingerprint(), **self.config.model_dump(mode="json", exclude={"training": {"device"}})}
        )
        self._build()
        with ExitStack() as held:
            self.mesh.by_first(lambda: held.enter_context(alone_in(self.run.path)))
            resumed = self.mesh.together(self._resume)
            self.mesh.by_first(self._write_config)
            self._run(resumed)

    def _run(self, resumed: Path | None) -> None:
        with Interrupt() as self._interrupt, self.mesh.naming(), self._tracking():
            if resumed is not None:
                self.message(f"going on from {resumed}")
            self._loop()

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
        named = {key: str(value) for key, value in paths.items() if isinstance(value, str | Path)}
        self.config = Config.parse(
            _replaced(self.config, "data", **named).model_dump(warnings=False), "arguments of Trainer"
        )

    def _build(self) -> None:
        """The parts of a run that have a state of their own."""
        run, training = self.run, self.config.training
        self.step, self.steps = 0, run.steps
        self.objective: Objective = run.objective
        self.optimizer = optimizers.build(run.model, self.config.optimizer)
        self.scaler = torch.amp.GradScaler(run.device.type, enabled=training.precision == "fp16")
        self.guard = FiniteGuard()
        self.meter = Meter(run.device, run.dtype)
        self.checkpoints = Checkpoints(run.path, run.model, self.optimizer, keep=self.config.checkpoint.keep)
        self._trackers: list[Tracker] = tracking.build(self.config.log, self.message) if self.mesh.first else []
        self._stopping = False
        self._signal: int | None = None
        self._evaluated: int | None = None  # the step of the last evaluation
        self._loss: float | None = None
        self._saved: Path | None = None
        self._bound: Bound | None = None
        self._mask_noise = None
        if self.config.model.mask_noise_steps:
            embedding, mask = run.model.get_input_embeddings(), needs_mask(run.objective)
            steps = self.config.model.mask_noise_steps
            self._mask_noise = MaskNoise(embedding, mask, steps, training.seed)
        activations.apply(run.model, training.checkpointing)
        if self.config.model.compile:
            for layer in decoder_layers(run.model):
                layer.compile(fullgraph=True)
        self.module: Any
        self.module, self.block_axis = apply.parallelise(run.row_model, self.mesh, self.config.parallel, run.dtype)

    def _write_config(self) -> None:
        try:
            self.run.path.mkdir(parents=True, exist_ok=True)
            (self.run.path / "config.yaml").write_text(self.config.dump(), encoding="utf-8")
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
            record = self._train_step()
            if self.step % self.config.log.every == 0 or self.step == self.steps:
                record |= {**self.meter.read(), **self._ranks(), "time": time.time()}
                self._log(record)
            for callback in self.callbacks:
                callback(self, record)
            self._agree_on_signal()
            every = self.config.checkpoint.every
            if self.step == self.steps or self._ending() or (every and self.step % every == 0):
                self._save()
            # Saved first: a run that dies while it evaluates repeats the evaluation, not the steps.
            if self._evaluation_due() and not self._ending():
                self._evaluate()
                if self._ending() and self._saved != layout.step_folder(self.run.path, self.step):
                    self._save()

    def _train_step(self) -> Record:
        """One update. A step whose loss or gradient is not finite changes no weight, but counts: data, noise and
        learning rate are functions of the step alone."""
        run, training = self.run, self.config.training
        self.meter.start()
        batch = run.sampler.batch(self.step)
        objective = self.objective.at(self.step, self.steps)
        part = self.mesh.position["replicate"], self.mesh.sizes["replicate"]
        micro = micro_batches(objective, batch, training.seed, training.micro_batch, part)
        rate = schedules.multiplier(self.config.schedule, self.step, self.steps) * self.config.optimizer.learning_rate
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        if self._mask_noise is not None:
            self._mask_noise.at(self.step)

        run.row_model.train()
        loss, metrics = self._forward_backward(objective, micro)
        self.scaler.unscale_(self.optimizer)
        norm = self._clip()
        update = self.guard.allows(loss, norm, overflow_is_scale=self.scaler.is_enabled())
        if update:
            self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self._loss = loss

        tokens = sum(len(document) for pack in batch for document in pack)
        self.meter.add(tokens, metrics.pop("flops") / self.mesh.size)
        self.guard.check(self.step, loss, norm, [document.sample for pack in batch for document in pack])
        record = {
            "kind": "step",
            "step": self.step,
            "steps": self.steps,
            "epoch": self.step * training.batch_size / len(run.packs),
        }
        record |= {"loss": loss, "learning_rate": rate, "grad_norm": norm, **metrics}
        record |= {"tokens": tokens}
        return record if update else record | self._skipped(norm)

    def _forward_backward(self, objective: Objective, micro: list[Rows]) -> tuple[float, dict[str, float]]:
        """Gradients of sum / count into the parameters; returns the loss, and the mean of the unweighted nll, rows and
        FLOPs of all processes. micro: of this process's replica."""
        row_model, counts = self.run.row_model, self.mesh.position["block"] == 0
        work = sum(flops(rows, row_model.shape) for rows in micro)
        labels = sum(len(rows.labelled) for rows in micro)
        own = [sum(rows.count for rows in micro), sum(len(rows) for rows in micro), work, labels]
        count, rows_in_all, work, labels_in_all = self.mesh.sum([value if counts else 0.0 for value in own])
        # A process that has nothing to learn from still takes its part in the sums, where there are any.
        passed = [rows for rows in micro if len(rows.labelled)] or (micro[:1] if labels_in_all else [])
        sums: dict[str, Any] = dict.fromkeys(("loss", "nll_sum", "labelled"), 0.0)
        for rows in passed:
            batch = row_model.collate(rows)
            with data.summing(self.module, rows is passed[-1]):
                with self.run.arithmetic():
                    terms = self.module(batch, objective)
                self.scaler.scale(terms.sum / (count or 1.0)).backward()
            for name, value in {"loss": terms.sum, **terms.metrics}.items():
                sums[name] = sums.get(name, 0.0) + value.detach().double()
        # Read only now: on a GPU every reading waits for the work before it.
        means = dict(zip(sums, self.mesh.sum([float(value) for value in sums.values()]), strict=True))
        metrics = {"nll": means["nll_sum"] / means["labelled"]} if means.get("labelled") else {}
        return means["loss"] / (count or 1.0), {**metrics, "rows": round(rows_in_all), "flops": work}

    def _clip(self) -> float:
        """The norm of the whole gradient, which is scaled down to `training.clip` where that is smaller."""
        gradients = [parameter.grad for parameter in self.run.model.parameters() if parameter.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        if self.config.training.clip:
            torch.nn.utils.clip_grads_with_norm_(self.run.model.parameters(), self.config.training.clip, norm)
        return float(norm)

    def _skipped(self, norm: float) -> Record:
        why = "the gradient overflowed" if self.scaler.is_enabled() else f"the gradient norm is {norm}"
        self.message(f"step {self.step}: {why}, so the update is skipped")
        return {"skipped": True}

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
        everyone = self.mesh.gathered(mine)
        return {key: [theirs[key] for theirs in everyone] for key in mine}

    def _agree_on_signal(self) -> None:
        """A signal that one process received ends the run on all of them, after the same step."""
        stop, number = self.mesh.largest([float(self._stopping), float(self._interrupt.signal or 0)])
        self._stopping, self._signal = bool(stop), int(number) or None

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
        return self.run.validation is not None and due

    def _evaluate(self) -> None:
        """The likelihood bound on the validation packs; `clip: auto` then chooses its noise levels."""

        def watch(done: int, packs: int) -> None:
            self._agree_on_signal()
            if self._signal is not None:
                raise _Abandoned

        try:
            self._bound, self.objective = evaluate(self.run, self.objective, self.step, self.steps, watch)
        except _Abandoned:
            self.message(f"step {self.step}: evaluation given up; the continued run makes it")
            return
        self._evaluated = self.step
        self._log(
            {
                "kind": "evaluation",
                "step": self.step,
                "steps": self.steps,
                "nats_per_token": self._bound.nats_per_token,
                "standard_error": self._bound.standard_error,
                "tokens": self._bound.tokens,
                "time": time.time(),
            }
        )

    # checkpoints

    def _save(self) -> None:
        state = {
            "steps": self.steps,
            "objective": self.objective.model_dump(mode="json"),
            "scaler": self.scaler.state_dict(),
            "streak": self.guard.streak,
            "exact": self.run.fingerprint(),
        }
        config, tokenizer = self.config.dump(), self.run.tokenizer
        self.mesh.by_first(lambda: self.checkpoints.save(self.step, state, config, tokenizer))
        self._saved = layout.step_folder(self.run.path, self.step)

    def _resume(self) -> Path | None:
        """Take up the newest checkpoint (or checkpoint.step) of this run's folder, if there is one."""
        folder = continued(self.run)
        if folder is None:
            return None
        state = self.checkpoints.load(folder)
        self.step, self._saved = state["step"], folder
        self.objective = type(self.objective)(**state["objective"], mask_token_id=self.objective.mask_token_id)
        self.scaler.load_state_dict(state["scaler"])
        self.guard = FiniteGuard(state["streak"])
        return folder


def micro_batches(
    objective: Objective, batch: Sequence[list[Document]], seed: int, size: int, part: tuple[int, int] = (0, 1)
) -> list[Rows]:
    """The rows of a step, `size` packs at a time, their documents side by side under the noise levels of the step.

    part: (r, R) makes micro-batches r, r + R, ... only, those of replica r of R.
    """
    levels = iter(objective.levels([document for pack in batch for document in pack], seed))
    micro = []
    for number, first in enumerate(range(0, len(batch), size)):
        documents = [document for pack in batch[first : first + size] for document in pack]
        its_levels = [next(levels) for _ in documents]
        if number % part[1] != part[0]:
            continue
        rows = objective.rows(documents, seed, its_levels).pruned()
        if objective.decoding.kind != "causal" and (rows.label == needs_mask(objective)).any():
            raise UserError(
                f"the training data holds the mask token (id {objective.mask_token_id}), which only noise may place: "
                f"prepare it again without, or choose another model.mask_token_id"
            )
        micro.append(rows)
    return micro


def continued(run: setup.Run) -> Path | None:
    """The checkpoint that a run goes on from, or None; UserError when it is damaged, unwanted or another run's."""
    checkpoint = run.config.checkpoint
    folder = layout.newest(run.path, checkpoint.step)
    if folder is None:
        return None
    if not checkpoint.resume:
        raise UserError(
            f"checkpoint.path={run.path}: holds a run already ({folder.name}); "
            f"set checkpoint.resume=true to continue it, or choose another folder"
        )
    layout.verify(folder)
    _match(layout.state_of(folder)["exact"], run.fingerprint(), folder)
    return folder


def _replaced(config: Config, section: str, **values: Any) -> Config:
    """A copy of the config in which the values that are not None replace the section's."""
    given = {key: value for key, value in values.items() if value is not None}
    return config.model_copy(update={section: getattr(config, section).model_copy(update=given)})


def _match(saved: dict[str, Any], ours: dict[str, Any], folder: Path) -> None:
    """Refuse to continue a run under settings that would make it another run."""
    for key in [*ours, *saved]:
        before, now = saved.get(key), ours.get(key)
        if before == now:
            continue
        plain = not isinstance(before, dict) and not isinstance(now, dict) and key != "data.train"
        difference = f"{key}={now}, but it was {before}" if plain else f"{key} is not what it was"
        raise UserError(
            f"{folder} cannot be continued exactly: {difference}; "
            f"restore that, or start a new run in another checkpoint.path"
        )
