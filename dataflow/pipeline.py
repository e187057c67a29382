"""The graph of stages: plain data, and the checks that need no run."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from pydantic import ValidationError

from dataflow.errors import ConfigError
from dataflow.stage import JOINS, WHOLE_GROUPS, Granularity, Stage, check_declaration, import_object
from schemas.catalog import is_reserved
from schemas.column import Column

KINDS = frozenset({"sampled", "baseline"})


@dataclass(frozen=True)
class StagePlan:
    """What the coordinator knows of a stage: names and numbers only.

    Attributes:
        name: The stage's name.
        depends_on: Stages whose acknowledgement makes a unit ready; empty for the source.
        granularity: See `Stage`.
        kinds: Which units it applies to: "sampled", "baseline", or both.
        expands: See `Stage`.
        max_units: Most units in one claim.
        deadline_s: Longest time for one claim, in seconds.
        max_attempts: Failures of one unit before it becomes a tombstone.
        min_group: Fewest surviving units of a group that may be used.
        one_owner: Never delivered twice.
        device: Stages of equal device take turns.
        loads_weights: See `Stage`.
        filters: See `Stage`.
    """

    name: str
    depends_on: tuple[str, ...]
    granularity: Granularity
    kinds: frozenset[str] = KINDS
    expands: bool = False
    max_units: int = 64
    deadline_s: float = 300.0
    max_attempts: int = 2
    min_group: int = 1
    one_owner: bool = False
    device: str | None = None
    loads_weights: bool = False
    filters: bool = False


@dataclass(frozen=True)
class StageSpec:
    """One stage of a pipeline: where its class is, with which options. Travels to other machines as it is.

    Attributes:
        use: Import path of a `Stage` subclass.
        options: Options for the stage's own config.
        settings: Overrides of the stage's attributes (workers, deadline_s, ...).
        where: Where the user wrote it, for errors ("stages[0]").
    """

    use: str
    options: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    where: str = ""

    def build(self) -> Stage:
        """Import the class and make the stage.

        Raises:
            ConfigError: If the import path, an option or a setting is wrong.
        """
        where = self.where or self.use
        cls = import_object(self.use, f"{where}.use")
        if not (isinstance(cls, type) and issubclass(cls, Stage)):
            raise ConfigError(
                f"{where}.use: {self.use!r} is no stage; decorate the function with @stage or subclass Stage"
            )
        try:
            built: Stage = cls(cls.Config.model_validate(dict(self.options)))
        except ValidationError as error:
            raise ConfigError(self._wrong_option(cls, error)) from error
        for name, value in self.settings.items():
            if value is not None:
                setattr(built, name, value)
        check_declaration(built.name, built.reads, built.writes)
        return built

    def _wrong_option(self, cls: type[Stage], error: ValidationError) -> str:
        """The first unknown option, else the first wrong one."""
        problems = sorted(error.errors(), key=lambda item: item["type"] != "extra_forbidden")
        key = ".".join(str(part) for part in problems[0]["loc"])
        known = list(cls.Config.model_fields)
        if problems[0]["type"] == "extra_forbidden":
            near = difflib.get_close_matches(key, known, n=1)
            what = "unknown option" + (f"; did you mean {near[0]!r}?" if near else "")
        else:
            what = problems[0]["msg"]
        where, name = self.where or self.use, cls.name or cls.__name__
        return f"{where}.options.{key}: {what}; the options of {name} are: {', '.join(known) or 'none'}"


@dataclass(frozen=True)
class Pipeline:
    """Stages, and how much of the data flows through them at a time.

    Attributes:
        specs: The stages, in any order; the columns they name decide the graph.
        windows: How many windows the run has; fewer if there are no prompts left to draw.
        rows_per_window: Worst case of rows that one window puts into the queue, without further draws.
        bytes_per_row: Worst case of bytes of one row.
        max_staleness: A window is admitted when at most this many earlier windows are not yet trained on.
        max_rows: Credit limit on rows of open windows; None is no limit.
        max_bytes: Credit limit on bytes of open windows; None is no limit.
        settings: Stage -> attributes in place of what the stage declares.
        irreproducible: Why a second run would not give the same bits; empty if it would.
        drops_by_rule: Reasons of drops that the rows alone decide: a second run has the same.
        prompts: How many prompts the data set has. This and the next suit a source that makes its prompts up.
        prompts_per_window: How many prompts a window draws, and how many groups it is filled up to.
        epochs: Passes over the data; None is no limit but `windows`.
        max_draws: Most further draws of a window, if a stage filters, in place of groups that are lost up to there.
    """

    specs: tuple[StageSpec, ...]
    windows: int
    rows_per_window: int
    bytes_per_row: int = 0
    max_staleness: int = 0
    max_rows: int | None = None
    max_bytes: int | None = None
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    irreproducible: str = ""
    drops_by_rule: frozenset[str] = frozenset()
    prompts: int = 1
    prompts_per_window: int = 1
    epochs: int | None = None
    max_draws: int = 0

    @cached_property
    def stages(self) -> dict[str, Stage]:
        """The stages by name, in topological order.

        Raises:
            ConfigError: If the graph cannot run; see `check`.
        """
        by_name: dict[str, Stage] = {}
        for spec in self.specs:
            stage = self._built(spec)
            if stage.name in by_name:
                raise ConfigError(f"{spec.where or spec.use}: there are two stages named {stage.name!r}")
            by_name[stage.name] = stage
        return self._sorted(by_name)

    def build(self, name: str) -> Stage:
        """Make a fresh copy of a stage: each worker has its own."""
        return next(stage for spec in self.specs if (stage := self._built(spec)).name == name)

    def _built(self, spec: StageSpec) -> Stage:
        stage = spec.build()
        for name, value in self.settings.get(stage.name, {}).items():
            setattr(stage, name, value)
        return stage

    def processes(self) -> dict[str, list[tuple[str, str]]]:
        """Process name -> its workers, each (worker name, stage name)."""
        processes: dict[str, list[tuple[str, str]]] = {}
        for name, stage in self.stages.items():
            for number in range(stage.workers):
                worker = f"{name}-{number}"
                processes.setdefault(stage.placement or worker, []).append((worker, name))
        return processes

    @cached_property
    def columns(self) -> dict[str, Column]:
        """Every column of the pipeline by name."""
        return {column.name: column for stage in self.stages.values() for column in stage.writes}

    @cached_property
    def producers(self) -> dict[str, str]:
        """Column name -> name of the stage that writes it."""
        return {column.name: stage.name for stage in self.stages.values() for column in stage.writes}

    @cached_property
    def plans(self) -> dict[str, StagePlan]:
        """What the coordinator needs to know, in topological order."""
        kinds: dict[str, frozenset[str]] = {}
        plans = {}
        for name, stage in self.stages.items():
            depends = _after(stage, self.stages.values(), self.producers)
            scope = KINDS
            for producer in depends:
                scope &= kinds[producer]
            if stage.granularity in (*JOINS, *WHOLE_GROUPS, "window") or not stage.baselines:
                # A greedy session is there to be compared with: it is no member of a group, and never trained on.
                scope &= {"sampled"}
            kinds[name] = scope
            plans[name] = StagePlan(
                name,
                depends,
                stage.granularity,
                scope,
                stage.expands,
                stage.batch_rows,
                stage.deadline_s,
                stage.max_attempts,
                stage.min_group,
                stage.one_owner,
                stage.device,
                stage.loads_weights,
                stage.filters,
            )
        return plans

    @property
    def further_draws(self) -> int:
        """Most further draws of a window: none where no stage filters."""
        return self.max_draws if any(stage.filters for stage in self.stages.values()) else 0

    @property
    def most_rows(self) -> int:
        """Worst case of rows that one window puts into the queue, all its draws counted."""
        return self.rows_per_window * (1 + self.further_draws)

    def __getstate__(self) -> dict[str, Any]:
        # The cached stages stay here: each process builds its own from the specifications.
        return {name: value for name, value in self.__dict__.items() if name in self.__dataclass_fields__}

    def check(self) -> None:
        """Raise the first reason why the pipeline cannot run.

        Raises:
            ConfigError: A column that nobody writes, two writers of one column, a reserved name, a cycle, no
                source, two stages that filter, or a credit limit smaller than one window.
        """
        plans = self.plans
        if sum(plan.granularity == "source" for plan in plans.values()) != 1:
            raise ConfigError("a pipeline needs exactly one stage of granularity 'source'")
        if sum(plan.expands for plan in plans.values()) != 1:
            raise ConfigError("a pipeline needs exactly one stage that expands prompts into sessions (rollout)")
        owners = [name for name, plan in plans.items() if plan.one_owner]
        if len(owners) > 1:
            raise ConfigError(
                f"a pipeline has at most one stage with one owner, the one that trains; these are: {owners}"
            )
        self._check_filters([plan for plan in plans.values() if plan.filters])
        for name, chosen in self.settings.items():
            if name not in plans:
                raise ConfigError(f"settings.{name}: there is no stage {name!r}; the stages are: {', '.join(plans)}")
            if plans[name].one_owner and chosen.get("workers", 1) > 1:
                raise ConfigError(f"settings.{name}.workers: stage {name!r} has one owner; it cannot have more workers")
        self._check_credits()

    @staticmethod
    def _check_filters(filters: Sequence[StagePlan]) -> None:
        if len(filters) > 1:
            raise ConfigError(
                f"a pipeline has at most one stage that filters; these are: {[plan.name for plan in filters]}; let one "
                "of them apply both rules, or declare filters on the last of them alone"
            )
        for plan in filters:
            if plan.granularity in ("source", "window") or plan.expands or plan.one_owner:
                raise ConfigError(
                    f"stage {plan.name!r} filters, and is of granularity {plan.granularity!r}, expands or has one "
                    "owner; a stage that filters comes before windows are whole: make it row, join, group or group_join"
                )

    def _check_credits(self) -> None:
        most, draws, fewer = self.most_rows, "", ""
        if self.further_draws:
            draws, fewer = f" with {self.further_draws} further draws", ", or allow fewer further draws"
        if self.max_rows is not None and self.max_rows < most:
            raise ConfigError(
                f"limits.max_rows: {self.max_rows} is smaller than one window's worst case of {most} rows{draws}, so "
                f"no window could ever be admitted; set it to at least {most} or make windows smaller{fewer}"
            )
        most_bytes = most * self.bytes_per_row
        if self.max_bytes is not None and self.max_bytes < most_bytes:
            raise ConfigError(
                f"limits.max_bytes: {self.max_bytes} is smaller than one window's worst case of {most_bytes} bytes"
                f"{draws}, so no window could ever be admitted; set it to at least {most_bytes} or make windows "
                f"smaller{fewer}"
            )

    def _sorted(self, by_name: dict[str, Stage]) -> dict[str, Stage]:
        producers = self._producers(by_name)
        waiting = {name: set(_after(stage, by_name.values(), producers)) for name, stage in by_name.items()}
        ordered: dict[str, Stage] = {}
        while waiting:
            free = [name for name, needs in waiting.items() if needs <= set(ordered)]
            if not free:
                raise ConfigError(f"the stages {', '.join(sorted(waiting))} wait for each other's columns in a cycle")
            for name in free:
                ordered[name] = by_name[name]
                del waiting[name]
        return ordered

    def _producers(self, by_name: dict[str, Stage]) -> dict[str, str]:
        producers: dict[str, str] = {}
        for stage in by_name.values():
            for column in stage.writes:
                if is_reserved(column.name) and column.producer != stage.name:
                    raise ConfigError(
                        f"stage {stage.name!r} writes column {column.name!r}, a reserved name"
                        + (f" that belongs to stage {_owner(column.name)!r}" if _owner(column.name) else "")
                        + "; choose another name"
                    )
                if column.name in producers:
                    raise ConfigError(
                        f"column {column.name!r} has two writers, the stages {producers[column.name]!r} and "
                        f"{stage.name!r}; rename the column in one of them, or remove one of the stages"
                    )
                producers[column.name] = stage.name
        for stage in by_name.values():
            for name in stage.reads:
                if name.startswith("__"):
                    raise ConfigError(
                        f"stage {stage.name!r} reads {name!r}; columns that begin with '__' steer the pipeline and "
                        "never reach a stage (a unit knows whether it is a baseline)"
                    )
                if name not in producers:
                    raise ConfigError(self._nobody_writes(stage, name, producers))
        return producers

    @staticmethod
    def _nobody_writes(stage: Stage, name: str, producers: Mapping[str, str]) -> str:
        near = difflib.get_close_matches(name, producers, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"the columns are: {', '.join(sorted(producers))}"
        owner = _owner(name)
        if owner and owner not in producers.values():
            hint = f"it is written by stage {owner!r}, which this pipeline does not have"
        return f"stage {stage.name!r} reads column {name!r}, which no stage writes; {hint}"

    def render(self) -> str:
        """Draw the graph as text: one line per stage, in the order of the data."""
        lines = []
        for name, stage in self.stages.items():
            plan = self.plans[name]
            after = f" after {', '.join(plan.depends_on)}" if plan.depends_on else ""
            how = stage.granularity + (f" x{stage.workers}" if stage.workers > 1 else "") + ", filters" * stage.filters
            lines.append(f"  {name} [{how}]{after}")
            lines.append(f"      reads  {_names(stage.reads)}")
            lines.append(f"      writes {_names([column.name for column in stage.writes])}")
        return "\n".join(lines)


def _after(stage: Stage, stages: Iterable[Stage], producers: Mapping[str, str]) -> tuple[str, ...]:
    """The stages whose acknowledgement `stage` waits for, in a fixed order.

    It waits for the producers of what it reads, and, once sessions have rows, for the stage that makes them: a stage of
    prompt columns alone still works on sessions. The stage with one owner (update) waits for every stage that does not
    read what it writes: a unit that a side stage drops or fails must not have been trained on before. A window is whole
    only after the stage that filters.
    """
    stages = list(stages)
    if stage.granularity == "source":
        return ()
    after = [producers[column] for column in stage.reads]
    if stage.one_owner:
        later = _readers_of(stage.name, stages, producers)
        after += [other.name for other in stages if other is not stage and other.name not in later]
    elif stage.expands:
        after += [other.name for other in stages if other.granularity == "source"]
    else:
        after += [other.name for other in stages if other.expands]
    if stage.granularity == "window":
        after += [other.name for other in stages if other.filters and other is not stage]
    return tuple(dict.fromkeys(after))


def _readers_of(name: str, stages: Sequence[Stage], producers: Mapping[str, str]) -> set[str]:
    """The stages that read what `name` writes, directly or through others."""
    found: set[str] = set()
    while True:
        more = {
            other.name
            for other in stages
            if other.name not in found and any(producers[column] in {name, *found} for column in other.reads)
        }
        if not more:
            return found
        found |= more


def _owner(column: str) -> str:
    from schemas.catalog import catalogued

    known = catalogued(column)
    return known.producer if known else ""


def _names(names: Sequence[str]) -> str:
    return ", ".join(names) if names else "nothing"
