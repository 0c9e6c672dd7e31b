"""The one description of a training run: a YAML file plus dotted overrides, checked before anything starts.

Unknown keys are errors that name the path and the nearest valid key. What the objective accepts besides `name`
is checked by the objective itself (each is a pydantic model of its own), so plug-ins bring their own options.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Self, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator

from unmask.errors import UserError, as_path
from unmask.registry import Registry, nearest


def _kinds(annotation: Any) -> Iterator[Any]:
    """The plain types in an annotation: int, float and NoneType of `tuple[int, float] | None`."""
    arguments = () if get_origin(annotation) is Literal else get_args(annotation)
    if not arguments:
        yield annotation
    for argument in arguments:
        yield from _kinds(argument)


class Section(BaseModel):
    """Settings that a user writes; a mistake in them is a UserError.

    Unknown keys are refused and so are, wherever a number is meant, true and false, infinities, nan, and whole numbers
    of more than 64 bits.
    """

    model_config = ConfigDict(extra="forbid", validate_default=True, allow_inf_nan=False)

    def __init__(self, **values: Any):
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise UserError(f"{type(self).__name__}: {_sentence(error, type(self))}") from None

    # Sections inside sections are validated by pydantic itself, which then knows the whole path of a mistake.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    @classmethod
    def parse(cls, tree: dict[str, Any], source: str = "config") -> Self:
        """Validate a nested dict; errors become one sentence naming `source` and the path."""
        try:
            return cls.model_validate(tree)
        except ValidationError as error:
            raise UserError(f"{source}: {_sentence(error, cls)}") from None

    @field_validator("*", mode="before")
    @classmethod
    def _numbers(cls, value: Any, info: ValidationInfo) -> Any:
        """pydantic takes true for 1."""
        if info.field_name is not None:
            kinds = set(_kinds(cls.model_fields[info.field_name].annotation))
            for item in value if isinstance(value, list | tuple) else [value]:
                if isinstance(item, bool) and bool not in kinds and kinds & {int, float}:
                    raise ValueError(f"{item} is no number: give one")
                if isinstance(item, int) and abs(item) >= 2**63:
                    raise ValueError(f"{item} is too large: it takes more than 64 bits")
        return value


class ModelConfig(Section):
    #: Folder with config.json and safetensors, or a `.gguf` file. Leave empty to start from `config`.
    name: str | None = None
    #: A transformers configuration (`model_type: qwen3`, `hidden_size: ...`): random initialisation from the seed.
    config: dict[str, Any] | None = None
    #: Parameters are kept in this dtype; see training.precision for the arithmetic.
    dtype: Literal["float32", "float64", "bfloat16", "float16"] = "float32"
    #: Id of the mask token. Empty: the model's or tokeniser's own, else a padded row, else a new one.
    mask_token_id: int | None = None
    #: Noise added to a mask embedding that is close to zero, over the first steps (converted AR models).
    mask_noise_steps: int = Field(default=0, ge=0)
    #: Compute the last layer's queries, output projection and MLP for labelled rows only; `auto`: where proven.
    skip_last_layer: bool | Literal["auto"] = "auto"
    #: Fused RMSNorm and SwiGLU (each verified against the module it replaces).
    fused: bool = True
    #: Attention backend: `auto` is tiles.
    attention: Literal["auto", "reference", "tiles", "flex"] = "auto"
    #: torch.compile every decoder layer.
    compile: bool = False


class SourceConfig(Section):
    #: What data.train takes.
    path: str
    #: Relative number of its tokens among what is trained on; empty (for all sources): as many as it has.
    weight: float | None = Field(default=None, gt=0)


class DataConfig(Section):
    #: A prepared dataset, or a source that `unmask prepare` reads; or a list of {path, weight}, which are mixed.
    train: str | list[SourceConfig] | None = None
    #: Held-out data in the same forms, for the likelihood bound, or {name: data} of several; empty: no evaluation.
    validation: str | dict[str, str] | None = None
    #: Folder or file of the tokeniser; empty: the prepared dataset's, else the model's.
    tokenizer: str | None = None
    #: Tokens in a pack.
    pack_tokens: int = Field(default=4096, ge=2)
    #: Documents longer than a pack are cut into chunks of its size; or refused; or left out of training, and counted.
    long_documents: Literal["cut", "refuse", "drop"] = "cut"

    @field_validator("train", mode="before")
    @classmethod
    def _sources(cls, train: Any) -> Any:
        """A path in a list stands for {path: ...}. Checked here, or a mistake would be told as one of a union."""
        if train is None or isinstance(train, str):
            return train
        if not isinstance(train, list):
            raise ValueError(f"it takes a path, or a list of paths or of {{path, weight}}, not {train!r}")
        if not train:
            raise ValueError("the list of sources is empty")
        items = [{"path": item} if isinstance(item, str) else item for item in train]
        try:
            return [SourceConfig.parse(item, f"item {number}") for number, item in enumerate(items)]
        except UserError as error:
            raise ValueError(str(error)) from None


class ObjectiveConfig(Section):
    model_config = ConfigDict(extra="allow")
    #: ar, mdlm, block_diffusion, fast_dllm_v2, or one that another package registered.
    name: str = "block_diffusion"

    def options(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimizerConfig(Section):
    #: adamw, muon (hidden matrices; AdamW for the rest), or one that another package registered.
    name: str = "adamw"
    #: Its peak: `schedule` multiplies it.
    learning_rate: float = Field(default=3e-4, gt=0)
    #: muon: the peak for hidden matrices; empty: learning_rate.
    muon_learning_rate: float | None = Field(default=None, gt=0)
    #: muon: decay of the running mean of the gradient.
    momentum: Beta = 0.95
    #: muon: look one step ahead of the running mean.
    nesterov: bool = True
    #: muon: Newton-Schulz iterations.
    ns_steps: int = Field(default=5, ge=1, lt=100)
    #: muon: scale of an update, 0.2 * sqrt(max(rows, columns)) as AdamW's (Moonlight) or Jordan's sqrt(rows / columns).
    adjust_lr: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    #: Decay of the running means of the gradient and of its square.
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    #: Added to the root of the second mean.
    eps: float = Field(default=1e-8, gt=0)
    #: Applied to matrices only; norms, biases and embeddings (the mask token's row among them) are not decayed.
    weight_decay: float = Field(default=0.1, ge=0)


class ScheduleConfig(Section):
    #: What follows the warm-up: cosine or linear (to `floor`), constant, wsd, or one that another package registered.
    name: str = "cosine"
    #: Steps of linear warm-up, at most those of the run; below 1, a fraction of all steps.
    warmup: float = Field(default=0.05, ge=0)
    #: The learning rate at the end, as a fraction of its peak.
    floor: float = Field(default=0.1, ge=0, le=1)
    #: wsd: steps of the decay to `floor` at the end; below 1, a fraction of all steps.
    decay: float = Field(default=0.2, gt=0)
    #: wsd: how it falls over the decay, 1 - x, 1 - sqrt(x) or a half cosine.
    decay_shape: Literal["linear", "sqrt", "cosine"] = "sqrt"


class SpikeConfig(Section):
    """Going back to the last checkpoint when the loss jumps (see `unmask.training.spikes`)."""

    #: A loss above `factor` times the median of the last `window` losses is a spike; 0: never.
    factor: float = Field(default=0.0, ge=0)
    #: Steps that the median is taken over; before there are so many, nothing is a spike.
    window: int = Field(default=50, ge=2)
    #: How often a run may go back; the next spike ends it.
    rollbacks: int = Field(default=3, ge=1)


class TrainingConfig(Section):
    #: Optimiser steps in all. Empty: `epochs` decides.
    steps: int | None = Field(default=None, ge=1)
    #: Passes over the training data, in place of `steps`; a fraction is allowed.
    epochs: float = Field(default=1.0, gt=0)
    #: Packs per optimiser step, over all ranks and accumulation.
    batch_size: int = Field(default=1, ge=1)
    #: Packs that go through the model together; batch_size / micro_batch is the accumulation.
    micro_batch: int = Field(default=1, ge=1)
    #: Largest gradient norm; 0 turns clipping off.
    clip: float = Field(default=1.0, ge=0)
    #: Decay of an average of the weights, kept in fp32 at least (0: none): sample, eval and export take it with --ema.
    ema: Beta = 0.0
    #: Arithmetic of the forward pass: autocast to bf16 or fp16 (with loss scaling), or none.
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    #: Activation checkpointing: `full` recomputes whole layers, `selective` keeps attention's result.
    checkpointing: Literal["none", "full", "selective"] = "none"
    #: Of random weights, the order of the data and the noise.
    seed: int = Field(default=0, ge=0, lt=2**63)
    #: Only torch algorithms that give the same bits every time; an operation without one is an error.
    deterministic: bool = False
    #: A loss that jumps: back to the last checkpoint, and past the data since.
    spike: SpikeConfig = SpikeConfig()
    #: cpu, cuda or cuda:N; `auto` is the GPU where there is one.
    device: str = "auto"
    #: CPU threads; empty: torch's choice.
    threads: int | None = Field(default=None, ge=1, le=1024)


class ParallelConfig(Section):
    """Sizes of the mesh axes; their product must be the number of processes."""

    #: Copies of the model that share a batch.
    data_parallel_size: int = Field(default=1, ge=1)
    #: Ranks that share a pack: see `placement` and `exchange`.
    block_parallel_size: int = Field(default=1, ge=1)
    #: Tensor parallelism.
    model_parallel_size: int = Field(default=1, ge=1)
    #: Parts the layers are divided into.
    pipeline_stages: int = Field(default=1, ge=1)
    #: Which rank of a pack owns which rows: csbp, context, block, serial; `auto`: least work, then fewest bytes.
    placement: str = "auto"
    #: How attention reaches others' keys: gather, ring, needed, query, ulysses, ulysses+ring; `auto`: fewest bytes.
    exchange: str = "auto"
    #: Neighbouring ranks that a fast network joins, for exchanges of two levels (ulysses+ring).
    node_size: int | None = Field(default=None, ge=1)
    #: Relative speeds of a pack's ranks, for placement: a list, `measured` at the start, or `equal`.
    speeds: Literal["equal", "measured"] | list[Annotated[float, Field(gt=0)]] = "equal"
    #: Seconds without a sign of another rank after which a run stops.
    timeout: float = Field(default=600.0, gt=0)

    def refuse_unsupported(self) -> None:
        """What this version cannot do is refused before a worker starts."""
        for axis in ("model_parallel_size", "pipeline_stages"):
            if getattr(self, axis) != 1:
                raise UserError(f"parallel.{axis}={getattr(self, axis)}: not in this version of unmask; set it to 1")
        blocks, node = self.block_parallel_size, self.node_size
        if blocks == 1:
            for key in ("placement", "exchange", "node_size", "speeds"):
                value = getattr(self, key)
                if value != type(self).model_fields[key].default:
                    raise UserError(
                        f"parallel.{key}={value} has no effect with block_parallel_size=1: leave it out, or give a "
                        f"pack several ranks"
                    )
        if "+" in self.exchange and (node is None or not 1 < node < blocks or blocks % node):
            raise UserError(
                f"parallel.exchange={self.exchange} needs parallel.node_size, a divisor of "
                f"block_parallel_size={blocks} strictly between 1 and it"
            )
        if node is not None and "+" not in self.exchange:
            raise UserError(
                f"parallel.node_size={node} has no effect with exchange={self.exchange}: leave it out, or choose an "
                f"exchange of two levels such as ulysses+ring"
            )
        if isinstance(self.speeds, list) and len(self.speeds) != blocks:
            raise UserError(
                f"parallel.speeds lists {len(self.speeds)} ranks, and block_parallel_size is {blocks}: give one each"
            )


class CheckpointConfig(Section):
    #: Folder of the run: checkpoints, log and the resolved config.
    path: str = Field(default="runs/unmask", min_length=1)
    #: Steps between checkpoints; 0 saves only at the end and on a signal.
    every: int = Field(default=0, ge=0)
    #: How many to keep; 0 keeps all.
    keep: int = Field(default=2, ge=0)
    #: Save at every evaluation that gives the lowest bound so far, and keep that checkpoint; `best` points to it.
    best: bool = False
    #: Write in the background, from a copy in memory, while training goes on.
    asynchronous: bool = False
    #: Continue from the newest checkpoint in `path` when there is one.
    resume: bool = True
    #: Continue from the checkpoint of this step instead; later ones are set aside at the next save.
    step: int | None = Field(default=None, ge=0)


class EvaluationConfig(Section):
    #: Steps between evaluations of the likelihood bound; 0: only at the end.
    every: int = Field(default=0, ge=0)
    #: Packs evaluated; 0 takes the whole validation set.
    packs: int = Field(default=16, ge=0)
    #: Noise draws per chunk (a document, or a part of pack_tokens of a longer one).
    draws: int = Field(default=1, ge=1)
    #: Evaluate the averaged weights where training.ema keeps them.
    ema: bool = True


class ProfileConfig(Section):
    """Steps that torch's profiler watches; a Chrome trace of each rank goes to `profile/` in the run's folder."""

    #: Steps before the first that is watched.
    start: int = Field(default=5, ge=0)
    #: How many are watched; 0: none.
    steps: int = Field(default=0, ge=0)
    #: Also who holds the memory: on a GPU a snapshot for pytorch.org/memory_viz, on a CPU a table by operation.
    memory: bool = False


class LogConfig(Section):
    #: Steps between lines of the JSONL log and of the console.
    every: int = Field(default=1, ge=1)
    #: `rich`: a live progress line; `plain`: a line each; `auto`: rich in a terminal, else plain.
    console: Literal["auto", "rich", "plain", "none"] = "auto"
    #: Trackers besides the JSONL log and the console: tensorboard, trackio, wandb, mlflow, or one of another package.
    trackers: list[str] = []
    #: Options of the trackers by name, such as `{wandb: {project: llada}}`; each tracker's are in docs/tracking.md.
    options: dict[str, dict[str, Any]] = {}
    #: The gradient noise scale, in packs; `auto`: where a step has two micro-batches and a pack one rank.
    noise_scale: bool | Literal["auto"] = "auto"
    #: Bins of the noise level for which the loss is logged apart; 0: none.
    levels: int = Field(default=5, ge=0, le=100)
    #: torch's profiler, for some steps.
    profile: ProfileConfig = ProfileConfig()


class _OnceOnly(yaml.SafeLoader):
    """YAML whose mappings name every key once: PyYAML itself lets the last of several win, in silence."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    problem=f"{key.value!r} is there twice", problem_mark=key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)


