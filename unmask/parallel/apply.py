"""The whole parallel story of a model, in the order in which it is applied."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel

from unmask.blocks.axis import BlockAxis, Layers
from unmask.config import ParallelConfig
from unmask.models import RowModel
from unmask.models.adapters import nf4
from unmask.models.decoder import decoder_layers
from unmask.parallel import expert, pipeline, tensor
from unmask.parallel.mesh import Mesh
from unmask.parallel.pipeline import Pipeline
from unmask.parallel.replicas import Sums, summed
from unmask.parallel.shard import sharded
from unmask.parallel.stages import Layout


class Pipe(NamedTuple):
    """How layers are assigned to pipeline stages, and the context in which a stage computes."""

    layout: Layout
    arithmetic: Callable[[], AbstractContextManager[Any]]


def parallelise(
    row_model: RowModel, mesh: Mesh, config: ParallelConfig, arithmetic: torch.dtype, pipe: Pipe | None = None
) -> tuple[RowModel | DistributedDataParallel | Pipeline, BlockAxis | None]:
    """The module a training step calls, and its block axis if there is one.

    tensor: every layer is divided over the axis's ranks; expert: so are the experts of every layer. block: packs are
    divided over its ranks. pipeline: a rank keeps its stages' layers. Then either every rank keeps the whole model, or
    its stages, and gradients are summed over all processes that hold the same, or FSDP2 divides what each holds over
    shard x block and sums them as it divides (with a tensor or expert axis it sums them in any case).
    """
    # A third time through the layers would gather parameters, or exchange keys, once more; and be compiled anew.
    row_model.apart &= (
        mesh.shards is None and mesh.tensor is None and (mesh.axis is None or config.placement == "block")
    )
    row_model.apart &= all(layer._compiled_call_impl is None for layer in decoder_layers(row_model.model))
    if mesh.size == 1:
        return row_model, None
    axis = None
    if mesh.tensor is not None:
        axis = tensor.TensorAxis(mesh.tensor, mesh.traffic)
        mesh.together(partial(tensor.divide, row_model, axis))
    if mesh.experts is not None:
        expert.divide(row_model.model, expert.ExpertAxis(mesh.experts, mesh.traffic))
    block, root = None, None
    if mesh.axis is not None:
        layers = layers_of(row_model, config, arithmetic)
        block = BlockAxis(mesh.axis, layers, config, rank_speeds(mesh, config), once=row_model.routing is not None)
        row_model.axis = block
    if pipe is not None:
        half = mesh.shards is not None and arithmetic.itemsize < row_model.model.dtype.itemsize
        wire = arithmetic if half else row_model.model.dtype
        root = Pipeline(row_model, mesh, pipe.layout, pipe.arithmetic, wire, axis)
    if mesh.shards is not None:
        return sharded(row_model, mesh, config, arithmetic, root), block
    if root is not None:
        return root, block
    return summed(row_model, mesh.device, Sums(mesh.group, mesh.traffic)), block


def layers_of(row_model: RowModel, config: ParallelConfig, arithmetic: torch.dtype) -> Layers:
    """What the block axis needs to know of the decoder; of its heads, those of one rank of the tensor axis."""
    widths, ranks = row_model.decoder.widths(arithmetic), config.model_parallel_size
    own = {window: replace(of, heads=of.heads // ranks, kv_heads=of.kv_heads // ranks) for window, of in widths.items()}
    return Layers(row_model.shape, own)


def check(parallel: ParallelConfig, row_model: RowModel) -> None:
    """UserError for a model that `parallel` would divide wrongly; needs no processes."""
    nf4.check_divisible(row_model.model, parallel.shards)
    if parallel.pipeline_stages > 1:
        pipeline.check(row_model.model)


def rank_speeds(mesh: Mesh, config: ParallelConfig) -> np.ndarray | None:
    """Relative speeds of the ranks of this process's pack, as asked for; None: equal."""
    if config.speeds == "equal":
        return None
    if isinstance(config.speeds, list):
        return np.array(config.speeds)
    mine = _measured_speed(mesh.device)
    # Ranks that share layers, and stages of a pipeline, must place alike: those of the first of them count.
    step = mesh.sizes["tensor"]
    first = mesh.rank % (mesh.size // mesh.sizes["pipeline"]) - mesh.position["block"] * step - mesh.position["tensor"]
    return np.array(mesh.gathered(mine)[first : first + mesh.sizes["block"] * step : step])


def _measured_speed(device: torch.device, size: int = 512) -> float:
    """Products of square matrices per second, the median of several."""
    matrix = torch.full((size, size), 0.5, device=device)
    taken = []
    for _ in range(12):
        start = time.perf_counter()
        (matrix @ matrix)[0, 0].item()
        taken.append(time.perf_counter() - start)
    return 1.0 / float(np.median(taken[2:]))
