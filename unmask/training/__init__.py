"""Training: the trainer, its optimisers, schedules, checkpoints and guards."""
