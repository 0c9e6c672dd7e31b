"""Several processes: the mesh they form, and what each axis of it does to a training step."""