class Config(Section):
    """A whole run. `Config.load(path, overrides)` reads YAML and applies `key.path=value` overrides."""

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    training: TrainingConfig = TrainingConfig()
    parallel: ParallelConfig = ParallelConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    log: LogConfig = LogConfig()

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        if self.training.batch_size % self.training.micro_batch:
            raise ValueError(
                f"training.batch_size={self.training.batch_size} must be a multiple of "
                f"training.micro_batch={self.training.micro_batch}"
            )
        if self.model.name and self.model.config:
            raise ValueError("give model.name (a checkpoint) or model.config (random initialisation), not both")
        return self

    @classmethod
    def load(cls, path: str | Path, overrides: list[str] | None = None) -> Config:
        """Read a YAML file and apply overrides like `optimizer.learning_rate=1e-4` (values are YAML)."""
        file = as_path(path, "a config file")
        try:
            tree = yaml.load(file.read_text(encoding="utf-8"), _OnceOnly)
        except FileNotFoundError:
            raise UserError(f"{path}: no such config file") from None
        except IsADirectoryError:
            own = file / "config.yaml"
            again = f"name {own}, or use `unmask train --from {path}` to do its run again"
            hint = again if own.is_file() else "name one"
            raise UserError(f"{path}: is a folder, not a config file: {hint}") from None
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{path}: cannot be read: {error}") from None
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            where = f":{mark.line + 1}" if mark else ""
            raise UserError(f"{path}{where}: not valid YAML: {getattr(error, 'problem', error)}") from None
        tree = {} if tree is None else tree
        if not isinstance(tree, dict):
            raise UserError(f"{path}: a config is a mapping of sections, not a {type(tree).__name__}")
        for override in overrides or []:
            apply_override(tree, override)
        return cls.parse(tree, str(path))

    def dump(self) -> str:
        """The resolved config as YAML; `Config.load` of it gives this config again."""
        return yaml.safe_dump(json.loads(self.model_dump_json()), sort_keys=False)


