"""Opening a trained model: a run, one of its steps, a folder of adapters, an exported folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch

from unmask.config import Config, ModelConfig
from unmask.errors import UserError, as_path
from unmask.files import read_json
from unmask.hf import fetching, read_config
from unmask.models.adapters import lora, nf4
from unmask.models.families import Family
from unmask.models.families.materialise import leave, without_values
from unmask.models.families.trained import also, objective_of, said
from unmask.models.families.transformers import empty_model
from unmask.models.fused.fuse import fuse
from unmask.models.load import DTYPES, adapt, load, own_tokenizer
from unmask.models.prove import proofs_of
from unmask.objectives import Objective, described, rebuild
from unmask.runs.distcp import load as load_tensors
from unmask.runs.distcp import load_average, load_weights
from unmask.runs.folder import BEST, EMA, state_of, step_of, taking_up, verify

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: What a folder of adapters says of its base and its objective.
ADAPTERS = "unmask.json"


class OpenModel(NamedTuple):
    """A trained model with what is needed to use it; objective: how it was trained, bound to its mask token."""

    model: PreTrainedModel
    tokenizer: Any
    mask_token_id: int | None
    objective: Objective
    #: Of a model with adapters, how it was made.
    settings: ModelConfig | None = None
    #: What whoever uses it should know: what was assumed, or asked for against the folder's word.
    notes: tuple[str, ...] = ()
    #: What its training began from, where that is known: a path.
    source: str | None = None


def open_model(
    path: str | Path,
    device: str = "cpu",
    dtype: str | None = None,
    *,
    mask_token_id: int | None = None,
    objective: str | Objective | None = None,
) -> OpenModel:
    """The model of a run (its newest checkpoint), of one step's folder (or RUN/best), or of an exported folder.

    Folders of the families in `unmask.models.families` open as what they were trained for.

    A path that ends in /ema stands for the EMA weights (training.ema) of what comes before it. dtype: of the
    parameters, "float32", "bfloat16", ...; default as they were trained. mask_token_id: of a folder that does not say
    its own; objective: how the model was trained, "block_diffusion,block_size=32" or an Objective, where the folder
    does not tell, or to use it as another. Raises UserError for a folder that is none of these, and for a damaged
    checkpoint.
    """
    opened = _opened(path, device, dtype, mask_token_id, None if objective is None else said(objective))
    if mask_token_id not in (None, opened.mask_token_id):
        raise UserError(
            f"{path}: mask_token_id={mask_token_id}, and it was trained with {opened.mask_token_id}; leave it out"
        )
    return opened


def _opened(
    path: str | Path, device: str, dtype: str | None, mask_token_id: int | None, objective: Objective | None
) -> OpenModel:
    folder = as_path(path, "a run, a step or an exported model")
    if dtype not in (None, *DTYPES):
        raise UserError(f"dtype={dtype}: not a dtype of weights; known: {', '.join(DTYPES)}")
    _check_device(device)
    ema = folder.name == EMA and not folder.exists()
    folder = folder.parent if ema else folder
    if not folder.is_dir():
        missing = folder.name == BEST and folder.parent.is_dir()
        hint = ": the run keeps its best only with checkpoint.best=true, after an evaluation" if missing else ""
        raise UserError(f"{path}: no such checkpoint folder{hint or fetching(path)}")
    step = step_of(folder)
    if step is not None:
        return _used_as(_open_step(step, device, dtype, ema), objective, str(folder))
    whole = (folder / "config.json").exists()
    adapted = (folder / ADAPTERS).exists() or (not whole and (folder / "adapter_config.json").exists())
    if adapted or whole:
        if ema:
            raise UserError(f"{folder}: an exported model has no EMA weights")
        if adapted:
            return _used_as(_open_adapters(folder, device, dtype), objective, str(folder))
        return _open_exported(folder, device, dtype, mask_token_id, objective)
    raise UserError(f"{path}: holds no checkpoint (step-...) and no exported model (config.json)")


def _used_as(opened: OpenModel, objective: Objective | None, where: str) -> OpenModel:
    """The model as if it had been trained by `objective`, if one is given."""
    if objective is None:
        return opened
    bound = objective.bind(opened.model, opened.tokenizer, opened.mask_token_id)
    if bound.decoding == opened.objective.decoding:
        return opened._replace(objective=bound)
    note = f"{where}: used as {described(objective)}, as asked; it was trained by {described(opened.objective)}"
    return opened._replace(objective=bound, notes=(*opened.notes, note))


def _check_device(name: str) -> None:
    try:
        torch.empty(0, device=name)
    except (RuntimeError, TypeError, AssertionError) as error:
        reason = (str(error).splitlines() or [""])[0]
        raise UserError(f"device={name}: nothing can be put there: {reason}") from None


def _open_step(folder: Path, device: str, dtype: str | None, ema: bool) -> OpenModel:
    verify(folder)
    config, state = Config.load(folder / "config.yaml"), state_of(folder)
    model = empty_model(folder / "hf", getattr(torch, config.model.dtype))
    lora.quantize(model, config.model.lora, values=False)
    lora.adapt(model, config.model.lora)
    load_weights(model, folder)
    if ema:
        load_average(model, folder)
    if dtype:
        nf4.dequantize(model)
    model.to(device, getattr(torch, dtype) if dtype else None).eval()
    adapt(model)
    if config.model.fused:
        fuse(model, proofs_of(model))
    tokenizer, mask = own_tokenizer(folder), getattr(model.config, "mask_token_id", None)
    with taking_up(folder):
        rebuilt = rebuild(config.objective.chosen, state["objective"])
    objective = rebuilt.bind(model, tokenizer, mask)
    settings = config.model if config.model.lora.rank else None
    opened = OpenModel(model, tokenizer, mask, objective.at(state["step"], state["steps"]), settings)
    return opened._replace(source=config.model.name)


class Step(Family):
    """A run's newest checkpoint, or one of its steps, whose model is trained further as it was saved."""

    name, foreign = "run", False

    def holds(self, path: Path) -> bool:
        return step_of(path) is not None

    def open(self, path: Path, raw: dict[str, Any], dtype: torch.dtype) -> PreTrainedModel:
        """UserError for a damaged checkpoint, and for adapters."""
        folder = cast(Path, step_of(path))
        verify(folder)
        settings = Config.load(folder / "config.yaml").model
        if settings.lora.rank:
            raise UserError(
                f"model.name={folder}: holds adapters beside its model: export it (`unmask export {folder} FOLDER`) "
                f"and name that folder"
            )
        with without_values():
            model = empty_model(folder / "hf", dtype)
        leave(model, lambda tensors: load_tensors({"model": dict(tensors)}, folder))
        return model


