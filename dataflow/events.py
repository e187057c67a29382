"""What happens to the coordinator, and what it decides: plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dataflow.batch import Failure, Tombstone, Unit
from dataflow.draws import Draw
from dataflow.weights import WeightsRef


@dataclass(frozen=True)
class Prompt:
    """One admitted prompt row.

    Attributes:
        uid: Its draw.
        sessions: How many sessions it asks for (`__rollout_n__`).
        is_baseline: Whether it is the greedy row (`__do_sample__` false).
        dropped: Why it is not admitted after all; empty if it is.
    """

    uid: str
    sessions: int
    is_baseline: bool
    dropped: str = ""


# Events: each carries `now`, seconds on a monotonic clock, so that the coordinator reads none itself.


@dataclass(frozen=True)
class WorkerJoined:
    """A worker came up and is ready to claim.

    Attributes:
        process: Workers of equal process die together; empty for a process of its own.
    """

    worker: str
    stage: str
    now: float
    process: str = ""


@dataclass(frozen=True)
class WorkerDied:
    """A worker's process ended. Its claims are void from this moment."""

    worker: str
    reason: str
    now: float


@dataclass(frozen=True)
class Holding:
    """What a worker is about, as it knows it. A lease that it neither works on nor may still be told of was lost.

    Attributes:
        claims: The claims that it works on.
        asking: Its requests for work that have no answer yet.
        latest: Its newest request; of later ones this message knows nothing.
    """

    claims: frozenset[int] = frozenset()
    asking: frozenset[int] = frozenset()
    latest: int = -1


@dataclass(frozen=True)
class ClaimWanted:
    """A worker asks for work. It is granted now or later, under the same ticket.

    Attributes:
        request: The worker's own number of this request.
    """

    worker: str
    ticket: int
    request: int
    loaded_version: int
    holding: Holding
    now: float


@dataclass(frozen=True)
class ClaimWithdrawn:
    """A worker stopped waiting for a ticket."""

    worker: str
    ticket: int
    now: float


@dataclass(frozen=True)
class Heartbeat:
    """A worker is alive: its leases are renewed."""

    worker: str
    holding: Holding
    now: float


@dataclass(frozen=True)
class Admitted:
    """The source wrote the prompt rows of a draw, at the addresses of this delivery.

    Attributes:
        draw: Number of the draw in its window.
    """

    worker: str
    claim: int
    window_index: int
    draw: int
    delivery: int
    prompts: tuple[Prompt, ...]
    now: float


@dataclass(frozen=True)
class Acknowledged:
    """A stage wrote a unit's columns, at the addresses of this delivery.

    Attributes:
        rows: How many rows the unit has; an expanding stage decides it.
    """

    worker: str
    claim: int
    unit: str
    delivery: int
    rows: int
    now: float


@dataclass(frozen=True)
class Failed:
    """A stage raised for a unit."""

    worker: str
    claim: int
    unit: str
    delivery: int
    failure: Failure
    retry: bool
    now: float


@dataclass(frozen=True)
class Dropped:
    """A stage excluded a unit by a rule."""

    worker: str
    claim: int
    unit: str
    delivery: int
    reason: str
    now: float


@dataclass(frozen=True)
class Stopped:
    """A stage stopped the run on purpose, or, with no worker's name, the run's surroundings failed."""

    worker: str
    reason: str
    now: float


@dataclass(frozen=True)
class Warned:
    """A stage has something to tell a person; the first message on a subject is told."""

    worker: str
    subject: str
    message: str
    now: float


@dataclass(frozen=True)
class Suspended:
    """A worker freed the device that its stage shares with others."""

    worker: str
    now: float


@dataclass(frozen=True)
class Published:
    """A learner published a policy version."""

    weights: WeightsRef
    now: float


@dataclass(frozen=True)
class Tick:
    """Time passed: leases and deadlines are looked at."""

    now: float


Event = (
    WorkerJoined
    | WorkerDied
    | ClaimWanted
    | ClaimWithdrawn
    | Heartbeat
    | Admitted
    | Acknowledged
    | Failed
    | Dropped
    | Stopped
    | Warned
    | Suspended
    | Published
    | Tick
)


@dataclass(frozen=True)
class ClaimedUnit:
    """One unit of a claim, and where its rows are.

    Attributes:
        unit: Its identity.
        rows: How many rows it has; 0 before rollout.
        delivery: Which delivery this is, from 0; it decides the addresses to write to.
        accepted: Stage -> the delivery whose rows are valid.
    """

    unit: Unit
    rows: int
    delivery: int
    accepted: Mapping[str, int]


