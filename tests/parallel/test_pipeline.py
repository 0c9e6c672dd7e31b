"""A pipeline: what each rank holds is what the dry run says, and hidden states are all that its stages exchange."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.parallel.pipeline_cases import records
from tests.parallel.shard_cases import held
from tests.parallel.test_shard import promised
from tests.parallel.trainer_cases import Case

CASE = {"blocks": 1, "batch_size": 6, "micro_batch": 1}


@pytest.mark.parametrize(
    "sizes, model, stage_layers",
    [
        ({"schedule": "1f1b"}, "five", (2, 3)),
        ({"schedule": "zbv"}, "uneven four", (1, 1, 1, 1)),
        ({"schedule": "1f1b", "shards": 2}, "uneven", (1, 1)),
    ],
)
def test_memory_is_foretold_to_the_byte(sizes, model, stage_layers, workers, tmp_path, monkeypatch):
    case = Case("mdlm (llada)", "auto", "auto", pipeline=2, model=model, stage_layers=stage_layers, **CASE, **sizes)
    found = workers(case.ranks).run(held, case, str(tmp_path / "run"))
    facts = promised(case, tmp_path / "dry", monkeypatch)
    for name in ("parameter_bytes", "gradient_bytes", "optimizer_bytes"):
        assert max(each[name] for each in found) == facts[name], name
    assert facts["processes"] == case.ranks and facts["stage_layers"] == list(stage_layers)


def test_only_hidden_states_and_their_gradients_travel(workers, tmp_path, monkeypatch):
    """Six packs of as many rows, there and back, of width 32 in fp64."""
    case = Case("ar", "auto", "auto", data="long", pipeline=2, model="uneven", stage_layers=(1, 1), **CASE)
    sent = workers(2).run(held, case, str(tmp_path / "run"))[0]["sent"]
    rows = promised(case, tmp_path / "dry", monkeypatch)["rows_first_step"]
    assert [each["hidden states"] for each in sent] == [rows * 32 * 8] * 2
    assert all(set(each) == {"hidden states"} for each in sent)


@pytest.mark.parametrize("sizes", [{}, {"blocks": 2, "placement": "csbp"}])
def test_the_log_has_what_one_process_logs(sizes, workers, tmp_path):
    """Losses by level come from the last stage, counts from the first rank of a pack."""
    case = replace(Case("ar", "auto", "auto", pipeline=2, stage_layers=(1, 1), **CASE), **sizes)
    ours, wanted = (
        workers(case.ranks).run(records, case, str(tmp_path / "ours"))[0],
        records(case.alone(), str(tmp_path)),
    )
    assert len(ours) == len(wanted) == 4
    for one, other in zip(ours, wanted, strict=True):
        shared = {key for key in other if key.startswith("nll") or key in ("rows", "tokens", "loss")}
        assert len(shared) > 4 and {key: one[key] for key in shared} == pytest.approx(
            {key: other[key] for key in shared}
        )
        assert len(one["rank_idle"]) == case.ranks and min(one["rank_idle"]) > 0
