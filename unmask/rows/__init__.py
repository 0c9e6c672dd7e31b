"""Rows, their visibility, tiles and exact costs: pure functions over numpy arrays, no processes, no torch."""

from unmask.rows.cost import Shape, flops, pairs
from unmask.rows.document import Document
from unmask.rows.rows import CLEAN, IGNORE, Rows, Stream, assemble, inert, padded

__all__ = ["CLEAN", "IGNORE", "Document", "Rows", "Shape", "Stream", "assemble", "flops", "inert", "padded", "pairs"]
