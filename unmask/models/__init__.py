"""Hugging Face decoders as they are, made ready for rows: loading, the mask token, checks, and the training root."""

from unmask.models.load import LoadedModel, load
from unmask.models.row_model import RowBatch, RowModel

__all__ = ["LoadedModel", "RowBatch", "RowModel", "load"]
