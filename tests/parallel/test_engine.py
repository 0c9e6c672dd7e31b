"""The script of docs/engine.md: an engine alone trains, scores and samples, alike on one process and on two."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from tests.models.diffusion_gemma_config import CONFIG
from tests.objectives.clipped import Clipped
from unmask import Config, Engine, UserError, sample
from unmask.config import apply_overrides
from unmask.engine.ema import local
from unmask.models import load
from unmask.objectives import build
from unmask.parallel.mesh import started

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


@contextmanager
def engine(*overrides: str, settings: Any = None) -> Iterator[Any]:
    """An engine of the page's settings, or of others, on the mesh that they ask for."""
    tree = {name: dict(section) for name, section in (settings or script()["SETTINGS"]).items()}
    apply_overrides(tree, overrides)
    config = Config.parse(tree)
    with started(config.parallel, torch.device("cpu")) as mesh:
        yield Engine(load(config.model, seed=3), mesh, config)


def bound(own: Any, name: str = "mdlm", **options: Any) -> Any:
    return build(name, options).bind(own.model, None, own.loaded.mask_token_id)


def batch(own: Any, objective: Any, first: int = 0, count: int = 8) -> list[Any]:
    """The micro-batches of this process's replica of a step."""
    return script()["rows_of"](objective, [script()["counting"](first + number) for number in range(count)], own.part)


def different(*overrides: str) -> list[int]:
    """What this process samples of a prompt, and of a length, of its own, while it shares the model."""
    rank = dist.get_rank() if dist.is_initialized() else int(overrides[0])
    decoding = build("block_diffusion", {"block_size": 4}).decoding
    with engine(*[each for each in overrides if "=" in each]) as own, own.generating() as model:
        return sample(model, None, [rank + 1] * (4 * rank + 1), length=4 + 20 * rank, decoding=decoding).token


@pytest.mark.parametrize("axes", ["parallel.shard_size=2", "parallel.data_parallel_size=2"])
def test_processes_that_share_a_model_sample_texts_of_their_own(axes: str, workers: Any) -> None:
    """One needs six times the passes of the other, which keeps it company."""
    assert workers(2).run(different, axes) == [different("0"), different("1")]


def test_gradients_are_updated_once() -> None:
    with engine() as own:
        objective = bound(own)
        rows = batch(own, objective, count=4)
        with pytest.raises(RuntimeError, match="there are no gradients"):
            own.update(lr=1e-3)
        own.forward_backward(objective, rows)
        with pytest.raises(RuntimeError, match="have had no update"):
            own.forward_backward(objective, rows)
        assert own.update(lr=1e-3).made and own.step == 1


def test_a_failed_pass_leaves_no_gradients() -> None:
    """The next call's are those of its own rows, which may come from a generator."""
    with engine() as own:
        objective = bound(own)
        rows = batch(own, objective, count=4)
        with pytest.raises(UserError, match="token id 99"):
            own.forward_backward(objective, [rows[0], replace(rows[1], token=rows[1].token * 0 + 99)])
        assert own.gradients.of() == []
        assert own.forward_backward(objective, (each for each in rows)).loss > 0
        own.update(lr=1e-3)


def uneven(*overrides: str) -> float:
    """The loss of a step of more micro-batches than the config's, four times as many on the first replica."""
    with engine("model.dtype=float64", "parallel.timeout=60", *overrides) as own:
        objective = bound(own)
        part, replicas = own.part
        rows = script()["rows_of"](objective, [script()["counting"](number) for number in range(20)], (0, 1))
        return own.forward_backward(objective, rows if replicas == 1 else [rows[:8], rows[8:]][part]).loss


def test_processes_that_share_a_model_may_have_unequal_numbers_of_rows(workers: Any) -> None:
    assert workers(2).run(uneven, "parallel.shard_size=2") == pytest.approx([uneven()] * 2, rel=1e-9)


def canvases(*overrides: str) -> list[int]:
    """What a DiffusionGemma, whose canvases are conditioned on its own predictions, continues a prompt with."""
    model = {**CONFIG, "text_config": {**CONFIG["text_config"], "num_global_key_value_heads": 2}}
    settings = {"model": {"config": model, "dtype": "float64"}, "training": {"batch_size": 2}}
    with engine(*overrides, settings=settings) as own, own.generating() as model:
        decoding = bound(own, "diffusion_gemma", block_size=8).decoding
        return sample(model, None, [3, 4, 5], length=16, steps=4, decoding=decoding).token


