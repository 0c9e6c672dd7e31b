"""The table of rules: every one of them can be broken, and is told in its sentence, without a model or processes."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache

import pytest

from tests.models.families import spec_of_config
from unmask.config import Config, ParallelConfig, apply_override, keys, rules
from unmask.config.rules import RULES, Known
from unmask.errors import UserError
from unmask.models.decoder import Attention, DecoderSpec, Experts
from unmask.models.tensor_plan import TensorPlan
from unmask.objectives import build

DENSE = DecoderSpec(
    kind="Dense",
    attention=(Attention(None, 4, 2, 8),) * 3,
    layers=("0", "1", "2"),
    rotary=None,
    experts={},
    routers=(),
    vocabulary=64,
    width=32,
    linear=100,
    labelled=10,
    head=2048,
    self_conditions=False,
    tensor=TensorPlan({"layers.0.up": 24}, {"layers.0.down": 25}, ("layers.0",)),
)
EXPERTS = "parallel.data_parallel_size=2 training.batch_size=2 parallel.expert_parallel_size=2"
#: (overrides, what else is known, part of the sentence)
EXAMPLES = [
    ("parallel.data_parallel_size=3 parallel.expert_parallel_size=2", {}, "=2 does not divide the 3 ranks of data_"),
    ("parallel.data_parallel_size=2 parallel.expert_parallel_size=2 parallel.model_parallel_size=2", {},
     "parallel.expert_parallel_size=2 does not go with parallel.model_parallel_size=2: set one of them to 1"),
    ("parallel.data_parallel_size=2 parallel.expert_parallel_size=2 parallel.pipeline_stages=2", {},
     "does not go with parallel.pipeline_stages=2: set one of them to 1"),
    ("parallel.schedule=zbv", {}, "parallel.schedule=zbv has no effect with pipeline_stages=1: leave it out, or give"),
    ("parallel.virtual_stages=3", {}, "parallel.virtual_stages=3 has no effect with pipeline_stages=1"),
    ("parallel.stage_layers=[2]", {}, "parallel.stage_layers=[2] has no effect with pipeline_stages=1"),
    ("parallel.bubble=0.5", {}, "parallel.bubble=0.5 has no effect with pipeline_stages=1"),
    ("parallel.pipeline_stages=2 parallel.virtual_stages=2", {}, "virtual_stages=2 has no effect with schedule=1f1b"),
    ("parallel.pipeline_stages=2 parallel.zero=3", {}, "parallel.zero=3 does not go with pipeline_stages=2: the"),
    ("parallel.pipeline_stages=2 parallel.prefetch=1", {}, "parallel.prefetch=1 has no effect with pipeline_stages=2,"),
    ("parallel.pipeline_stages=2 parallel.stage_layers=[1,1,1]", {}, "lists 3 stages, and there are 2 ("),
    ("parallel.data_parallel_size=2 parallel.zero=2", {}, "parallel.zero=2 has no effect: no ranks divide a copy"),
    ("parallel.prefetch=1", {}, "parallel.prefetch=1 has no effect: no ranks divide a copy"),
    ("parallel.offload=true", {}, "parallel.offload=True has no effect: no ranks divide a copy"),
    ("parallel.placement=csbp", {}, "parallel.placement=csbp has no effect with block_parallel_size=1: leave it out,"),
    ("parallel.exchange=ring", {}, "parallel.exchange=ring has no effect with block_parallel_size=1"),
    ("parallel.node_size=2", {}, "parallel.node_size=2 has no effect with block_parallel_size=1"),
    ("parallel.speeds=measured", {}, "parallel.speeds=measured has no effect with block_parallel_size=1"),
    ("parallel.block_parallel_size=4 parallel.exchange=ulysses+ring parallel.node_size=3", {},
     "parallel.exchange=ulysses+ring needs parallel.node_size, a divisor of block_parallel_size=4 strictly between"),
    ("parallel.block_parallel_size=4 parallel.node_size=2", {}, "parallel.node_size=2 has no effect with exchange="),
    ("parallel.block_parallel_size=2 parallel.speeds=[1]", {}, "parallel.speeds lists 1 ranks, and block_parallel_s"),
    ("parallel.block_parallel_size=4 parallel.exchange=ring+gather parallel.node_size=2", {},
     "parallel.exchange=ring+gather: only ulysses goes with a second exchange: ulysses+ring, +gather, +needed"),
    ("parallel.block_parallel_size=4 parallel.exchange=ulysses+rng parallel.node_size=2", {},
     "parallel.exchange=ulysses+rng: unknown exchange (did you mean 'ring'?); known: auto, gather,"),
    ("parallel.block_parallel_size=2 parallel.placement=cspb", {}, "placement=cspb: unknown placement (did you mean '"),
    ("parallel.block_parallel_size=2 parallel.placement=block parallel.exchange=ring", {},
     "parallel.exchange=ring has no effect with placement=block, which exchanges nothing: leave it at auto"),
    ("parallel.pipeline_stages=2 parallel.model_parallel_size=2", {"processes": 1},
     "parallel.pipeline_stages=2 x parallel.data_parallel_size=1 x parallel.block_parallel_size=1 x parallel.model_"
     "parallel_size=2 asks for 4 processes, and 1 was started: unmask train --nproc 4 ..."),
    ("parallel.block_parallel_size=3", {"processes": 2}, "asks for 3 processes, and 2 were started"),
    ("training.precision=fp16 model.dtype=float16", {}, "training.precision=fp16 needs parameters in full precision"),
    ("training.precision=bf16 model.dtype=float64", {}, "training.precision=bf16 does not go with model.dtype=float64"),
    ("training.epochs=2 training.steps=4", {}, "training.epochs=2.0 has no effect beside training.steps=4: leave one"),
    *((f"optimizer.{key}", {}, f"optimizer.{key} has no effect: optimizer.name=adamw; use muon")
      for key in ("muon_learning_rate=0.1", "momentum=0.5", "nesterov=False", "ns_steps=3", "adjust_lr=original")),
    ("schedule.name=constant schedule.floor=0.2", {},
     "floor=0.2 has no effect: schedule.name=constant does not read it, cosine and linear and wsd do"),
    ("schedule.decay=0.5", {}, "schedule.decay=0.5 has no effect: schedule.name=cosine does not read it, wsd does"),
    ("schedule.name=linear schedule.decay_shape=linear", {}, "schedule.decay_shape=linear has no effect: schedule.nam"),
    *((f"model.lora.{key}", {}, f"model.lora.{key} has no effect: model.lora.rank is 0") for key in (
        "alpha=8.0", "dropout=0.1", "targets=['q']", "dora=True", "rslora=True", "quantize=nf4", "train=['norms']")),
    *((f"model.lora.rank=2 parallel.data_parallel_size=2 training.batch_size=2 parallel.{size}=2", {},
       f"parallel.{size}=2 does not go with model.lora: adapters are trained under data_parallel_size, shard_size and")
      for size in ("model_parallel_size", "pipeline_stages", "expert_parallel_size")),
    ("model.lora.rank=2 model.lora.dropout=0.1 parallel.shard_size=2 training.batch_size=2", {},
     "model.lora.dropout=0.1 on 2 processes gives other numbers than on one: set it to 0"),
    ("model.lora.rank=2 model.lora.quantize=nf4 model.lora.dora=true", {},
     "model.lora.quantize=nf4 does not go with model.lora.dora=true, which needs the norms of whole weights"),
    ("model.lora.rank=2 model.lora.quantize=nf4 parallel.shard_size=2 parallel.offload=true", {},
     "model.lora.quantize=nf4 does not go with parallel.offload=true, unproven for weights in four bits: use false"),
    ("model.lora.rank=2 model.lora.quantize=nf4 training.offload_activations=true", {},
     "model.lora.quantize=nf4 does not go with training.offload_activations=true, unproven for weights in four bits"),
    ("model.lora.rank=2 optimizer.name=muon", {}, "optimizer.name=muon is for whole matrices, not for the factors of"),
    ("model.lora.rank=2 model.compile=true", {}, "model.compile=true does not go with model.lora, unproven when com"),
    ("training.offload_activations=true training.checkpointing=mlp", {},
     "training.offload_activations=true has no effect with training.checkpointing=mlp: use full or selective, whose"),
    ("training.offload_activations=true training.checkpointing=full model.compile=true", {},
     "training.offload_activations=true does not go with model.compile=true: leave one of them out"),
    ("training.offload_activations=true training.checkpointing=full", {"device": "cpu"},
     "training.offload_activations=true has no effect on a CPU, whose memory it would move activations to"),
    ("model.mask_noise_steps=2 objective.name=ar", {"objective": build("ar")},
     "model.mask_noise_steps=2 has no effect: objective.name=ar places no mask token; set it to 0"),
    ("evaluation.ar=true objective.name=ar", {"objective": build("ar")},
     "evaluation.ar=true has no effect with objective.name=ar: the bound is that already; leave it out"),
    ("evaluation.ar=true objective.name=diffusion_gemma", {"objective": build("diffusion_gemma")},
     "has no effect with objective.name=diffusion_gemma: its encoder has a loss of its own; leave it out"),
    *((f"model.{key} {other}", {}, f"model.{key} does not go with {other}: set model.")
      for key in ("balance_loss=0.01", "z_loss=1") for other in ("parallel.pipeline_stages=2", "model.compile=true")),
    ("training.spike.window=9", {}, "training.spike.window=9 has no effect: training.spike.factor is 0"),
    ("training.spike.rollbacks=9", {}, "training.spike.rollbacks=9 has no effect: training.spike.factor is 0"),
    ("training.spike.factor=0.5 checkpoint.every=1", {}, "training.spike.factor=0.5: every other loss would be a spik"),
    ("training.spike.factor=2", {}, "training.spike.factor needs checkpoints to go back to: set checkpoint.every"),
    ("log.noise_scale=true", {}, "log.noise_scale=true: it cannot be measured here: a step is one micro-batch (train"),
    *((f"log.profile.{key}", {}, "log.profile: nothing is profiled with log.profile.steps=0: give the number of steps")
      for key in ("memory=true", "start=1")),
    ("optimizer.name=muon optimizer.state=8bit", {}, "optimizer.state=8bit goes with optimizer.name=adamw, not with"),
    ("optimizer.state=bf16 optimizer.betas=[0.9,0.999]", {}, "as with optimizer.betas=[0.9, 0.999]: give betas of 0.9"),
    ("model.attention=flex", {"device": "cpu"}, "model.attention=flex: FlexAttention has no backward on CPU; use"),
    ("", {"restarts": 1}, "--restarts resumes from checkpoints: set checkpoint.every"),
    ("checkpoint.every=1 checkpoint.resume=false", {"restarts": 1}, "and checkpoint.resume=False forbids that: leave"),
    ("checkpoint.every=1 checkpoint.step=2", {"restarts": 1}, "and checkpoint.step=2 forbids that: leave it out"),
    ("data.validation={}", {}, "data.validation: names no set; give {name: path, ...}, or leave it out"),
    ("checkpoint.best=true", {"validation": False}, "checkpoint.best goes by the likelihood bound: give data.validati"),
    ("evaluation.ema=false", {}, "evaluation.ema=false has no effect: training.ema=0 keeps no EMA weights"),
    *((f"evaluation.every={every}",
       {"objective": build("block_diffusion", {"clip": "auto"}), "validation": bool(1 - every)},
       "objective.clip=auto moves at evaluations: give data.validation and evaluation.every") for every in (0, 1)),
    *((f"data.{key}", {"prepared": True}, f"data.{key} has no effect: the data are prepared already; leave it out, or")
      for key in ("fields={'a': 'b'}", "supervise=last", "chat_template=c.jinja")),
    ("schedule.warmup=5", {"steps": 4}, "schedule.warmup=5 is longer than the run, which has 4 steps: give fewer, or"),
    ("schedule.name=wsd schedule.warmup=1 schedule.decay=3", {"steps": 1},
     "schedule.warmup=1 and schedule.decay=3 are longer than the run, which has 1 step: give fewer, or fractions of"),
    ("log.profile.steps=4 log.profile.start=1", {"steps": 4}, "log.profile covers steps 2 to 5, and the run has 4: g"),
    ("parallel.data_parallel_size=2 parallel.shard_size=2 training.batch_size=6 training.micro_batch=2", {},
     "parallel.data_parallel_size=2 x shard_size=2: every shard of the model needs a micro-batch; a step has 3 "
     "(training.batch_size / micro_batch): raise batch_size to 8"),
    ("parallel.data_parallel_size=2", {}, "parallel.data_parallel_size=2: every replica of the model needs a"),
    ("parallel.shard_size=2 parallel.offload=true training.batch_size=2", {"device": "cpu"},
     "parallel.offload=true has no effect on a CPU, whose memory it would move the model to"),
    ("parallel.data_parallel_size=2 training.batch_size=2 parallel.expert_parallel_size=2 model.compile=true", {},
     "model.compile=true does not go with parallel.expert_parallel_size=2, whose layers communicate; set it to false"),
    ("parallel.model_parallel_size=2 model.compile=true", {}, "model.compile=true does not go with parallel.model_par"),
    ("parallel.model_parallel_size=2 optimizer.name=muon", {},
     "optimizer.name=muon needs whole matrices, of which parallel.model_parallel_size=2 leaves every rank a part: use"),
    ("parallel.model_parallel_size=2 model.skip_last_layer=true", {},
     "model.skip_last_layer=true does not go with parallel.model_parallel_size: use auto or false"),
    ("parallel.pipeline_stages=2", {}, "parallel.schedule=1f1b on pipeline_stages=2 needs at least 2 micro-batches, "
     "and each rank has 1 (training.batch_size / micro_batch, over replicas and shards): raise batch_size"),
    ("parallel.pipeline_stages=2 parallel.schedule=zbv training.batch_size=2", {}, "needs at least 3 micro-batches"),
    ("parallel.pipeline_stages=2 parallel.schedule=interleaved training.batch_size=5", {}, "takes micro-batches in ro"),
    ("parallel.pipeline_stages=2 parallel.shard_size=2 parallel.offload=true training.batch_size=4", {},
     "parallel.offload=true does not go with parallel.pipeline_stages=2: no schedule has been proven with it"),
    ("parallel.pipeline_stages=2 parallel.schedule=zbv training.batch_size=4 model.compile=true", {},
     "model.compile=true does not go with parallel.schedule=zbv: torch does not divide the backward pass"),
    ("parallel.pipeline_stages=2 parallel.schedule=zbv training.batch_size=4 training.checkpointing=full", {},
     "training.checkpointing=full does not go with parallel.schedule=zbv, which runs a layer's backward"),
    ("parallel.block_parallel_size=2 model.attention=reference", {},
     "model.attention=reference needs whole packs: with block_parallel_size=2 use tiles"),
    ("parallel.block_parallel_size=3 data.pack_tokens=2", {},
     "parallel.block_parallel_size=3: more ranks than tokens in a pack (data.pack_tokens=2)"),
    (EXPERTS, {"decoder": replace(DENSE, experts={})}, "=2: Dense has no stacked experts to divide; set it to 1"),
    (EXPERTS, {"decoder": replace(DENSE, experts={"a": Experts(4, "it is odd")})}, "=2: a is not divided here: it is"),
    (EXPERTS, {"decoder": replace(DENSE, experts={"a": Experts(4, None), "b": Experts(3, None)})},
     "parallel.expert_parallel_size=2 does not divide the 3 experts of b: give a divisor"),
    ("parallel.model_parallel_size=2", {"decoder": replace(DENSE, tensor="there is no plan for Dense")},
     "parallel.model_parallel_size: there is no plan for Dense, so unmask does not divide it; set it to 1"),
    ("parallel.model_parallel_size=3", {"decoder": DENSE}, "=3 does not divide num_attention_heads=4 of the model: gi"),
    ("parallel.model_parallel_size=4", {"decoder": DENSE}, "=4 does not divide num_key_value_heads=2 of the model"),
    ("parallel.model_parallel_size=2", {"decoder": DENSE}, "=2 does not divide layers.0.down=25 of the model: give"),
    ("parallel.model_parallel_size=2", {"decoder": replace(DENSE, tensor=TensorPlan({}, {}, ()), vocabulary=1)},
     "parallel.model_parallel_size=2: a vocabulary of 1 leaves a rank without a token; give fewer ranks"),
    ("parallel.pipeline_stages=2 parallel.schedule=zbv training.batch_size=4", {"decoder": DENSE},
     "parallel.pipeline_stages=2 makes 4 stages with schedule=zbv, and the model has 3 layers: give fewer"),
    ("parallel.pipeline_stages=2 parallel.stage_layers=[1,1] training.batch_size=4", {"decoder": DENSE},
     "parallel.stage_layers=[1, 1] adds up to 2, and the model has 3 layers"),
    ("parallel.block_parallel_size=3 parallel.exchange=ulysses", {"decoder": DENSE},
     "parallel.exchange=ulysses: 4 query and 2 key heads do not divide over 3 ranks; use gather, ring or needed"),
    ("model.balance_loss=0.1", {"decoder": DENSE}, "model.balance_loss=0.1 has no effect: Dense has no router beside"),
    ("model.z_loss=1", {"decoder": DENSE}, "model.z_loss=1 has no effect: Dense has no router beside stacked experts"),
    *((f"model.{key}", {"decoder": replace(DENSE, routers=("a",), experts=dict.fromkeys("ab", Experts(2, None)))},
       f"model.{key}: not every layer of Dense has one router; set it to 0")
      for key in ("balance_loss=0.1", "z_loss=1")),
]  # fmt: skip


def asked(overrides: str, known: dict) -> Known:
    tree: dict = {}
    for override in re.split(r" (?=[a-z_.]+=)", overrides) if overrides else ():
        apply_override(tree, override)
    return Known(Config.parse(tree), **known)


@cache
def facts() -> list[dict]:
    return [asked(overrides, known).facts() for overrides, known, _ in EXAMPLES]


@pytest.mark.parametrize("overrides, known, sentence", EXAMPLES)
def test_a_broken_rule_is_told_in_its_sentence(overrides, known, sentence):
    with pytest.raises(UserError) as error:
        rules.check(asked(overrides, known))
    assert sentence in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.keys)
def test_a_rule_is_of_keys_that_exist_and_some_example_breaks_it(rule):
    settings = [key for key in re.split("[ =]", rule.keys) if key.split(".")[0] in Config.model_fields]
    assert set(settings) - {"objective.places_mask", "objective.decoding.kind", "parallel.level"} <= set(keys())
    assert any(map(rule.broken, facts()))


def test_the_defaults_break_no_rule():
    assert not list(rules.broken(Known(Config())))


def test_the_table_answers_for_a_mesh_alone():
    mesh = ParallelConfig(data_parallel_size=2, block_parallel_size=2, placement="csbp", exchange="ring")
    assert not list(rules.broken(Known(parallel=mesh)))
    wrong = mesh.model_copy(update={"speeds": [1.0], "expert_parallel_size": 3})
    assert [sentence.split()[0] for sentence in rules.broken(Known(parallel=wrong))] == [
        "parallel.expert_parallel_size=3",
        "parallel.speeds",
    ]


def test_and_for_a_model_that_nobody_has_made():
    options = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 3}
    decoder = spec_of_config("qwen3", **options)
    assert not list(rules.broken(asked("parallel.model_parallel_size=2", {"decoder": decoder})))
    (sentence,) = rules.broken(asked("parallel.model_parallel_size=4", {"decoder": decoder}))
    assert sentence.startswith("parallel.model_parallel_size=4 does not divide num_key_value_heads=2 of the model")
