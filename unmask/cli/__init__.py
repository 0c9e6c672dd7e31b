"""The command line: a table of verbs, a file each, that call the package. `unmask --help` lists them in this order."""

# isort: off
from unmask.cli import train, prepare, sample, evaluate, export, small  # noqa: F401  (each adds its verbs to the table)

# isort: on
from unmask.cli.app import app
from unmask.cli.main import main

__all__ = ["app", "main"]
