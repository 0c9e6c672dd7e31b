"""Trackio: a run of the project `log.options.trackio.project` in its local database.

`trackio show --project unmask` shows it, `trackio sync` uploads it to a Space. A run that goes on keeps its name, which
is its id there (the name of the run's folder and a part that tells it from others), and is asked how far it came.
"""

from __future__ import annotations

from contextlib import redirect_stdout
from io import StringIO
from typing import Any

from unmask.config import Section
from unmask.tracking import Start
from unmask.tracking.following import PREFIX, Following, identity


class Options(Section):
    #: Project that groups runs; one database each.
    project: str = "unmask"
    #: Name of the run, with a unique suffix; empty: the name of its folder.
    name: str | None = None
    #: Groups runs in the interface.
    group: str | None = None


class Trackio(Following):
    """Writes through a trackio.Run; stdout is for results, so what trackio prints there is not shown."""

    Options = Options
    package = "trackio"

    def open(self, run: Start, anew: bool) -> dict[str, int]:
        import trackio

        key, known = identity(run, "trackio", anew)
        options = self.options
        name = f"{options.name or run.path.resolve().name}-{key[:6]}"
        with redirect_stdout(StringIO()):
            self._run: Any = trackio.init(
                project=options.project,
                name=name,
                group=options.group,
                config=run.config,
                resume="allow",
                embed=False,
                # What the processor and the GPU are busy with belongs to a monitor of the machine.
                auto_log_cpu=False,
                auto_log_gpu=False,
            )
        # Or trackio finishes it once more when the program ends, and says so on stdout.
        trackio.context_vars.current_run.set(None)
        return self._reach(name) if known else {}

    def _reach(self, name: str) -> dict[str, int]:
        from trackio.sqlite_storage import SQLiteStorage

        logs = SQLiteStorage.get_logs(self.options.project, name)
        return {
            kind: max((log["step"] for log in logs if any(key.startswith(f"{prefix}/") for key in log)), default=-1)
            for kind, prefix in PREFIX.items()
        }

    def write(self, step: int, numbers: dict[str, float], time: float | None) -> None:
        self._run.log(numbers, step=step)

    def close(self) -> None:
        with redirect_stdout(StringIO()):
            self._run.finish()
