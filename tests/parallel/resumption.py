"""A run that is stopped on one mesh and goes on on another, against one that nobody stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tests.parallel.trainer_cases import STEPS, Case, train


def run(workers: Any, case: Case, path: Path, stop: int | None = None) -> dict[str, Any]:
    """What the first rank says of a run on as many processes as the case has."""
    if case.ranks == 1:
        return train(case, str(path), stop)
    return workers(case.ranks).run(train, case, str(path), stop)[0]


def goes_on(workers: Any, first: Case, second: Case, whole: dict[str, Any], path: Path) -> None:
    """Losses, norms and weights are those of `whole`, where the second case goes on from the first one's step 3."""
    assert run(workers, first, path, stop=3)["step"] == 3
    rest = run(workers, second, path)
    assert rest["step"] == len(rest["loss"]) == STEPS
    for key in ("loss", "norm"):
        np.testing.assert_allclose(rest[key], whole[key], rtol=1e-10, atol=1e-10)
    for name, weight in whole["weights"].items():
        np.testing.assert_allclose(rest["weights"][name], weight, rtol=1e-10, atol=1e-10)
