"""AdamW whose running means are kept in fewer bits than its arithmetic: bf16, or 8 or 4 bits in blocks.

    m <- b1 m + (1 - b1) g,   v <- b2 v + (1 - b2) g^2      in fp32 at least, from the means as they are kept
    W <- (1 - lr decay) W - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)

and then m and v are rounded. In 8 bits (Dettmers et al. 2110.02861) and in 4 (Li et al. 2309.01507) a block of elements
has one scale in fp32, and an element is the number of the nearest entry of a table, those of bitsandbytes and torchao.
Here a block lies inside of a row of its matrix: codes and scales are plain tensors, divided by rows as the matrix is. A
checkpoint goes on bit for bit on any other mesh; torchao's blocks depend on the mesh.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from unmask.config import Config, OptimizerConfig
from unmask.engine.ema import local
from unmask.errors import UserError
from unmask.parallel.tensor import divided_dims

#: Bits of an element -> elements of a block, at most.
BLOCK = {8: 256, 4: 128}
#: Smaller tensors, and those whose rows no block of SHORTEST elements divides, keep their means in fp32.
SMALLEST, SHORTEST = 4096, 32
MEANS = ("exp_avg", "exp_avg_sq")
#: Elements that are in full precision at a time.
CHUNK = 2**21


def check(config: Config, model: nn.Module) -> None:
    """Raise UserError where a tensor axis would divide a row inside of a block."""
    state = config.optimizer.state
    if state not in ("8bit", "4bit"):
        return
    ranks = config.parallel.model_parallel_size
    for parameter, dim in divided_dims(model).items() if ranks > 1 else ():
        block = block_of(parameter, int(state[0]))
        if block and dim == parameter.ndim - 1 and parameter.shape[dim] // ranks % block:
            raise UserError(
                f"optimizer.state={state}: parallel.model_parallel_size={ranks} divides rows of {parameter.shape[dim]} "
                f"elements inside of a block of {block}: use bf16"
            )


def block_of(parameter: Tensor, bits: int) -> int:
    """Elements of a block of the parameter's means, a divisor of its rows; 0: they are kept in fp32."""
    block = math.gcd(parameter.shape[-1], BLOCK[bits]) if parameter.ndim > 1 else 0
    return block if block >= SHORTEST and parameter.numel() >= SMALLEST else 0


