"""The placement and the exchange that the documentation adds give the numbers of one process."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

from tests.parallel.trainer_cases import Case, train

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"
CASE = Case("block_diffusion (bd3lm)", "in_turn", "prefix", steps=4, model="sliding")


def extended(path: str) -> tuple[dict[str, Any], list[str]]:
    """What `train` says of CASE with the page's own definitions, and the exchange that attention took."""
    from unmask.blocks.exchange import exchanges

    made = []
    for block in re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL):
        if "placements.add(" in block or "exchanges.add(" in block:
            exec(block, {"np": np})
    build = exchanges["prefix"].build
    exchanges["prefix"].build = staticmethod(lambda *given: made.append("prefix") or build(*given))
    return train(CASE, path), made


def test_the_page_s_placement_and_exchange_change_no_number(workers, tmp_path):
    one = train(CASE.alone(), str(tmp_path / "one"))
    (two, made), (_, others) = workers(2).run(extended, str(tmp_path / "two"))
    assert made and others
    np.testing.assert_allclose(two["loss"], one["loss"], rtol=1e-10)
    for name, weight in one["weights"].items():
        np.testing.assert_allclose(two["weights"][name], weight, rtol=1e-9, atol=1e-10)
