"""Commit strategies: which of the masks of a step are filled in for good, the rest being predicted again.

A strategy is a pure function `(candidates, quota, options)` that gives the indices of the candidates to commit, at
least `quota` of them (of `schedule`: LLaDA's masks / steps). c_1 >= c_2 >= ... are the confidences in falling
order, H the entropies of the predicted distributions.

| strategy       | commits                                                           | source                          |
|----------------|-------------------------------------------------------------------|---------------------------------|
| low_confidence | the `quota` most confident                                        | LLaDA, Nie 2502.09992           |
| threshold      | every c > threshold                                               | Fast-dLLM, Wu 2505.22618        |
| dynamic        | the n first, n the largest with (n + 1)(1 - c_n) < factor         | Fast-dLLM, Wu 2505.22618        |
| entropy        | the largest set U with sum of H over U - max of H over U <= gamma | EB-Sampler, Ben-Hamu 2505.24857 |
| low_entropy    | the `quota` with the lowest entropies                             | Dream, Ye 2508.15487            |
| margin         | the `quota` with the largest gap between their two best tokens    | Kim 2502.06768                  |
| random         | `quota` at random                                                 | MDLM, Sahoo 2406.07524          |

Those that take exactly the `quota` best by some score may draw them instead, one after the other and each with
probability proportional to exp(score / alg_temp) among what is left (Dream's `alg_temp`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from unmask.registry import Registry
from unmask.sampling.choice import Candidates
from unmask.sampling.options import STRATEGIES, Options

strategies = Registry(
    "strategy", {name: f"unmask.sampling.strategies:{name}" for name in STRATEGIES}, group="unmask.strategies"
)


def low_confidence(candidates: Candidates, quota: int, options: Options) -> Tensor:
    """The `quota` most confident: LLaDA re-masks the least confident ones."""
    return _best(candidates.confidence, candidates, quota, options)


def threshold(candidates: Candidates, quota: int, options: Options) -> Tensor:
    """Every confidence above `threshold`, at least `quota` (with steps: SDAR's rule)."""
    sure = int((candidates.confidence > options.threshold).sum())
    return _largest(candidates.confidence, max(quota, sure))


def dynamic(candidates: Candidates, quota: int, options: Options) -> Tensor:
    """The n most confident, n the largest with (n + 1)(1 - c_n) < factor: the more at once, the surer each must be.

    Under that bound the greedy tokens of the n marginals are those of the joint distribution (Fast-dLLM, theorem 1).
    """
    confidence = candidates.confidence.sort(descending=True).values
    n = torch.arange(1, len(confidence) + 1, device=confidence.device)
    # (n + 1)(1 - c_n) grows with n, so that the places where it is small enough come first.
    return _largest(candidates.confidence, max(quota, int(((n + 1) * (1 - confidence) < options.factor).sum())))


def entropy(candidates: Candidates, quota: int, options: Options) -> Tensor:
    """The largest set of lowest entropies whose sum, without its largest member, is at most `gamma` (nats).

    That bounds the error of drawing them independently: their mutual information.
    """
    entropies = torch.special.entr(candidates.probability).sum(-1)
    rising = entropies.sort().values
    others = rising.cumsum(0) - rising
    return _largest(-entropies, max(quota, int((others <= options.gamma).sum())))


def low_entropy(candidates: Candidates, quota: int, options: Options) -> Tensor:
    """The `quota` whose distributions have the least entropy."""
    return _best(-torch.special.entr(candidates.probability).sum(-1), candidates, quota, options)


def margin(candidates: Candidates, quota: int, options: Options) -> Tensor:
    """The `quota` whose most probable token leads the second by most."""
    first, second = candidates.probability.topk(2).values.unbind(-1)
    return _best(first - second, candidates, quota, options)


def random(candidates: Candidates, quota: int, options: Options) -> Tensor:
    """`quota` positions at random, as the reverse process of masked diffusion unmasks them."""
    return _largest(candidates.order, quota)


def _best(score: Tensor, candidates: Candidates, quota: int, options: Options) -> Tensor:
    """The `quota` largest scores, or as many drawn without replacement by softmax(score / alg_temp).

    The largest of log p + G, G = -log(-log u) a Gumbel number each, are such draws in order (Kool 1903.06059).
    """
    if options.alg_temp:
        score = score / options.alg_temp - (-candidates.order.to(score).log()).log()
    return _largest(score, quota)


def _largest(score: Tensor, count: int) -> Tensor:
    """Indices of the `count` largest scores, earlier positions first among equals."""
    return score.argsort(descending=True, stable=True)[:count]
