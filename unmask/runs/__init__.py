"""The folder of a run: written, found, opened and compared."""
