"""gather: every rank gets all shared keys and values, and computes its own tiles while they travel.

Bytes summed over ranks, S shared rows: 2 S D_kv s (P-1) forward, 2 S D_kv (s + g) (P-1) backward.
"""

from __future__ import annotations

import numpy as np
import torch

from unmask.blocks.exchange.direct import Direct
from unmask.blocks.exchange.direct import bytes_sent as direct_bytes
from unmask.blocks.exchange.division import Division, Widths
from unmask.blocks.exchange.wire import Wire


def everything(division: Division, reader: int, owner: int) -> np.ndarray:
    return np.arange(len(division.shared[owner]))


def build(division: Division, wire: Wire, device: torch.device) -> Direct:
    return Direct(division, wire, device, everything)


def bytes_sent(division: Division, widths: Widths) -> tuple[np.ndarray, np.ndarray]:
    """Bytes every rank sends in one layer, forward and backward: two int64 [ranks]."""
    return direct_bytes(division, widths, everything)
