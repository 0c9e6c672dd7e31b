"""What is trusted of a model is first tried on a miniature of it: its configuration, small and with random weights.

The miniature has all layers, heads and experts of the model, so that every module has its name there, but few hidden
dimensions and tokens. One pass of a small causal pack through it tells: which fused forms give what the modules gave
themselves, whether the last layer may skip unlabelled rows, whether the head is a plain projection, what routers
return, whether anything draws random numbers. No weight of the model is needed, which may still be on `meta`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from unmask.attention import NAME, Plan
from unmask.errors import UserError
from unmask.models import dropout
from unmask.models.decoder import DecoderSpec, decoder_layers, spec_of
from unmask.models.families.materialise import META, device_of
from unmask.models.fused import fuse, last_layer
from unmask.models.positions import limit_of
from unmask.rows import Rows, Stream, assemble

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: What a module that is built differently after all may raise while it is tried.
BUILT_DIFFERENTLY = (TypeError, AttributeError, RuntimeError, ValueError, KeyError, IndexError)
TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-4}
#: Sizes of a miniature: hidden states, and what a tensor axis divides, for each of its ranks.
WIDTH, PART = 32, 8
#: The last position that is tried of a model that names no limit.
POSITIONS = 4096
#: Layers of a miniature whose hidden states cannot be narrower than the model's.
LAYERS = 2


@dataclass(frozen=True)
class Proofs:
    """What is proven of a model, by names of its modules.

    tried: kind of fused form, name -> whether it gave the module's own result; alike: (kind, class) of modules that did
    in every trial, so that those of the class which a trial does not reach will, too (not attention, which may differ
    from layer to layer); skips: the last layer may compute labelled rows only; plain_head: logits are a projection of
    the hidden states, and the config's soft cap of it; routers: why the losses of routers are not defined for one, None
    where they are.
    """

    tried: dict[tuple[str, str], bool] = field(default_factory=dict)
    alike: frozenset[tuple[str, str]] = frozenset()
    skips: bool = False
    plain_head: bool = True
    routers: dict[str, str | None] = field(default_factory=dict)

    def fits(self, form: fuse.Form) -> bool:
        """Whether a fused form is proven for its module."""
        return self.tried.get((form.kind, form.name), (form.kind, type(form.module).__name__) in self.alike)


class Call(NamedTuple):
    """A module's arguments and result in a pass."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any


def proofs_of(model: PreTrainedModel, device: torch.device | str | None = None) -> Proofs:
    """What is proven of a model, found out once and kept with it. device: where it will run, if it is on `meta`.

    UserError for a model that draws random numbers while it is trained, or that has no miniature.
    """
    proofs: Proofs | None = vars(model).get("proofs")
    if proofs is None:
        proofs = _proven(miniature(model, device=device), spec_of(model))
        vars(model)["proofs"] = proofs
    return proofs


def miniature(model: PreTrainedModel, ranks: int = 1, device: torch.device | str | None = None) -> PreTrainedModel:
    """A small random model of the same configuration and dtype, which a tensor axis of `ranks` divides evenly.

    Its fused forms are those of the model. Where hidden states cannot be narrower it has the first layers only.
    """
    device = device or device_of(model)
    device = "cpu" if torch.device(device) == META else device  # of a model that nobody will fill
    attention, why = spec_of(model).attention, ""
    for narrow, layers in ((True, len(attention)), (False, min(LAYERS, len(attention)))):
        try:
            small = _built(type(model), _shrunk(model, ranks, narrow, layers), model.dtype, device)
            if spec_of(small).attention == attention[:layers]:
                if vars(model).get("fused"):
                    fuse.fuse(small, proofs_of(model))
                vars(small)["proofs"] = Proofs()
                return small
            why = "its attention has other heads"
        except Exception as error:  # whatever transformers raises for values that do not go together
            why = (str(error).splitlines() or [""])[0]
    raise UserError(f"{type(model).__name__} cannot be tried on a small model of the same config: {why}")


def trial_rows(positions: int = 16) -> Rows:
    """A small causal pack whose even rows are labelled and whose positions go up to `positions`."""
    index = np.arange(16)
    far, label = index * (positions - 1) // 15, np.where(index % 2 == 0, 0, -100)
    return assemble([(Stream(index % PART, far, index * 0, index + 1, label, index * 0.0), None)], 1.0)


def close(got: Tensor, expected: Tensor) -> bool:
    """Equal up to the rounding of the dtype, in numbers as large as the largest."""
    tolerance = TOLERANCE.get(expected.dtype, 3e-2) * float(expected.abs().max())
    return got.shape == expected.shape and torch.allclose(got, expected, rtol=0.0, atol=tolerance)


def _shrunk(model: PreTrainedModel, ranks: int, narrow: bool, layers: int) -> Any:
    config = copy.deepcopy(model.config)
    text = config.get_text_config()
    fields, head_dim = text.to_dict(), spec_of(model).attention[0].head_dim
    changes: dict[str, Any] = {"vocab_size": ranks * PART + 1}
    if fields.get("pad_token_id") is not None:
        changes["pad_token_id"] = 0
    if narrow:
        changes["hidden_size"] = WIDTH
        if fields.get("head_dim") is None:
            changes["head_dim"] = head_dim
    for name, value in fields.items():
        if "intermediate_size" in name and value:
            changes[name] = [ranks * PART] * len(value) if isinstance(value, list) else ranks * PART
    if layers < text.num_hidden_layers:
        changes |= {name: value[:layers] for name, value in fields.items()
                    if isinstance(value, list) and len(value) == text.num_hidden_layers}  # fmt: skip
        changes["num_hidden_layers"] = layers
    for name, value in changes.items():
        setattr(text, name, value)
    for name in config.sub_configs:
        other: Any = getattr(config, name, None)
        if other is not text and getattr(other, "num_hidden_layers", None):  # a tower for images
            other.num_hidden_layers = 1
    return config


