"""Built-in models by name. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dataflow.errors import ConfigError
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
    """Directory of a built-in model, whether it is made or not; an existing directory as it is; else a hub id.

    Raises:
        ConfigError: If it is written like a path and there is no such directory.
    """
    if name in MODELS:
        return str(MODELS[name].directory())
    path = Path(name).expanduser()
    if path.is_dir():
        return str(path.resolve())
    if name[:1] in (".", "/", "~") or name.count("/") > 1:
        raise ConfigError(f"model.path: there is no directory {name!r}")
    return name


def fetch_model(name: str) -> None:
    """Download a hub model into the hub's own cache, so that every process finds it there.

    Raises:
        ConfigError: If there is no such model, or no hub can be reached.
    """
    from huggingface_hub import snapshot_download

    try:
        snapshot_download(name)
    except Exception as error:  # the hub's client raises many kinds, all of which mean the same here
        raise ConfigError(
            f"model.path: {name!r} is no directory and no built-in model ({', '.join(MODELS)}), and could not be "
            f"downloaded: {type(error).__name__}: {error}"
        ) from error


def local_model(name: str) -> str:
    """Directory of a model that is on this machine: a directory as it is, a hub id in the hub's cache.

    Raises:
        ConfigError: If it is not there.
    """
    if Path(name).is_dir():
        return name
    from huggingface_hub import snapshot_download

    try:
        return str(snapshot_download(name, local_files_only=True))
    except Exception as error:
        raise ConfigError(f"model.path: the model {name!r} is not on this machine: {error}") from error
