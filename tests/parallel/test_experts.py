"""What goes with divided experts besides plain steps, which the parity matrix holds: resumption on other meshes,
EMA weights, bounds, Muon, half precision, memory, bytes; and what is refused before a process starts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.parallel.resumption import goes_on, run
from tests.parallel.shard_cases import held
from tests.parallel.test_shard import promised
from tests.parallel.trainer_cases import MODELS, Case, documents, train
from tests.training.tiny import config
from unmask.errors import UserError
from unmask.export import export
from unmask.training import setup

BASE = Case("block_diffusion (bd3lm)", "auto", blocks=1, model="experts", batch_size=4, micro_batch=1)
ON = {
    "1": BASE.alone(),
    "2 experts": replace(BASE, replicas=2, experts=2),
    "2 experts, sharded": replace(BASE, shards=4, experts=2),
    "2 shards": replace(BASE, shards=2),
}
FEATURES = (
    "training.ema=0.8", "evaluation.every=3", "evaluation.packs=0", "optimizer.name=muon", "optimizer.eps=1e-4",
)  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return train(ON["1"], str(tmp_path_factory.mktemp("whole")))


@pytest.mark.parametrize(
    "first, second",
    [("2 experts", "1"), ("1", "2 experts"), ("2 experts", "2 shards"), ("2 experts, sharded", "2 experts")],
)
def test_a_run_goes_on_on_another_mesh(first, second, workers, whole, tmp_path):
    goes_on(workers, ON[first], ON[second], whole, tmp_path)


def test_averages_bounds_muon_and_export(workers, tmp_path):
    from transformers import AutoModelForCausalLM

    case = replace(ON["2 experts"], options=FEATURES)
    alone = train(case.alone(), str(tmp_path / "alone"))
    first, second = workers(2).run(train, case, str(tmp_path / "two"))
    assert len(alone["bound"]) == 2 and first["last"] == second["last"]
    for key in ("loss", "norm", "bound", "last"):  # Muon's iterations are bf16's
        np.testing.assert_allclose(first[key], alone[key], rtol=1e-4)
    for path in ("alone", "two"):
        export(tmp_path / path / "ema", tmp_path / f"{path}-hf")
    ours, theirs = (
        AutoModelForCausalLM.from_pretrained(tmp_path / f"{path}-hf", dtype="float64") for path in ("two", "alone")
    )
    assert ours.config._experts_implementation != "unmask"
    for (name, average), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        np.testing.assert_allclose(average.detach(), other.detach(), atol=1e-3, err_msg=name)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_stays_close(precision, workers, tmp_path):
    case = replace(ON["2 experts"], dtype="float32", options=(f"training.precision={precision}", "training.ema=0.5"))
    ours, one = run(workers, case, tmp_path / "two"), train(case.alone(), str(tmp_path / "one"))
    assert np.abs(np.array(ours["loss"]) / one["loss"] - 1).max() < 0.03


def overflowing(path: str) -> tuple[float, list[bool]]:
    """(the loss scale at the end, which of four steps were skipped): an expert of rank 1 overflows in the second."""
    from unittest import mock

    import torch.distributed as dist

    from unmask.engine.engine import Engine
    from unmask.training.trainer import Trainer

    forward, skipped = Engine.forward_backward, []

    def poisoned(engine, objective, micro):
        found = forward(engine, objective, micro)
        if engine.step == 1 and dist.get_rank() == 1:
            experts = engine.model.base_model.layers[0].mlp.experts
            experts._parameters["down_proj"].grad.to_local()[0, 0, 0] = float("inf")
        return found

    options = ["parallel.data_parallel_size=2", "parallel.expert_parallel_size=2", "training.precision=fp16"]
    with mock.patch.object(Engine, "forward_backward", poisoned):
        settings = config(Path(path), *options, "parallel.timeout=60", model=MODELS["experts"])
        trainer = Trainer(config=settings, callbacks=[lambda _, record: skipped.append(record.get("skipped", False))])
        trainer.train(documents("packed"))
    return trainer.engine.scaler.get_scale(), skipped


def test_an_expert_that_overflows_is_one_on_all_ranks(workers, tmp_path):
    first, second = workers(2).run(overflowing, str(tmp_path))
    assert first == second == (2.0**15, [False, True, False, False])


@pytest.mark.parametrize("on", ["2 experts", "2 experts, sharded"])
def test_memory_is_foretold_to_the_byte_and_rows_are_counted(on, workers, tmp_path, monkeypatch):
    case = replace(ON[on], objective="mdlm (llada)")
    found = workers(case.ranks).run(held, case, str(tmp_path / "run"))
    facts = promised(case, tmp_path / "dry", monkeypatch)
    for name in ("parameter_bytes", "gradient_bytes", "optimizer_bytes"):
        assert max(each[name] for each in found) == facts[name], name
    # A row goes to two experts in each of two layers, at most; there and back, and so do gradients.
    sent = sum(each["experts"] for each in found[0]["sent"])
    assert 0 < sent <= facts["rows_first_step"] * 2 * 2 * 4 * 32 * 8 and sent % (32 * 8) == 0


SIZE = "parallel.expert_parallel_size=2"
REFUSED = {
    "does not divide the 3 ranks": (["parallel.data_parallel_size=3", SIZE], {}),
    "does not divide the 3 experts of model.layers.0.mlp.experts": (
        ["parallel.data_parallel_size=2", SIZE], {"num_experts": 3}
    ),
    "Qwen3ForCausalLM has no stacked experts": (["parallel.data_parallel_size=2", SIZE], {"model_type": "qwen3"}),
    "model.balance_loss=1 has no effect: Qwen3ForCausalLM": (["model.balance_loss=1"], {"model_type": "qwen3"}),
}  # fmt: skip


@pytest.mark.parametrize("said", REFUSED)
def test_refused(said, tmp_path):
    overrides, model = REFUSED[said]
    options = {**MODELS["experts"], **model}
    if options["model_type"] == "qwen3":
        options = {}
    settings = config(tmp_path, *overrides, "training.batch_size=4", model=options)
    with pytest.raises(UserError, match=said):
        setup.prepare(settings, documents("packed"))