def apply_override(
    tree: dict[str, Any], text: str, form: str = "key.path=value", example: str = "training.steps=100"
) -> None:
    """Set `key.path=value` in a nested dict; the value is YAML. form, example: how a text should look."""
    key, sign, value = text.partition("=")
    if not sign or not key:
        raise UserError(f"{text!r} is not of the form {form}, such as {example}")
    *parents, last = key.split(".")
    node: Any = tree
    for parent in parents:
        if not isinstance(node.get(parent), dict):
            node[parent] = {}
        node = node[parent]
    try:
        node[last] = _number(yaml.safe_load(value))
    except yaml.YAMLError:
        raise UserError(f"{text!r}: {value!r} is not a valid YAML value") from None


def _number(value: Any) -> Any:
    """YAML 1.1 reads 1e-4 as a string; people mean a number."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def flat(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values of nested dicts with the keys that a user writes: section.key."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _sentence(error: ValidationError, root: type[BaseModel]) -> str:
    """What is wrong with the first key that is; the members of a union that were tried are told as one."""
    errors = error.errors()
    first, keys = errors[0], [_key(root, one["loc"]) for one in errors]
    path, more = ".".join(map(str, keys[0])), len(set(keys)) - 1
    if first["type"] == "extra_forbidden":
        known = _keys(root, keys[0][:-1])
        text = f"unknown key {path!r}{_hint(root, path, known)}; valid here: {', '.join(known)}"
    elif first["type"] == "value_error":
        text = f"{path + ': ' if path else ''}{first['ctx']['error']}"
    elif first["type"] == "model_type":
        text = f"{path}={first['input']!r}: it takes the keys {type_name(_annotation(root, keys[0]))}"
    elif first["type"] == "missing":
        text = f"{path} is missing"
    elif not path:
        text = f"it takes {type_name(root)}, not {first['input']!r}"
    elif keys[0] != first["loc"]:
        text = f"{path}={first['input']!r}: it takes {type_name(_annotation(root, keys[0]))}"
    else:
        text = f"{path}={first['input']!r}: {first['msg'][0].lower()}{first['msg'][1:]}"
    return text + (f" (and {more} more)" if more else "")


def keys() -> dict[str, Any]:
    """Every key of a config as a user writes it, options of the objectives among them, and what it may hold."""
    found = dict(_leaves(Config))
    for objective in OWNERS["objective"].names():
        fields = OWNERS["objective"][objective].model_fields
        found |= {f"objective.{key}": field.annotation for key, field in fields.items() if not field.exclude}
    return found


def _leaves(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(key, what it may hold) of everything in a section and the sections in it."""
    for key, field in section.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, Section):
            yield from _leaves(inner, f"{prefix}{key}.")
        elif not field.exclude:
            yield prefix + key, inner


