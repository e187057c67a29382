"""Built-in prompt files, made on the spot. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from stages.models.cache import models_root


def prompts_path(name: str) -> Path:
    """Path of a prompt file: a built-in data set by name, made if it is not there, else the path itself."""
    maker = BUILTIN.get(name)
    if maker is None:
        return Path(name).expanduser()
    path = models_root().parent / "data" / maker.file
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        maker.write(path)
    return path


class _Maker:
    def __init__(self, file: str, write: Callable[[Path], None]) -> None:
        self.file = file
        self.write = write


BUILTIN: dict[str, _Maker] = {}
