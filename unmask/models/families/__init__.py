"""Families of checkpoints: how models that other people made become decoders over rows."""