def _hint(root: type[BaseModel], path: str, here: list[str]) -> str:
    """A hint for an unknown key: whose it is, the same name in another section, a similar name here, then in any."""
    objectives = OWNERS["objective"]
    if root is not Config and any(root is objectives[name] for name in objectives.names()):
        others = [name for name in objectives.names() if path in objectives[name].model_fields]
        if others:
            return f" (an option of {', '.join(others)}: leave it out)"
    last, elsewhere = path.split(".")[-1], list(keys())
    same = [key for key in elsewhere if key.split(".")[-1] == last and key != path]
    if same:
        return f" (did you mean {same[0]!r}?)"
    similar = difflib.get_close_matches(last, [key.split(".")[-1] for key in elsewhere], n=1, cutoff=0.8)
    found = [key for key in elsewhere if key.split(".")[-1] in similar]
    return nearest(last, here) or (f" (did you mean {found[0]!r}?)" if found else "")


def _key(root: Any, path: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """The part of an error's path that a user wrote: pydantic adds the member of a union that it tried."""
    key: list[int | str] = []
    model = root
    for part in path:
        if isinstance(part, str):
            if model is None:
                break
            field = model.model_fields.get(part)
            model = _section(field.annotation) if field else None
        key.append(part)
    return tuple(key)


def _annotation(root: Any, path: tuple[int | str, ...]) -> Any:
    """What the field at `path` may hold; of a list, the list."""
    annotation: Any = root
    for part in path:
        if isinstance(part, str):
            annotation = _section(annotation).model_fields[part].annotation
    return annotation


def _keys(model: Any, path: tuple[int | str, ...]) -> list[str]:
    model = _section(_annotation(model, path))
    return [name for name, field in model.model_fields.items() if not field.exclude]


def _section(annotation: Any) -> Any:
    """The model inside `Model | None`, `list[Model]` and the like."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for found in map(_section, get_args(annotation)) if found), None)


#: Parts of a config whose keys belong to what they name; asked when a key is looked for, not before.
OWNERS = Registry("section", {"objective": "unmask.objectives:objectives"})

NAMES = {str: "text", int: "whole number", float: "number", bool: "true or false", dict: "mapping"}


def type_name(annotation: Any) -> str:
    """An annotation in words: choices are listed, None is "empty"."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return type_name(arguments[0])
    if origin is Literal:
        return " or ".join(f"`{choice}`" for choice in arguments)
    if origin in (Union, UnionType):
        parts = [type_name(argument) for argument in arguments if argument is not type(None)]
        return " or ".join([*parts, "empty"] if type(None) in arguments else parts)
    if origin is tuple and arguments[-1] is not Ellipsis:
        return f"[{', '.join(map(type_name, arguments))}]"
    if origin in (list, tuple):
        return f"list of {type_name(arguments[0])}"
    if origin is dict:
        return "mapping"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return f"{{{', '.join(annotation.model_fields)}}}"
    return NAMES.get(annotation, str(annotation))