def _built(kind: Any, config: Any, dtype: torch.dtype, device: torch.device | str) -> PreTrainedModel:
    from transformers.initialization import no_init_weights

    from unmask.models.load import adapt

    with torch.random.fork_rng(devices=[]):
        with no_init_weights():
            model = kind._from_config(config, dtype=dtype, attn_implementation=NAME)
        model.tie_weights()
    adapt(model)
    dropout.off(model)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():  # scales and biases are neither 0 nor 1
                size = torch.rand(tensor.shape, generator=generator) + 0.5
                if tensor.ndim > 1:
                    size = torch.randn(tensor.shape, generator=generator) / tensor.shape[-1] ** 0.5
                tensor.copy_(size)
    return model.to(device).eval()


@torch.no_grad()
def _proven(model: PreTrainedModel, whole: DecoderSpec) -> Proofs:
    """whole: the model that this is the miniature of."""
    spec, limit, device = spec_of(model), limit_of(model.config), model.device
    rows = trial_rows(POSITIONS if limit is None else limit.tokens)
    plan = partial(Plan.from_rows, rows, dict.fromkeys(spec.windows), backend="reference", device=device)
    forms = list(fuse.forms(model))
    last = decoder_layers(model)[-1]
    routers = {name: model.get_submodule(name) if name in spec.routers else None for name in whole.routers}
    token, position = (torch.from_numpy(each)[None].to(device) for each in (rows.token, rows.position))
    before = _generators(device)
    watched = {*(form.module for form in forms), *filter(None, routers.values()), last, model.base_model}
    model.train()
    with _calls(watched) as calls:
        logits = model(input_ids=token, position_ids=position, plan=plan(), use_cache=False).logits
    model.eval()
    if not all(map(torch.equal, before, _generators(device))):
        raise UserError(
            f"{spec.kind} draws random numbers while it is trained, by other means than the settings of config.json "
            f"that unmask knows: its loss would not be a function of the seed"
        )
    tried = {(form.kind, form.name): _agrees(form.forward, calls[form.module])
             for form in forms if form.module in calls}  # fmt: skip
    classes = {(form.kind, form.name): (form.kind, type(form.module).__name__) for form in forms}
    unlike = {classes[each] for each, fits in tried.items() if not fits}
    skips = False
    if spec.layers == whole.layers and (forward := last_layer.skipping(last, spec)) is not None:
        own = calls[last]
        labelled = torch.from_numpy(rows.labelled).to(device)
        some = {**own.kwargs, "plan": plan(labelled_window=spec.windows[-1])}
        skips = _agrees(forward, Call(own.args, some, _first(own.output)[:, labelled]))
    return Proofs(
        tried,
        frozenset(classes[each] for each in tried if each[0] != "attention") - unlike,
        skips,
        _is_plain(model, calls[model.base_model].output.last_hidden_state, logits),
        {name: _not_softmax(router, calls) for name, router in routers.items()},
    )


@contextmanager
def _calls(modules: set[nn.Module]) -> Iterator[dict[nn.Module, Call]]:
    """The last call of each module in what runs inside."""
    calls: dict[nn.Module, Call] = {}

    def note(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        calls[module] = Call(args, kwargs, output)

    handles = [module.register_forward_hook(note, with_kwargs=True) for module in modules]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def _agrees(forward: Callable[..., Any], call: Call) -> bool:
    """Whether another forward makes of a call's arguments what the module made of them."""
    try:
        return close(_first(forward(*call.args, **call.kwargs)), _first(call.output))
    except BUILT_DIFFERENTLY:
        return False


def _first(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


def _is_plain(model: PreTrainedModel, hidden: Tensor, logits: Tensor) -> bool:
    head = model.get_output_embeddings()
    ours = nn.functional.linear(hidden, head.weight, head.bias)
    if softcap := getattr(model.config.get_text_config(), "final_logit_softcapping", None):
        ours = softcap * torch.tanh(ours / softcap)
    return close(ours, logits.to(ours.dtype))


def _not_softmax(router: nn.Module | None, calls: dict[nn.Module, Call]) -> str | None:
    """Why the losses are not defined for a router; None when it took the top k of a softmax of the logits that it
    returned: (logits [N, E], weights [N, k], index [N, k])."""
    if router is None or router not in calls:
        return "was not reached by the trial of a small model"
    kind, output = type(router).__name__, calls[router].output
    try:
        logits, weights, index = output
        top = logits.softmax(-1, dtype=torch.float32).topk(index.shape[1], dim=-1)
    except (RuntimeError, ValueError, TypeError, AttributeError):
        return f"{kind} does not return logits, weights and experts"
    if not torch.equal(top.indices, index):
        return f"{kind} does not choose by a softmax of its logits"
    if torch.allclose(logits.float().sum(-1), torch.ones(len(logits), device=logits.device), atol=1e-2):
        return f"{kind} returns probabilities in place of logits"
    ratio = weights.float() / top.values
    if not torch.allclose(ratio, ratio[:, :1].expand_as(ratio), rtol=0.02):
        return f"{kind} does not weigh experts by a softmax of its logits"
    return None


def _generators(device: torch.device) -> list[Tensor]:
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]
