"""The entropy of what is predicted right already: the confidence term of LLaDA2 and dParallel.

    sum over rows i of weight_i [argmax z_i = label_i] H(softmax(z_i)),     z = softcap(h W^T + b)

Its gradient makes the model surer of what it gets right, so that more tokens can be committed at once. Which rows count
is no function that is differentiated. Logits are made of some rows at a time, and again in the backward pass.

Sources: dParallel, Chen et al. 2509.26488; LLaDA2, Bie et al. 2512.15745.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from unmask.kernels.linear_cross_entropy import CHUNK


def entropy_of_correct(
    hidden: Tensor, logits: Callable[[Tensor], Tensor], label: Tensor, loss_weight: Tensor
) -> Tensor:
    """The weighted sum of entropies, in nats, a scalar with gradient.

    hidden [n, width], label int64 [n], loss_weight [n]; logits: of some rows, [m, width] -> [m, vocabulary].
    """
    total = loss_weight.new_zeros(())
    for start in range(0, len(hidden), CHUNK):
        part = slice(start, start + CHUNK)
        rows = hidden[part], logits, label[part], loss_weight[part]
        total = total + checkpoint(_of_rows, *rows, use_reentrant=False)
    return total


def _of_rows(hidden: Tensor, logits: Callable[[Tensor], Tensor], label: Tensor, loss_weight: Tensor) -> Tensor:
    z = logits(hidden)
    log = z.log_softmax(-1)
    entropy = -(log.exp() * log.masked_fill(log == -torch.inf, 0.0)).sum(-1)
    return (loss_weight * (z.argmax(-1) == label) * entropy).sum()
