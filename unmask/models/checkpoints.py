"""Reading a run's checkpoints: finding them, proving them whole, opening their model.

<run>/config.yaml                  the resolved config
<run>/run.json                     what the run was started with, once for every start
<run>/log.jsonl                    one object per logged step
<run>/best                         a link to the checkpoint of the lowest bound, under checkpoint.best
<run>/step-00000010/               one checkpoint, complete by the time it has this name
    .metadata, *.distcp            model, averaged weights, optimiser and random state (torch DCP, reshardable)
    state.json                     step, objective, loss scale, and what an exact resume must find unchanged
    hf/                            config.json and the tokeniser
    config.yaml, manifest.json     the manifest holds the size and SHA-256 of every file
"""

from __future__ import annotations

import hashlib
import json
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from pydantic import BaseModel, Field, ValidationError

from unmask.config import Config, ModelConfig
from unmask.errors import UserError, as_path
from unmask.files import parse_json, read_json
from unmask.hf import fetching, open_tokenizer, read_config
from unmask.models import distcp, lora, nf4
from unmask.models.fuse import fuse
from unmask.models.load import DTYPES, adapt, empty_model, load
from unmask.models.trained import also, objective_of, said
from unmask.objectives import Objective, described, rebuild

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MANIFEST = "manifest.json"
BEST = "best"
#: RUN/ema, RUN/best/ema and so on name the averaged weights of a checkpoint; there is no such folder.
EMA = "ema"
#: What a folder of adapters says of its base and its objective.
ADAPTERS = "unmask.json"
_NAME = re.compile(r"step-([0-9]{8,})")


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


def step_folder(run: Path, step: int) -> Path:
    return run / f"step-{step:08d}"


def saved_steps(run: Path) -> list[int]:
    """The steps of a run that have a checkpoint, in order."""
    if not run.is_dir():
        return []
    matches = (_NAME.fullmatch(entry.name) for entry in run.iterdir() if entry.is_dir())
    return sorted(int(match[1]) for match in matches if match)


def newest(run: Path, step: int | None = None) -> Path | None:
    """The folder of a run's newest checkpoint, or of `step`; None for a run without checkpoints."""
    steps = saved_steps(run)
    if step is not None and step not in steps:
        known = f"it has {', '.join(map(str, steps))}" if steps else "it has none"
        raise UserError(f"{run}: no checkpoint of step {step}; {known}")
    if not steps:
        return None
    return step_folder(run, steps[-1] if step is None else step)


def step_of(path: Path) -> Path | None:
    """The folder of a step that a path stands for: a run's newest, RUN/best, or itself; None for any other path."""
    if not path.is_dir():
        return None
    if path.name == BEST and path.is_symlink():
        path = path.parent / path.readlink()
    return path if (path / "state.json").exists() or _NAME.fullmatch(path.name) else newest(path)


