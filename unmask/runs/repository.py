"""What git says of a folder, without running what the folder's own configuration names.

A repository may configure programs that git starts while it only compares files: a file-system monitor, filters, diff
drivers, a transport that fetches what is missing. Whoever made the folder would run them as the user.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
from functools import cache
from typing import Any

#: Seconds that git may take to describe a working tree.
PATIENCE = 10.0
#: No program of the folder's: no monitor, no hooks; no transport is allowed in the environment.
INERT = ("-c", "core.fsmonitor=false", "-c", f"core.hooksPath={os.devnull}")
FILTER = re.compile(r"filter\..*\.(clean|smudge|process|required)", re.DOTALL)


@cache
def state(folder: str) -> dict[str, Any] | None:
    """{commit, dirty, diff} of the working tree around `folder`, as it was when first asked for; None outside one.

    diff: SHA-256 of `git diff HEAD`, where tracked files were changed; submodules are left out.
    """
    commit = _git(folder, "rev-parse", "HEAD")
    names = _git(folder, "config", "--list", "--name-only", "-z")
    if commit is None or names is None:
        return None
    filters = [name for name in names.decode(errors="surrogateescape").split("\0") if FILTER.fullmatch(name)]
    off = [f"{name}={'false' if name.endswith('required') else ''}" for name in dict.fromkeys(filters)]
    inert = [argument for each in off for argument in ("-c", each)]
    diff = _git(folder, *inert, "diff", "--no-ext-diff", "--no-textconv", "--ignore-submodules=all", "HEAD")
    digest = hashlib.sha256(diff).hexdigest() if diff else None
    return {"commit": commit.decode().strip(), "dirty": bool(diff), "diff": digest}


def _git(folder: str, *arguments: str) -> bytes | None:
    closed = {**os.environ, "GIT_ALLOW_PROTOCOL": "", "GIT_NO_LAZY_FETCH": "1", "GIT_OPTIONAL_LOCKS": "0"}
    command = ["git", "-C", folder, *INERT, *arguments]
    try:
        done = subprocess.run(command, capture_output=True, timeout=PATIENCE, env=closed)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