class LowPrecisionAdamW(Optimizer):
    """AdamW with means in `config.state`: bf16, 8bit or 4bit; parameters may be DTensors, whose state then is, too.

    State of a parameter: step, and exp_avg and exp_avg_sq in bf16 or fp32 (fp64 of fp64), or as codes in uint8 (with 4
    bits two in a byte) beside exp_avg_scale and exp_avg_sq_scale, fp32 [..., row / block].
    """

    def __init__(self, groups: list[dict[str, Any]], config: OptimizerConfig):
        options = {"lr": config.learning_rate, "betas": config.betas, "eps": config.eps}
        super().__init__(groups, options)
        self.bits = {"bf16": 16, "8bit": 8, "4bit": 4}[config.state]
        self.codec = Codec(self.bits) if self.bits < 16 else None

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    if not state:
                        state.update(self._begin(parameter))
                    self._update(parameter, state, group)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, which would cast every state to its parameter's dtype."""
        super().load_state_dict({**state_dict, "state": {}})
        saved, own = (chain.from_iterable(each["params"] for each in groups)
                      for groups in (state_dict["param_groups"], self.param_groups))  # fmt: skip
        for key, parameter in zip(saved, own, strict=True):
            if key in state_dict["state"]:
                self.state[parameter] = dict(state_dict["state"][key])

    def _begin(self, parameter: Tensor) -> dict[str, Tensor]:
        """Means of zero."""
        state: dict[str, Tensor] = {"step": torch.tensor(0.0)}
        block = 0 if self.codec is None else block_of(parameter, self.bits)
        kept = torch.bfloat16 if self.codec is None else torch.promote_types(parameter.dtype, torch.float32)
        for mean in MEANS:
            if block:
                state[mean] = _zeros(parameter, 2 if self.bits == 4 else 1, torch.uint8)
                state[f"{mean}_scale"] = _zeros(parameter, block, torch.float32)
            else:
                state[mean] = _zeros(parameter, 1, kept)
        return state

    def _update(self, parameter: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
        state["step"] += 1
        time = state["step"].double()
        corrections = [1 - beta**time for beta in group["betas"]]
        tensors = {"weight": parameter, "gradient": parameter.grad, **state}
        held = {key: local(each) for key, each in tensors.items() if each is not None and key != "step"}
        weight = held["weight"]
        if not weight.ndim:
            return self._update_rows(held, group, corrections)
        rows = max(1, CHUNK // max(1, weight[:1].numel()))
        for start in range(0, len(weight), rows):
            part = {key: each[start : start + rows] for key, each in held.items()}
            self._update_rows(part, group, corrections)

    def _update_rows(self, of: dict[str, Tensor], group: dict[str, Any], corrections: list[Tensor]) -> None:
        weight = of["weight"]
        wide = torch.promote_types(weight.dtype, torch.float32)
        gradient = of["gradient"].to(wide)
        means = []
        for name, new, beta in zip(MEANS, (gradient, gradient.square()), group["betas"], strict=True):
            scale = of.get(f"{name}_scale")
            if scale is None or self.codec is None:
                mean = of[name].to(wide).lerp(new, 1 - beta)
                of[name].copy_(mean)
            else:
                signed = name == "exp_avg"
                mean = self.codec.read(of[name], scale, signed).to(wide).lerp(new, 1 - beta)
                self.codec.write(mean, of[name], scale, signed)
            means.append(mean)
        first, second = (mean / correction for mean, correction in zip(means, corrections, strict=True))
        kept = weight.to(wide) * (1 - group["lr"] * group["weight_decay"])
        weight.copy_(kept.addcdiv_(first, second.sqrt_().add_(group["eps"]), value=-group["lr"]))


class Codec:
    """Means as numbers of the entries of a table. bits: 8 or 4."""

    def __init__(self, bits: int):
        self.bits = bits
        entries = {signed: table(bits, signed) for signed in (True, False)}
        self._entries = entries
        self._between = {signed: (each[1:] + each[:-1]) / 2 for signed, each in entries.items()}

    def read(self, codes: Tensor, scale: Tensor, signed: bool) -> Tensor:
        """Values in fp32. codes uint8 [..., row] (of 4 bits [..., row / 2]), scale [..., row / block]."""
        if self.bits == 4:
            codes = torch.stack([codes >> 4, codes & 15], dim=-1).flatten(-2)
        scaled = self._on(codes.device, self._entries, signed)[codes.int()]
        return (scaled.unflatten(-1, (scale.shape[-1], -1)) * scale[..., None]).flatten(-2)

    def write(self, values: Tensor, codes: Tensor, scale: Tensor, signed: bool) -> None:
        """Round `values` into codes and scale."""
        blocks = values.float().unflatten(-1, (scale.shape[-1], -1))
        scale.copy_(blocks.abs().amax(-1))
        scaled = (blocks / scale[..., None].clamp(min=torch.finfo(torch.float32).tiny)).flatten(-2)
        between = self._on(codes.device, self._between, signed)
        found = torch.bucketize(scaled, between, out_int32=True, right=True).to(torch.uint8)
        codes.copy_(found if self.bits == 8 else found[..., ::2] << 4 | found[..., 1::2])

    def _on(self, device: torch.device, tables: dict[bool, Tensor], signed: bool) -> Tensor:
        if tables[signed].device != device:
            tables[signed] = tables[signed].to(device)
        return tables[signed]


def table(bits: int, signed: bool) -> Tensor:
    """The 2^bits entries, rising, of which the last is 1, in fp32.

    Decades, each with twice the points of the one below it (dynamic tree quantisation). Of a mean square in 4 bits,
    1/16 to 1: none may be rounded to zero, which divides.
    """
    if bits == 4 and not signed:
        return torch.arange(1, 17) / 16
    decades = bits - 1
    found = [torch.zeros(1), torch.ones(1)]
    for decade in range(decades):
        edges = torch.linspace(0.1, 1, (1 if signed else 2) * 2**decade + 1, dtype=torch.float64)
        points = ((edges[1:] + edges[:-1]) / 2 * 10.0 ** (decade + 1 - decades)).float()
        found += [points, -points] if signed else [points]
    return torch.cat(found).sort().values


def _zeros(parameter: Tensor, fewer: int, dtype: torch.dtype) -> Tensor:
    """[..., row / fewer], divided as the parameter is."""
    held = local(parameter)
    shape = [*held.shape[:-1], held.shape[-1] // fewer] if held.ndim else []
    made = torch.zeros(shape, dtype=dtype, device=held.device)
    if not isinstance(parameter, DTensor):
        return made
    whole = torch.Size([*parameter.shape[:-1], parameter.shape[-1] // fewer])
    strides = torch.empty(whole, device="meta").stride()
    divided = DTensor.from_local(
        made, parameter.device_mesh, parameter.placements, run_check=False, shape=whole, stride=strides
    )
    return divided.to(parameter.device)  # from_local moves what FSDP2 keeps in the CPU's memory to the mesh's device
