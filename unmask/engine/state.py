"""The state of an engine: the tensors that torch DCP saves, and fills in place when it loads, and plain values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from unmask.engine.optim.masters import MASTER
from unmask.engine.optim.optimizers import FIXED
from unmask.models.adapters import nf4

if TYPE_CHECKING:
    from unmask.engine.engine import Engine


def weights(model: torch.nn.Module) -> dict[str, Any]:
    """The model's tensors by name as DCP stores them: tied weights once, under their first name; see `nf4.stored`."""
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    names = {name for name, _ in [*model.named_parameters(), *model.named_buffers()]}
    tensors = [(name, tensor) for name, tensor in get_model_state_dict(model).items() if name in names]
    return {key: part for name, tensor in tensors for key, part in nf4.stored(name, tensor).items()}


def tensors(engine: Engine) -> dict[str, Any]:
    """The live tensors of model, optimiser, random state and EMA weights."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    random = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        random["cuda"] = torch.cuda.get_rng_state()
    optimizer = _all_groups(engine, get_optimizer_state_dict(engine.model, engine.optimizer))
    state = {"model": weights(engine.model), "optimizer": optimizer, "random": random}
    return state if engine.ema is None else {**state, "ema": engine.ema.average}


def without_absent(state: dict[str, Any], names: frozenset[str]) -> dict[str, Any]:
    """The tensors of which a checkpoint has something, by the names in it: an older one may lack EMA weights, masters,
    or the random state of a GPU."""
    state = dict(state)
    for part in {"random", "ema"} & set(state):
        state[part] = {name: value for name, value in state[part].items() if f"{part}.{name}" in names}
        if not state[part]:
            del state[part]
    for name, parameter in state["optimizer"]["state"].items():
        if f"optimizer.state.{name}.{MASTER}" not in names:
            parameter.pop(MASTER, None)
    return state


def load(engine: Engine, state: dict[str, Any]) -> None:
    """Take up `tensors` that have been filled. The optimiser's settings, and how it computes, stay the config's; EMA
    weights and masters that are absent start from the weights."""
    from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

    optimizer = engine.optimizer
    kept = {group["role"]: {key: group[key] for key in FIXED if key in group} for group in optimizer.param_groups}
    saved = _own_groups(engine, state["optimizer"])
    groups = [{**group, **kept[group["role"]]} for group in saved["param_groups"]]
    set_optimizer_state_dict(engine.model, optimizer, {**saved, "param_groups": groups})
    torch.set_rng_state(state["random"]["cpu"])
    if "cuda" in state["random"]:
        torch.cuda.set_rng_state(state["random"]["cuda"])
    if engine.ema is not None and "ema" not in state:
        engine.ema.restart()


def _all_groups(engine: Engine, state: dict[str, Any]) -> dict[str, Any]:
    """An optimiser's state dict with the groups of the whole model, which the first process writes for all.

    A group of which it holds nothing has the settings of those that it has of the same optimiser, decay apart.
    """
    if engine.mesh.sizes["pipeline"] == 1:
        return state
    held = {group["role"]: group for group in state["param_groups"]}
    whole = [{**held.get(role, held["kept"]), "role": role, "params": names} for role, names in engine.groups]
    return {**state, "param_groups": whole}


def _own_groups(engine: Engine, state: dict[str, Any]) -> dict[str, Any]:
    """The opposite: without parameters of other stages."""
    if engine.mesh.sizes["pipeline"] == 1:
        return state
    held = {name for name, _ in engine.model.named_parameters()}
    groups = [(group, [name for name in group["params"] if name in held]) for group in state["param_groups"]]
    return {**state, "param_groups": [{**group, "params": names} for group, names in groups if names]}
