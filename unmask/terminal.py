"""What is printed for people: characters that would steer a terminal are shown, not sent to it.

Paths, names in data, messages of templates and what models write come from elsewhere; an escape sequence in them could
rewrite the screen, set its title or answer a later prompt. What goes to a file or a pipe on stdout stays as it is.
"""

from __future__ import annotations

import re
import sys
from typing import Any, TextIO

#: C0 and C1 controls but for tabs and line ends, and what turns the direction of text.
STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def shown(text: str) -> str:
    """`text` with a backslash escape in place of every character that steers a terminal."""
    return STEERING.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def say(*parts: Any, sep: str = " ", end: str = "\n", file: TextIO | None = None, flush: bool = False) -> None:
    """`print`, to a terminal and to stderr with `shown`."""
    out = sys.stdout if file is None else file
    text = sep.join(map(str, parts))
    print(shown(text) if out is sys.stderr or out.isatty() else text, end=end, file=out, flush=flush)
