"""An objective for tests whose loss reads columns: the clipped surrogate of PPO, with a penalty as GRPO has it.

    r = p / p_old,   loss of a row = -min(r A, clip(r, 0.8, 1.2) A) + 0.1 (p_ref / p - log(p_ref / p) - 1)

A, log p_old and log p_ref are functions of a row's label and position alone, so that they are the same in any pack.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from unmask.objectives import LossTerms, objectives
from unmask.objectives.block_diffusion import BlockDiffusion


class Clipped(BlockDiffusion):
    columns = {"advantage": (), "log_probs": (2,)}

    def rows(self, documents, seed, levels=None):
        rows = super().rows(documents, seed, levels)
        phase = 0.7 * rows.label + rows.position
        log_probs = np.stack([-4 + 0.3 * np.cos(phase), -4 + 0.2 * np.sin(2 * phase)], 1)
        return replace(rows, columns={"advantage": np.sin(phase).astype(np.float32), "log_probs": log_probs})

    def loss(self, hidden, head, rows):
        value, log_prob = self._terms(hidden, head, rows)
        metrics = {"nll_sum": -log_prob.detach().sum(), "labelled": value.new_tensor(float(len(value)))}
        metrics["surprise"] = log_prob.detach().square().sum()
        return LossTerms((rows.weight * value).sum(), rows.count, metrics, -log_prob.detach())

    def scores(self, hidden, head, rows):
        return self._terms(hidden, head, rows)[0]

    def evaluation(self):
        return self

    def _terms(self, hidden, head, rows):
        """(loss, log p) of every row."""
        log_prob = head.log_probs(hidden, rows.label, self.excluded_token)
        old, reference = rows.columns["log_probs"].unbind(1)
        ratio, log_ratio = (log_prob - old).exp(), reference - log_prob
        advantage = rows.columns["advantage"]
        gain = (ratio * advantage).minimum(ratio.clamp(0.8, 1.2) * advantage)
        return 0.1 * (log_ratio.exp() - log_ratio - 1) - gain, log_prob


objectives.add("clipped", Clipped)
