"""`python -m unmask`, for launchers that start modules: torchrun --nproc-per-node 4 -m unmask train run.yaml.

The command `unmask` starts here too: from the first line on a signal ends it in order, and a process that `unmask
train --nproc` has started ends with it.
"""

from unmask import endings


def run() -> None:
    """Import the command line and call it."""
    with endings.at_once():
        from unmask.processes import launched

        launched.end_with_launcher()
        from unmask.cli import main

        main()


if __name__ == "__main__":
    run()
