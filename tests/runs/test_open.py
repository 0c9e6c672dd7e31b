"""Opening a run's model for use: the same weights, mask token, tokeniser and objective as in training."""

from pathlib import Path

import pytest
import torch

from tests.training.tiny import train, weights
from unmask.errors import UserError
from unmask.runs.folder import saved_steps, verify
from unmask.runs.open import open_model


def test_a_run_or_a_step_opens_as_it_was_trained(tmp_path):
    trainer = train(tmp_path, "checkpoint.every=2", objective={"name": "block_diffusion", "block_size": 16})
    opened = open_model(tmp_path)
    trained = weights(trainer)
    assert all(torch.equal(parameter, trained[name]) for name, parameter in opened.model.named_parameters())
    assert opened.model.get_output_embeddings().weight is opened.model.get_input_embeddings().weight
    assert opened.mask_token_id == opened.objective.mask_token_id == 63
    assert opened.objective == trainer.objective and opened.objective.decoding.block_size == 16
    assert opened.tokenizer is None and not opened.model.training
    earlier = open_model(tmp_path / "step-00000002", dtype="bfloat16")
    assert earlier.model.dtype == torch.bfloat16
    assert not torch.equal(earlier.model.model.norm.weight.float(), opened.model.model.norm.weight)


def test_the_opened_model_gives_the_same_loss(tmp_path):
    from unmask.models import RowModel

    trainer = train(tmp_path)
    opened = open_model(tmp_path)
    rows = trainer.objective.rows(trainer.run.source.sampler.batch(0)[0], 0)
    ours = RowModel(opened.model)
    expected = trainer.engine.row_model(trainer.engine.row_model.collate(rows), trainer.objective)
    got = ours(ours.collate(rows), opened.objective)
    assert float(got.sum.detach()) == pytest.approx(float(expected.sum.detach()), rel=1e-6)


def test_the_block_size_is_the_one_the_schedule_had_come_to(tmp_path):
    schedule = [{"until": 3, "size": 4}, {"size": 16}]
    objective = {"name": "block_diffusion", "block_schedule": schedule}
    train(tmp_path, "training.steps=5", "checkpoint.every=2", "checkpoint.keep=0", objective=objective)
    assert open_model(tmp_path / "step-00000002").objective.block_size == 4
    assert open_model(tmp_path).objective.block_size == 16


def test_what_is_no_checkpoint_is_named(tmp_path):
    with pytest.raises(UserError, match="no such checkpoint folder"):
        open_model(tmp_path / "nowhere")
    with pytest.raises(UserError, match="holds no checkpoint"):
        open_model(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match='no "unmask" entry'):
        open_model(tmp_path)


def test_a_damaged_checkpoint_is_refused(tmp_path):
    train(tmp_path, "checkpoint.every=2", "checkpoint.keep=0")
    path = tmp_path / "step-00000004" / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[:-1])
    other = f"name the folder of another step, such as {tmp_path / 'step-00000002'}$"
    with pytest.raises(UserError, match=f"__0_0.distcp: has.*written; {other}"):
        open_model(tmp_path)
    with pytest.raises(UserError, match="; resume from an earlier one with checkpoint.step=2$"):
        train(tmp_path, "training.steps=6")


def test_a_manifest_with_a_damaged_key_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "step-00000001"
    folder.mkdir()
    (folder / "a").write_text("a")
    (folder / "manifest.json").write_text('{"files": {"a": {"bytes": 1, "sha257": "x"}}}')
    with pytest.raises(UserError, match="not a manifest"):
        verify(folder)


def test_a_file_that_is_named_like_a_step_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "step-00000099").write_text("")
    assert saved_steps(tmp_path) == []


@pytest.mark.parametrize("trained", ["float64", "float32"])
def test_a_mixture_of_experts_opens_in_fp64(tmp_path: Path, trained: str) -> None:
    """transformers' grouped matmul of experts takes no fp64: an opened model goes without, as in training."""
    from unmask.sampling import sample

    moe = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
    trainer = train(tmp_path, f"model.dtype={trained}", "training.steps=1", model=moe)
    opened = open_model(tmp_path, dtype="float64")
    options = {"decoding": opened.objective.decoding, "length": 5}
    token = sample(opened.model, None, [1, 2, 3], **options).token
    assert token == sample(trainer.run.model, None, [1, 2, 3], **options).token
