"""The metrics writer `mlflow`: an MLflow tracking server or store, with metrics in groups.

The store is that of MLflow's variables, such as MLFLOW_TRACKING_URI. A run that is resumed
continues its run there.

A thread sends what has gathered every few seconds, so that training never waits for a server. If
the server cannot be reached, the lines are kept in memory and sent later.
"""

import importlib
import re
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
from ruamel.yaml import YAML

from training.dotted_keys import flatten
from training.logs import log
from training.spikes import TrainingError
from training.writers.groups import grouped_name
from training.writers.registry import MetricsWriter, WriterContext, register
from training.writers.tracker import store_id, stored_id

SECONDS_PER_SEND = 5.0
# Limits of MLflow: metrics and parameters in a request, characters of a parameter and of a tag.
_MOST_METRICS, _MOST_PARAMETERS, _MOST_CHARACTERS = 1000, 100, 5000


def _allowed(name: str) -> str:
    """Return a name of a metric or a parameter, without characters that MLflow does not allow."""
    return re.sub(r"[^\w./: -]", "_", name)


@register("mlflow")
class MLflowWriter(MetricsWriter):
    """Writes scalars, texts, images and the configuration to MLflow."""

    requires = "mlflow"

    def __init__(self, context: WriterContext):
        self._context = context
        self._mlflow: Any = importlib.import_module("mlflow")  # only this writer needs the extra
        self._client: Any = None
        self._run_id = ""
        self._sender: ThreadPoolExecutor | None = None
        self._sending: Future[None] | None = None
        self._unsent: list[Callable[[], None]] = []
        self._metrics: list[Any] = []
        self._sent, self._has_warned, self._is_finished = 0.0, False, False

    def begin(self, resumed_step: int) -> None:
        """Continue the run of the directory, or start one. Raises: TrainingError."""
        self._sent, self._has_warned, self._is_finished = time.monotonic(), False, False
        if self._run_id:  # after a rollback, when the server may be away
            self._unsent.append(partial(self._client.update_run, self._run_id, "RUNNING"))
            self._sender = ThreadPoolExecutor(1, "mlflow")
            return
        try:
            self._client = self._mlflow.MlflowClient()
            self._run_id = self._open_run(resumed_step)
            self._client.log_text(self._run_id, self._context.resolved_config, "config.yaml")
        except Exception as error:  # stores of artifacts have exceptions of their own
            raise TrainingError(
                f"training.writers: mlflow cannot open a run at {self._mlflow.get_tracking_uri()} "
                f"({_first_line(error)}); check MLFLOW_TRACKING_URI, and that this host can write "
                "to the artifact store of that server"
            ) from error
        self._sender = ThreadPoolExecutor(1, "mlflow")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Add the scalars of a step to those that are sent next."""
        now, metric = int(1000 * time.time()), self._mlflow.entities.Metric
        for name, value in values.items():
            self._metrics.append(metric(_allowed(grouped_name(name)), float(value), now, step))
        if time.monotonic() - self._sent > SECONDS_PER_SEND:
            self._send()

    def write_text(self, step: int, name: str, text: str) -> None:
        """Add a text to what is sent next, as a file."""
        path = f"{name}/step_{step:08d}.txt"
        self._unsent.append(partial(self._client.log_text, self._run_id, text, path))

    def write_image(self, step: int, name: str, image_HWC: np.ndarray) -> None:
        """Add an image to what is sent next, as a file."""
        path = f"{name}/step_{step:08d}.png"
        self._unsent.append(partial(self._client.log_image, self._run_id, image_HWC, path))

    def finish(self) -> None:
        """Let `close` end the run as finished; it counts as killed otherwise."""
        self._is_finished = True

    def close(self) -> None:
        """Send the rest, and end the run."""
        if self._sender is None:
            return
        try:
            self._wait()
            self._send()
            self._wait()
        finally:
            self._sender.shutdown()
            self._sender = None
        if self._unsent:
            log.warning("mlflow: the last %d requests were not sent", len(self._unsent))
            return
        try:
            self._client.set_terminated(self._run_id, "FINISHED" if self._is_finished else "KILLED")
        except Exception as error:
            log.warning("mlflow: cannot record the end of the run: %s", _first_line(error))

    def _open_run(self, resumed_step: int) -> str:
        context, client = self._context, self._client
        known = stored_id(context.directory, "mlflow") if resumed_step else None
        if known is not None:
            client.update_run(known, "RUNNING")
            return known
        experiment = client.get_experiment_by_name(context.project)
        number = (
            experiment.experiment_id if experiment else client.create_experiment(context.project)
        )
        name = context.directory.resolve().name
        run_id = str(client.create_run(number, run_name=name).info.run_id)
        client.set_tag(run_id, "command", context.command[:_MOST_CHARACTERS])
        parameters = [
            self._mlflow.entities.Param(_allowed(key), str(value)[:_MOST_CHARACTERS])
            for key, value in flatten(
                YAML(typ="safe", pure=True).load(context.resolved_config)
            ).items()
            if key
        ]
        for begin in range(0, len(parameters), _MOST_PARAMETERS):
            client.log_batch(run_id, params=parameters[begin : begin + _MOST_PARAMETERS])
        store_id(context.directory, "mlflow", run_id)
        return run_id

    def _send(self) -> None:
        """Let the thread send all that has gathered, unless it is still sending."""
        if self._sending is not None and not self._sending.done():
            return
        self._wait()
        for begin in range(0, len(self._metrics), _MOST_METRICS):
            some = self._metrics[begin : begin + _MOST_METRICS]
            self._unsent.append(partial(self._client.log_batch, self._run_id, metrics=some))
        self._metrics = []
        self._sent = time.monotonic()
        assert self._sender is not None
        self._sending = self._sender.submit(self._send_all, list(self._unsent))

    def _send_all(self, requests: list[Callable[[], None]]) -> None:
        for request in requests:
            try:
                request()
            except self._mlflow.MlflowException as error:
                if not _is_rejected(error):
                    raise
                log.warning("mlflow: the server rejected a request: %s", _first_line(error))
            self._unsent.remove(request)

    def _wait(self) -> None:
        """Wait for the thread, and warn once if it has failed."""
        sending, self._sending = self._sending, None
        if sending is None:
            return
        try:
            sending.result()
        except Exception as error:  # stores of artifacts have exceptions of their own
            if not self._has_warned:
                self._has_warned = True
                log.warning(
                    "mlflow: cannot send metrics: %s; they are kept in memory", _first_line(error)
                )


def _is_rejected(error: Any) -> bool:
    """Whether a server will never take the request of an MlflowException: its content is wrong."""
    status = error.get_http_status_code()
    credentials, overload = (401, 403), (408, 429)
    return 400 <= status < 500 and status not in credentials + overload


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
