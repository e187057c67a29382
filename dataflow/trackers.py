"""Where metrics go besides the terminal: TensorBoard event files, written without torch or TensorFlow."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path


class TensorBoard:
    """Writes one event file of scalars.

    Args:
        directory: Where the event file goes; made if it is not there.
    """

    def __init__(self, directory: Path) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(str(directory))

    def on_window(self, index: int, metrics: Mapping[str, float]) -> None:
        """Write one value per metric at step `index`."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._writer.add_event(Event(wall_time=time.time(), step=index, summary=Summary(value=values)))

    def close(self) -> None:
        """Write what is buffered and close the file."""
        self._writer.close()