@dataclass(frozen=True)
class Claim:
    """The right of one worker to work on given units for one stage.

    Attributes:
        id: Number of the claim.
        stage: The stage.
        window: Name of the window.
        window_index: Its number in the run.
        units: The units, in canonical order; empty for the source.
        baselines: For a join, the greedy units of the claimed uids that finished.
        tombstones: For group, join and window stages, the units of the claimed groups that are gone.
        draw: For the source, which prompts to write.
        delivery: For the source, which delivery this is.
        deadline_s: Seconds until the work is cancelled.
        weights: Newest published version.
        oldest_loaded: Oldest version that a stage which loads weights holds.
        suspend: Not work, but a call to free the device for another stage.
    """

    id: int
    stage: str
    window: str
    window_index: int
    units: tuple[ClaimedUnit, ...] = ()
    baselines: tuple[ClaimedUnit, ...] = ()
    tombstones: tuple[Tombstone, ...] = ()
    draw: Draw | None = None
    delivery: int = 0
    deadline_s: float = 300.0
    weights: WeightsRef | None = None
    oldest_loaded: int = 0
    suspend: bool = False


# Effects


@dataclass(frozen=True)
class Grant:
    """Answer a ticket with a claim."""

    worker: str
    ticket: int
    claim: Claim


@dataclass(frozen=True)
class Settled:
    """A unit came to a stage's end, or an attempt at it failed: written to the journal.

    Attributes:
        outcome: `done`; `attempt failed`, after which it may be tried again; or how the unit left for good.
        failure: The exception, where there was one.
        worker: Who reported it; empty for what the coordinator decided.
    """

    unit: Unit
    stage: str
    outcome: str
    reason: str
    delivery: int
    rows: int
    failure: Failure | None = None
    worker: str = ""


ATTEMPT_FAILED = "attempt failed"


@dataclass(frozen=True)
class WindowClosed:
    """All units of a window are terminal and acknowledged.

    Attributes:
        counts: (kind, outcome) -> units. Outcomes: trained, used as baseline, `dropped: reason`,
            `failed: stage`.
        metrics: What the coordinator itself measured of the window.
    """

    window: str
    window_index: int
    counts: Mapping[tuple[str, str], int]
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Unused:
    """Nobody works on a closed window any more, not even too late: its partition can be cleared."""

    window: str


@dataclass(frozen=True)
class Alarm:
    """Something a person should read; the run goes on."""

    message: str


@dataclass(frozen=True)
class Halt:
    """The run cannot go on."""

    reason: str


@dataclass(frozen=True)
class Finished:
    """All windows are closed."""


Effect = Grant | Settled | WindowClosed | Unused | Alarm | Halt | Finished


@dataclass(frozen=True)
class Blocked:
    """Units that have not moved: what, where, since when, and what will happen.

    Attributes:
        stage: The stage they are at.
        state: `ready` (nobody took them), `leased` (a worker holds them) or `waiting` (for other stages).
        worker: Who holds them.
        units: How many.
        uids: Some of their uids (for the source, their windows), those that wait longest first.
        seconds: How long the first of them has been in this state.
        until_s: Seconds until something is done about it, negative if that is overdue; None where only the limit on a
            run that does not move applies.
        action: What is done then, or what is needed first.
    """

    stage: str
    state: str
    worker: str
    units: int
    uids: tuple[str, ...]
    seconds: float
    until_s: float | None
    action: str


@dataclass
class Ledger:
    """What became of every unit. `balanced` is the conservation law.

    Attributes:
        created: Kind -> units ever admitted.
        settled: (kind, outcome) -> units.
        in_flight: Kind -> units admitted and not settled.
        redelivered: Stage -> units granted again after a loss or a failure.
        late: Acknowledgements that came after another delivery was accepted; ignored.
        failures: Stage -> exceptions attributed to units.
    """

    created: dict[str, int] = field(default_factory=dict)
    settled: dict[tuple[str, str], int] = field(default_factory=dict)
    in_flight: dict[str, int] = field(default_factory=dict)
    redelivered: dict[str, int] = field(default_factory=dict)
    late: int = 0
    failures: dict[str, int] = field(default_factory=dict)

    @property
    def balanced(self) -> bool:
        """Whether created = settled + in flight, for each kind of unit."""
        return all(
            count == self.in_flight.get(kind, 0) + sum(n for (k, _), n in self.settled.items() if k == kind)
            for kind, count in self.created.items()
        )

    def units(self, outcome: str) -> int:
        """Units whose outcome is, or begins with, `outcome`."""
        return sum(
            count for (_, name), count in self.settled.items() if name == outcome or name.startswith(outcome + ":")
        )
