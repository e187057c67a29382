"""Where the models that the project makes itself are kept, and how one gets there in one piece."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path


def models_root(cache: Path | None = None) -> Path:
    """Directory that holds all made models; not created.

    Args:
        cache: The directory itself. None: `dataflow/models` below `$XDG_CACHE_HOME`, or `~/.cache` if unset.
    """
    if cache is not None:
        return cache
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "dataflow" / "models"


def is_model(directory: Path) -> bool:
    """Whether the directory holds a model: config.json and at least one safetensors file."""
    return (directory / "config.json").is_file() and any(directory.glob("*.safetensors"))


def build(directory: Path, fill: Callable[[Path], None]) -> None:
    """Fill a temporary directory beside `directory`, then rename it into place.

    Nobody ever sees a half-written model. Of two processes that build the same directory at one time,
    one wins and the other discards its work.

    Args:
        directory: Must not exist, or be empty.
        fill: Writes the files into the directory it is given, which is empty.

    Raises:
        FileExistsError: `directory` holds something else than a model.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    if directory.exists() and any(directory.iterdir()):
        raise FileExistsError(f"{directory} is not empty. Remove it, or name a new directory.")
    temporary = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    try:
        fill(temporary)
        temporary.chmod(0o755)
        temporary.rename(directory)
    except OSError:
        # The rename fails if another process has put its model there meanwhile: same recipe, same model.
        if not is_model(directory):
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
