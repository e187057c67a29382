"""Policy weights as numbered files: what a learner publishes and an engine loads.

One safetensors file per version in a directory in shared memory, written under a temporary name and
renamed into place, never rewritten, and unlinked when every engine has loaded a later version.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class WeightsRef:
    """Where to find one policy version, and how to verify that an engine has loaded it.

    Attributes:
        version: Policy version; 0 is the initial model.
        path: safetensors file with Hugging Face parameter names; tied parameters appear once.
        probe_ids: Token ids of a fixed probe text.
        probe_log_probs: The learner's log-probability (nats, temperature 1) of each probe token after
            the first, under these weights. Length ``len(probe_ids) - 1``.
        probe_step: Largest absolute change of a probe log-probability since the previous version. A
            step below the verification bound cannot be told by the probe; then fingerprints decide.
        fingerprints: Parameter name -> sum (float64) of a fixed sample of its elements.
        others: Name -> file of what else belongs to the version, such as the weights of a critic.
    """

    version: int
    path: str
    probe_ids: tuple[int, ...] = ()
    probe_log_probs: tuple[float, ...] = ()
    probe_step: float = 0.0
    fingerprints: tuple[tuple[str, float], ...] = ()
    others: Mapping[str, str] = field(default_factory=dict, hash=False)


class WeightsDirectory:
    """The directory that holds a run's weight files. Private to the user (mode 0700, files 0600)."""

    def __init__(self, run_id: str) -> None:
        shm = Path("/dev/shm")
        root = shm if shm.is_dir() else Path(tempfile.gettempdir())
        self.path = root / f"dataflow-{os.getuid()}-{run_id}"

    def create(self) -> None:
        """Make the directory if it is not there."""
        self.path.mkdir(mode=0o700, exist_ok=True)

    def file(self, version: int, name: str = "policy") -> Path:
        """Path of one of a version's files, whether it exists or not."""
        return self.path / f"{version:06d}-{name}.safetensors"

    def write(self, write: Callable[[Path], object], version: int, name: str = "policy") -> Path:
        """Have a file written under another name, rename it into its place, and return the place."""
        temporary = self.path / f".{version:06d}-{name}.tmp"
        write(temporary)
        temporary.chmod(0o600)
        return temporary.rename(self.file(version, name))

    def discard_before(self, version: int) -> list[int]:
        """Unlink the files of every version older than `version`; returns the versions unlinked."""
        gone = set()
        for path in self.path.glob("*.safetensors"):
            number = path.stem.partition("-")[0]
            if number.isdigit() and int(number) < version:
                path.unlink(missing_ok=True)
                gone.add(int(number))
        return sorted(gone)

    def remove(self) -> None:
        """Remove the directory and all it holds."""
        shutil.rmtree(self.path, ignore_errors=True)
