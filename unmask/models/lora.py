"""Low-rank adapters: LoRA (Hu et al. 2106.09685), rank-stabilised (2312.03732) and with magnitudes (DoRA, 2402.09353).

    y = W x + s B A x,     s = alpha / rank, with rslora alpha / sqrt(rank);     B = 0 at the start

W is frozen, with `quantize` in four bits (QLoRA, 2305.14314). The layers are peft's own, put in place of the model's
linear modules: names, hooks and wrappers see a transformers model as ever. `train` adds whole parameters (embeddings,
norms) or the mask token's row.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from unmask.errors import UserError
from unmask.models import nf4
from unmask.models.check import decoder_layers
from unmask.registry import nearest

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from unmask.config import AdapterConfig, Config

ADAPTER = "default"
#: What peft puts before the names of a model that it has wrapped.
PREFIX = "base_model.model."


def check_config(config: Config) -> None:
    """UserError for settings that have no effect without adapters, or that do not go with them; before any worker."""
    lora, parallel = config.model.lora, config.parallel
    if not lora.rank:
        for key, field in type(lora).model_fields.items():
            if getattr(lora, key) != field.default:
                raise UserError(f"model.lora.{key}={getattr(lora, key)} has no effect: model.lora.rank is 0")
        return
    for key in ("model_parallel_size", "pipeline_stages", "expert_parallel_size"):
        if getattr(parallel, key) > 1:
            raise UserError(
                f"parallel.{key}={getattr(parallel, key)} does not go with model.lora: adapters are trained under "
                f"data_parallel_size, shard_size and block_parallel_size"
            )
    ranks = parallel.data_parallel_size * parallel.shard_size * parallel.block_parallel_size
    if lora.dropout and ranks > 1:
        raise UserError(
            f"model.lora.dropout={lora.dropout:g} on {ranks} processes gives other numbers than on one: set it to 0"
        )
    if lora.quantize != "none":
        _check_quantized(config)
    if config.optimizer.name == "muon":
        raise UserError("optimizer.name=muon is for whole matrices, not for the factors of model.lora: use adamw")
    if config.model.compile:
        raise UserError("model.compile=true does not go with model.lora, unproven when compiled: use false")


def _check_quantized(config: Config) -> None:
    quantize = f"model.lora.quantize={config.model.lora.quantize}"
    if config.model.lora.dora:
        raise UserError(f"{quantize} does not go with model.lora.dora=true, which needs the norms of whole weights")
    for key, wanted in (
        ("parallel.offload", config.parallel.offload),
        ("training.offload_activations", config.training.offload_activations),
    ):
        if wanted:
            raise UserError(f"{quantize} does not go with {key}=true, unproven for weights in four bits: use false")
    nf4.kind()


def quantize(
    model: PreTrainedModel, lora: AdapterConfig, device: torch.device | str = "cpu", values: bool = True
) -> None:
    """Put the weights that will have adapters in four bits, on `device`, one after the other (see `nf4.quantize`)."""
    if lora.quantize == "none" or not lora.rank:
        return
    names, within = targets(model, lora), {each for layer in decoder_layers(model) for each in layer.modules()}
    for path, module in list(model.named_modules()):
        if module in within and isinstance(module, nn.Linear) and path.split(".")[-1] in names:
            nf4.quantize(module, path, device, values)


def adapt(model: PreTrainedModel, lora: AdapterConfig, seed: int = 0) -> None:
    """Put adapters into a model and freeze everything else but `lora.train`; nothing where the rank is 0.

    A is a function of `seed`. UserError for a target that is no linear module of the layers.
    """
    if not lora.rank:
        return
    from peft import inject_adapter_in_model

    settings = peft_config(model, lora)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(settings, model, ADAPTER)
    for name, parameter in extras(model, lora):
        if not parameter.is_floating_point():
            raise UserError(f"model.lora.train: {name} is quantised and cannot be trained")
        parameter.requires_grad_(True)


def peft_config(model: PreTrainedModel, lora: AdapterConfig) -> Any:
    """The adapters as peft's LoraConfig describes them."""
    from peft import LoraConfig

    tokens = None
    if "mask_token" in lora.train:
        if getattr(model.config, "mask_token_id", None) is None:
            raise UserError(f"model.lora.train=[mask_token]: {type(model).__name__} has no mask token; leave it out")
        tokens = {_name_of(model, model.get_input_embeddings()): [model.config.mask_token_id]}
    names = targets(model, lora)
    return LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha or lora.rank,  # type: ignore[arg-type]
        lora_dropout=lora.dropout,
        use_dora=lora.dora,
        use_rslora=lora.rslora,
        target_modules=names,
        exclude_modules=_elsewhere(model, names) or None,
        trainable_token_indices=tokens,
    )


def targets(model: PreTrainedModel, lora: AdapterConfig) -> list[str]:
    """Last parts of the names of the linear modules that get adapters; `auto`: of all in the decoder's layers that are
    trained (the routers of a DiffusionGemma are not)."""
    known = sorted(
        {
            name.split(".")[-1]
            for layer in decoder_layers(model)
            for name, module in layer.named_modules()
            if isinstance(module, nn.Linear) and module.weight.requires_grad
        }
    )
    if lora.targets == "auto":
        return known
    for target in lora.targets:
        if target not in known:
            hint = nearest(target, known)
            raise UserError(
                f"model.lora.targets: the layers of {type(model).__name__} have no linear module {target!r}{hint}; "
                f"known: {', '.join(known)}"
            )
    return sorted(set(lora.targets))


def _elsewhere(model: PreTrainedModel, names: list[str]) -> list[str]:
    """Modules outside the decoder's layers, of a vision tower, that have the names of targets."""
    inside = {module for layer in decoder_layers(model) for module in layer.modules()}
    return [path for path, each in model.named_modules() if path.split(".")[-1] in names and each not in inside]


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
    model.tie_weights()


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


def _tied_head(model: PreTrainedModel, lora: AdapterConfig) -> dict[str, Tensor]:
    """A head that is trained as the embedding: peft loads the two one by one."""
    head, weight = model.get_output_embeddings(), model.get_input_embeddings().weight
    if "embeddings" not in lora.train or head.weight is not weight:
        return {}
    return {f"{name}.weight": weight for name, module in model.named_modules() if module is head}


def _name_of(model: nn.Module, wanted: nn.Module) -> str:
    return next(name for name, module in model.named_modules() if module is wanted).split(".")[-1]
