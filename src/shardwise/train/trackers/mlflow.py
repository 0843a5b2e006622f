"""MLflow; its own variables choose server and experiment (MLFLOW_TRACKING_URI,
MLFLOW_EXPERIMENT_NAME). A run that is started again goes on under its id, kept in RUN/mlflow_id."""

from __future__ import annotations

from importlib import import_module

from shardwise.checkpoint.files import replace_file, text_of
from shardwise.train.trackers import Run


class Place:
    """A `Tracker`."""

    def __init__(self, run: Run) -> None:
        self._mlflow = import_module("mlflow")
        file = run.directory / "mlflow_id"
        earlier = text_of(file).strip() or None
        started = self._mlflow.start_run(run_id=earlier, run_name=None if earlier else run.name)
        replace_file(file, str(started.info.run_id).encode())
        if earlier is None:
            flat = {f"{s}.{k}": v for s, keys in run.config.items() for k, v in keys.items()}
            self._mlflow.log_params(flat)

    def numbers(self, step: int, row: dict[str, float]) -> None:
        self._mlflow.log_metrics(row, step=step)

    def text(self, step: int, name: str, text: str) -> None:
        self._mlflow.log_text(text, f"{name.replace('/', '_')}_{step:08d}.txt")

    def close(self) -> None:
        self._mlflow.end_run()
