"""The script of docs/engine.md: an engine alone trains, scores and samples, alike on one process and on two."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "engine.md"
AXES = ("data_parallel_size", "shard_size", "block_parallel_size", "model_parallel_size", "pipeline_stages")


@cache
def script() -> dict[str, Any]:
    """The names that the page's script leaves, without its run on one process."""
    code = re.search(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)[1]
    assert len(code.splitlines()) <= 60
    body, run, _ = code.partition("\nloss, before")
    assert run
    names: dict[str, Any] = {"__name__": "docs"}
    exec(compile(body, str(PAGE), "exec"), names)
    return names


def counting(*overrides: str) -> tuple[float, float, float, list[int]]:
    """(loss of the last step, held-out nll before and after, tokens sampled)."""
    return script()["main"](["model.dtype=float64", "parallel.timeout=60", *overrides])


@pytest.fixture(scope="module")
def one() -> tuple[float, float, float, list[int]]:
    return counting()


@pytest.mark.parametrize("axis", AXES)
def test_two_processes_are_one(axis: str, one: Any, workers: Any) -> None:
    for loss, before, after, token in workers(2).run(counting, f"parallel.{axis}=2"):
        assert (loss, before, after) == pytest.approx(one[:3], rel=1e-9)
        assert token == one[3] == [*range(9, 16), 0]


def different(*overrides: str) -> list[int]:
    """What this process samples of a prompt, and of a length, of its own, while it shares the model."""
    import torch
    import torch.distributed as dist

    from unmask import Config, Engine, sample
    from unmask.config import apply_overrides
    from unmask.models import load
    from unmask.objectives import build
    from unmask.parallel.mesh import started

    rank = dist.get_rank() if dist.is_initialized() else int(overrides[0])
    tree = {name: dict(section) for name, section in script()["SETTINGS"].items()}
    apply_overrides(tree, [each for each in overrides if "=" in each])
    config = Config.parse(tree)
    with started(config.parallel, torch.device("cpu")) as mesh:
        loaded = load(config.model, seed=3)
        decoding = build("block_diffusion", {"block_size": 4}).decoding
        engine = Engine(loaded, mesh, config)
        with engine.generating() as model:
            prompt = [rank + 1] * (4 * rank + 1)
            return sample(model, None, prompt, length=4 + 20 * rank, decoding=decoding).token


@pytest.mark.parametrize("axes", ["parallel.shard_size=2", "parallel.data_parallel_size=2"])
def test_processes_that_share_a_model_sample_texts_of_their_own(axes: str, workers: Any) -> None:
    """One needs six times the passes of the other, which keeps it company."""
    assert workers(2).run(different, axes) == [different("0"), different("1")]


def test_gradients_are_updated_once(workers: Any) -> None:
    import torch

    from unmask import Config, Engine
    from unmask.models import load
    from unmask.objectives import build
    from unmask.parallel.mesh import Mesh

    names = script()
    loaded = load(Config.parse(names["SETTINGS"]).model)
    objective = build("mdlm").bind(loaded.model, None, loaded.mask_token_id)
    engine = Engine(loaded, Mesh(torch.device("cpu")), Config.parse(names["SETTINGS"]))
    rows = names["rows_of"](objective, [names["counting"](number) for number in range(4)], (0, 1))
    with pytest.raises(RuntimeError, match="there are no gradients"):
        engine.update(lr=1e-3)
    engine.forward_backward(objective, rows)
    with pytest.raises(RuntimeError, match="have had no update"):
        engine.forward_backward(objective, rows)
    assert engine.update(lr=1e-3).made and engine.step == 1


def test_a_failed_pass_leaves_no_gradients() -> None:
    """The next call's are those of its own rows, which may come from a generator."""
    from dataclasses import replace

    import torch

    from unmask import Config, Engine, UserError
    from unmask.models import load
    from unmask.objectives import build
    from unmask.parallel.mesh import Mesh

    names = script()
    loaded = load(Config.parse(names["SETTINGS"]).model)
    objective = build("mdlm").bind(loaded.model, None, loaded.mask_token_id)
    engine = Engine(loaded, Mesh(torch.device("cpu")), Config.parse(names["SETTINGS"]))
    rows = names["rows_of"](objective, [names["counting"](number) for number in range(4)], (0, 1))
    with pytest.raises(UserError, match="token id 99"):
        engine.forward_backward(objective, [rows[0], replace(rows[1], token=rows[1].token * 0 + 99)])
    assert engine.gradients.of() == []
    assert engine.forward_backward(objective, (each for each in rows)).loss > 0
    engine.update(lr=1e-3)


