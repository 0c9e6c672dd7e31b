"""needed: a rank gets the shared rows that some query of its own attends, and no others.

The gain over `gather` is whatever windows, packed documents and short prefixes leave unread.
"""

from __future__ import annotations

import numpy as np
import torch

from unmask.blocks.exchange.direct import Direct
from unmask.blocks.exchange.direct import bytes_sent as direct_bytes
from unmask.blocks.exchange.division import Division, Widths
from unmask.blocks.exchange.wire import Wire


def build(division: Division, wire: Wire, device: torch.device) -> Direct:
    return Direct(division, wire, device, Division.read)


def bytes_sent(division: Division, widths: Widths) -> tuple[np.ndarray, np.ndarray]:
    """Bytes every rank sends in one layer, forward and backward: two int64 [ranks]."""
    return direct_bytes(division, widths, Division.read)
