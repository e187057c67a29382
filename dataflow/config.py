"""The run's typed configuration: YAML and `key=value` arguments, merged once, validated once.

A recipe subclasses `RunConfig` with its own sections; defaults live in the models and nowhere else.
"""

from __future__ import annotations

import difflib
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dataflow.errors import ConfigError
from dataflow.pipeline import Pipeline, StageSpec


class Section(BaseModel):
    """Base of every part of a configuration: frozen, and no unknown key."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class RunSection(Section):
    """Where a run lives."""

    name: str = Field("run", pattern=r"^[A-Za-z0-9._-]+$", coerce_numbers_to_str=True)
    """Names the run directory; a run of the same name is kept beside it under a number."""
    dir: str = "runs"
    """Folder of run directories."""
    seed: int = 0
    """Decides the order of the prompts and every sample."""
    save_model: bool = True
    """Write the trained model to RUN/model at the end, in Hugging Face layout."""


class ClusterSection(Section):
    """The Ray cluster."""

    address: str | None = None
    """Address of an existing Ray cluster; none starts a local one, which ends with the run."""
    start_timeout_s: float = Field(300.0, gt=0)
    """Longest time for all workers to come up, in seconds."""
    max_restarts: int = Field(3, ge=0)
    """How often in a row, with no window closed between, one worker process may be started again after its death."""


class QueueSection(Section):
    """TransferQueue."""

    storage_units: int = Field(1, ge=1)
    """Storage processes; one is enough on one machine."""
    timeout_s: float = Field(30.0, ge=1)
    """Deadline of every queue call, in seconds."""


class LimitsSection(Section):
    """Bounds that keep a run from growing, hanging or going on for nothing."""

    max_rows: int | None = Field(None, ge=1)
    """Credit limit: most rows of open windows, counted at worst case; none is no limit."""
    max_bytes: int | None = Field(None, ge=1)
    """Credit limit: most bytes of open windows, counted at worst case; none is no limit."""
    lease_s: float = Field(60.0, ge=2)
    """Seconds without a heartbeat after which a worker's units are given to others."""
    warn_s: float = Field(60.0, gt=0)
    """Seconds without any progress after which the run shows what it waits for; and again each time they double."""
    stall_s: float = Field(600.0, gt=0)
    """Seconds without any progress, and with no claim within its deadline, after which the run stops and says why."""
    max_failures: float | None = Field(0.5, gt=0)
    """Units that may fail for good before the run stops: a count if 1 or more, else a share of all units so far."""
    max_empty_windows: int = Field(3, ge=1)
    """Windows in a row with nothing to train on, after which the run stops."""

    @property
    def heartbeat_s(self) -> float:
        """Seconds between a worker's heartbeats: several to a lease."""
        return self.lease_s / 6


class StageSettings(Section):
    """What a configuration may change of a stage; what it leaves out is as the stage declares."""

    workers: int | None = Field(None, ge=1)
    """Copies of the stage."""
    batch_rows: int | None = Field(None, ge=1)
    """Most units in one claim."""
    deadline_s: float | None = Field(None, gt=0)
    """Longest time for one claim, in seconds."""
    max_attempts: int | None = Field(None, ge=1)
    """Failures of one unit before it becomes a tombstone."""
    placement: str | None = None
    """Stages of equal placement share one process."""


class StageEntry(StageSettings):
    """A stage of the user's own."""

    use: str
    """Import path: `package.module:name` or `folder/file.py:name`."""
    options: dict[str, Any] = {}
    """Options for the stage's own config."""


class Fault(Section):
    """One thing that goes wrong, on purpose; `dataflow.testing.faults` does it.

    It strikes the claim, process or report that a matching unit is in.
    """

    kind: Literal["kill", "hang", "slow", "raise", "drop", "duplicate", "late"]
    """kill: the process is ended by SIGKILL. hang: process() does not return (for `seconds`, if given). slow: it takes
    `seconds` longer. raise: it raises. drop: the report is lost. duplicate: it is sent twice. late: the write takes
    `seconds` longer."""
    stage: str
    """The stage that it strikes."""
    window: int | None = Field(None, ge=0)
    """Only in this window."""
    uid: str | None = None
    """Only units of this uid."""
    greedy: bool | None = None
    """Only greedy units, or only sampled ones."""
    probability: float = Field(1.0, gt=0, le=1)
    """Chance that it strikes, drawn anew for each delivery of a unit from run.seed."""
    times: int | None = Field(1, ge=1)
    """How often in the run; none is no limit."""
    seconds: float = Field(0.0, ge=0)
    """How long `slow`, `late` and, if it is not for ever, `hang` take."""
    where: Literal["before", "written", "reported"] = "before"
    """When a `kill` comes: before process(), when the rows are written and not reported, or after the report."""


class RunConfig(Section):
    """What every run has, whatever its recipe."""

    recipe: str = "stages.recipes:rl"
    """Import path of the recipe that turns this configuration into a pipeline."""
    run: RunSection = RunSection()
    cluster: ClusterSection = ClusterSection()
    queue: QueueSection = QueueSection()
    limits: LimitsSection = LimitsSection()
    stages: list[StageEntry] = []
    """Stages of the user's own, added to the recipe's."""
    settings: dict[str, StageSettings] = {}
    """Stage name -> what is changed of it: workers, batch_rows, deadline_s, max_attempts, placement."""
    faults: list[Fault] = []
    """Faults to put into the run, to see that it survives them; see docs/faults.md."""

    def changes(self) -> dict[str, dict[str, Any]]:
        """Stage name -> the attributes that are changed of it."""
        return {name: chosen.model_dump(exclude_none=True) for name, chosen in self.settings.items()}

    def own_stages(self) -> tuple[StageSpec, ...]:
        """The user's stages as specifications."""
        return tuple(
            StageSpec(
                entry.use,
                entry.options,
                entry.model_dump(include=set(StageSettings.model_fields)),
                f"stages[{index}]",
            )
            for index, entry in enumerate(self.stages)
        )


