"""Training on one process: the trainer, its optimisers, schedules, checkpoints and guards."""
