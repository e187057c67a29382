"""Drives a coordinator by hand, for tests that are tables of events and effects."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dataflow.batch import Failure
from dataflow.coordinator import Coordinator
from dataflow.events import (
    Acknowledged,
    Admitted,
    Claim,
    ClaimWanted,
    ClaimWithdrawn,
    Effect,
    Failed,
    Grant,
    Heartbeat,
    Holding,
    Prompt,
    Tick,
    WorkerDied,
    WorkerJoined,
)
from dataflow.pipeline import StagePlan

SAMPLED = frozenset({"sampled"})


def plans(*stages: StagePlan) -> dict[str, StagePlan]:
    return {stage.name: stage for stage in stages}


def source(**options: Any) -> StagePlan:
    return StagePlan("source", (), "source", **options)


def rollout(**options: Any) -> StagePlan:
    return StagePlan("rollout", ("source",), "row", expands=True, loads_weights=True, **options)


def reward(**options: Any) -> StagePlan:
    return StagePlan("reward", ("rollout",), "row", **options)


def update(*after: str, **options: Any) -> StagePlan:
    return StagePlan("update", after, "window", kinds=SAMPLED, one_owner=True, **options)


def remax() -> dict[str, StagePlan]:
    return plans(
        source(),
        rollout(),
        reward(),
        StagePlan("join", ("reward", "rollout"), "join", kinds=SAMPLED),
        StagePlan("advantage", ("reward", "join"), "row", kinds=SAMPLED),
        update("advantage", "rollout"),
    )


def grpo(min_group: int = 2) -> dict[str, StagePlan]:
    return plans(
        source(),
        rollout(),
        reward(),
        StagePlan("advantage", ("reward",), "group", min_group=min_group),
        update("advantage", "rollout"),
    )


def dapo() -> dict[str, StagePlan]:
    return plans(
        source(max_attempts=2),
        rollout(),
        reward(),
        StagePlan("filter", ("reward",), "group", min_group=2, filters=True),
        StagePlan("advantage", ("filter",), "group", min_group=2),
        update("advantage", "filter", "rollout"),
    )


def admitted(worker: str, claim: Claim, *prompts: Prompt, now: float = 0.0) -> Admitted:
    """What a source says that wrote these prompts for its claim."""
    assert claim.draw is not None
    return Admitted(worker, claim.id, claim.window_index, claim.draw.number, claim.delivery, prompts, now)


@dataclass
class Drive:
    """A coordinator, a clock that stands still unless told, and a record of every effect."""

    coordinator: Coordinator
    now: float = 0.0
    tickets: int = 0
    effects: list[Effect] = field(default_factory=list)
    granted: dict[int, Claim] = field(default_factory=dict)

    def send(self, event: Any) -> list[Effect]:
        effects = self.coordinator.handle(event)
        self.effects += effects
        for effect in effects:
            if isinstance(effect, Grant):
                self.granted[effect.ticket] = effect.claim
        return effects

    def join(self, *workers: str) -> None:
        for worker in workers:
            self.send(WorkerJoined(worker, worker.split("-")[0], self.now))

    def want(self, worker: str) -> int:
        """Ask for work; returns the ticket."""
        self.tickets += 1
        self.send(ClaimWanted(worker, self.tickets, self.tickets, 0, Holding(), self.now))
        return self.tickets

    def claim(self, worker: str) -> Claim:
        """Ask for work that must be there."""
        return self.granted[self.want(worker)]

    def idle(self, worker: str) -> bool:
        """Whether there is no work for the worker now."""
        ticket = self.want(worker)
        if ticket in self.granted:
            return False
        self.send(ClaimWithdrawn(worker, ticket, self.now))
        return True

    def admit(self, *prompts: Prompt, worker: str = "source-0") -> list[Effect]:
        claim = self.claim(worker)
        return self.send(admitted(worker, claim, *prompts, now=self.now))

    def acknowledge(self, worker: str, claim: Claim, units: Iterable[str] | None = None, rows: int = 1) -> list[Effect]:
        """Acknowledge the given units of a claim, or all of them, one at a time."""
        effects: list[Effect] = []
        for unit in claim.units:
            if units is None or unit.unit.id in units:
                effects += self.send(Acknowledged(worker, claim.id, unit.unit.id, unit.delivery, rows, self.now))
        return effects

    def fail(self, worker: str, claim: Claim, *units: str, retry: bool = True, error: str = "boom") -> list[Effect]:
        effects: list[Effect] = []
        for unit in claim.units:
            if unit.unit.id in units:
                failure = Failure("Error", error)
                effects += self.send(Failed(worker, claim.id, unit.unit.id, unit.delivery, failure, retry, self.now))
        return effects

    def beat(self, worker: str, *, claims: Iterable[int] = (), asking: Iterable[int] = ()) -> list[Effect]:
        """Send a heartbeat of a worker that has had every answer but those it is `asking` for."""
        return self.send(Heartbeat(worker, Holding(frozenset(claims), frozenset(asking), self.tickets), self.now))

    def wait(self, seconds: float) -> list[Effect]:
        """Let time pass."""
        self.now += seconds
        return self.send(Tick(self.now))

    def die(self, worker: str) -> list[Effect]:
        return self.send(WorkerDied(worker, "killed", self.now))

    def work(self, worker: str) -> Claim:
        """Claim once and acknowledge all of it."""
        claim = self.claim(worker)
        self.acknowledge(worker, claim)
        return claim

    def of(self, kind: type) -> list[Any]:
        return [effect for effect in self.effects if isinstance(effect, kind)]


def drive(table: Mapping[str, StagePlan], windows: int = 1, *, workers: Sequence[str] = (), **options: Any) -> Drive:
    run = Drive(Coordinator(table, "run", windows, **options))
    run.join(*(workers or [f"{name}-0" for name in table]))
    return run


def ids(claim: Claim) -> list[str]:
    return [unit.unit.id for unit in claim.units]


def key(uid: str, session: int = 0, window: int = 0) -> str:
    return f"run/train/{window:06d}/{uid}/{session}"