def uneven(*overrides: str) -> float:
    """The loss of a step of more micro-batches than the config's, four times as many on the first replica."""
    import torch

    from unmask import Config, Engine
    from unmask.config import apply_overrides
    from unmask.models import load
    from unmask.objectives import build
    from unmask.parallel.mesh import started

    names = script()
    tree = {name: dict(section) for name, section in names["SETTINGS"].items()}
    apply_overrides(tree, ["model.dtype=float64", "parallel.timeout=60", *overrides])
    config = Config.parse(tree)
    with started(config.parallel, torch.device("cpu")) as mesh:
        loaded = load(config.model)
        objective = build("mdlm").bind(loaded.model, None, loaded.mask_token_id)
        engine = Engine(loaded, mesh, config)
        rows = names["rows_of"](objective, [names["counting"](number) for number in range(20)], (0, 1))
        if engine.part[1] == 2:
            rows = [rows[:8], rows[8:]][engine.part[0]]
        return engine.forward_backward(objective, rows).loss


def test_processes_that_share_a_model_may_have_unequal_numbers_of_rows(workers: Any) -> None:
    assert workers(2).run(uneven, "parallel.shard_size=2") == pytest.approx([uneven()] * 2, rel=1e-9)


def canvases(*overrides: str) -> list[int]:
    """What a DiffusionGemma, whose canvases are conditioned on its own predictions, continues a prompt with."""
    import torch

    from tests.models.diffusion_gemma_config import CONFIG
    from unmask import Config, Engine, sample
    from unmask.config import apply_overrides
    from unmask.models import load
    from unmask.objectives import build
    from unmask.parallel.mesh import started

    text = {**CONFIG["text_config"], "num_global_key_value_heads": 2}
    tree: dict[str, Any] = {
        "model": {"config": {**CONFIG, "text_config": text}, "dtype": "float64"},
        "training": {"batch_size": 2},
    }
    apply_overrides(tree, list(overrides))
    config = Config.parse(tree)
    with started(config.parallel, torch.device("cpu")) as mesh:
        loaded = load(config.model)
        objective = build("diffusion_gemma", {"block_size": 8}).bind(loaded.model, None, None)
        with Engine(loaded, mesh, config).generating() as model:
            return sample(model, None, [3, 4, 5], length=16, steps=4, decoding=objective.decoding).token


@pytest.mark.parametrize("axis", ["shard_size", "model_parallel_size"])
def test_canvases_are_conditioned_where_the_embedding_is_divided(axis: str, workers: Any) -> None:
    assert workers(2).run(canvases, f"parallel.{axis}=2") == [canvases()] * 2


def test_what_is_no_rows_no_rate_and_no_column_is_one_sentence() -> None:
    import torch

    from unmask import Config, Engine, UserError
    from unmask.models import load
    from unmask.objectives import build
    from unmask.parallel.mesh import Mesh

    names = script()
    config = Config.parse(names["SETTINGS"])
    loaded = load(config.model)
    objective = build("mdlm").bind(loaded.model, None, loaded.mask_token_id)
    engine = Engine(loaded, Mesh(torch.device("cpu")), config)
    [rows] = names["rows_of"](objective, [names["counting"](number) for number in range(2)], (0, 1))
    for wrong in (rows, objective, [names["counting"](1)]):
        with pytest.raises(UserError, match="rows is a list of Rows"):
            engine.forward_backward(objective, wrong)
    for column in (np.zeros(3), [0.0] * len(rows), np.zeros((len(rows), 2, 2)), np.array(["a"] * len(rows))):
        with pytest.raises(UserError, match="the column 'advantage' is no array of numbers"):
            engine.forward_backward(objective, [replace(rows, columns={"advantage": column})])
    for label in (-1, 18):
        with pytest.raises(UserError, match="labels are from 0 to 17"):
            engine.forward_backward(objective, [replace(rows, label=np.full(len(rows), label))])
    engine.forward_backward(objective, iter([rows]))
    for rate in (float("nan"), "x", None, [1e-3] * 7, -1.0):
        with pytest.raises(UserError, match="lr is a number, or 3"):
            engine.update(rate)
    assert engine.update(1e-3).made
