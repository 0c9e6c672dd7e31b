"""Optimisers and schedules, by name."""
