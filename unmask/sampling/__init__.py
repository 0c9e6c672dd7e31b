"""Samplers: fill the masks of a canvas with a trained model; `samplers` finds one by name."""

from unmask.sampling.api import Sample, sample, samplers
from unmask.sampling.canvas import Canvas, continuation, infill
from unmask.sampling.network import Network
from unmask.sampling.options import Options

__all__ = ["Canvas", "Network", "Options", "Sample", "continuation", "infill", "sample", "samplers"]
