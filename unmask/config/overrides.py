"""What the changes to a config file displace in it: an override beats the file, whatever else the file says of it.

A new name drops the options that were the old one's alone; steps and epochs, and a model's name and its config, take
each other's place; a switch that is turned off takes its section's other keys with it. `~key` removes a key.
"""

from __future__ import annotations

from typing import Any

from unmask.config.section import OWNERS
from unmask.errors import UserError

Tree = dict[str, Any]

#: Keys of `optimizer` that only muon reads, and keys of `schedule` that only some schedules of ours read.
MUON = ("muon_learning_rate", "momentum", "nesterov", "ns_steps", "adjust_lr")
OF_SCHEDULE = {"floor": ("cosine", "linear", "wsd"), "decay": ("wsd",), "decay_shape": ("wsd",)}
#: Keys whose 0 leaves the other keys of their section without effect.
SWITCHES = ("model.lora.rank", "training.spike.factor", "log.profile.steps")


def remove(tree: Tree, text: str) -> None:
    """Take the key that `text` (`~key.path`) names out of what a file says; UserError where it is not there."""
    *parents, last = text.removeprefix("~").split(".")
    section: Any = tree
    for parent in parents:
        section = section.get(parent) if isinstance(section, dict) else None
    if not isinstance(section, dict) or last not in section:
        raise UserError(f"{text!r} removes a key that is not in the file: leave it out")
    del section[last]


def make_way(tree: Tree, given: Tree) -> None:
    """Drop from `tree`, what a file says, what `given`, nested in the same way, puts something else in the place of."""
    for one, other in (("steps", "epochs"), ("epochs", "steps")):
        asked = _section(given, "training")
        if asked.get(one) is not None and other not in asked:
            _section(tree, "training").pop(other, None)
    model, file = _section(given, "model"), _section(tree, "model")
    if model.get("name") is not None and "config" not in model:
        file.pop("config", None)
    if "model_type" in _section(model, "config") and "name" not in model:  # a whole config, not a field of one
        file.pop("name", None)
    for section in ("objective", "optimizer", "schedule"):
        _rename(section, _section(tree, section), _section(given, section))
    for path in SWITCHES:
        *parents, switch = path.split(".")
        file, asked = _section(tree, *parents), _section(given, *parents)
        if switch in asked and not asked[switch]:
            for key in file.keys() - asked.keys():
                del file[key]


def _rename(section: str, file: Tree, given: Tree) -> None:
    """Drop the options of the file's optimiser, schedule or objective that are not also those of the one given."""
    if "name" not in given:
        return
    old, new = file.get("name"), given["name"]
    if old != new:
        for key in file.keys() & _left(section, old, new) - given.keys():
            del file[key]


def _left(section: str, old: Any, new: Any) -> set[str]:
    """Options that `old` takes (None: the file does not say) and `new` does not."""
    if section == "optimizer":
        return set(MUON) if old == "muon" else set()
    if section == "schedule":
        return {key for key, readers in OF_SCHEDULE.items() if (old or "cosine") in readers and new not in readers}
    known = OWNERS["objective"].names()
    before = known if old is None else [name for name in [old] if name in known]
    taken = {key for name in before for key in _options(name)}
    return taken - (_options(new) if new in known else set())


def _options(objective: str) -> set[str]:
    return set(OWNERS["objective"][objective].model_fields)


def _section(tree: Tree, *path: str) -> Tree:
    """The mapping at a path; an empty one where there is none."""
    found: Any = tree
    for key in path:
        found = found.get(key) if isinstance(found, dict) else None
    return found if isinstance(found, dict) else {}
