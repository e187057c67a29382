"""Built-in models by name. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from stages.models.cache import is_model


@dataclass(frozen=True)
class BuiltinModel:
    """A model that the project makes or fetches itself.

    Attributes:
        directory: Where it is kept.
        maker: Module that makes it when it is run as a command.
    """

    directory: Callable[[], Path]
    maker: str

    @property
    def is_made(self) -> bool:
        """Whether it is there already."""
        return is_model(self.directory())


# The makers are imported on use: `python -m` warns of a module that its own package has imported already.


def _tiny_directory() -> Path:
    from stages.models.tiny import tiny_directory

    return tiny_directory()


def _smollm2_directory() -> Path:
    from stages.models.smollm2 import smollm2_directory

    return smollm2_directory()


MODELS: dict[str, BuiltinModel] = {
    "tiny": BuiltinModel(_tiny_directory, "stages.models.tiny"),
    "smollm2": BuiltinModel(_smollm2_directory, "stages.models.smollm2"),
}


def resolve_model(name: str) -> str:
    """Directory of a built-in model, whether it is made or not; an existing directory as it is; else a hub id."""
    if name in MODELS:
        return str(MODELS[name].directory())
    path = Path(name).expanduser()
    return str(path.resolve()) if path.is_dir() else name
