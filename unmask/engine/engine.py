"""Engine: one update of a model on a mesh, whoever asks for it: a training loop, reinforcement learning, distillation.

    losses = engine.forward_backward(objective, rows)      gradients of sum / count, over all processes
    update = engine.update(lr)                             clipped; none is made of a gradient that is not finite
    nll    = engine.nll(rows)                              of every labelled row, without gradient
    with engine.generating() as model: ...                 samplers run on the model as it is divided

On several processes all of them call the same methods in the same order, each with the rows of its replica (`part`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from unmask.config import Config, rules
from unmask.config.rules import Known
from unmask.engine import activations, state
from unmask.engine.ema import Ema
from unmask.engine.generation import Generating
from unmask.engine.gradients import Gradients, Losses, square
from unmask.engine.guards import FiniteGuard
from unmask.engine.mask_noise import MaskNoise
from unmask.engine.observe import LevelLosses, NoiseScale, Observer
from unmask.engine.offload import Offload, Streams
from unmask.engine.optim import optimizers
from unmask.engine.optim.masters import masters
from unmask.engine.precision import Precision
from unmask.engine.scaling import SharedScaler
from unmask.errors import UserError
from unmask.models import RowModel, routing
from unmask.models.decoder import decoder_layers, spec_of
from unmask.models.families.materialise import fill, stand_ins
from unmask.objectives import rebuild
from unmask.parallel import apply, replicas, shard, stages
from unmask.parallel.pipeline import Pipeline
from unmask.parallel.stages import layout_of
from unmask.rows import Rows

if TYPE_CHECKING:
    from unmask.models import LoadedModel
    from unmask.objectives import Objective
    from unmask.parallel.mesh import Mesh


class Update(NamedTuple):
    """What became of a step: the norm of its gradient before clipping, and whether the weights were changed."""

    norm: float
    made: bool


class Engine:
    """A model, divided as the mesh says, with its gradients, its optimiser and what follows its weights.

    loaded: the model, which the engine divides in place; its weights may be unread yet. row_model: what `row_model_of`
    has made of it, if it has. example: an objective and rows such as those of a step, by which the stages of a pipeline
    are balanced (None: evenly).

    UserError for a config whose settings do not go together, or with the model.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        mesh: Mesh,
        config: Config,
        row_model: RowModel | None = None,
        example: tuple[Objective, Rows] | None = None,
    ) -> None:
        self.loaded, self.mesh, self.config = loaded, mesh, config
        self.model = loaded.model
        known = Known(config, device=mesh.device.type, decoder=spec_of(self.model))
        mesh.together(lambda: rules.check(known))
        #: Updates so far, those that were skipped among them: data, noise and learning rates are functions of it.
        self.step = 0
        self.precision = Precision.of(config, mesh.device)
        self.row_model = row_model or row_model_of(loaded, config)
        #: (role, names) of the optimiser's groups of the whole model, of which a stage of a pipeline holds some.
        self.groups = optimizers.named_groups(self.model)
        self._divide(example)
        self.optimizer = optimizers.build(self.model, config.optimizer)
        #: The learning rates that `config.optimizer` asks for, of every parameter group.
        self.rates = [group.get("lr", config.optimizer.learning_rate) for group in self.optimizer.param_groups]
        decay = config.training.ema
        self.ema = Ema(self.model, decay, masters(self.optimizer)) if decay else None
        self.scaler = self._scaler()
        self.guard = FiniteGuard()
        self.levels, self.noise = LevelLosses(config.log.levels), self._noise_scale()
        observers: list[Observer] = [self.levels, *([] if self.noise is None else [self.noise])]
        passes = -(-config.training.batch_size // (config.training.micro_batch * mesh.part[1]))
        self.gradients = Gradients(
            self.row_model, mesh, self.module, self.precision, passes, self.scaler, observers=observers
        )
        self._loss: float | None = None

    @property
    def part(self) -> tuple[int, int]:
        """(r, R): this process's rows are those of replica r of R."""
        return self.mesh.part

    def forward_backward(self, objective: Objective, rows: Iterable[Rows]) -> Losses:
        """The gradients of a step, once before every `update`. rows: the micro-batches of this process's replica.

        Where the computation raises, its gradients are dropped.
        """
        if self._loss is not None:
            raise RuntimeError("forward_backward: the gradients of the step before have had no update")
        micro = _listed(rows)
        if self._mask_noise is not None:
            self._mask_noise.at(self.step)
        self.module.train()
        try:
            losses = self.gradients.accumulate(objective, micro)
        except BaseException:  # those of some micro-batches, to which the next call would add
            self.optimizer.zero_grad(set_to_none=True)
            raise
        self._loss = losses.loss
        return losses

    def update(self, lr: float | Sequence[float]) -> Update:
        """Clip the gradients and change the weights by them, or leave these where loss or gradients are not finite.

        lr: one for every parameter group (see `rates`), or the first optimiser's, to which the others keep their ratio.
        """
        if self._loss is None:
            raise RuntimeError("update: there are no gradients; call forward_backward first")
        if not isinstance(lr, Sequence):
            peak = self.config.optimizer.learning_rate
            known = isinstance(lr, int | float)
            lr = [lr if rate == peak else rate * (lr / peak) for rate in self.rates] if known else [lr]
        if len(lr) != len(self.rates) or not all(isinstance(rate, int | float) and 0 <= rate < inf for rate in lr):
            raise UserError(f"Engine.update: lr is a number, or {len(self.rates)} (one a parameter group), not {lr!r}")
        for group, rate in zip(self.optimizer.param_groups, lr, strict=True):
            group["lr"] = rate
        self.scaler.unscale_(self.optimizer)
        norm = self.gradients.clip(self.config.training.clip)
        made = self.guard.allows(self._loss, norm, overflow_is_scale=self.scaler.is_enabled())
        if made:
            self.scaler.step(self.optimizer)
            if self.ema is not None:
                self.ema.update(self.step)
            if self.noise is not None:
                self.noise.update(norm, self.config.training.batch_size)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        self._loss = None
        self.step += 1
        return Update(norm, made)

    @torch.no_grad()
    def nll(self, rows: Sequence[Rows], objective: Objective | None = None) -> list[Tensor]:
        """-log p of the label of every labelled row, [n] for each Rows, over the whole vocabulary; with an objective
        what it scores (`Objective.scores`), which may exclude a token.

        Where ranks share the model all of them give equally many Rows (`inert` ones if need be); where they share a
        pack, the same ones, and each has the result of the whole pack.
        """
        objective = objective or rebuild("ar", {})
        with self.evaluating() as module:
            return [module(module.collate(each), objective, per_row=True) for each in _listed(rows)]

    @contextmanager
    def evaluating(self) -> Iterator[Any]:
        """What computes packs as they are, without gradient: module(module.collate(rows), objective, per_row=True)."""
        training = self.row_model.training
        self.row_model.eval()
        try:
            with self.precision():
                yield self.module if isinstance(self.module, Pipeline) else self.row_model
        finally:
            self.row_model.train(training)
            shard.rest(self.module)

    @contextmanager
    def generating(self, ema: bool = False) -> Iterator[Generating]:
        """The model as samplers take it, in place of a whole one; ema: with the averaged weights.

        Every process may sample prompts of its own, but for those that share layers (tensor, pipeline), which sample
        the same. Where processes share the model, all wait at the end of the block for the last one.
        """
        model = Generating(self.row_model, self.module, self.mesh, self.precision)
        training = self.row_model.training
        self.row_model.eval()
        try:
            with self.averaged() if ema else nullcontext():
                yield model
                model.finish()
        finally:
            self.row_model.train(training)
            shard.rest(self.module)

    def averaged(self) -> AbstractContextManager[None]:
        """The EMA of the weights in their place, for as long as the block lasts; without `training.ema` the weights."""
        return nullcontext() if self.ema is None else self.ema.applied()

    # state

    def state_dict(self) -> dict[str, Any]:
        """All that a continuation needs: live tensors as torch DCP saves them, and plain values under `engine`."""
        plain = {name: part.state_dict() for name, part in self._parts().items()}
        plain |= {"step": self.step, "streak": self.guard.streak, "overflows": self.guard.overflows}
        return {**state.tensors(self), "engine": plain}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Take up a `state_dict` whose tensors have been filled in place; what it lacks begins anew."""
        state.load(self, saved)
        plain = saved["engine"]
        self.step = plain["step"]
        self.guard = FiniteGuard(plain.get("streak", 0), plain.get("overflows", 0))
        for name, part in self._parts().items():
            if plain.get(name):
                part.load_state_dict(plain[name])

    def _parts(self) -> dict[str, Any]:
        parts: dict[str, Any] = {"scaler": self.scaler, "levels": self.levels}
        return parts if self.noise is None else {**parts, "noise_scale": self.noise}

    # construction

    def _divide(self, example: tuple[Objective, Rows] | None) -> None:
        """`module`, which a step calls. First of all: FSDP2 puts other parameters in place of the model's."""
        config, mesh, training = self.config, self.mesh, self.config.training
        self._mask_noise = None
        if config.model.mask_noise_steps and self.loaded.mask_token_id is not None:
            embedding = self.model.get_input_embeddings()
            fill(self.model, only=[embedding])  # whose values say how large the noise is
            steps, mask = config.model.mask_noise_steps, self.loaded.mask_token_id
            self._mask_noise = MaskNoise(self.model.get_input_embeddings(), mask, steps, training.seed)
        away = Offload(Streams(mesh.device)) if training.offload_activations else None
        activations.apply(self.model, training.checkpointing, away)
        if config.model.compile:
            for layer in decoder_layers(self.model):
                layer.compile(fullgraph=True)
        elif mesh.sizes["pipeline"] == 1:
            group = None if mesh.axis is None else mesh.axis.wire.groups[0]
            self.row_model.routing = routing.watch(self.model, config.model.balance_loss, config.model.z_loss, group)
        if not mesh.divided:  # replicas are made equal to the first
            mesh.together(self._fill)
        pipe = self._pipe(example) if mesh.sizes["pipeline"] > 1 else None
        self.module: Any
        self.module, self.block_axis = apply.parallelise(
            self.row_model, mesh, config.parallel, self.precision.dtype, pipe
        )
        if mesh.divided:  # each process what it holds
            mesh.together(self._fill)

    def _fill(self) -> None:
        """Read what this process holds of the weights, if they are still to be read."""
        fill(self.model, "cpu" if self.config.parallel.offload else None)

    def _pipe(self, example: tuple[Objective, Rows] | None) -> apply.Pipe:
        """Which stage has which layers: as the config says, or by what rank 0 has measured."""
        parallel, measured = self.config.parallel, None
        if self.mesh.first and parallel.stage_layers is None:
            count = parallel.stages
            if example is None:
                measured = stages.balanced([1.0] * len(decoder_layers(self.model)), count)
            else:
                objective, rows = example
                values = stand_ins(self.model, self.mesh.device, decoder_layers(self.model))
                with self.precision(), values:
                    each, first, last = stages.measured(self.row_model, rows, objective)
                measured = stages.balanced(each, count, first, last)
        layers = parallel.stage_layers or self.mesh.gathered(measured)[0]
        return apply.Pipe(layout_of(parallel, layers), self.precision)

    def _scaler(self) -> torch.amp.GradScaler:
        half = self.config.training.precision == "fp16"
        if self.mesh.divided:
            return SharedScaler(self.mesh.device.type, self.mesh.group, enabled=half)
        return torch.amp.GradScaler(self.mesh.device.type, enabled=half)

    def _noise_scale(self) -> NoiseScale | None:
        config = self.config
        wanted = bool(config.log.noise_scale) and rules.unmeasured(config) is None
        # Of one micro-batch a replica, the gradient of a part of the step is what goes into the sum.
        single = config.training.batch_size == config.training.micro_batch * self.mesh.sizes["replicate"]
        replicas.measure(self.module, wanted and single)
        if not wanted:
            return None
        return NoiseScale(
            lambda: square(self.gradients.of(), self.mesh.device),
            lambda: replicas.own_square(self.module),
            self.scaler.get_scale,
        )


def _listed(rows: Iterable[Rows]) -> list[Rows]:
    """The micro-batches; UserError for what are none."""
    if isinstance(rows, Rows) or not isinstance(rows, Iterable):
        raise UserError(f"Engine: rows is a list of Rows, not a {type(rows).__name__} alone")
    micro = list(rows)
    if not all(isinstance(each, Rows) for each in micro):
        raise UserError(f"Engine: rows is a list of Rows (objective.rows makes one), not of {type(micro[0]).__name__}")
    return micro


def row_model_of(loaded: LoadedModel, config: Config) -> RowModel:
    """The model over rows, as the config asks for it."""
    # Of a layer that is divided, the rows that are left would be divided anew.
    skips = False if config.parallel.model_parallel_size > 1 else config.model.skip_last_layer
    return RowModel(loaded.model, skip_last_layer=skips, backend=config.model.attention)