@dataclass(frozen=True)
class Recipe:
    """How a configuration becomes a pipeline.

    Attributes:
        config: The configuration's model, a subclass of `RunConfig`.
        build: Makes the pipeline; imports nothing heavy and starts nothing. Raises ConfigError.
        prepare: Makes what the run needs and does not have, such as a built-in model; may take a while. Given the
            configuration and a function to report progress with.
        summarise: What to say at the end of a run, given metric -> (weighted sum, weight) over all windows.
    """

    config: type[RunConfig]
    build: Callable[[Any], Pipeline]
    prepare: Callable[[Any, Callable[[str], None]], None]
    summarise: Callable[[Mapping[str, tuple[float, float]]], list[str]]


def load_config(path: Path | None, overrides: Sequence[str], default: Path) -> tuple[RunConfig, Recipe]:
    """Read a YAML file, apply `key=value` overrides, and validate.

    Args:
        path: The YAML file; None takes `default`.
        overrides: `section.key=value` texts; values are YAML.
        default: The configuration to use when no file is named.

    Raises:
        ConfigError: Names the file or key, the nearest known key, and what was expected.
    """
    from dataflow.stage import import_object

    data = _merge(path or default, overrides)
    where = str(path or "the built-in configuration") + (" with the command line's settings" if overrides else "")
    recipe = import_object(str(data.get("recipe", RunConfig.model_fields["recipe"].default)), f"{where}: recipe")
    if not isinstance(recipe, Recipe):
        raise ConfigError(f"{where}: recipe: {data['recipe']!r} is no dataflow Recipe")
    try:
        return recipe.config.model_validate(data), recipe
    except ValidationError as error:
        raise ConfigError(_explain(error, recipe.config, where)) from None


def _merge(path: Path, overrides: Sequence[str]) -> dict[str, Any]:
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    if not path.is_file():
        raise ConfigError(f"there is no configuration file {str(path)!r}")
    for text in overrides:
        if "=" not in text or text.startswith("="):
            raise ConfigError(f"argument {text!r}: expected key=value, such as rollout.n=8")
    try:
        loaded = OmegaConf.load(path)
        if not isinstance(loaded, DictConfig):
            raise ConfigError(f"{path}: expected a mapping of sections, got a list")
        merged = OmegaConf.merge(loaded, OmegaConf.from_dotlist(list(overrides)))
        data = OmegaConf.to_container(merged, resolve=True)
    except (OmegaConfBaseException, YAMLError, OSError) as error:  # OSError: omegaconf's word for a bare value
        raise ConfigError(f"{path}: {error}") from error
    assert isinstance(data, dict)
    return {str(key): value for key, value in data.items()}


def _explain(error: ValidationError, model: type[BaseModel], where: str) -> str:
    lines = []
    for item in error.errors():
        key = _dotted(item["loc"])
        if item["type"] == "extra_forbidden":
            if isinstance(item["input"], dict) and item["input"]:
                key += "." + next(iter(item["input"]))
            lines.append(f"unknown key {key!r}; {_nearest(key, model)}")
        elif item["type"] == "value_error":
            lines.append(
                f"{key}: {str(item['msg']).removeprefix('Value error, ')}"
                if key
                else str(item["msg"]).removeprefix("Value error, ")
            )
        else:
            lines.append(f"{key}: {item['msg']}, got {item['input']!r}")
    return f"{where}: " + "\n  ".join(lines)


def _dotted(loc: Sequence[int | str]) -> str:
    text = ""
    for part in loc:
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return text.lstrip(".")


def _nearest(key: str, model: type[BaseModel]) -> str:
    if "[" in key:  # inside a list of stages
        known = list(StageEntry.model_fields)
        close = difflib.get_close_matches(key.rpartition(".")[2], known, n=1)
        return f"did you mean {close[0]!r}?" if close else f"known keys here: {', '.join(known)}"
    known = list(known_keys(model))
    flat = key.replace("-", ".").replace("_", ".")
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    close = close or [name for name in known if name.replace("_", ".") == flat]
    if not close:
        tails = {name.rpartition(".")[2] for name in known}
        tail = difflib.get_close_matches(key.rpartition(".")[2], sorted(tails), n=1, cutoff=0.7)
        close = [name for name in known if name.rpartition(".")[2] in tail]  # update.lr and critic.lr alike
    if close:
        return f"did you mean {' or '.join(repr(name) for name in close)}?"
    section = key.rpartition(".")[0]
    near = [name for name in known if name.rpartition(".")[0] == section]
    return f"known keys here: {', '.join(near) or ', '.join(known)}"


def known_keys(model: type[BaseModel], prefix: str = "") -> Mapping[str, str]:
    """Every dotted key of a configuration model, with its one-line description."""
    keys: dict[str, str] = {}
    for name, field in model.model_fields.items():
        annotation = field.annotation
        inner = next(
            (a for a in (annotation, *typing.get_args(annotation)) if isinstance(a, type) and issubclass(a, Section)),
            None,
        )
        if inner is not None and typing.get_origin(annotation) not in (list, dict):
            keys.update(known_keys(inner, f"{prefix}{name}."))
        else:
            keys[prefix + name] = (field.description or "").replace("\n", " ")
    return keys
