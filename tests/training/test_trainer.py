"""The training step against transformers and a hand-written loop, and what its options may and may not change."""

import math
import os
import signal

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.training.tiny import MODEL, PLAIN, config, documents, log, losses, train, weights
from unmask import ParallelConfig, Trainer
from unmask.engine.engine import Engine
from unmask.errors import UserError
from unmask.training.speed import memory


def test_a_step_is_the_one_written_by_hand(tmp_path):
    """The AR objective on separate documents: transformers' own loss, clipped, then AdamW by its formula."""
    from transformers import AutoConfig, AutoModelForCausalLM

    options = ["model.dtype=float64", "training.clip=0.5", "optimizer.weight_decay=0.2", "schedule.warmup=0"]
    options += ["schedule.name=constant", "training.steps=1", "training.micro_batch=2", "model.fused=false"]
    trainer = train(tmp_path, *options, objective={"name": "ar"})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        fields = {key: value for key, value in MODEL.items() if key != "model_type"}
        reference = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **fields), dtype=torch.float64)
    packs = trainer.run.source.sampler.batch(0)
    total, count = torch.zeros((), dtype=torch.float64), 0
    for document in (document for pack in packs for document in pack):
        token = torch.from_numpy(document.token)[None]
        logits = reference(input_ids=token).logits[0]
        total = total + torch.nn.functional.cross_entropy(logits[:-1], token[0, 1:], reduction="sum")
        count += len(document) - 1
    (total / count).backward()
    assert losses(tmp_path)[0][1] == pytest.approx(total.item() / count, abs=1e-12)

    gradients = [parameter.grad for parameter in reference.parameters()]
    norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients))
    assert log(tmp_path)[0]["grad_norm"] == pytest.approx(norm, rel=1e-10)
    assert norm > 0.5
    rate = 0.003
    trained = weights(trainer)
    for name, parameter in reference.named_parameters():
        gradient = parameter.grad * 0.5 / (norm + 1e-6)
        decay = rate * 0.2 if parameter.ndim == 2 and "embed" not in name else 0.0
        expected = parameter.detach() * (1 - decay) - rate * gradient / (gradient.abs() + 1e-8)
        torch.testing.assert_close(trained[name], expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("objective", ["ar", "mdlm", "block_diffusion", "fast_dllm_v2"])
def test_accumulation_is_one_big_batch(tmp_path, objective):
    """4 micro-batches of 1 pack give the loss and the gradient of 1 micro-batch of 4 packs."""
    results = []
    for size in (1, 4):
        path = tmp_path / str(size)
        options = [*PLAIN, "training.clip=0", "training.steps=1", "training.batch_size=4", "model.dtype=float64"]
        trainer = train(path, *options, f"training.micro_batch={size}", objective={"name": objective})
        results.append((losses(path)[0][1], weights(trainer)))
    (one, first), (four, second) = results
    assert one == pytest.approx(four, abs=1e-12)
    for name, weight in first.items():
        torch.testing.assert_close(weight, second[name], rtol=0, atol=1e-12)


class AttendCalls(TorchDispatchMode):
    calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += func == torch.ops.unmask.attend.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode, calls", [("none", 2), ("full", 4), ("selective", 2), ("mlp", 2)])
def test_checkpointing_changes_nothing_but_the_work(tmp_path, mode, calls, monkeypatch):
    """Same loss and gradients; two layers attend twice, or twice more where attention is computed again."""
    options = [*PLAIN, "training.clip=0", "training.steps=1", "model.dtype=float64", "training.micro_batch=2"]
    options += ["model.skip_last_layer=false"]  # a skipping last layer is never checkpointed: its backward comes first
    plain = weights(train(tmp_path / "plain", *options))
    count = AttendCalls()
    forward_backward = Engine.forward_backward

    def counted(self, objective, micro):
        with count:
            return forward_backward(self, objective, micro)

    monkeypatch.setattr(Engine, "forward_backward", counted)
    checkpointed = train(tmp_path / mode, *options, f"training.checkpointing={mode}")
    for name, weight in weights(checkpointed).items():
        torch.testing.assert_close(weight, plain[name], rtol=0, atol=1e-12)
    assert losses(tmp_path / mode) == losses(tmp_path / "plain")
    assert count.calls == calls


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_stays_close(tmp_path, precision):
    train(tmp_path / "fp32", "training.steps=8")
    train(tmp_path / precision, "training.steps=8", f"training.precision={precision}")
    for (_, full), (_, half) in zip(losses(tmp_path / "fp32"), losses(tmp_path / precision), strict=True):
        assert half == pytest.approx(full, rel=0.03)
    assert losses(tmp_path / "fp32") != losses(tmp_path / precision)


def test_fp16_skips_the_steps_that_overflow_and_goes_on(tmp_path):
    def overflow(trainer, record):
        if record["step"] == 2:
            trainer.engine.scaler.update(2.0**120)
        before.append(weights(trainer))

    before = []
    trainer = train(tmp_path, "training.steps=4", "training.precision=fp16", callbacks=[overflow])
    skipped = [record["step"] for record in log(tmp_path) if record.get("skipped")]
    assert skipped == [3, 4]
    assert trainer.engine.scaler.get_scale() == 2.0**118
    assert all(torch.equal(before[1][name], before[3][name]) for name in before[1])
    assert not torch.equal(before[0]["model.norm.weight"], before[1]["model.norm.weight"])


@pytest.mark.parametrize("bad", [1, 2])
def test_one_or_two_bad_steps_are_skipped(tmp_path, monkeypatch, bad):
    poison(monkeypatch, range(1, 1 + bad))
    trainer = train(tmp_path, "training.steps=5")
    assert [record["step"] for record in log(tmp_path) if record.get("skipped")] == list(range(2, 2 + bad))
    assert all(torch.isfinite(weight).all() for weight in weights(trainer).values())


def test_three_bad_steps_stop_the_run_and_leave_its_checkpoint(tmp_path, monkeypatch):
    poison(monkeypatch, range(2, 9))
    with pytest.raises(UserError, match=r"step 5: the loss is nan, 3 steps in a row \(samples \d+"):
        train(tmp_path, "training.steps=9", "checkpoint.every=2")
    assert sorted(entry.name for entry in tmp_path.glob("step-*")) == ["step-00000002", "step-00000004"]


def poison(monkeypatch, steps):
    """Make the loss of these steps (from 0) nan."""
    forward = Engine.forward_backward

    def poisoned(self, objective, micro):
        losses = forward(self, objective, micro)
        self._loss = math.nan if self.step in steps else losses.loss
        return losses._replace(loss=self._loss)

    monkeypatch.setattr(Engine, "forward_backward", poisoned)


def test_every_layer_is_compiled_whole(tmp_path, monkeypatch):
    compiled = []
    original = torch.nn.Module.compile

    def compile_eagerly(self, *args, **kwargs):
        compiled.append((type(self).__name__, kwargs))
        return original(self, *args, **kwargs, backend="aot_eager")

    monkeypatch.setattr(torch.nn.Module, "compile", compile_eagerly)
    options = ["training.steps=1", "training.micro_batch=2", "model.dtype=float64"]
    ours = weights(train(tmp_path / "compiled", "model.compile=true", *options))
    plain = weights(train(tmp_path / "plain", *options))
    assert compiled == [("Qwen3DecoderLayer", {"fullgraph": True})] * 2
    for name, weight in plain.items():
        torch.testing.assert_close(ours[name], weight, rtol=0, atol=1e-9)


def test_mask_noise_ends_and_is_never_saved(tmp_path):
    """The noise changes the first loss and no weight by itself: the model on disk has the stored mask row."""
    quiet = train(tmp_path / "quiet", "training.steps=1", *PLAIN, "optimizer.learning_rate=1e-30")
    noisy = train(
        tmp_path / "noisy", "training.steps=1", *PLAIN, "optimizer.learning_rate=1e-30", "model.mask_noise_steps=1"
    )
    assert losses(tmp_path / "quiet") != losses(tmp_path / "noisy")
    assert all(torch.equal(weight, weights(noisy)[name]) for name, weight in weights(quiet).items())


def test_the_log_has_every_number(tmp_path):
    trainer = train(tmp_path, "training.steps=4", "log.every=2", validation=documents(4, seed=1))
    records = log(tmp_path)
    assert [(record["kind"], record["step"]) for record in records] == [("step", 2), ("step", 4), ("evaluation", 4)]
    first, last, evaluation = records
    batch = [document for pack in trainer.run.source.sampler.batch(1) for document in pack]
    assert first["tokens"] == sum(map(len, batch))
    assert first["epoch"] == pytest.approx(2 / trainer.run.source.sampler.steps(1))
    assert last["learning_rate"] == pytest.approx(0.003 * 0.1)
    assert first["rows"] >= first["tokens"]
    assert first["nll"] == pytest.approx(math.log(64), abs=0.3)
    assert 0 < first["mfu"] < 1 and first["tokens_per_second"] > 0
    assert 0 < first["memory"] <= memory(trainer.run.device)
    assert last["time"] >= first["time"] and last["grad_norm"] > 0
    assert evaluation["nats_per_token"] == trainer.summary.validation.nats_per_token
    assert evaluation["nats_per_token"] == pytest.approx(math.log(64), abs=0.3)


def test_a_model_learns(tmp_path):
    """Documents that repeat one token are soon predicted."""
    data = [{"input_ids": [token] * 64} for token in range(8)]
    train(tmp_path, "training.steps=60", "optimizer.learning_rate=0.01", data=data)
    first, last = log(tmp_path)[0], log(tmp_path)[-1]
    assert first["nll"] > 3.5 and last["nll"] < 1.0


def test_clip_auto_follows_the_evaluations(tmp_path):
    options = ["evaluation.every=2", "training.steps=4"]
    objective = {"name": "block_diffusion", "block_size": 8, "clip": "auto"}
    trainer = train(tmp_path, *options, objective=objective, validation=documents(8, seed=1))
    low, high = trainer.objective.window
    assert 0.5 - 1e-9 <= high - low <= 0.9 + 1e-9
    assert [record["step"] for record in log(tmp_path) if record["kind"] == "evaluation"] == [2, 4]


def test_arguments_win_over_the_config(tmp_path):
    settings = config(tmp_path / "config", "training.steps=50")
    trainer = Trainer(config=settings, checkpoint_path=tmp_path / "argument", parallel_config=ParallelConfig())
    summary = trainer.train(train_dataset=documents(), epochs=1, batch_size=8)
    assert summary.path == tmp_path / "argument" and summary.checkpoint.parent == tmp_path / "argument"
    assert summary.step == summary.steps == math.ceil(len(trainer.run.source.mixture) / 8)
    assert not (tmp_path / "config").exists()
    assert settings.training.steps == 50


def test_a_signal_at_the_last_step_leaves_the_evaluation_to_the_same_command(tmp_path):
    def end(trainer, record):
        if record["step"] == record["steps"]:
            os.kill(os.getpid(), signal.SIGTERM)

    held_out = documents(8, seed=1)
    summary = train(tmp_path, callbacks=[end], validation=held_out).summary
    assert (summary.step, summary.steps, summary.interrupted, summary.validation) == (4, 4, signal.SIGTERM, None)
    summary = train(tmp_path, validation=held_out).summary
    assert (summary.step, summary.interrupted) == (4, None) and summary.validation is not None


def test_a_length_can_change_while_it_runs(tmp_path):
    def shorten(trainer, record):
        if record["step"] == 2:
            trainer.set_steps(3)

    summary = train(tmp_path, "training.steps=100", callbacks=[shorten]).summary
    assert (summary.step, summary.steps) == (3, 3)
    assert log(tmp_path)[-1]["learning_rate"] == pytest.approx(0.003 * 0.1)


@pytest.mark.parametrize(
    "overrides, options, sentence",
    [
        (["objective.blok_size=4"], {}, "blok_size"),
        (["training.device=cuda:99"], {}, "training.device=cuda:99"),
        (["training.device=toaster"], {}, "training.device=toaster: no such device"),
        (["parallel.data_parallel_size=2"], {}, "parallel.data_parallel_size=2"),
        (["training.precision=fp16", "model.dtype=float16"], {}, "set model.dtype=float32"),
        (["log.trackers=[nowhere]"], {}, "unknown tracker 'nowhere'"),
        (["optimizer.name=adamm"], {}, "unknown optimizer 'adamm'.*did you mean 'adamw'"),
        ([], {"data": "nowhere/at/all"}, "data.train=nowhere/at/all: no such dataset"),
        ([], {"data": [{"input_ids": [1, 2, 64]}]}, "token id 64 and the model has 64 embeddings"),
        ([], {"data": documents(), "validation": "nowhere"}, "data.validation=nowhere"),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(tmp_path, overrides, options, sentence):
    with pytest.raises(UserError, match=sentence):
        train(tmp_path / "run", *overrides, **options)
    assert not (tmp_path / "run").exists()


def test_a_run_needs_a_folder_it_can_write(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"checkpoint\.path=.*file/run: .*file is not a folder"):
        train(tmp_path / "file" / "run")


def test_nothing_to_train_on(tmp_path):
    with pytest.raises(UserError, match="give data.train"):
        Trainer(config=config(tmp_path)).train()
