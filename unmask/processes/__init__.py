"""Processes: started, met, watched, and told of when one is lost."""
