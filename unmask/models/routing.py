"""What routers do: their losses, and how evenly they use their experts.

Of a layer with E experts, over the n rows that go through the model together (all ranks that share them):

    balance = E * sum over e of f_e * p_e      f_e: rows sent to expert e, over n; p_e: mean router probability of e
    z       = mean over rows of logsumexp(logits)^2

f_e counts each of a row's k experts, so an even router has balance k. A layer that computes labelled rows only has only
these. The losses of a micro-batch are the means over layers; those of a step the means over its micro-batches that
hold labels, whatever ranks these run on. Rows that stand for nothing, or that several ranks compute, count never or
once. The gradient enters where the router's weights leave it, so that nothing else has to hand the loss on.

Sources: balance, Fedus et al. 2101.03961 (eq. 4) as `load_balancing_loss_func` of transformers has it for one layer;
z, Zoph et al. 2202.08906 (eq. 5).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from unmask.errors import UserError
from unmask.models.decoder import spec_of
from unmask.models.prove import proofs_of

#: Sums of a layer besides the rows of every expert: rows, entropy, balance, z.
SUMS = 4


def check(model: Any, wanted: dict[str, float]) -> None:
    """UserError for losses (by the key that asks for them) that have no meaning for the routers of a model."""
    asked = [f"{key}={value:g}" for key, value in wanted.items() if value]
    if not asked:
        return
    for name, why in proofs_of(model).routers.items():
        if why:
            raise UserError(f"{asked[0]}: {name}: {why}; set it to 0")


def watch(model: Any, balance: float = 0.0, z: float = 0.0, group: Any = None) -> Routing | None:
    """The routers of a model, before it is divided; None where it has none, or some of another kind."""
    spec = spec_of(model)
    if not spec.routers or len(spec.routers) != len(spec.experts) or any(proofs_of(model).routers.values()):
        return None
    sizes = [experts.number for experts in spec.experts.values()]
    return Routing([model.get_submodule(name) for name in spec.routers], sizes, balance, z, group)


class Routing:
    """Watches routers. experts: of each; balance, z: coefficients of the losses; group: ranks that share a pack.

    weight: of a micro-batch's losses in the gradient, set before its forward pass.
    """

    def __init__(self, routers: list[nn.Module], experts: list[int], balance: float, z: float, group: Any = None):
        self.experts, self.balance, self.z, self.group = experts, balance, z, group
        self.weight: Tensor | float = 1.0
        self._open = False
        self._counted = self._labelled = torch.empty(0)
        self._whole: dict[int, tuple[Tensor, Tensor]] = {}
        self._sums: dict[int, Tensor] = {}
        for number, router in enumerate(routers):
            router.register_forward_hook(partial(self._routed, number))

    @contextmanager
    def watching(self, counted: Tensor, labelled: Tensor) -> Iterator[None]:
        """The forward pass of a micro-batch. counted: bool [N], which rows do; labelled: those with a label."""
        self._counted, self._labelled, self._open = counted, labelled, True
        self._whole.clear()
        try:
            yield
        finally:
            self._open = False

    def _routed(self, number: int, router: nn.Module, args: Any, output: Any) -> Any:
        """Of the forward pass, or of one that is repeated in backward for what checkpointing did not keep."""
        if not torch.is_grad_enabled() or not (self._open or number in self._whole):
            return None
        logits, weights, index = output
        counted = self._counted
        if len(logits) != len(counted):
            counted = counted[self._labelled]
        share, sums = self._losses(number, logits.float() if logits.dtype.itemsize < 4 else logits, index, counted)
        if self._open:
            self._sums[number] = self._sums.get(number, 0.0) + sums
        if not self.balance and not self.z:
            return None
        return logits, _Attach.apply(weights, share, self.weight), index

    def _losses(self, number: int, logits: Tensor, index: Tensor, counted: Tensor) -> tuple[Tensor, Tensor]:
        """(this rank's share of the weighted losses, its sums of a layer [E + SUMS])."""
        experts = logits.shape[1]
        mask = counted.to(logits.dtype)
        logged = logits.log_softmax(-1)
        probability = logged.exp()
        if self._open:
            taken = mask[:, None].expand(index.shape).flatten()
            counts = torch.zeros(experts + 1, dtype=torch.float64, device=logits.device)
            counts[-1] = mask.sum()
            counts[:-1].scatter_add_(0, index.flatten(), taken.double())
            whole = counts.clone()
            if self.group is not None and (self.balance or self.z):
                dist.all_reduce(whole, group=self.group)
            self._whole[number] = counts, whole
        counts, whole = self._whole[number]
        rows = whole[-1].clamp(min=1.0)
        share = (whole[:-1] / rows).to(logits.dtype)
        even = experts / rows * ((mask[:, None] * probability).sum(0) @ share)
        square = (mask * logits.logsumexp(-1).square()).sum() / rows
        loss = (self.balance * even + self.z * square) / len(self.experts)
        with torch.no_grad():
            entropy = -(mask[:, None] * probability * logged).sum()
            sums = torch.cat([counts, torch.stack([entropy, even, square]).double()])
        return loss, sums

    def mine(self) -> list[float]:
        """This process's sums since the last call, of all layers, to be added to those of the others."""
        nothing = torch.zeros(0, dtype=torch.float64)
        layers = [self._sums.get(number, nothing.new_zeros(size + SUMS)) for number, size in enumerate(self.experts)]
        self._sums.clear()
        self._whole.clear()
        return torch.cat([each.cpu() for each in layers]).tolist()

    def read(self, sums: Sequence[float], micro: float) -> dict[str, float]:
        """The numbers of a step from the sums of all processes; micro: its micro-batches that hold labels."""
        if not micro:
            return {}
        layers = torch.tensor(sums, dtype=torch.float64).split([size + SUMS for size in self.experts])
        counts = [layer[:-SUMS] for layer in layers]
        rows, entropy, even, square = torch.stack([layer[-SUMS:] for layer in layers]).mean(0).tolist()
        found = {
            "expert_load": max(float(each.max() / each.mean().clamp(min=1e-30)) for each in counts),
            "experts_unused": sum(int((each == 0).sum()) for each in counts),
            "router_entropy": entropy / max(rows, 1.0),
        }
        found |= {"balance_loss": even / micro} if self.balance else {}
        return found | ({"z_loss": square / micro} if self.z else {})


class _Attach(torch.autograd.Function):
    """The router's weights as they are; their backward pass also begins that of `loss`, times `weight`."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, loss: Tensor, weight: Tensor | float) -> Tensor:
        ctx.gradient = torch.zeros_like(loss) + weight
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, ctx.gradient, None
