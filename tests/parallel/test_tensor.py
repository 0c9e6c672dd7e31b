"""What goes with a tensor axis besides plain steps, which the parity matrix holds: resumption on other meshes, averaged
weights, bounds, noise on the mask token, half precision; and what is refused before a process starts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.parallel.resumption import goes_on, run
from tests.parallel.shard_cases import held
from tests.parallel.test_shard import promised
from tests.parallel.trainer_cases import Case, documents, train
from tests.training.tiny import config
from unmask.errors import UserError
from unmask.training import setup

BASE = Case("block_diffusion (bd3lm)", blocks=1, tensor=2, batch_size=4, micro_batch=2)
ON = {
    "1": BASE.alone(),
    "2 tensor": BASE,
    "2 blocks": replace(BASE, blocks=2, tensor=1),
    "2 shards": replace(BASE, shards=2, tensor=1),
}
FEATURES = ("training.ema=0.8", "model.mask_noise_steps=6", "evaluation.every=3", "evaluation.packs=0")


def averages(run):
    from unmask.runs.open import open_model

    folder = sorted(Path(run).glob("step-*"))[-1]
    return {name: weight.detach().numpy() for name, weight in open_model(folder / "ema").model.named_parameters()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return train(ON["1"], str(tmp_path_factory.mktemp("whole")))


@pytest.mark.parametrize(
    "first, second", [("2 tensor", "1"), ("1", "2 tensor"), ("2 tensor", "2 shards"), ("2 blocks", "2 tensor")]
)
def test_a_run_goes_on_on_another_mesh(first, second, workers, whole, tmp_path):
    goes_on(workers, ON[first], ON[second], whole, tmp_path)


def test_averages_bounds_and_noise_on_the_mask_token(workers, tmp_path):
    case = replace(BASE, options=FEATURES)
    alone = train(case.alone(), str(tmp_path / "alone"))
    first, second = workers(2).run(train, case, str(tmp_path / "two"))
    assert len(alone["bound"]) == 2 and first["last"] == second["last"]
    for key in ("loss", "norm", "bound", "last"):
        np.testing.assert_allclose(first[key], alone[key], rtol=1e-10)
    ours = averages(tmp_path / "two")
    for name, average in averages(tmp_path / "alone").items():
        np.testing.assert_allclose(ours[name], average, rtol=1e-10, atol=1e-10)
    plain = train(replace(case.alone(), options=()), str(tmp_path / "plain"))
    assert abs(plain["loss"][0] - alone["loss"][0]) > 1e-6  # the noise was there


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_stays_close(precision, workers, tmp_path):
    case = replace(BASE, dtype="float32", options=(f"training.precision={precision}",))
    ours, one = run(workers, case, tmp_path / "two"), train(case.alone(), str(tmp_path / "one"))
    assert np.abs(np.array(ours["loss"]) / one["loss"] - 1).max() < 0.03


def overflowing(path: str, options: list[str], always: bool = False) -> tuple[float, list[bool], str]:
    """(the loss scale at the end, which steps were skipped, what ended the run): a gradient of rank 1 overflows in the
    second step, or in all."""
    from unittest import mock

    import torch.distributed as dist

    from unmask.engine.engine import Engine
    from unmask.errors import UserError
    from unmask.training.trainer import Trainer

    forward, skipped = Engine.forward_backward, []

    def poisoned(engine, objective, micro):
        found = forward(engine, objective, micro)
        if (always or engine.step == 1) and dist.get_rank() == 1:
            projection = engine.model.base_model.layers[0].mlp.down_proj
            projection._parameters["weight"].grad.to_local()[0, 0] = float("inf")
        return found

    def see(trainer, record):
        skipped.append(record.get("skipped", False))

    trainer = Trainer(
        config=config(Path(path), *options, "training.precision=fp16", "parallel.timeout=60"), callbacks=[see]
    )
    with mock.patch.object(Engine, "forward_backward", poisoned):
        try:
            trainer.train(documents("packed"))
        except UserError as error:
            return trainer.engine.scaler.get_scale(), skipped, str(error)
    return trainer.engine.scaler.get_scale(), skipped, ""


def test_an_overflow_on_one_rank_is_one_on_all(workers, tmp_path):
    first, second = workers(2).run(overflowing, str(tmp_path), ["parallel.model_parallel_size=2"])
    assert first == second == (2.0**15, [False, True, False, False], "")


@pytest.mark.parametrize("options", [["parallel.model_parallel_size=2"], ["parallel.shard_size=2"]])
def test_overflows_that_no_scale_mends_end_the_run_on_all_ranks(options, workers, tmp_path):
    found = workers(2).run(overflowing, str(tmp_path), [*options, "training.steps=60"], True)
    for scale, skipped, told in found:
        assert (scale, skipped) == (0.5, [True] * 16)
        assert "step 17: the gradient norm is inf in fp16, 17 steps in a row" in told


@pytest.mark.parametrize("sizes", [{"tensor": 2}, {"tensor": 2, "shards": 2}])
def test_memory_is_foretold_to_the_byte(sizes, workers, tmp_path, monkeypatch):
    case = replace(BASE, objective="mdlm (llada)", micro_batch=1, **sizes)
    found = workers(case.ranks).run(held, case, str(tmp_path / "run"))
    facts = promised(case, tmp_path / "dry", monkeypatch)
    for name in ("parameter_bytes", "gradient_bytes", "optimizer_bytes"):
        assert max(each[name] for each in found) == facts[name], name
    assert found[0]["sent"][0]["tensor"] > 0


FOUR = {"num_key_value_heads": 4}
MOE = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
REFUSED = {
    "num_key_value_heads=2": (["parallel.model_parallel_size=4"], {}),
    "num_attention_heads=4": (["parallel.model_parallel_size=3"], {}),
    "model.compile": (["parallel.model_parallel_size=2", "model.compile=true"], {}),
    "skip_last_layer": (["parallel.model_parallel_size=2", "model.skip_last_layer=true"], {}),
    "muon": (["parallel.model_parallel_size=2", "optimizer.name=muon"], {}),
    "intermediate_size|gate_proj=30": (["parallel.model_parallel_size=4"], {"intermediate_size": 30, **FOUR}),
    "layers.0.mlp.experts is divided as 'moe_tp_experts'": (["parallel.model_parallel_size=2"], MOE),
}


@pytest.mark.parametrize("said", REFUSED)
def test_refused(said, tmp_path):
    overrides, model = REFUSED[said]
    with pytest.raises(UserError, match=said):
        setup.prepare(config(tmp_path, *overrides, model=model), documents("packed"))
