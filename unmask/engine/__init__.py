"""What makes one update, whoever asks for it."""
