"""Fused forms of parts of a decoder, and a last layer for labelled rows only; what is proven is taken."""
