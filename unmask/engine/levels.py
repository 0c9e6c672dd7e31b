"""The loss by noise level: where in the range from few masks to all of them a model learns.

The level of a noisy block (for whole-document objectives: of a document) is the share of its supervised tokens that are
masked, which needs no help from the objective. Bins have equal widths over (0, 1]: under levels drawn uniformly they
are quantiles. Logged is the mean unweighted nll of a bin's labelled rows since the last line of the log.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unmask.objectives.levels import bin_of
from unmask.rows import Document, Rows


def masked_share(rows: Rows, documents: Sequence[Document], mask_token: int) -> np.ndarray:
    """float64 [N]: the level of every row's noisy block; nan for clean rows. documents: those that became `rows`."""
    level = np.full(len(rows), np.nan)
    noisy = np.flatnonzero(rows.block >= 0)
    if not len(noisy):
        return level
    starts = np.cumsum([0, *(len(document) for document in documents)])
    supervised = np.concatenate([document.supervised for document in documents])
    block = rows.block[noisy]
    targets = np.bincount(block, supervised[starts[rows.document[noisy]] + rows.position[noisy]])
    masked = np.bincount(block, rows.token[noisy] == mask_token)
    level[noisy] = (masked / np.maximum(targets, 1))[block]
    return level


class LevelLosses:
    """Sums of nll and labelled rows in `bins` bins; 0 bins: nothing is kept."""

    def __init__(self, bins: int):
        self.bins = bins
        self.nll, self.labelled = np.zeros(bins), np.zeros(bins)
        self._bin: list[np.ndarray] = []
        self._sum: Tensor | float = 0.0

    def start(self, micro: Sequence[Rows], documents: Sequence[Sequence[Document]], mask_token: int | None) -> None:
        """A step begins with these micro-batches; mask_token: None where no noise is placed."""
        self._bin, self._sum = [], 0.0
        for rows, its in zip(micro, documents, strict=True):
            if self.bins and mask_token is not None:
                self._bin.append(bin_of(masked_share(rows, its, mask_token)[rows.labelled], self.bins))

    def see(self, number: int, held: np.ndarray | None, nll: Tensor | None) -> None:
        """The nll [rows] of labelled rows of micro-batch `number`; held: which of its labelled rows (None: all)."""
        if not self._bin or nll is None:
            return
        its = self._bin[number] if held is None else self._bin[number][held]
        member = torch.nn.functional.one_hot(torch.from_numpy(its).to(nll.device), self.bins + 1)[:, : self.bins]
        self._sum = self._sum + nll.double() @ member.double()

    def mine(self, counts: bool) -> list[float]:
        """This process's sums of the step, [2 * bins]: nll and, where it `counts` its packs, labelled rows by bin."""
        nll = self._sum.tolist() if isinstance(self._sum, Tensor) else [0.0] * self.bins
        found = [np.bincount(its, minlength=self.bins + 1)[: self.bins] for its in self._bin] if counts else []
        return [*nll, *(np.sum(found, axis=0).tolist() if found else [0.0] * self.bins)]

    def take(self, sums: Sequence[float]) -> None:
        """The sums of all processes."""
        self.nll += sums[: self.bins]
        self.labelled += sums[self.bins :]

    def read(self) -> dict[str, float]:
        """{"nll/0.00-0.20": mean nll, ...} of the bins that hold rows, since the last reading."""
        edges = np.linspace(0, 1, self.bins + 1)
        means = {
            f"nll/{edges[bin]:.2f}-{edges[bin + 1]:.2f}": float(self.nll[bin] / self.labelled[bin])
            for bin in np.flatnonzero(self.labelled)
        }
        self.nll[:], self.labelled[:] = 0, 0
        return means

    def state_dict(self) -> dict[str, Any]:
        return {"nll": self.nll.tolist(), "labelled": self.labelled.tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if len(state["nll"]) == self.bins:  # else log.levels changed: the next line begins anew
            self.nll, self.labelled = np.array(state["nll"]), np.array(state["labelled"])
