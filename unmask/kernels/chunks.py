"""Row chunks that stay in a CPU core's cache between the passes of an elementwise kernel."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

#: Elements of a chunk: half a megabyte in fp32, so that a handful of operands fit a 2 MB second-level cache.
ELEMENTS = 2**17


def row_chunks(x: Tensor, elements: int | None = None) -> Iterator[slice]:
    """Slices of the rows of x [rows, width]: of about `elements` on CPU, one slice elsewhere (launches cost more)."""
    rows = len(x) if x.device.type != "cpu" else max(1, (elements or ELEMENTS) // x.shape[-1])
    return (slice(start, min(start + rows, len(x))) for start in range(0, len(x), max(rows, 1)))
