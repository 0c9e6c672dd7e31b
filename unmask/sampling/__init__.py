"""Samplers: fill the masks of a canvas with a trained model; `samplers` and `strategies` find theirs by name."""

from unmask.sampling.api import Hole, Piece, Sample, sample, stream
from unmask.sampling.canvas import Canvas, Fill, continuation, infill
from unmask.sampling.network import Clean, Network, Noisy
from unmask.sampling.options import Options
from unmask.sampling.session import samplers
from unmask.sampling.strategies import strategies

__all__ = [
    "Canvas",
    "Clean",
    "Fill",
    "Hole",
    "Network",
    "Noisy",
    "Options",
    "Piece",
    "Sample",
    "continuation",
    "infill",
    "sample",
    "samplers",
    "strategies",
    "stream",
]
