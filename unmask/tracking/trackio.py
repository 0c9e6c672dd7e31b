"""Trackio: a local database that `trackio show --project NAME` opens; the interface is W&B's.

A run that goes on keeps its name, which is its id there, and is asked how far it came.
"""
