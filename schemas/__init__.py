"""Column declarations, the column catalogue, and prompt files. Depends on pyarrow alone."""

from schemas.column import Column, ColumnError

__all__ = ["Column", "ColumnError"]
