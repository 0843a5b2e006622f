"""TensorBoard: event files in RUN/tensorboard; a resumed run hides what it does again."""

from __future__ import annotations

from shardwise.train.trackers import Run


class Place:
    """A `Tracker`."""

    def __init__(self, run: Run) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = run.directory / "tensorboard"
        self._writer = SummaryWriter(str(folder), purge_step=run.step + 1 if run.step else None)

    def numbers(self, step: int, row: dict[str, float]) -> None:
        for name, value in row.items():
            self._writer.add_scalar(name, value, step)

    def text(self, step: int, name: str, text: str) -> None:
        self._writer.add_text(name, text, step)

    def close(self) -> None:
        self._writer.close()
