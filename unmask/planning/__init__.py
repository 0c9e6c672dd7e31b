"""What a run would take, without making it."""
