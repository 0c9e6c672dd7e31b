"""Characters that steer a terminal are shown, not sent to it; what goes to a pipe stays as it is."""

import io
import sys

from unmask.terminal import say, shown
from unmask.tracking import Start
from unmask.tracking.console import ConsoleTracker

FOREIGN = "\x1b]0;title\x07\x1b[2Jgone\r\x9b1A\u202eabc\tx\n"
SHOWN = "\\x1b]0;title\\x07\\x1b[2Jgone\\r\\x9b1A\\u202eabc\tx\n"


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_only_a_pipe_gets_them_as_they_are():
    assert shown(FOREIGN) == SHOWN and shown("naïve ▒ 語 🙂\n") == "naïve ▒ 語 🙂\n"
    terminal, pipe = Terminal(), io.StringIO()
    for out in (terminal, pipe):
        say("a", FOREIGN, sep="|", end="", file=out)
    assert terminal.getvalue() == f"a|{SHOWN}" and pipe.getvalue() == f"a|{FOREIGN}"


def test_stderr_is_for_people(monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    say(FOREIGN, end="", file=sys.stderr)
    assert sys.stderr.getvalue() == SHOWN


def test_messages_of_a_run(tmp_path, capfd):
    tracker = ConsoleTracker()
    tracker.start(Start(tmp_path, 0, 1, {"log": {"console": "plain"}}, {}))
    tracker.message("data/\x1b[2J")
    assert capfd.readouterr().err == "data/\\x1b[2J\n"
