"""The rules themselves, in the order in which they are told."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from unmask.config import AdapterConfig, Config, ParallelConfig, TrainingConfig
from unmask.config.overrides import MUON, OF_SCHEDULE
from unmask.config.rules.rule import Rule, apart, no_effect
from unmask.config.sections import in_steps
from unmask.errors import counted
from unmask.registry import Registry, nearest

#: What lists the names that a key may have; imported when one is looked for.
NAMED = Registry(
    "key", {"exchange": "unmask.blocks.exchange:exchanges", "placement": "unmask.blocks.placement:placements"}
)


def unmeasured(config: Config) -> str | None:
    """Why the gradient noise scale cannot be measured; None where it can."""
    parallel, training = config.parallel, config.training
    if training.batch_size == training.micro_batch:
        return "a step is one micro-batch (training.batch_size / micro_batch must be at least 2)"
    for key, said in (
        ("block_parallel_size", "the gradient of a pack is spread over parallel.block_parallel_size ranks"),
        ("model_parallel_size", "the gradient is spread over parallel.model_parallel_size ranks"),
        ("pipeline_stages", "the gradient is spread over parallel.pipeline_stages ranks, which sum it once a step"),
        ("expert_parallel_size", "the gradient of experts is spread over parallel.expert_parallel_size ranks"),
    ):
        if getattr(parallel, key) > 1:
            return said
    if parallel.level:
        return "FSDP2 (parallel.shard_size, parallel.zero) sums the gradient of a part before it could be measured"
    return None


def _divides_nodes(parallel: ParallelConfig) -> bool:
    node, blocks = parallel.node_size, parallel.block_parallel_size
    return node is not None and 1 < node < blocks and blocks % node == 0


def _unknown(kind: str, names: Iterable[str]) -> dict[str, str] | None:
    """Of the first name that is none of its kind: a hint, and those that are."""
    known = ["auto", *NAMED[kind].names()]
    wrong = next((name for name in names if name not in known), None)
    return None if wrong is None else {"hint": nearest(wrong, known), "known": ", ".join(known)}


def _product(parallel: ParallelConfig, started: int) -> dict[str, str]:
    """The axes that multiply to the number of processes, and how many there are."""
    axes = ("pipeline_stages", "data_parallel_size", "shard_size", "block_parallel_size", "model_parallel_size")
    shown = ("data_parallel_size", "block_parallel_size")
    sizes = [f"parallel.{axis}={getattr(parallel, axis)}" for axis in axes
             if axis in shown or getattr(parallel, axis) > 1]  # fmt: skip
    return {"sizes": " x ".join(sizes), "started": f"{started} {'was' if started == 1 else 'were'}"}


def _idle(parallel: ParallelConfig, training: TrainingConfig) -> dict[str, int] | None:
    """Where copies and shards are more than micro-batches: these, and the least batch size."""
    replicas, micro = parallel.data_parallel_size * parallel.shard_size, training.batch_size // training.micro_batch
    return {"micro": micro, "least": replicas * training.micro_batch} if replicas > micro else None


def heads_fit(heads: int, kv_heads: int, size: int) -> bool:
    """Whether heads divide evenly over `size` ranks, each with whole groups of its key heads or a part of one group."""
    return heads % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0)


def _unfit_heads(parallel: ParallelConfig, decoder: Any) -> Iterator[dict[str, int]]:
    """Heads of layers, on one rank of the tensor axis, that ulysses cannot divide."""
    if not parallel.exchange.startswith("ulysses"):
        return
    size = parallel.node_size or parallel.block_parallel_size
    for layer in decoder.attention:
        heads, kv_heads = (each // parallel.model_parallel_size for each in (layer.heads, layer.kv_heads))
        if not heads_fit(heads, kv_heads, size):
            yield {"heads": heads, "kv_heads": kv_heads, "size": size}


def _widths(decoder: Any) -> Iterator[tuple[str, int]]:
    """What a tensor axis divides, by name."""
    for layer in decoder.attention:
        yield from (("num_attention_heads", layer.heads), ("num_key_value_heads", layer.kv_heads))
    if not isinstance(decoder.tensor, str):
        yield from (*decoder.tensor.columns.items(), *decoder.tensor.rows.items())


def _first(found: Iterable[dict[str, Any]]) -> dict[str, Any] | None:
    return next(iter(found), None)


#: Schedules of ours; those of others read what they like.
SCHEDULES = ("constant", "cosine", "linear", "wsd")

# fmt: off
#: What a mesh is by itself.
MESH = [
    Rule("parallel.expert_parallel_size",
         "{parallel.expert_parallel_size=} does not divide the {parallel.data_ranks} ranks of data_parallel_size x "
         "shard_size x block_parallel_size, among which experts are divided",
         lambda parallel: parallel.data_ranks % parallel.expert_parallel_size),
    *apart("parallel.expert_parallel_size", "parallel.model_parallel_size parallel.pipeline_stages",
           ": set one of them to 1"),
    *no_effect("parallel", "schedule virtual_stages stage_layers bubble", "parallel.pipeline_stages=1",
               " with pipeline_stages=1: leave it out, or give the layers several ranks"),
    Rule("parallel.virtual_stages parallel.schedule=gpipe|1f1b|zbv",
         "{parallel.virtual_stages=} has no effect with schedule={parallel.schedule}: leave it out, or use "
         "interleaved"),
    Rule("parallel.pipeline_stages parallel.zero=2|3",
         "{parallel.zero=} does not go with pipeline_stages={parallel.pipeline_stages}: the ranks of a pipeline sum "
         "gradients once a step, over all of its micro-batches; use zero=1"),
    Rule("parallel.pipeline_stages parallel.prefetch",
         "{parallel.prefetch=} has no effect with pipeline_stages={parallel.pipeline_stages}, where a rank's layers "
         "stay gathered for a step: set it to 0"),
    Rule("parallel.stage_layers",
         "parallel.stage_layers lists {count} stages, and there are {parallel.stages} (pipeline_stages x stages of a "
         "rank): give one number each",
         lambda parallel: (count := len(parallel.stage_layers)) != parallel.stages and {"count": count}),
    *no_effect("parallel", "zero prefetch offload", "parallel.level=0",
               ": no ranks divide a copy of the model; give parallel.shard_size=2 or more"),
    *no_effect("parallel", "placement exchange node_size speeds", "parallel.block_parallel_size=1",
               " with block_parallel_size=1: leave it out, or give a pack several ranks"),
    Rule("parallel.exchange",
         "{parallel.exchange=} needs parallel.node_size, a divisor of block_parallel_size="
         "{parallel.block_parallel_size} strictly between 1 and it",
         lambda parallel: "+" in parallel.exchange and not _divides_nodes(parallel)),
    Rule("parallel.node_size",
         "{parallel.node_size=} has no effect with exchange={parallel.exchange}: leave it out, or choose an exchange "
         "of two levels such as ulysses+ring", lambda parallel: "+" not in parallel.exchange),
    Rule("parallel.speeds",
         "parallel.speeds lists {count} ranks, and block_parallel_size is {parallel.block_parallel_size}: give one "
         "each", lambda parallel: isinstance(parallel.speeds, list)
         and (count := len(parallel.speeds)) != parallel.block_parallel_size and {"count": count}),
    Rule("parallel.exchange",
         "{parallel.exchange=}: only ulysses goes with a second exchange: ulysses+ring, +gather, +needed",
         lambda parallel: "+" in parallel.exchange and not re.fullmatch(
             r"ulysses\+(?!ulysses$|query$).+", parallel.exchange)),
    Rule("parallel.exchange", "{parallel.exchange=}: unknown exchange{hint}; known: {known}",
         lambda parallel: _unknown("exchange", parallel.exchange.split("+"))),
    Rule("parallel.placement", "{parallel.placement=}: unknown placement{hint}; known: {known}",
         lambda parallel: _unknown("placement", [parallel.placement])),
    Rule("parallel.placement=block parallel.exchange",
         "{parallel.exchange=} has no effect with placement=block, which exchanges nothing: leave it at auto"),
    Rule("processes",
         "{sizes} asks for {parallel.processes} processes, and {started} started: unmask train --nproc "
         "{parallel.processes} ...",
         lambda parallel, processes: parallel.processes != processes and _product(parallel, processes)),
]
#: What settings are beside each other.
SETTINGS = [
    Rule("training.precision=fp16 model.dtype=float16",
         "training.precision=fp16 needs parameters in full precision: set model.dtype=float32"),
    Rule("training.precision model.dtype=float64",
         "{training.precision=} does not go with model.dtype=float64: set float32"),
    Rule("training.epochs training.steps",
         "training.epochs={training.epochs!s} has no effect beside {training.steps=}: leave one of them out "
         "(~training.steps, ~training.epochs)"),
    *no_effect("optimizer", " ".join(MUON), "optimizer.name=adamw", ": optimizer.name=adamw; use muon"),
    *(rule for key, readers in OF_SCHEDULE.items() for rule in no_effect(
        "schedule", key, f"schedule.name={'|'.join(name for name in SCHEDULES if name not in readers)}",
        f": {{schedule.name=}} does not read it, {' and '.join(readers)} do{'es' * (len(readers) == 1)}")),
    *no_effect("model.lora", " ".join(key for key in AdapterConfig.model_fields if key != "rank"),
               "model.lora.rank=0", ": model.lora.rank is 0"),
    *apart("parallel.model_parallel_size parallel.pipeline_stages parallel.expert_parallel_size", "model.lora.rank",
           ": adapters are trained under data_parallel_size, shard_size and block_parallel_size", "model.lora"),
    Rule("model.lora.rank model.lora.dropout",
         "{model.lora.dropout=} on {parallel.data_ranks} processes gives other numbers than on one: set it to 0",
         lambda parallel: parallel.data_ranks > 1),
    *apart("model.lora.quantize", "model.lora.dora", ", which needs the norms of whole weights"),
    *apart("model.lora.quantize", "parallel.offload training.offload_activations",
           ", unproven for weights in four bits: use false"),
    Rule("optimizer.name=muon model.lora.rank",
         "optimizer.name=muon is for whole matrices, not for the factors of model.lora: use adamw"),
    *apart("model.compile", "model.lora.rank", ", unproven when compiled: use false", "model.lora"),
    Rule("training.offload_activations training.checkpointing=none|mlp",
         "{training.offload_activations=} has no effect with {training.checkpointing=}: use full or selective, whose "
         "kept activations it moves"),
    *apart("training.offload_activations", "model.compile", ": leave one of them out"),
    Rule("model.mask_noise_steps objective.places_mask=false",
         "{model.mask_noise_steps=} has no effect: objective.name={config.objective.chosen} places no mask token; set "
         "it to 0"),
    *(Rule(f"evaluation.ar objective.decoding.kind={kind}",
           f"evaluation.ar=true has no effect with objective.name={{config.objective.chosen}}: {why}; leave it out")
      for kind, why in (("causal", "the bound is that already"), ("canvas", "its encoder has a loss of its own"))),
    *apart("model.balance_loss model.z_loss", "parallel.pipeline_stages model.compile",
           ": set ONE to 0, or do without it"),
    *no_effect("training.spike", "window rollbacks", "training.spike.factor=0", ": training.spike.factor is 0"),
    Rule("training.spike.factor",
         "{training.spike.factor=}: every other loss would be a spike; give a factor above 1, or 0",
         lambda training: training.spike.factor <= 1),
    Rule("training.spike.factor checkpoint.every=0",
         "training.spike.factor needs checkpoints to go back to: set checkpoint.every"),
    Rule("log.noise_scale=true", "log.noise_scale=true: it cannot be measured here: {why}; use auto or false",
         lambda config: (why := unmeasured(config)) and {"why": why}),
    *(Rule(f"log.profile.{key} log.profile.steps=0",
           "log.profile: nothing is profiled with log.profile.steps=0: give the number of steps to profile")
      for key in ("memory", "start")),
    Rule("optimizer.state optimizer.name=muon",
         "{optimizer.state=} goes with optimizer.name=adamw, not with muon: use full"),
    Rule("optimizer.state=bf16",
         "{optimizer.state=}: bf16 moments stop updating where an update changes them by less than 1/256, as "
         "with optimizer.betas={betas}: give betas of 0.996 or less, or use 8bit",
         lambda optimizer: any(0 < 1 - beta < 2**-8 for beta in optimizer.betas) and {"betas": list(optimizer.betas)}),
    Rule("training.offload_activations device=cpu",
         "training.offload_activations=true has no effect on a CPU, whose memory it would move activations to"),
    Rule("model.attention=flex device=cpu", "model.attention=flex: FlexAttention has no backward on CPU; use tiles"),
    Rule("restarts checkpoint.every=0", "--restarts resumes from checkpoints: set checkpoint.every"),
    *(Rule(f"restarts checkpoint.{key}",
           f"--restarts resumes from the newest checkpoint, and checkpoint.{key}={{checkpoint.{key}!s}} forbids that: "
           f"leave it out") for key in ("resume", "step")),
]
#: What they need of the data, and of the length of a run.
DATA = [
    Rule("data.validation={}", "data.validation: names no set; give {{name: path, ...}}, or leave it out"),
    Rule("checkpoint.best validation=false",
         "checkpoint.best goes by the likelihood bound: give data.validation"),
    Rule("evaluation.ema=false training.ema=0",
         "evaluation.ema=false has no effect: training.ema=0 keeps no EMA weights"),
    *(Rule(f"objective.clip=auto {lacking}",
           "objective.clip=auto moves at evaluations: give data.validation and evaluation.every")
      for lacking in ("validation=false", "evaluation.every=0")),
    *no_effect("data", "fields supervise chat_template", "prepared=true",
               ": the data are prepared already; leave it out, or give it to `unmask prepare`"),
    Rule("schedule.warmup",
         "{schedule.warmup=} is longer than the run, which has {length}: give fewer, or a fraction of all steps "
         "(below 1)",
         lambda schedule, steps: schedule.warmup > max(1, steps) and {"length": counted(steps, "step")}),
    Rule("schedule.name=wsd",
         "{schedule.warmup=} and {schedule.decay=} are longer than the run, which has {length}: give fewer, or "
         "fractions of all steps (below 1)",
         lambda schedule, steps: sum(in_steps(each, steps) for each in (schedule.warmup, schedule.decay))
         > max(1, steps) and {"length": counted(steps, "step")}),
    Rule("log.profile.steps",
         "log.profile covers steps {first} to {last}, and the run has {steps}: give a smaller log.profile.start or "
         "fewer log.profile.steps",
         lambda log, steps: (last := log.profile.start + log.profile.steps) > steps
         and {"first": log.profile.start + 1, "last": last}),
]
#: What goes on which mesh.
ON_MESH = [
    Rule("parallel.shard_size",
         "{parallel.data_parallel_size=} x shard_size={parallel.shard_size}: every shard of the model needs a "
         "micro-batch; a step has {micro} (training.batch_size / micro_batch): raise batch_size to {least}",
         lambda parallel, training: _idle(parallel, training)),
    Rule("parallel.data_parallel_size parallel.shard_size=1",
         "{parallel.data_parallel_size=}: every replica of the model needs a micro-batch; a step has {micro} "
         "(training.batch_size / micro_batch): raise batch_size to {least}",
         lambda parallel, training: _idle(parallel, training)),
    Rule("parallel.offload device=cpu",
         "parallel.offload=true has no effect on a CPU, whose memory it would move the model to"),
    *apart("model.compile", "parallel.expert_parallel_size parallel.model_parallel_size",
           ", whose layers communicate; set it to false"),
    Rule("optimizer.name=muon parallel.model_parallel_size",
         "optimizer.name=muon needs whole matrices, of which {parallel.model_parallel_size=} leaves every rank a "
         "part: use adamw"),
    Rule("model.skip_last_layer=true parallel.model_parallel_size",
         "model.skip_last_layer=true does not go with parallel.model_parallel_size: use auto or false"),
    Rule("parallel.pipeline_stages",
         "parallel.{why}, and each rank has {micro} (training.batch_size / micro_batch, over replicas and shards): "
         "raise batch_size",
         lambda config: (why := config.parallel.too_few(config.passes())) and {"why": why, "micro": config.passes()}),
    *apart("parallel.offload", "parallel.pipeline_stages", ": no schedule has been proven with it"),
    Rule("parallel.schedule=zbv model.compile",
         "model.compile=true does not go with parallel.schedule=zbv: torch does not divide the backward pass of a "
         "compiled layer into that of the input and that of the weights; use 1f1b"),
    Rule("parallel.schedule=zbv training.checkpointing=full|selective",
         "{training.checkpointing=} does not go with parallel.schedule=zbv, which runs a layer's backward pass "
         "in two parts and would repeat its forward pass, and exchanges, for each: use mlp"),
    Rule("parallel.block_parallel_size model.attention=reference|flex",
         "{model.attention=} needs whole packs: with block_parallel_size={parallel.block_parallel_size} use tiles"),
    Rule("parallel.block_parallel_size",
         "{parallel.block_parallel_size=}: more ranks than tokens in a pack ({data.pack_tokens=})",
         lambda parallel, data: parallel.block_parallel_size > data.pack_tokens),
]
#: What the model must have for the mesh, and for losses of its routers.
MODEL = [
    Rule("parallel.expert_parallel_size decoder.experts={}",
         "{parallel.expert_parallel_size=}: {decoder.kind} has no stacked experts to divide; set it to 1"),
    Rule("parallel.expert_parallel_size",
         "{parallel.expert_parallel_size=}: {name} is not divided here: {why}; set it to 1",
         lambda decoder: _first({"name": name, "why": experts.unfit}
                                for name, experts in decoder.experts.items() if experts.unfit)),
    Rule("parallel.expert_parallel_size",
         "{parallel.expert_parallel_size=} does not divide the {number} experts of {name}: give a divisor",
         lambda parallel, decoder: _first({"name": name, "number": experts.number}
                                          for name, experts in decoder.experts.items()
                                          if experts.number % parallel.expert_parallel_size)),
    Rule("parallel.model_parallel_size",
         "parallel.model_parallel_size: {decoder.tensor}, so unmask does not divide it; set it to 1",
         lambda decoder: isinstance(decoder.tensor, str)),
    Rule("parallel.model_parallel_size",
         "{parallel.model_parallel_size=} does not divide {name}={width} of the model: give a divisor",
         lambda parallel, decoder: _first({"name": name, "width": width} for name, width in _widths(decoder)
                                          if width % parallel.model_parallel_size)),
    Rule("parallel.model_parallel_size",
         "{parallel.model_parallel_size=}: a vocabulary of {decoder.vocabulary} leaves a rank without a token; give "
         "fewer ranks",
         lambda parallel, decoder: -(-decoder.vocabulary // parallel.model_parallel_size)
         * (parallel.model_parallel_size - 1) >= decoder.vocabulary),
    Rule("parallel.pipeline_stages",
         "{parallel.pipeline_stages=} makes {parallel.stages} stages with schedule={parallel.schedule}, and the model "
         "has {layers}: give fewer",
         lambda parallel, decoder: parallel.stages > (count := len(decoder.layers))
         and {"layers": counted(count, "layer")}),
    Rule("parallel.stage_layers",
         "{parallel.stage_layers=} adds up to {total}, and the model has {layers}",
         lambda parallel, decoder: (total := sum(parallel.stage_layers)) != (count := len(decoder.layers))
         and {"total": total, "layers": counted(count, "layer")}),
    Rule("parallel.exchange",
         "parallel.exchange=ulysses: {heads} query and {kv_heads} key heads do not divide over {size} ranks; use "
         "gather, ring or needed", lambda parallel, decoder: _first(_unfit_heads(parallel, decoder))),
    *(Rule(f"model.{key} decoder.routers=()",
           f"{{model.{key}=}} has no effect: {{decoder.kind}} has no router beside stacked experts; set it to 0")
      for key in ("balance_loss", "z_loss")),
    *(Rule(f"model.{key}", f"{{model.{key}=}}: not every layer of {{decoder.kind}} has one router; set it to 0",
           lambda decoder: len(decoder.routers) != len(decoder.experts)) for key in ("balance_loss", "z_loss")),
]
# fmt: on
RULES: Sequence[Rule] = (*MESH, *SETTINGS, *DATA, *ON_MESH, *MODEL)
