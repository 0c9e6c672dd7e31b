"""The gradient noise scale: against gradients whose noise is known, and a run's own gradients taken one by one."""

import numpy as np
import pytest

from tests.training.tiny import PLAIN, config, documents, log, stop_at, train
from unmask.engine.observe import DECAY, NoiseScale
from unmask.errors import UserError
from unmask.training import setup
from unmask.training.source import micro_batches


def test_it_finds_the_noise_that_was_put_in():
    """Packs' gradients are g + noise of variance 3 in each of 50 dimensions, and |g|^2 = 2: 150 / 2 packs."""
    generator = np.random.default_rng(0)
    gradient = np.full(50, (2 / 50) ** 0.5)
    scale, found = NoiseScale(), []
    for _ in range(4000):
        packs = gradient + 3**0.5 * generator.standard_normal((256, 50))
        parts = packs.reshape(4, 64, 50).mean(axis=1)
        scale.add(float((parts**2).sum(axis=1).mean()), float((packs.mean(axis=0) ** 2).sum()), 4, 256)
        found.append((scale.variance, scale.square))
    variance, square = np.mean(found[500:], axis=0)
    assert variance == pytest.approx(150, rel=0.02)
    assert square == pytest.approx(2, rel=0.02)


def test_it_has_no_value_before_both_means_are_positive():
    scale = NoiseScale()
    assert scale.value is None
    scale.add(part=1.0, whole=2.0, parts=2, batch_size=4)  # the whole is noisier than its parts
    assert scale.value is None
    again = NoiseScale()
    again.add(part=2.0, whole=1.5, parts=2, batch_size=4)
    assert again.value == pytest.approx((0.5 * 4) / 1.0)


def test_a_step_takes_its_first_micro_batch_and_the_whole(tmp_path):
    """4 micro-batches: |G_b|^2 is the gradient of the first one alone, times 4, over the count of the whole step."""
    options = ["model.dtype=float64", "training.batch_size=4", *PLAIN[2:]]
    partial = []

    def see(trainer, record):
        partial.append(
            (
                trainer.engine.noise._part,
                trainer.engine.noise._parts,
                trainer.engine.noise.state_dict(),
                record["grad_norm"],
            )
        )

    trainer = train(tmp_path, *options, "training.clip=0", "training.steps=1", callbacks=[see])
    part, parts, state, norm = partial[0]
    # By hand: the sum of the first pack's loss over the count of all four.
    fresh = train(tmp_path / "fresh", *options, "training.steps=1", "optimizer.learning_rate=1e-300", "training.clip=0")
    objective = fresh.objective.at(0, 1)
    micro = micro_batches(objective, fresh.run.source.documents(0), 0, 1)
    count = sum(rows.count for rows in micro)
    model = fresh.engine.row_model
    squares = []
    for rows in (micro[0], None):
        model.zero_grad()
        for each in micro if rows is None else [rows]:
            batch = model.collate(each)
            (model(batch, objective).sum / count).backward()
        squares.append(sum(float(p.grad.square().sum()) for p in model.parameters()))
    assert parts == 4 and part == pytest.approx(16 * squares[0], rel=1e-9)
    assert norm**2 == pytest.approx(squares[1], rel=1e-9)
    square, variance = (4 * squares[1] - part) / 3, (part - squares[1]) * 4 / 3
    assert state == pytest.approx({"square": (1 - DECAY) * square, "variance": (1 - DECAY) * variance}, rel=1e-9)
    assert trainer.engine.noise.value is None or trainer.engine.noise.value > 0


def test_the_log_has_it_where_it_can_be_measured(tmp_path):
    train(tmp_path / "two", "training.batch_size=2", "training.steps=8")
    assert all("noise_scale" in record for record in log(tmp_path / "two"))
    train(tmp_path / "one", "training.batch_size=2", "training.micro_batch=2")
    assert not any("noise_scale" in record for record in log(tmp_path / "one"))
    train(tmp_path / "off", "log.noise_scale=false")
    assert not any("noise_scale" in record for record in log(tmp_path / "off"))


@pytest.mark.parametrize(
    "options, reason",
    [
        (["training.batch_size=1"], "a step is one micro-batch"),
        (["training.micro_batch=2"], "a step is one micro-batch"),
        (["parallel.block_parallel_size=2"], "the gradient of a pack is spread over parallel.block_parallel_size"),
    ],
)
def test_it_is_refused_where_it_is_insisted_on_and_cannot_be_measured(tmp_path, options, reason):
    with pytest.raises(UserError, match=f"log.noise_scale=true: it cannot be measured here: {reason}"):
        setup.prepare(config(tmp_path / "run", "log.noise_scale=true", *options), documents())
    assert not (tmp_path / "run").exists()


def test_it_resumes(tmp_path):
    train(tmp_path / "whole", "training.steps=8")
    train(tmp_path / "halves", "training.steps=8", callbacks=[stop_at(4)])
    train(tmp_path / "halves", "training.steps=8")
    whole, halves = ([record["noise_scale"] for record in log(tmp_path / n)] for n in ("whole", "halves"))
    assert whole == halves and any(value is not None for value in whole)
