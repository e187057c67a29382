"""Columns in, columns out: stages of RL post-training over a columnar queue.

A custom stage needs `Column`, `stage` (or `Stage`), and sometimes `Drop` and `RowError`; a notebook needs `connect`.
"""

from dataflow.batch import Batch, Unit
from dataflow.errors import ConfigError, DataflowError, Drop, QueueError, RowError, RunError
from dataflow.inspect import connect
from dataflow.stage import Stage, StageConfig, StageContext, stage
from schemas.column import Column

__all__ = [
    "Batch",
    "Column",
    "ConfigError",
    "DataflowError",
    "Drop",
    "QueueError",
    "RowError",
    "RunError",
    "Stage",
    "StageConfig",
    "StageContext",
    "Unit",
    "connect",
    "stage",
]
