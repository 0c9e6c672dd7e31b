"""What is installed: the packages that unmask requires, those that add to it, and programs that it can make use of."""

from __future__ import annotations

import shutil
from importlib import metadata
from typing import Any

#: Extra of unmask -> (distributions of which one must be there, what it is for).
EXTRAS = {
    "gguf": (("gguf",), "reading models from .gguf files"),
    "lm-eval": (("lm-eval",), "published benchmarks (unmask eval --tasks)"),
    "quant": (("torchao",), "a base in four bits under adapters (model.lora.quantize)"),
    "ray": (("ray",), "training under Ray Train (launch/ray_train.py)"),
    "tensorboard": (("tensorboard",), "logging to TensorBoard"),
    "trackio": (("trackio",), "logging to Trackio"),
    "wandb": (("wandb",), "logging to Weights & Biases"),
    "mlflow": (("mlflow-skinny", "mlflow"), "logging to MLflow"),
}
#: Program -> (Debian package, what it is for).
TOOLS = {
    "ip": ("iproute2", "measuring block parallelism over shaped links (benchmarks/block_parallel.py, as root)"),
    "c++": ("g++", "compiling layers on a CPU (model.compile)"),
}


def required() -> tuple[dict[str, str | None], list[str]]:
    """Versions of what unmask requires, and a sentence for each that is missing or too old."""
    from packaging.requirements import Requirement

    found: dict[str, str | None] = {}
    broken = []
    for text in metadata.requires("unmask") or []:
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        found[requirement.name] = version(requirement.name)
        if found[requirement.name] is None:
            broken.append(f"{requirement.name} is not installed: pip install '{text}'")
        elif not requirement.specifier.contains(found[requirement.name] or "", prereleases=True):
            broken.append(f"{requirement.name} {found[requirement.name]} is too old: pip install '{text}'")
    return {"unmask": version("unmask"), **found}, broken


def optional() -> dict[str, dict[str, Any]]:
    """Of every extra that adds something: the installed version or None, and what it is for."""
    found = {}
    for name, (distributions, purpose) in EXTRAS.items():
        there = (version(distribution) for distribution in distributions)
        found[name] = {"version": next((each for each in there if each), None), "for": purpose}
    return found


def tools() -> dict[str, dict[str, Any]]:
    """Of every program: its path or None, the Debian package that holds it, and what it is for."""
    return {name: {"path": shutil.which(name), "package": package, "for": purpose}
            for name, (package, purpose) in TOOLS.items()}  # fmt: skip


def version(distribution: str) -> str | None:
    """The installed version of a distribution, or None."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
