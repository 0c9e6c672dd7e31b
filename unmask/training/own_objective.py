"""The objective of a run: what its config names, else the one that its model was trained by.

A folder that unmask exported, and one of a family, say how they were trained. A run on one keeps that: the name, the
block size, the shift and which clean rows are seen, which are how the model is decoded. Other options (weights, noise
levels, the variant) may change. Another objective is a conversion, refused unless `objective.convert` asks for it. An
autoregressive model says nothing against any: every conversion begins with one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from unmask.config import Config, ObjectiveConfig
from unmask.errors import UserError
from unmask.hf import read_config
from unmask.models.families.trained import also, objective_of
from unmask.objectives import Objective, build, described, name_of, objectives, rebuild
from unmask.runs.folder import state_of, step_of, taking_up

#: Options that say how a model is decoded, which a variant of the same objective leaves as they are.
STRUCTURE = ("block_size", "shift", "clean")


def chosen(config: Config) -> tuple[Config, list[str]]:
    """The config with its objective's name and options, and what should be said of them.

    UserError for an objective that is not the model's own without objective.convert, or with it where there is nothing
    to convert.
    """
    section, where = config.objective, f"model.name={config.model.name}"
    own, others = _own(config.model.name)
    asked, given = section.name, section.options()
    free = own is None or asked in others or (own.decoding.kind == "causal" and asked is not None)
    if section.convert and (free or asked is None):
        why = "the model has no objective that would be changed" if free else "objective.name is left out, the model's"
        raise UserError(f"objective.convert=true has no effect: {why}; leave it out")
    if free or own is None:
        return _named(config, section.chosen, given), []
    if section.convert:
        made = build(section.chosen, given)
        if made.decoding == own.decoding:
            raise UserError("objective.convert=true has no effect: it is the model's own objective; leave it out")
        note = f"{where} was trained by {described(own)}, and is converted to {described(made)} (objective.convert)"
        return config, [note]
    own_name = name_of(own)
    if asked not in (None, own_name):
        made = build(asked, given)
        if made.decoding == own.decoding:
            return config, []
        raise _another(where, own, f"objective.name={asked}")
    try:
        options = _merged(own, given)
        made = build(own_name, options)
    except UserError as error:
        if asked is None:
            raise UserError(f"objective.name is left out, so that it is {own_name}, as {where} says: {error}") from None
        raise
    _check_decoding(where, own, made, given)
    said = []
    if asked is None:
        unsure = f"; it does not tell, and may be {' or '.join(others)}: name that" if others else ""
        said = [f"objective {described(made)}: what {where} was trained by{unsure}"]
    return _named(config, own_name, options), said


def _named(config: Config, name: str, options: dict[str, Any]) -> Config:
    section = ObjectiveConfig.model_validate({"name": name, "convert": config.objective.convert, **options})
    return config.model_copy(update={"objective": section})


def _own(name: str | None) -> tuple[Objective | None, tuple[str, ...]]:
    """How a model's folder says that it was trained, and by which other objectives it may have been.

    Of a run's folder, its newest checkpoint says it.
    """
    folder = Path(name) if name is not None else None
    if folder is None or not folder.is_dir():
        return None, ()
    step = step_of(folder)
    if step is not None:
        trained = Config.load(step / "config.yaml").objective.chosen
        with taking_up(step):
            return rebuild(trained, state_of(step)["objective"]), ()
    if not (folder / "config.json").is_file():
        return None, ()
    raw = read_config(folder)
    return objective_of(raw, str(folder / "config.json")), also(raw)


def _merged(own: Objective, given: dict[str, Any]) -> dict[str, Any]:
    """What is given, and of the model's own options those that go with it."""
    name, base = name_of(own), own.settled()
    presets = objectives[name].presets
    variant = given.get("variant", base.get("variant"))
    if variant != base.get("variant"):
        base = {key: value for key, value in base.items() if key in STRUCTURE}
        for key in STRUCTURE:
            if key in type(own).model_fields and key not in presets.get(variant, {}):
                base.setdefault(key, getattr(own, key))
    if given.get("block_schedule") is not None:
        base.pop("block_size", None)
    kept = {key: value for key, value in base.items() if key not in given}
    unused = rebuild(name, kept | given).unused()
    return {key: value for key, value in kept.items() if key not in unused} | given


def _check_decoding(where: str, own: Objective, made: Objective, given: dict[str, Any]) -> None:
    """UserError for options that make another model: naming the first of them that was given."""
    known = own.decoding._replace(block_size=None), made.decoding._replace(block_size=None)
    sizes = {own.decoding.block_size, made.decoding.block_size}
    if known[0] == known[1] and (len(sizes) == 1 or None in sizes):  # a canvas' size may be left to the model
        return
    key = next(key for key in (*STRUCTURE, "block_schedule", "variant", *given) if key in given)
    raise _another(where, own, f"objective.{key}={given[key]}")


def _another(where: str, own: Objective, given: str) -> UserError:
    key = given.partition("=")[0]
    return UserError(
        f"{given}: {where} was trained by {described(own)}; leave {key} out (~{key} where a file has it) to keep that, "
        f"or set objective.convert=true to make another model of it"
    )
