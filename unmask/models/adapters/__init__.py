"""Low-rank adapters, and the frozen weights in four bits that they are trained on."""
