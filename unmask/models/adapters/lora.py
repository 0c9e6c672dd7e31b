"""Low-rank adapters: LoRA (Hu et al. 2106.09685), rank-stabilised (2312.03732) and with magnitudes (DoRA, 2402.09353).

    y = W x + s B A x,     s = alpha / rank, with rslora alpha / sqrt(rank);     B = 0 at the start

W is frozen, with `quantize` in four bits (QLoRA, 2305.14314). The layers are peft's own, put in place of the model's
linear modules: names, hooks and wrappers see a transformers model as ever. `train` adds whole parameters (embeddings,
norms) or the mask token's row.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from unmask.errors import UserError
from unmask.models.adapters import nf4
from unmask.models.decoder import changed, decoder_layers
from unmask.registry import nearest

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from unmask.config import AdapterConfig

ADAPTER = "default"
#: What peft puts before the names of a model that it has wrapped.
PREFIX = "base_model.model."
#: Settings that tell bases of the same shapes apart.
FIELDS = ("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
          "hidden_act", "rms_norm_eps", "sliding_window")  # fmt: skip


def quantize(
    model: PreTrainedModel, lora: AdapterConfig, device: torch.device | str = "cpu", values: bool = True
) -> None:
    """Put the weights that will have adapters in four bits, on `device`, one after the other (see `nf4.quantize`)."""
    if lora.quantize == "none" or not lora.rank:
        return
    for path, module in targets(model, lora).items():
        nf4.quantize(module, path, device, values)


def adapt(model: PreTrainedModel, lora: AdapterConfig, seed: int = 0) -> None:
    """Put adapters into a model and freeze everything else but `lora.train`; nothing where the rank is 0.

    A is a function of `seed`. UserError for a target that is no linear module of the layers, or smaller than the rank.
    """
    if not lora.rank:
        return
    from peft import inject_adapter_in_model
    from peft.tuners.tuners_utils import DUMMY_TARGET_MODULES

    found, settings = targets(model, lora), peft_config(model, lora)
    for name, module in found.items():
        if lora.rank > min(module.out_features, module.in_features):
            raise UserError(
                f"model.lora.rank={lora.rank} is more than {name} has itself, of {module.out_features} x "
                f"{module.in_features}: use a smaller one, or leave {_last(name)} out of model.lora.targets"
            )
    # Of a whole mixture peft would move the targets to its stacked experts (_convert_peft_config_moe), not of layers.
    layers = nn.ModuleList(decoder_layers(model))
    names = [name for name, module in layers.named_modules() if module in set(found.values())]
    model.requires_grad_(False)
    theirs = replace(settings, target_modules=names, exclude_modules=None, target_parameters=None)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(replace(theirs, trainable_token_indices=None), layers, ADAPTER)
    if settings.trainable_token_indices:
        inject_adapter_in_model(replace(theirs, target_modules=DUMMY_TARGET_MODULES), model, ADAPTER)
    model.peft_config = {ADAPTER: settings}
    for name, parameter in extras(model, lora):
        if not parameter.is_floating_point():
            raise UserError(f"model.lora.train: {name} is quantised and cannot be trained")
        parameter.requires_grad_(True)
    changed(model)


def peft_config(model: PreTrainedModel, lora: AdapterConfig) -> Any:
    """The adapters as peft's LoraConfig describes them: names of modules, beside those that only share a name.

    Where peft moves the targets of a mixture to its stacked experts, the weights are named instead of the modules.
    """
    from peft import LoraConfig

    tokens = None
    if "mask_token" in lora.train:
        if getattr(model.config, "mask_token_id", None) is None:
            raise UserError(f"model.lora.train=[mask_token]: {type(model).__name__} has no mask token; leave it out")
        tokens = {_last(_name_of(model, model.get_input_embeddings())): [model.config.mask_token_id]}
    found = targets(model, lora)
    names = {_last(name) for name in found}
    moved = set() if lora.dora else {name for name in names if _is_moved(model, name)}
    left = names - moved
    others = [name for name, _ in model.named_modules() if _last(name) in left and name not in found]
    return LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha or lora.rank,  # type: ignore[arg-type]
        lora_dropout=lora.dropout,
        use_dora=lora.dora,
        use_rslora=lora.rslora,
        target_modules=sorted(left),
        exclude_modules=others or None,
        target_parameters=[f"{name}.weight" for name in found if _last(name) in moved] or None,
        trainable_token_indices=tokens,
    )


def targets(model: PreTrainedModel, lora: AdapterConfig) -> dict[str, nn.Linear]:
    """name -> the linear modules that get adapters; `auto`: all in the decoder's layers that are trained (the routers
    of a DiffusionGemma are not)."""
    within = {each for layer in decoder_layers(model) for each in layer.modules()}
    linear = {
        name: module
        for name, module in model.named_modules()
        if module in within and isinstance(module, nn.Linear) and module.weight.requires_grad
    }
    if lora.targets == "auto":
        return linear
    known = sorted({_last(name) for name in linear})
    if not lora.targets:
        raise UserError(f"model.lora.targets=[]: names no module; leave it out, or name some of {', '.join(known)}")
    for target in lora.targets:
        if target not in known:
            hint = nearest(target, known)
            raise UserError(
                f"model.lora.targets: the layers of {type(model).__name__} have no linear module {target!r}{hint}; "
                f"known: {', '.join(known)}"
            )
    return {name: module for name, module in linear.items() if _last(name) in lora.targets}


def _is_moved(model: PreTrainedModel, name: str) -> bool:
    """Whether peft reads the name of a module as the stacked experts of a mixture."""
    from peft import LoraConfig
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    config = LoraConfig(target_modules=[name])
    try:
        convert_peft_config_for_transformers(config, model, None)
    except ValueError:  # one of the two that it would join
        return True
    return set(config.target_modules or ()) != {name}


def extras(model: PreTrainedModel, lora: AdapterConfig) -> Iterator[tuple[str, nn.Parameter]]:
    """(name, parameter) of the whole parameters that are trained beside adapters; tied ones once."""
    whole = set(model.get_input_embeddings().parameters()) if "embeddings" in lora.train else set()
    for path, module in model.named_modules():
        if "norms" in lora.train and type(module).__name__.endswith("Norm"):
            whole |= set(module.parameters(recurse=False))
        for name, parameter in module.named_parameters(path, recurse=False):
            if parameter in whole:
                whole.discard(parameter)
                yield name, parameter


def adapters_of(model: nn.Module) -> dict[str, nn.Module]:
    """name -> the module that peft put in place of the model's own."""
    if "peft" not in sys.modules:
        return {}
    from peft.tuners.lora import LoraLayer
    from peft.utils.other import TrainableTokensWrapper

    kinds: Any = (LoraLayer, TrainableTokensWrapper)
    return {name: each for name, each in model.named_modules() if isinstance(each, kinds)}


