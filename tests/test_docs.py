"""The documentation holds: its commands and Python blocks run, in order, and its tables, keys and links are true.

A page's ```console blocks are run in a folder that looks like the clone after `make demo`, in page order, and what a
page shows of a command's output must be printed, in that order, up to its numbers; `...` stands for anything. ```python
blocks of a page share a namespace; an ```output block after one is what it prints, to the letter. Commands that set up
the environment are not run: make targets must exist, scripts must too.
"""

from __future__ import annotations

import io
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import chdir, redirect_stderr, redirect_stdout
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import yaml

from unmask.cli import main, verbs
from unmask.config import Config
from unmask.models.families import families
from unmask.objectives import build

ROOT = Path(__file__).resolve().parent.parent
#: Pages whose blocks are run; each starts from the folder that the README leaves.
RUN = ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
PAGES = [*RUN, "CONTRIBUTING.md", "CHANGELOG.md"]

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"\d[\d,.:]*|\bnan\b")
#: Commands that make the environment, or measure for minutes.
SETUP = re.compile(r"make \w+|pip install 'unmask\[\w+\]'|\. \.venv/bin/activate|python (benchmarks/\w+\.py) --json")


class Block(NamedTuple):
    """kind: what stands after the fence; place: page:line."""

    kind: str
    text: str
    place: str


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: str) -> Iterator[Block]:
    text = read(page)
    for found in FENCE.finditer(text):
        yield Block(found[1], found[2], f"{page}:{text.count(chr(10), 0, found.start()) + 1}")


def prose(page: str) -> str:
    return FENCE.sub("", read(page))


def commands(block: Block) -> Iterator[tuple[str, list[str]]]:
    """(command, the lines shown below it) of a console block."""
    for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
        command, *shown = part.rstrip("\n").split("\n")
        yield command, shown


def run(command: str, folder: Path) -> tuple[int, str]:
    """(exit code, stdout and stderr). `unmask` runs in this process: a new one takes seconds to import torch."""
    if not command.startswith("unmask ") or re.search(r"[|<>;&]", command):
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(["bash", "-c", command], cwd=folder, env={**os.environ, "PATH": path},
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)  # fmt: skip
        return done.returncode, done.stdout
    said, code = io.StringIO(), 0
    with chdir(folder), redirect_stdout(said), redirect_stderr(said):
        with mock.patch.object(sys, "argv", shlex.split(command)):
            try:
                main()
            except SystemExit as exit:
                code = int(exit.code or 0)
    return code, said.getvalue()


def numberless(line: str) -> str:
    """Columns are as wide as what they hold: runs of spaces count as one."""
    return re.sub(r"\s+", " ", NUMBER.sub("#", line)).strip()


def missing(shown: list[str], said: str) -> str | None:
    """The first line shown that `said` does not have, after the ones before it; `...` within a line is anything."""
    lines = iter(map(numberless, said.splitlines()))
    for wanted in map(numberless, shown):
        pattern = re.escape(wanted).replace(re.escape("..."), ".*")
        if wanted and wanted != "..." and not any(re.fullmatch(pattern, line) for line in lines):
            return wanted
    return None


def run_console(block: Block, folder: Path) -> None:
    for command, shown in commands(block):
        if setup := SETUP.fullmatch(command):
            assert setup[1] is None or (ROOT / setup[1]).is_file(), f"{block.place}: {command}"
            continue
        code, said = run(command, folder)
        refused = bool(shown) and shown[-1].startswith("unmask: ")
        assert code == (2 if refused else 0), f"{block.place}: {command}\n{said}"
        lost = missing(shown, said)
        assert lost is None, f"{block.place}: {command}\nshows: {lost}\nsaid: {said}"