@pytest.mark.parametrize("axis", ["shard_size", "model_parallel_size"])
def test_canvases_are_conditioned_where_the_embedding_is_divided(axis: str, workers: Any) -> None:
    assert workers(2).run(canvases, f"parallel.{axis}=2") == [canvases()] * 2


def test_what_is_no_rows_no_rate_and_no_column_is_one_sentence() -> None:
    with engine() as own:
        objective = bound(own)
        [rows] = batch(own, objective, count=2)
        for wrong in (rows, objective, [script()["counting"](1)]):
            with pytest.raises(UserError, match="rows is a list of Rows"):
                own.forward_backward(objective, wrong)
        for column in (np.zeros(3), [0.0] * len(rows), np.zeros((len(rows), 2, 2)), np.array(["a"] * len(rows))):
            with pytest.raises(UserError, match="the column 'advantage' is no array of numbers"):
                own.forward_backward(objective, [replace(rows, columns={"advantage": column})])
        for label in (-1, 18):
            with pytest.raises(UserError, match="labels are from 0 to 17"):
                own.forward_backward(objective, [replace(rows, label=np.full(len(rows), label))])
        own.forward_backward(objective, iter([rows]))
        for rate in (float("nan"), "x", None, [1e-3] * 7, -1.0):
            with pytest.raises(UserError, match="lr is a number, or 3"):
                own.update(rate)
        assert own.update(1e-3).made


def steps(own: Any, first: int, count: int = 2) -> None:
    objective = bound(own)
    for step in range(first, first + count):
        own.forward_backward(objective, batch(own, objective, 8 * step))
        assert own.update(lr=1e-2).made


def resumed(folder: str, optimizer: str, *overrides: str) -> tuple[int, int, bool, bool, bool]:
    """(steps of an engine, of one that takes up its state halfway, whether the weights, their averages, and what the
    optimiser is told end equal)."""
    options = ["training.ema=0.5", f"optimizer.name={optimizer}", "parallel.timeout=60", *overrides]
    with engine(*options) as own:
        steps(own, 0)
        dcp.save(own.state_dict(), checkpoint_id=folder, no_dist=own.mesh.size == 1)
        steps(own, 2)
        whole = own.state_dict()
    with engine(*options) as other:
        groups = other.optimizer.param_groups
        told = [{key: value for key, value in each.items() if key != "params"} for each in groups]
        state = other.state_dict()
        dcp.load(state, checkpoint_id=folder, no_dist=other.mesh.size == 1)
        for group in state["optimizer"]["param_groups"]:
            group |= {key: None for key in ("fused", "foreach") if key in group}  # as another machine has saved it
        other.load_state_dict(state)
        groups = other.optimizer.param_groups
        kept = [{key: each[key] for key in known} for each, known in zip(groups, told, strict=True)]
        steps(other, 2)
        ours = other.state_dict()
    same = [
        all(local(ours[part][name]).equal(local(tensor)) for name, tensor in whole[part].items())
        for part in ("model", "ema")
    ]
    return own.step, other.step, *same, kept == told


@pytest.mark.parametrize(
    "optimizer, axis",
    [("adamw", None), *(("adamw", axis) for axis in AXES), ("muon", None), ("muon", "pipeline_stages")],
)
def test_the_state_of_an_engine_is_all_that_a_continuation_needs(
    optimizer: str, axis: str | None, workers: Any, tmp_path: Path
) -> None:
    arguments = (str(tmp_path / "state"), optimizer)
    ends = [resumed(*arguments)] if axis is None else workers(2).run(resumed, *arguments, f"parallel.{axis}=2")
    assert all(end == (4, 4, True, True, True) for end in ends)


def test_a_loss_s_own_metrics_are_means_over_labelled_rows() -> None:
    with engine("model.dtype=float64") as own:
        objective = Clipped(block_size=4).bind(own.model, None, own.loaded.mask_token_id)
        rows = batch(own, objective)
        log_p = -torch.cat(own.nll(rows, build("block_diffusion", {"block_size": 4}).bind(own.model, None, 17)))
        metrics = own.forward_backward(objective, rows).metrics
    assert metrics["nll"] == pytest.approx(float(-log_p.mean()), rel=1e-12)
    assert metrics["surprise"] == pytest.approx(float(log_p.square().mean()), rel=1e-12)
