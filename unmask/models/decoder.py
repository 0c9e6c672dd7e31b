"""The decoder described once: what a model computes in every layer, by whose name, of which sizes.

A short forward with a plan that only records tells, for every decoder layer, whether its attention asked the
interface, and with which sliding window. Linear attention and state-space layers never ask; soft-capped scores and
attention sinks ask for things `attend` does not compute: such models are refused before anything is trained with a
wrong mask.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from inspect import signature
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from unmask.attention.interface import MissingPlan
from unmask.blocks.exchange import Widths
from unmask.errors import UserError
from unmask.models.experts import experts_of, routers_of, unfit
from unmask.models.families.materialise import is_unread
from unmask.models.fused.last_layer import labelled_only
from unmask.models.tensor_plan import TensorPlan, tensor_plan
from unmask.rows import Shape

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Attention(NamedTuple):
    """One layer's: its sliding window (None: full), heads of queries and of keys, and the width of a head."""

    window: int | None
    heads: int
    kv_heads: int
    head_dim: int


class Experts(NamedTuple):
    """A module of stacked experts: how many, and why `unmask.models.experts` does not compute it (None: it does)."""

    number: int
    unfit: str | None


@dataclass(frozen=True)
class DecoderSpec:
    """What a decoder is made of; names are of modules of the whole model.

    kind: the model's class, for sentences; attention, layers: by layer; rotary: what makes the same rotary embeddings
    for all layers, if anything does; experts by name, and routers beside them;
    vocabulary: rows of the embedding; width: of hidden states; linear: elements of the layers' matrices, of experts the
    share that a row uses, but `labelled`, those that only labelled rows need to pass through where the last layer
    skips the others; head: elements of the output projection; self_conditions: whether noisy rows take what a first
    pass predicted for them; tensor: how a tensor axis divides it, or why it does not.
    """

    kind: str
    attention: tuple[Attention, ...]
    layers: tuple[str, ...]
    rotary: str | None
    experts: dict[str, Experts]
    routers: tuple[str, ...]
    vocabulary: int
    width: int
    linear: float
    labelled: float
    head: int
    self_conditions: bool
    tensor: TensorPlan | str

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The sliding window of every layer's attention (None: full)."""
        return tuple(attention.window for attention in self.attention)

    def shape(self, skips: bool) -> Shape:
        """Parameter counts and windows for rows.flops; skips: the last layer computes labelled rows only."""
        query = sum(each.heads * each.head_dim for each in self.attention) // len(self.attention)
        skipped = int(self.labelled) if skips else 0
        linear = int(self.linear if skips else self.linear + self.labelled)
        return Shape(linear, skipped + self.head, query, self.windows, skips)

    def widths(self, arithmetic: torch.dtype) -> dict[int | None, Widths]:
        """What a row takes on the wire when attention runs in `arithmetic`, by the layer's sliding window."""
        wide = 8 if arithmetic == torch.float64 else 4
        return {
            window: Widths(heads, kv_heads, head_dim, arithmetic.itemsize, wide, wide)
            for window, heads, kv_heads, head_dim in self.attention
        }


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The decoder's layers, in order; UserError when the model has no such list."""
    layers = getattr(model.base_model, "layers", None)
    if not layers:
        raise UserError(f"{type(model).__name__} has no decoder layers that unmask knows (base_model.layers)")
    return list(layers)


def spec_of(model: PreTrainedModel) -> DecoderSpec:
    """The description of a model, on `meta` too; made once and kept with it, whatever divides the model later.

    UserError for a model whose attention bypasses the interface.
    """
    spec: DecoderSpec | None = vars(model).get("decoder_spec")
    return spec if spec is not None else _described(model, _probed(model))


def changed(model: PreTrainedModel) -> None:
    """Describe a model anew, if it was, whose modules have changed, and not its attention."""
    if (spec := vars(model).get("decoder_spec")) is not None:
        _described(model, spec.attention)


def _described(model: Any, attention: tuple[Attention, ...]) -> DecoderSpec:
    config, layers = model.config.get_text_config(), decoder_layers(model)
    name_of = {module: name for name, module in model.named_modules()}
    linear, labelled = _elements(config, layers)
    spec = DecoderSpec(
        kind=type(model).__name__,
        attention=attention,
        layers=tuple(name_of[layer] for layer in layers),
        rotary=name_of.get(_rotary(model.base_model)),
        experts={
            name: Experts(next(module.parameters()).shape[0], unfit(module))
            for name, module in experts_of(model).items()
        },
        routers=tuple(routers_of(model)),
        vocabulary=model.get_input_embeddings().weight.shape[0],
        width=config.hidden_size,
        linear=linear,
        labelled=labelled,
        head=next(model.get_output_embeddings().parameters()).numel(),
        self_conditions=getattr(model.base_model, "self_conditions", False),
        tensor=tensor_plan(model),
    )
    model.decoder_spec = spec
    return spec


