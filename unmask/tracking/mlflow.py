"""MLflow: a run of the experiment `log.options.mlflow.experiment`, in a database in the run's folder or on a server.

`mlflow ui --backend-store-uri sqlite:///<run>/mlflow.db` shows the default. A run that goes on is found by the id kept
in its folder, and asked how far it came.
"""

from __future__ import annotations

import logging
import time as clock
from typing import Any

from unmask.config import Section, flat
from unmask.tracking import Start
from unmask.tracking.following import IDENTITIES, PREFIX, Following, identity, keep

#: Seconds of records that are written together: a database takes as long for a thousand numbers as for one.
PERIOD = 2.0
#: What MLflow takes at once, and the longest value of a parameter.
METRICS, PARAMETERS, LONGEST = 1000, 100, 6000


class Options(Section):
    #: Tracking URI, such as http://host:5000 or sqlite:///runs/mlflow.db; empty: `mlflow.db` in the run's folder.
    uri: str | None = None
    #: Experiment that groups runs.
    experiment: str = "unmask"
    #: Name of the run; empty: the name of its folder.
    name: str | None = None


class MLflow(Following):
    """Writes through MlflowClient."""

    Options = Options
    package = "mlflow"

    def open(self, run: Start, anew: bool) -> dict[str, int]:
        from mlflow import MlflowClient

        logging.getLogger("mlflow.store.db.utils").setLevel(logging.WARNING)  # it tells how it makes its tables
        uri = self.options.uri or f"sqlite:///{run.path.resolve() / 'mlflow.db'}"
        self._client: Any = MlflowClient(uri)
        self._pending: list[Any] = []
        self._written = clock.monotonic()
        self._id, known = identity(run, "mlflow", anew)
        if known:
            self._client.update_run(self._id, status="RUNNING")
            return self._reach()
        self._id = self._new(run)
        return {}

    def _new(self, run: Start) -> str:
        experiment = self._client.get_experiment_by_name(self.options.experiment)
        number = experiment.experiment_id if experiment else self._client.create_experiment(self.options.experiment)
        made = self._client.create_run(number, run_name=self.options.name or run.path.resolve().name)
        keep(run.path / IDENTITIES, "mlflow", made.info.run_id)
        self._parameters(made.info.run_id, run.config)
        return made.info.run_id

    def _parameters(self, number: str, config: dict[str, Any]) -> None:
        from mlflow.entities import Param

        parameters = [Param(key, str(value)[:LONGEST]) for key, value in flat(config)]
        for first in range(0, len(parameters), PARAMETERS):
            self._client.log_batch(number, params=parameters[first : first + PARAMETERS])

    def _reach(self) -> dict[str, int]:
        metrics = self._client.get_run(self._id).data.metrics
        reached = {}
        for kind, prefix in PREFIX.items():
            of_kind = [name for name in metrics if name.startswith(f"{prefix}/")]
            steps = [metric.step for name in of_kind[:1] for metric in self._client.get_metric_history(self._id, name)]
            reached[kind] = max(steps, default=-1)
        return reached

    def write(self, step: int, numbers: dict[str, float], time: float | None) -> None:
        from mlflow.entities import Metric

        stamp = round(1000 * (clock.time() if time is None else time))
        self._pending += [Metric(name, value, stamp, step) for name, value in numbers.items()]
        if len(self._pending) >= METRICS or clock.monotonic() - self._written > PERIOD:
            self._flush()

    def _flush(self) -> None:
        for first in range(0, len(self._pending), METRICS):
            self._client.log_batch(self._id, metrics=self._pending[first : first + METRICS])
        self._pending, self._written = [], clock.monotonic()

    def close(self) -> None:
        self._flush()
        self._client.set_terminated(self._id)