def digest(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def describe(folder: Path) -> dict[str, dict[str, Any]]:
    """name -> {bytes, sha256} of every file below `folder` but the manifest."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
    return {str(path.relative_to(folder)): {"bytes": path.stat().st_size, "sha256": digest(path)} for path in files}


def verify(folder: Path, *, training: bool = False) -> None:
    """Raise UserError, naming the file, unless `folder` holds exactly what was written to it.

    training: an earlier checkpoint is chosen by its key in the config, not by its folder.
    """
    try:
        manifest = parse_json((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
    except FileNotFoundError:
        raise UserError(
            f"{folder / MANIFEST}: missing, so the checkpoint cannot be trusted; {_others(folder, training)}"
        ) from None
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(f"{folder / MANIFEST}: not a manifest; {_others(folder, training)}") from None
    if not isinstance(manifest, dict) or not all(_is_entry(known) for known in manifest.values()):
        raise UserError(f"{folder / MANIFEST}: not a manifest; {_others(folder, training)}")
    for name, known in manifest.items():
        path = folder / name
        if not path.is_file():
            damage = "is missing"
        elif (size := path.stat().st_size) != known["bytes"]:
            damage = f"has {size} bytes, not the {known['bytes']} that were written"
        elif digest(path) != known["sha256"]:
            damage = "was altered after it was written (its SHA-256 differs)"
        else:
            continue
        raise UserError(f"{path}: {damage}; {_others(folder, training)}")


def _is_entry(known: Any) -> bool:
    return isinstance(known, dict) and isinstance(known.get("bytes"), int) and isinstance(known.get("sha256"), str)


def _others(folder: Path, training: bool) -> str:
    match = _NAME.fullmatch(folder.name)
    earlier = [step for step in saved_steps(folder.parent) if match and step < int(match[1])]
    if not earlier:
        return "there is no earlier checkpoint in this run"
    if training:
        return f"go on from an earlier one with checkpoint.step={earlier[-1]}"
    return f"name the folder of another step, such as {step_folder(folder.parent, earlier[-1])}"


class State(BaseModel):
    """What state.json holds; what else does, the parts of a training run look at themselves."""

    step: int = Field(ge=0)
    steps: int = Field(ge=0)
    objective: dict[str, Any]
    exact: dict[str, Any]
    best: tuple[int, float] | None = None
    streak: int = 0
    overflows: int = 0


def state_of(folder: Path) -> dict[str, Any]:
    """The contents of state.json; UserError where they are damaged."""
    path, hint = folder / "state.json", "take another checkpoint"
    found = read_json(path, hint)
    try:
        State.model_validate_json(json.dumps(found), strict=True)  # as JSON: a list is a tuple
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}; {hint}") from None
    return found


@contextmanager
def taking_up(folder: Path) -> Iterator[None]:
    """Tell what cannot be made of the contents of state.json as a mistake of that file."""
    try:
        yield
    except (UserError, KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        if str(folder) in str(error):
            raise
        reason = " ".join(str(error).split()) if isinstance(error, UserError) else f"{type(error).__name__} {error}"
        raise UserError(f"{folder / 'state.json'}: is damaged ({reason[:200]}); take another checkpoint") from error


# DCP without a process group warns that it saves and loads in one process, which is what we ask for. Once, and not in
# a `catch_warnings`: that is no thread's own, and checkpoints may be written in one.
warnings.filterwarnings("ignore", message=".*torch.distributed is disabled.*")


def weights(model: torch.nn.Module) -> dict[str, Any]:
    """The model's tensors by name as DCP stores them: tied weights once, under their first name; see `nf4.stored`."""
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    own = {name for name, _ in [*model.named_parameters(), *model.named_buffers()]}
    found = [(name, tensor) for name, tensor in get_model_state_dict(model).items() if name in own]
    return {key: part for name, tensor in found for key, part in nf4.stored(name, tensor).items()}


def load_weights(model: torch.nn.Module, folder: Path) -> None:
    """Read the model's tensors, and nothing else, from a verified checkpoint folder."""
    distcp.load({"model": weights(model)}, folder)


@torch.no_grad()
def load_average(model: torch.nn.Module, folder: Path) -> None:
    """Put the averaged weights of a verified checkpoint in place of the model's; UserError where it holds none."""
    saved = distcp.contents(folder)
    live = {name: parameter for name, parameter in model.named_parameters() if f"ema.{name}" in saved.names}
    if not live:
        raise UserError(f"{folder}: holds no averaged weights: the run was trained with training.ema=0")
    wide = {name: torch.promote_types(parameter.dtype, torch.float32) for name, parameter in live.items()}
    average = {name: torch.empty_like(parameter, dtype=wide[name]) for name, parameter in live.items()}
    distcp.load({"ema": average}, folder, saved)
    for name, parameter in live.items():
        parameter.copy_(average[name])


def open_model(
    path: str | Path,
    device: str = "cpu",
    dtype: str | None = None,
    *,
    mask_token_id: int | None = None,
    objective: str | Objective | None = None,
) -> OpenModel:
    """The model of a run (its newest checkpoint), of one step's folder (or RUN/best), or of an exported folder.

    Folders of the families in `unmask.models.families`, and DiffusionGemma's, open as what they were trained for.

    A path that ends in /ema stands for the averaged weights (training.ema) of what comes before it. dtype: of the
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
            raise UserError(f"{folder}: an exported model has no averaged weights beside its own")
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
        fuse(model)
    has_tokenizer = (folder / "hf" / "tokenizer_config.json").exists()
    tokenizer = open_tokenizer(folder / "hf") if has_tokenizer else None
    mask = getattr(model.config, "mask_token_id", None)
    with taking_up(folder):
        rebuilt = rebuild(config.objective.chosen, state["objective"])
    objective = rebuilt.bind(model, tokenizer, mask)
    settings = config.model if config.model.lora.rank else None
    opened = OpenModel(model, tokenizer, mask, objective.at(state["step"], state["steps"]), settings)
    return opened._replace(source=config.model.name)


def stored_model(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    """The model of one step as it was saved, to train it further; UserError for a damaged one, and for adapters."""
    verify(folder)
    settings = Config.load(folder / "config.yaml").model
    if settings.lora.rank:
        raise UserError(
            f"model.name={folder}: holds adapters beside its model: export it (`unmask export {folder} FOLDER`) and "
            f"name that folder"
        )
    model = empty_model(folder / "hf", getattr(torch, settings.dtype))
    load_weights(model, folder)
    return model.to(dtype)


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
    tokenizer = None
    if (folder / "tokenizer_config.json").exists():
        tokenizer = open_tokenizer(folder)
    model, tokenizer, mask = load(settings, tokenizer, device=device)
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