def run_page(page: str, folder: Path) -> None:
    names: dict[str, Any] = {"__name__": "docs"}
    said = io.StringIO()
    for block in blocks(page):
        if block.kind == "console":
            run_console(block, folder)
        elif block.kind == "python":
            said = io.StringIO()
            with chdir(folder), redirect_stdout(said):
                exec(compile(block.text, block.place, "exec"), names)
        elif block.kind == "output":
            assert said.getvalue() == block.text, block.place


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the pages count on, after `make demo` and the README's own commands."""
    folder = tmp_path_factory.mktemp("docs") / "clone"
    for name in ("docs", "recipes"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for page in ROOT.glob("*.md"):
        shutil.copy(page, folder)
    code, said = run("unmask demo --steps 1 --layers 1 --files 4", folder)
    assert code == 0, said
    run_page("README.md", folder)
    return folder


@pytest.mark.parametrize("page", RUN)
def test_every_block_runs(page: str, clone: Path, tmp_path: Path) -> None:
    if page == "README.md":
        return  # `clone` ran it
    folder = tmp_path / "clone"
    shutil.copytree(clone, folder)
    with mock.patch.dict(families._added):  # an example's family ends with its page: tables are made of them
        run_page(page, folder)


@pytest.mark.parametrize("page", PAGES)
def test_blocks_are_of_a_kind_that_is_tested(page: str) -> None:
    kinds = {"console", "python", "output", "yaml", "toml", "text"}
    for block in blocks(page):
        assert block.kind in kinds, block.place
        if block.kind == "console":
            assert block.text.startswith("$ "), f"{block.place}: commands begin with `$ `"
        elif block.kind == "yaml":
            config = Config.parse(yaml.safe_load(block.text), block.place)
            build(config.objective.chosen, config.objective.options())
        elif block.kind == "text":
            assert "$ " not in block.text, f"{block.place}: commands belong in a console block"


@pytest.mark.parametrize("page", PAGES)
def test_targets_and_verbs_exist(page: str) -> None:
    targets = set(re.findall(r"^(\w+):", read("Makefile"), re.MULTILINE))
    known = set(verbs.names())
    text = read(page)
    assert set(re.findall(r"(?:`|\$ )make (\w+)", text)) <= targets
    assert set(re.findall(r"(?:`|\$ )unmask (\w+)", text)) <= known


@pytest.mark.parametrize("page", PAGES)
def test_config_keys_exist(page: str) -> None:
    """Every `section.key` in the prose and every override in a command."""
    sections = {name: field.annotation for name, field in Config.model_fields.items()}
    text = prose(page) + "".join(block.text for block in blocks(page) if block.kind == "console")
    for section, key in re.findall(rf"[` \[]({'|'.join(sections)})\.(\w+)\b(?=[`=: ,])", text):
        known = set(getattr(sections[section], "model_fields", {}))
        if section == "objective":
            from unmask.objectives import objectives

            known |= {field for name in ("mdlm", "block_diffusion") for field in objectives[name].model_fields}
        # log.jsonl is a file.
        assert key in known or key in {"stepz", "jsonl"}, f"{page}: {section}.{key}"


def test_the_generated_tables_are_current() -> None:
    spec = spec_from_file_location("docs_generate", ROOT / "docs" / "generate.py")
    assert spec is not None and spec.loader is not None
    generate = module_from_spec(spec)
    spec.loader.exec_module(generate)
    for page in RUN:
        assert generate.generated(read(page)) == read(page), f"{page}: run `python docs/generate.py`"
    found = set(re.findall(r"<!-- table: (\w+) -->", "".join(map(read, RUN))))
    assert found == set(generate.TABLES)
    for key in re.findall(r"^\| `(\w+)\.(\w+)` \|", read("docs/configuration.md"), re.MULTILINE):
        assert key[1] in Config.model_fields[key[0]].annotation.model_fields  # type: ignore[union-attr]


@pytest.mark.parametrize("page", PAGES)
def test_links_resolve(page: str) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"https?://", target):
            continue
        name, _, anchor = target.partition("#")
        path = (ROOT / page).parent / name if name else ROOT / page
        assert path.exists(), f"{page}: {target}"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
            slugs = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
            assert anchor in slugs, f"{page}: {target}"


@pytest.mark.parametrize("page", PAGES)
def test_named_files_exist(page: str) -> None:
    """Source files, from the root or from the package's folder."""
    for path in re.findall(r"`((?:\w+/)+\w+\.py)`", prose(page)):
        assert (ROOT / path).is_file() or (ROOT / "unmask" / path).is_file(), f"{page}: {path}"


def test_every_page_is_reachable() -> None:
    linked = set(re.findall(r"\]\((\w[\w-]*\.md)\)", read("docs/index.md")))
    assert linked == {path.name for path in (ROOT / "docs").glob("*.md")} - {"index.md"}
