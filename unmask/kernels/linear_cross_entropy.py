"""Linear cross-entropy: the head and its loss in chunks, so that no [rows, vocabulary] matrix is ever whole.

    z = softcap(h W^T + b),   nll_i = logsumexp(z_i) - z_i[label_i],   loss = sum_i weight_i nll_i
    dz = weight_i (softmax(z_i) - onehot(label_i)),   dh = dz W,   dW = dz^T h

Of a weighted sum the weights are known before the forward, so each chunk's gradients are formed while its logits are at
hand: dh goes to one buffer, dW to another, and backward only scales them. Of single log-probabilities the weights are
the gradients that arrive in the backward pass, which forms each chunk's logits again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from unmask.kernels.chunks import row_chunks
from unmask.kernels.vocabulary_parallel import Divided, VocabularyShard, gathered_logits, summed_gradient

#: Rows of a chunk: long enough for the matrix products, short enough to keep logits small.
CHUNK = 1024


class Head(NamedTuple):
    """From hidden states to logits: weight [vocabulary, width], an optional bias [vocabulary] and soft-cap of logits.

    shard: which part of the vocabulary weight and bias are, where a group's ranks divide it. All of them then ask for
    the same, with the same hidden, label (ids of the whole vocabulary), weight and exclude; they get the same results
    and the same gradient of hidden, and each that of its own part. What they make of the results stands for one loss:
    backward starts from the same gradient on each.

    hidden [n, width]; label int64 [n], token ids; exclude: a token id whose logit is taken as -inf. Matrix products run
    in autocast's dtype where it is on, sums in fp32 (fp64 for fp64), which results are in.
    """

    weight: Tensor
    bias: Tensor | None = None
    softcap: float | None = None
    shard: VocabularyShard | None = None

    def cross_entropy(
        self, hidden: Tensor, label: Tensor, weight: Tensor, exclude: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """(sum of weight [n] * nll, with gradient; nll of every row, [n], without): the cheapest loss there is."""
        inputs = _cast(hidden), self.weight, self.bias
        grad = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
        return _WeightedSum.apply(*inputs, label, weight, self._softmax(exclude), grad)

    def log_probs(self, hidden: Tensor, label: Tensor, exclude: int | None = None) -> Tensor:
        """log p(label) of every row, [n], with gradient. It takes the logits twice, and keeps none."""
        return _LogProbs.apply(_cast(hidden), self.weight, self.bias, label, self._softmax(exclude))

    def logits(self, hidden: Tensor, exclude: int | None = None) -> Tensor:
        """[n, vocabulary], with gradient: ask for some rows at a time, as `unmask.kernels.confidence` does."""
        softcap, shard = self.softcap, self.shard
        hidden = hidden if shard is None else summed_gradient(hidden, shard)
        logits = torch.nn.functional.linear(hidden, self.weight, self.bias)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        if shard is not None:
            logits = gathered_logits(logits, shard)
        if exclude is not None:
            logits = logits.index_fill(-1, torch.tensor([exclude], device=logits.device), -torch.inf)
        return logits

    def _softmax(self, exclude: int | None) -> Softmax:
        return _Whole(self.softcap, exclude) if self.shard is None else Divided(self.softcap, exclude, self.shard)


class Softmax(Protocol):
    """The cross-entropy of a chunk of rows, in place."""

    def chunk(self, logits: Tensor, label: Tensor, loss_weight: Tensor | None, dz: Tensor) -> Tensor:
        """nll [n] of logits [n, vocabulary], which are lost; with loss_weight [n] both they and dz (themselves, or of
        another dtype) become loss_weight * d nll / d logits."""
        ...

    def summed(self, dh: Tensor) -> Tensor:
        """The gradient of hidden from what the logits of this rank add to it."""
        ...


class _Whole(NamedTuple):
    """Softmax over a vocabulary that this rank has all of."""

    softcap: float | None
    exclude: int | None

    def chunk(self, logits: Tensor, label: Tensor, loss_weight: Tensor | None, dz: Tensor) -> Tensor:
        nll = logits.new_empty(len(logits))
        for rows in row_chunks(logits):
            weight = None if loss_weight is None else loss_weight[rows, None]
            nll[rows] = _softmax_gradient(logits[rows], label[rows, None], weight, self.softcap, self.exclude)
            if weight is not None and dz is not logits:
                dz[rows] = logits[rows]
        return nll

    def summed(self, dh: Tensor) -> Tensor:
        return dh


def _cast(hidden: Tensor) -> Tensor:
    device = hidden.device.type
    return hidden.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else hidden


class _WeightedSum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        label: Tensor,
        loss_weight: Tensor,
        softmax: Softmax,
        grad: bool,
    ):
        loss_weight = loss_weight.to(torch.promote_types(hidden.dtype, torch.float32))
        wanted = [grad and needed for needed in ctx.needs_input_grad[:3]]
        nll, *gradients = _sweep(softmax, (hidden, weight, bias), label, loss_weight, wanted)
        ctx.save_for_backward(*gradients)
        ctx.dtypes = hidden.dtype, weight.dtype
        ctx.mark_non_differentiable(nll)
        return (nll * loss_weight).sum(), nll

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        dh, dw, db = ctx.saved_tensors
        hidden, weight = ctx.dtypes
        return (
            None if dh is None else (dh * grad).to(hidden),
            None if dw is None else (dw * grad).to(weight),
            None if db is None else db * grad,
            *[None] * 4,
        )


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, label: Tensor, softmax: Softmax):
        ctx.save_for_backward(hidden, weight, bias, label)
        ctx.softmax = softmax
        return -_sweep(softmax, (hidden, weight, bias), label, None, (False,) * 3)[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, label = ctx.saved_tensors
        _, dh, dw, db = _sweep(ctx.softmax, (hidden, weight, bias), label, -grad, ctx.needs_input_grad[:3])
        return (
            None if dh is None else dh.to(hidden.dtype),
            None if dw is None else dw.to(weight.dtype),
            db,
            None,
            None,
        )


def _sweep(
    softmax: Softmax,
    inputs: tuple[Tensor, Tensor, Tensor | None],
    label: Tensor,
    loss_weight: Tensor | None,
    wanted: Sequence[bool],
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """nll [n] and the wanted gradients of sum(loss_weight * nll) by (hidden, weight, bias), in fp32 at least.

    loss_weight may be None where no gradient is wanted.
    """
    hidden, weight, bias = inputs
    wide, matrix = torch.promote_types(hidden.dtype, torch.float32), weight.to(hidden.dtype)
    if not any(wanted):
        loss_weight = None
    nll = torch.empty(len(hidden), dtype=wide, device=hidden.device)
    dh = torch.empty_like(hidden, dtype=wide) if wanted[0] else None
    dw = torch.zeros_like(weight, dtype=wide) if wanted[1] else None
    db = torch.zeros_like(bias, dtype=wide) if wanted[2] and bias is not None else None
    for start in range(0, len(hidden), CHUNK):
        part = slice(start, start + CHUNK)
        logits = _logits(hidden[part], matrix, bias, wide)
        narrow = wide != hidden.dtype and loss_weight is not None
        dz = torch.empty_like(logits, dtype=hidden.dtype) if narrow else logits
        nll[part] = softmax.chunk(logits, label[part], None if loss_weight is None else loss_weight[part], dz)
        if db is not None:
            db += logits.sum(0)
        if dh is not None:
            dh[part] = dz @ matrix
        if dw is not None:
            _accumulate(dw, dz, hidden[part])
    return nll, dh if dh is None else softmax.summed(dh), dw, db


def _softmax_gradient(
    logits: Tensor, target: Tensor, loss_weight: Tensor | None, softcap: float | None, exclude: int | None
) -> Tensor:
    """nll [n] of logits [n, vocabulary], which become weight * d nll / d logits, in place. target, weight: [n, 1]."""
    slope = None
    if softcap is not None:
        logits.div_(softcap).tanh_()
        slope = 1 - logits * logits if loss_weight is not None else None
        logits.mul_(softcap)
    if exclude is not None:
        logits[:, exclude] = float("-inf")
    chosen, top = logits.gather(1, target), logits.amax(1, keepdim=True)
    total = logits.sub_(top).exp_().sum(1, keepdim=True)
    if loss_weight is not None:
        logits.mul_(loss_weight / total).scatter_add_(1, target, -loss_weight)
    if slope is not None:
        logits.mul_(slope)
    return (total.log_() + top - chosen)[:, 0]


def _logits(hidden: Tensor, matrix: Tensor, bias: Tensor | None, wide: torch.dtype) -> Tensor:
    logits = (hidden @ matrix.T).to(wide)
    return logits if bias is None else logits.add_(bias)


def _accumulate(dw: Tensor, dz: Tensor, hidden: Tensor) -> None:
    if dw.dtype == dz.dtype:
        dw.addmm_(dz.T, hidden)
    else:
        dw += dz.T @ hidden
