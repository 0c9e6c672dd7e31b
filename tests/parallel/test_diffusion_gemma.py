"""DiffusionGemma on several processes is DiffusionGemma on one: losses, gradient norms and weights.

Both passes of self-conditioning, the frozen routers and the encoder's loss take part; and what is refused.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.parallel.matrix import SMOOTH
from tests.parallel.test_parity import is_one, row
from tests.parallel.trainer_cases import MODELS, Case, documents, train
from tests.training.tiny import config
from unmask.errors import UserError
from unmask.training import setup

#: Small steps: norms of its small random embeddings make a difference of rounding grow from step to step.
STEADY = (*SMOOTH, "optimizer.learning_rate=0.0003")
ONE = Case("diffusion_gemma", blocks=1, model="gemma", data="prompt", batch_size=4, micro_batch=1, options=STEADY)
DRAWS = replace(ONE, objective="diffusion_gemma (2 draws)")
PAIRS = replace(ONE, model="gemma pairs")
GEMMA_MATRIX = [
    *[replace(ONE, blocks=2, placement=placement) for placement in ("csbp", "context", "block")],
    replace(ONE, objective="diffusion_gemma (no first pass)", blocks=2, exchange="ring", data="packed"),
    replace(DRAWS, replicas=2, micro_batch=2),
    replace(ONE, shards=2, zero=3, checkpointing="full"),
    replace(DRAWS, replicas=2, experts=2),
    replace(ONE, blocks=2, shards=2, experts=2),
    replace(PAIRS, tensor=2),
    replace(PAIRS, objective="diffusion_gemma (2 draws)", tensor=2, shards=2, checkpointing="selective"),
    replace(PAIRS, blocks=2, tensor=2, placement="csbp"),
    # In fp32 rounding alone turns near ties of a router into other experts; where all are taken there are none.
    replace(ONE, blocks=2, dtype="float32", model="gemma dense"),
]


#: Tensor ranks beside others' cost most, and what they do together the parity matrix shows.
FULL = [case for case in GEMMA_MATRIX if case.tensor == 2 and case.ranks == 4]


@pytest.mark.parametrize("case", [row(case, case not in FULL) for case in GEMMA_MATRIX])
def test_any_number_of_processes_is_one(case, workers, alone, tmp_path):
    one, ranks = alone(case), workers(case.ranks).run(train, case, str(tmp_path))
    assert min(one["loss"][:3]) > 0
    is_one(ranks, one, case)


REFUSED = {
    "does not divide num_key_value_heads=1": ["parallel.model_parallel_size=2"],
    "computes something else when its layers run one stage after the other": ["parallel.pipeline_stages=2"],
    "model.balance_loss=1: .* returns probabilities": ["model.balance_loss=1"],
}


@pytest.mark.parametrize("said", REFUSED)
def test_refused(said, tmp_path):
    settings = config(tmp_path, *REFUSED[said], objective={"name": "diffusion_gemma"}, model=MODELS["gemma"])
    with pytest.raises(UserError, match=said):
        setup.prepare(settings, documents("packed"))


def test_it_has_no_likelihood_bound(tmp_path):
    settings = config(tmp_path, objective={"name": "diffusion_gemma"}, model=MODELS["gemma"])
    with pytest.raises(UserError, match="data.validation: DiffusionGemma has no likelihood bound"):
        setup.prepare(settings, documents("packed"), documents("packed"))
