"""What git says of a folder: the commit, whether files were changed; and nothing of the folder's own is executed."""

import stat
import subprocess

import pytest

from unmask.runs import repository

state = repository.state.__wrapped__


@pytest.fixture
def git(tmp_path):
    def run(*arguments):
        identity = ["-c", "user.name=n", "-c", "user.email=e"]
        subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], check=True, capture_output=True)

    assert state(str(tmp_path)) is None
    run("init")
    (tmp_path / "file").write_text("one")
    run("add", "file")
    run("commit", "-m", "one")
    return run


def test_the_state_of_a_folder(tmp_path, git):
    clean = state(str(tmp_path))
    assert len(clean["commit"]) == 40 and (clean["dirty"], clean["diff"]) == (False, None)
    hashes = set()
    for text in ("two", "three"):
        (tmp_path / "file").write_text(text)
        dirty = state(str(tmp_path))
        assert dirty["commit"] == clean["commit"] and dirty["dirty"]
        hashes.add(dirty["diff"])
    assert len(hashes) == 2


def test_no_program_of_the_folder_is_run(tmp_path, git):
    ran = tmp_path / "ran"
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\necho ran >> {ran}\ncat 2>/dev/null\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    (tmp_path / ".gitattributes").write_text("file filter=f diff=d\n")
    keys = ("core.fsmonitor", "filter.f.clean", "filter.f.smudge", "filter.f.process", "diff.d.command",
            "diff.d.textconv", "diff.external")  # fmt: skip
    for key in keys:
        git("config", key, str(program))
    git("config", "filter.f.required", "true")
    (tmp_path / "file").write_text("two")
    assert state(str(tmp_path))["dirty"] and not ran.exists()
    subprocess.run(["git", "-C", str(tmp_path), "diff", "HEAD"], capture_output=True)
    assert ran.exists()  # what git does by itself
