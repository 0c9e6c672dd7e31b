"""Block parallelism: which rank computes which rows of a pack, and what crosses the network between them."""
