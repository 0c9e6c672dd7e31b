"""The entropy of what is predicted right already: the confidence term of LLaDA2 and dParallel.

    sum over rows i of weight_i [argmax z_i = label_i] H(softmax(z_i)),     z = softcap(h W^T + b)

Its gradient makes the model surer of what it gets right, so that more tokens can be committed at once. Which rows count
is no function that is differentiated. Logits are made of some rows at a time, and again in the backward pass.

Sources: dParallel, Chen et al. 2509.26488; LLaDA2, Bie et al. 2512.15745.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from unmask.kernels.linear_cross_entropy import CHUNK


def entropy_of_correct(
    hidden: Tensor,
    projection: tuple[Tensor, Tensor | None, float | None],
    label: Tensor,
    loss_weight: Tensor,
    exclude: int | None = None,
) -> Tensor:
    """The weighted sum of entropies, in nats, a scalar with gradient.

    hidden [n, width], label int64 [n], loss_weight [n]; projection: the weight [vocabulary, width], its bias and the
    soft-cap of the logits; exclude: a token id whose logit is taken as -inf.
    """
    total = loss_weight.new_zeros(())
    for start in range(0, len(hidden), CHUNK):
        part = slice(start, start + CHUNK)
        given = hidden[part], *projection, label[part], loss_weight[part], exclude
        total = total + checkpoint(_of_rows, *given, use_reentrant=False)
    return total


def _of_rows(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    softcap: float | None,
    label: Tensor,
    loss_weight: Tensor,
    exclude: int | None,
) -> Tensor:
    logits = torch.nn.functional.linear(hidden, weight, bias)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if exclude is not None:
        logits = logits.index_fill(-1, torch.tensor([exclude], device=logits.device), -torch.inf)
    log = logits.log_softmax(-1)
    entropy = -(log.exp() * log.masked_fill(log == -torch.inf, 0.0)).sum(-1)
    return (loss_weight * (logits.argmax(-1) == label) * entropy).sum()
