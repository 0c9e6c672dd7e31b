"""Export: a trained model in a format that other programs open; `formats` finds a writer by name."""

from unmask.export.api import export, facts, formats

__all__ = ["export", "facts", "formats"]
