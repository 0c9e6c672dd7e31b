"""The command line: a table of verbs, a file each, that call the package."""

from unmask.cli.app import app, verbs
from unmask.cli.main import main

__all__ = ["app", "main", "verbs"]