def _open_adapters(folder: Path, device: str, dtype: str | None) -> OpenModel:
    """The base that a folder of adapters names, with them; UserError for files that are damaged, and another base."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    said, file = folder / ADAPTERS, folder / "adapter_model.safetensors"
    recorded = _recorded(said)
    fields = recorded["model"] | {"mask_token_id": recorded["mask_token_id"]} | ({"dtype": dtype} if dtype else {})
    settings = ModelConfig.parse(fields, str(said))
    try:
        tensors = load_file(file, device=device)
    except (OSError, SafetensorError) as error:
        reason = (str(error).splitlines() or [""])[0]
        raise UserError(f"{file}: cannot be read ({reason}): export the adapters again") from None
    model, tokenizer, mask = load(settings, own_tokenizer(folder), device=device)
    if "base" in recorded:
        lora.check_base(model, recorded["base"], f"{said} (model.name={settings.name})")
    lora.load_state(model, settings.lora, tensors, str(file))
    objective = rebuild(recorded["objective"]["name"], recorded["objective"]["options"])
    return OpenModel(model.eval(), tokenizer, mask, objective.model_copy(update={"mask_token_id": mask}), settings)


def _recorded(path: Path) -> dict[str, Any]:
    """What a folder of adapters says of itself; UserError where it does not."""
    again = "export the adapters again"
    if not path.exists():
        raise UserError(f"{path}: missing, and it names the base and the objective of the adapters: {again}")
    recorded = read_json(path, again)
    kinds: dict[str, Any] = {"model": dict, "objective": dict, "mask_token_id": int | None}
    if not isinstance(recorded, dict) or not all(isinstance(recorded.get(key, ""), kinds[key]) for key in kinds):
        raise UserError(f"{path}: does not say the base and the objective of the adapters: {again}")
    if not {"name", "options"} <= recorded["objective"].keys():
        raise UserError(f"{path}: does not say the objective of the adapters: {again}")
    base = recorded.get("base", {"config": {}, "weights": {}, "dtype": ""})
    if not isinstance(base, dict) or not all(isinstance(base.get(key), dict) for key in ("config", "weights")):
        raise UserError(f"{path}: what it says of the base is damaged: {again}")
    return recorded


def _open_exported(
    folder: Path, device: str, dtype: str | None, mask_token_id: int | None, asked: Objective | None
) -> OpenModel:
    config = read_config(folder)
    where = folder / "config.json"
    recorded = objective_of(config, str(where))
    objective = asked or recorded
    if objective is None:
        raise UserError(
            f'{where}: does not say how the model was trained (no "unmask" entry): it was not exported by unmask; '
            f"name its objective (ar where it is autoregressive), or train from it with model.name={folder}"
        )
    kept = dtype or config.get("dtype") or config.get("torch_dtype") or "float32"
    settings = {"name": str(folder), "dtype": kept, "mask_token_id": mask_token_id}
    masked = objective.places_mask or mask_token_id is not None or config.get("mask_token_id") is not None
    model, tokenizer, mask = load(ModelConfig.parse(settings, str(where)), device=device, masked=masked)
    opened = OpenModel(model.eval(), tokenizer, mask, objective.bind(model, tokenizer, mask))
    return opened._replace(notes=tuple(_notes(where, config, opened, recorded, asked)))


def _notes(
    where: Path, config: dict[str, Any], opened: OpenModel, recorded: Objective | None, asked: Objective | None
) -> Iterator[str]:
    """What was assumed of an exported folder, or asked for against its word."""
    others, named = also(config), config.get("mask_token_id")
    if asked is None and others:
        yield (
            f"{where}: taken for {described(opened.objective)}; it does not tell, and where the model was trained by "
            f"{' or '.join(others)}, name that (objective=NAME of sample, --objective NAME of eval and export)"
        )
    elif asked is not None and recorded is not None and not others and asked.decoding != recorded.decoding:
        yield f"{where}: used as {described(asked)}, as asked; it says {described(recorded)}"
    if named is not None and named != opened.mask_token_id:
        yield f"{where}: mask token {opened.mask_token_id}, as asked; it says {named}"
