"""`python -m unmask`, for launchers that start modules: torchrun --nproc-per-node 4 -m unmask train run.yaml."""

from unmask.cli import main

main()