def check_attention(model: PreTrainedModel) -> None:
    """UserError, naming the layer or the setting, when `attend` would not compute this model's attention."""
    config = model.config.get_text_config()
    types = getattr(config, "layer_types", None) or []
    for number, kind in enumerate(types):
        if kind not in ("full_attention", "sliding_attention"):
            raise UserError(f"layer {number} is {kind}: unmask trains full and sliding attention only")
    if softcap := getattr(config, "attn_logit_softcapping", None):
        raise UserError(
            f"model config attn_logit_softcapping={softcap}: attend does not compute it; set it to 0 or null"
        )
    for name, module in model.named_modules():
        if name.endswith("self_attn") and isinstance(getattr(module, "sinks", None), nn.Parameter):
            raise UserError(f"{name} uses attention sinks, which attend does not compute")
    for attention in spec_of(model).attention:
        heads, kv_heads = attention.heads, attention.kv_heads
        if heads % kv_heads:
            raise UserError(
                f"model config num_attention_heads={heads} is no multiple of num_key_value_heads={kv_heads}"
            )


class Probe:
    """A plan that answers with zeros and remembers who asked."""

    def __init__(self) -> None:
        self.asked: dict[nn.Module, Attention] = {}

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None
    ) -> tuple[Tensor, None]:
        if value.shape[3] != key.shape[3]:
            kind = f"{type(module).__name__} has keys of width {key.shape[3]} and values of width {value.shape[3]}"
            raise UserError(f"{kind}: attend needs one width, so unmask cannot train it")
        self.asked[module] = Attention(window, query.shape[1], key.shape[1], query.shape[3])
        return query.new_zeros((query.shape[0], query.shape[2], query.shape[1], value.shape[3])), None


def _probed(model: PreTrainedModel) -> tuple[Attention, ...]:
    """Every layer's attention, from a probing forward of two tokens."""
    probe, training = Probe(), model.training
    layers = decoder_layers(model)
    model.eval()
    try:
        with torch.no_grad(), _shapes_only(model) if is_unread(model) else nullcontext():
            device = model.get_input_embeddings().weight.device
            token = torch.zeros((1, 2), dtype=torch.long, device=device)
            model.base_model(
                input_ids=token, position_ids=torch.arange(2, device=device)[None], plan=probe, use_cache=False
            )
    except MissingPlan:
        raise UserError(f"{type(model).__name__} hands no plan to its attention: unmask cannot train it") from None
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        reason = (str(error).splitlines() or [""])[0]
        raise UserError(f"{type(model).__name__}: a trial of two tokens fails with this config: {reason}") from error
    finally:
        model.train(training)
    by_layer = []
    for number, layer in enumerate(layers):
        asked = [probe.asked[module] for module in layer.modules() if module in probe.asked]
        if len(asked) != 1:
            types = getattr(model.config.get_text_config(), "layer_types", None)
            kind = types[number] if types else type(layer).__name__
            raise UserError(f"layer {number} ({kind}) bypasses the attention interface: unmask cannot train it")
        window = asked[0].window
        if window is not None and window < 1:
            raise UserError(f"layer {number} has a sliding window of {window} tokens: it must be at least 1")
        by_layer.append(asked[0])
    return tuple(by_layer)


@contextmanager
def _shapes_only(model: PreTrainedModel) -> Iterator[None]:
    """Let a model on `meta` run."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    logger, experts = logging.getLogger("torch._subclasses.fake_tensor"), model.config._experts_implementation
    quiet, logger.disabled = logger.disabled, True  # what fails there is told in one sentence
    if any(map(unfit, experts_of(model).values())):
        model.set_experts_implementation("batched_mm")  # transformers' grouped one takes no fp32 without values
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as fake, faked(model, fake):  # buffers are there
            yield
    finally:
        logger.disabled = quiet
        model.set_experts_implementation(experts)


@contextmanager
def faked(model: nn.Module, fake: Any, device: torch.device | str = "cpu") -> Iterator[None]:
    """Fake tensors in place of parameters, and of buffers on `meta`; tied ones stay tied.

    device: of those on `meta`.
    """

    def like(each: Any) -> Any:
        if not each.is_meta:
            return fake.from_tensor(each) if isinstance(each, nn.Parameter) else each
        with fake:
            made = torch.empty(each.shape, dtype=each.dtype, device=device)
        return nn.Parameter(made, each.requires_grad) if isinstance(each, nn.Parameter) else made

    held: list[tuple[dict[str, Any], str, Any]] = []
    for module in model.modules():
        held += [(module._parameters, name, each) for name, each in module._parameters.items() if each is not None]
        held += [(module._buffers, name, each) for name, each in module._buffers.items() if each is not None]
    made = {id(each): like(each) for _, _, each in held}
    try:
        for of, name, each in held:
            of[name] = made[id(each)]
        yield
    finally:
        for of, name, each in held:
            of[name] = each


def _rotary(base: nn.Module) -> nn.Module | None:
    rotary: Any = getattr(base, "rotary_emb", None)
    return None if rotary is None or "layer_type" in signature(rotary.forward).parameters else rotary


def _elements(config: Any, layers: list[nn.Module]) -> tuple[float, float]:
    """Of the layers' matrices: (elements that every row passes through, those that only labelled rows may)."""
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    used = getattr(config, "num_experts_per_tok", None) or getattr(config, "top_k_experts", None)
    share = used / experts if experts and used else 1.0
    last, every, labelled = set(labelled_only(layers[-1])), 0.0, 0.0
    for name, parameter in (each for layer in layers for each in layer.named_parameters()):
        if parameter.dim() >= 2:
            size = parameter.numel() * (share if "experts." in name else 1.0)
            every, labelled = (every, labelled + size) if parameter in last else (every + size, labelled)
    return every, labelled