@torch.no_grad()
def merge(model: PreTrainedModel) -> None:
    """Add the adapters to the weights and put the model's own modules back: W <- W + s B A.

    Weights in four bits are dequantised first: the sum is not quantised again.
    """
    found = adapters_of(model)
    if not found:
        return
    nf4.dequantize(model)
    from peft.utils.other import TrainableTokensWrapper

    for name, module in found.items():
        parent, _, last = name.rpartition(".")
        if isinstance(module, TrainableTokensWrapper):
            own = module.unload_and_optionally_merge_module(merge=True, safe_merge=False, adapter_names=None)
        else:
            layer: Any = module
            layer.merge(safe_merge=True)
            own = layer.get_base_layer()
        setattr(model.get_submodule(parent), last, own)
    model.requires_grad_(True)
    if hasattr(model, "peft_config"):
        del model.peft_config


def state(model: PreTrainedModel, lora: AdapterConfig) -> dict[str, Tensor]:
    """Adapters and extras by the names under which peft saves them."""
    from peft.utils import get_peft_model_state_dict

    found = get_peft_model_state_dict(model, adapter_name=ADAPTER, save_embedding_layers=False)
    found |= {name: parameter.detach() for name, parameter in extras(model, lora)}
    found |= _tied_head(model, lora)
    return {PREFIX + name: tensor.detach().clone().contiguous() for name, tensor in found.items()}


