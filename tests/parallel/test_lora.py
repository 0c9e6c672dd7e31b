"""Runs with adapters give on any number of processes what they give on one, and go on on another mesh."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.parallel.matrix import SMOOTH
from tests.parallel.resumption import goes_on
from tests.parallel.test_parity import is_one, name
from tests.parallel.trainer_cases import Case, train

ADAPTERS = ("model.lora.rank=3", "model.lora.alpha=6", "training.ema=0.9")
DORA = (*ADAPTERS, "model.lora.dora=true", "model.lora.train=[mask_token]")
EXTRAS = (*ADAPTERS, "model.lora.rslora=true", "model.lora.train=[embeddings,norms]")
QUANTISED = (*ADAPTERS, "model.lora.quantize=nf4")
BASE = Case("block_diffusion (bd3lm)", blocks=1, placement="auto", batch_size=4, micro_batch=1, options=ADAPTERS)
MATRIX = [
    replace(BASE, replicas=2),
    replace(BASE, blocks=2, placement="csbp", micro_batch=2, options=DORA, checkpointing="full"),
    replace(BASE, shards=2, zero=3, options=DORA),
    replace(BASE, shards=2, zero=2, options=(*EXTRAS, *SMOOTH), checkpointing="selective", dtype="float32"),
    replace(BASE, blocks=2, shards=2, placement="csbp", micro_batch=2, options=EXTRAS, checkpointing="mlp"),
    replace(BASE, blocks=2, shards=2, placement="csbp", micro_batch=2, options=(*ADAPTERS, *SMOOTH), dtype="float32"),
    replace(BASE, replicas=2, options=QUANTISED),
    replace(BASE, blocks=2, placement="csbp", micro_batch=2, options=QUANTISED, checkpointing="selective"),
    replace(BASE, shards=2, zero=3, options=QUANTISED),
    replace(BASE, shards=2, zero=2, options=QUANTISED, checkpointing="full"),
    replace(BASE, blocks=2, shards=2, placement="csbp", micro_batch=2, options=QUANTISED),
    replace(BASE, replicas=2, shards=2, options=QUANTISED),
]


@pytest.mark.parametrize("case", MATRIX, ids=name)
def test_adapters_on_any_number_of_processes_are_those_of_one(case, workers, alone, tmp_path):
    if case.options is QUANTISED:
        pytest.importorskip("torchao")
    one, ranks = alone(case), workers(case.ranks).run(train, case, str(tmp_path))
    is_one(ranks, one, case)
    moved = [key for key in one["weights"] if "lora_B" in key]
    assert len(moved) == 14 and all(np.abs(one["weights"][key]).max() > 0 for key in moved)


def test_a_run_with_adapters_goes_on_on_another_mesh(workers, alone, tmp_path):
    goes_on(workers, MATRIX[2], MATRIX[1], alone(MATRIX[1]), tmp_path)


def test_a_base_in_four_bits_goes_on_on_another_mesh(workers, alone, tmp_path):
    pytest.importorskip("torchao")
    divided, copied = MATRIX[8], MATRIX[6]
    goes_on(workers, divided, copied, alone(copied), tmp_path)