@torch.no_grad()
def load_state(model: PreTrainedModel, lora: AdapterConfig, tensors: dict[str, Tensor], where: str) -> None:
    """Put what `state` returned into a model with the same adapters; UserError where a tensor is missing or another."""
    from peft.utils import set_peft_model_state_dict

    plain = {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}
    wanted = {name.removeprefix(PREFIX): tensor.shape for name, tensor in state(model, lora).items()}
    for name in {**wanted, **plain}:
        if name not in plain or name not in wanted or plain[name].shape != wanted[name]:
            raise UserError(f"{where}: {name} does not fit the adapters that its settings describe")
    for name, parameter in extras(model, lora):
        parameter.copy_(plain.pop(name))
    for name in _tied_head(model, lora):
        del plain[name]
    set_peft_model_state_dict(model, plain, ADAPTER)


def base_facts(model: PreTrainedModel) -> dict[str, Any]:
    """What tells the base of a model with adapters from another: settings, and numbers of frozen weights.

    {"config": {field: value}, "dtype": name, "weights": {parameter: numbers}}; numbers, not a digest, as they are to be
    compared in another dtype, too. Neither weights in four bits nor embedding and head, which gain rows.
    """
    config = model.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    fields = {name: getattr(config, name, None) for name in FIELDS} | {"rope_theta": rope.get("rope_theta")}
    ends = [module for module in (model.get_input_embeddings(), model.get_output_embeddings()) if module is not None]
    outside = {parameter for module in ends for parameter in module.parameters()}
    frozen = {
        name: parameter.detach()
        for name, parameter in model.named_parameters()
        if not (parameter.requires_grad or parameter in outside or nf4.is_nf4(parameter))
    }
    chosen = _spread(list(frozen), 16)
    values = {name: [float(each) for each in _spread(frozen[name].flatten(), 8)] for name in chosen}
    return {"config": fields, "dtype": str(model.dtype).removeprefix("torch."), "weights": values}


def check_base(model: PreTrainedModel, recorded: dict[str, Any], where: str) -> None:
    """UserError unless the base has the facts that were recorded (`base_facts`); `where` says of what."""
    own = base_facts(model)
    differ = [name for name, value in recorded["config"].items() if own["config"].get(name) != value]
    exact = own["dtype"] == recorded["dtype"]
    rounding = 0.0 if exact else 2**-7  # of bfloat16, twice
    parameters = dict(model.named_parameters())
    for name, wanted in recorded["weights"].items():
        found = [float(each) for each in _spread(parameters[name].detach().flatten(), 8)] if name in parameters else []
        close = (abs(a - b) <= rounding * abs(b) + (0 if exact else 1e-6) for a, b in zip(found, wanted, strict=False))
        if len(found) != len(wanted) or not all(close):
            differ.append(name)
    if differ:
        raise UserError(
            f"{where}: the adapters were trained on another base ({differ[0]} differs): name the one they belong to"
        )


def _spread(values: Any, count: int) -> Any:
    """At most so many of a sequence, evenly from its first to its last."""
    last, count = len(values) - 1, min(count, len(values))
    return [values[last * at // max(count - 1, 1)] for at in range(count)]


def _tied_head(model: PreTrainedModel, lora: AdapterConfig) -> dict[str, Tensor]:
    """A head that is trained as the embedding: peft loads the two one by one."""
    head, weight = model.get_output_embeddings(), model.get_input_embeddings().weight
    if "embeddings" not in lora.train or head.weight is not weight:
        return {}
    return {f"{name}.weight": weight for name, module in model.named_modules() if module is head}


def _name_of(model: nn.Module, wanted: nn.Module) -> str:
    return next(name for name, module in model.named_modules() if module is wanted)


def _last(name: str) -> str:
    return name.rpartition(".")[2]
