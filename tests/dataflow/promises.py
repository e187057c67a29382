"""What a coordinator promises, checked after every event against a model that knows only what was sent and granted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dataflow.batch import prompt_key
from dataflow.draws import Draw
from dataflow.events import (
    ATTEMPT_FAILED,
    Acknowledged,
    Admitted,
    Claim,
    ClaimWanted,
    ClaimWithdrawn,
    Dropped,
    Effect,
    Event,
    Failed,
    Finished,
    Grant,
    Halt,
    Heartbeat,
    Holding,
    Settled,
    Tick,
    Unused,
    WindowClosed,
    WorkerDied,
    WorkerJoined,
)
from dataflow.stage import JOINS, WHOLE_GROUPS

if TYPE_CHECKING:
    from tests.dataflow.world import Hand, World

UPDATE = "update"
LEASE_S = 60.0
MIN_GROUP = 2
DROPPED = "dropped: a rule"
PROMPTS, PER_WINDOW, MAX_DRAWS = 7, 2, 2
LOOK_EVERY = 16
"""Events between two looks at the whole of the state, which costs more than an event does."""


@dataclass(eq=False)
class Job:
    """A claim, what its worker has not reported, and what the coordinator has not heard.

    Attributes:
        request: The worker's request that it answers.
        deadline: When its worker should have been done, seconds.
        left: Units that the worker has not reported.
        unheard: Units of which no report has arrived.
        retried: Units that are to be tried again when the claim is over.
        counts: Whether its units are the worker's: neither its death, nor silence, nor an overrun took them.
    """

    worker: str
    request: int
    claim: Claim
    deadline: float
    left: list[str]
    unheard: set[str]
    retried: set[str] = field(default_factory=set)
    counts: bool = True

    def holds(self, name: str) -> bool:
        """Whether nobody else may have the unit."""
        return self.counts and (name in self.unheard or (name in self.retried and bool(self.unheard)))

    def known(self, holding: Holding) -> bool:
        """Whether its worker works on it, or may yet be told of it."""
        return self.claim.id in holding.claims or self.request in holding.asking or self.request > holding.latest


def filling(claim: Claim) -> str:
    """What the source works on: a draw of a window."""
    assert claim.draw is not None
    return f"{claim.window}+{claim.draw.number}"


class Promises:
    """The model. `before` and `after` are called around every call of the coordinator."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._plans = world.plans
        self.jobs: dict[int, Job] = {}
        self._held: dict[str, list[Job]] = {}
        self._heard: dict[str, float] = {}
        self._waiting: dict[int, str] = {}
        self._holder: dict[tuple[str, str], Job] = {}
        self._granted: set[tuple[str, str, int]] = set()
        self._written: dict[tuple[str, str, int], int] = {}
        self._accepted: dict[tuple[str, str], int] = {}
        self._deaths: Counter[tuple[str, str]] = Counter()
        self._source_failures: Counter[str] = Counter()
        self._members: dict[str, set[str]] = {}
        self._kinds: Counter[str] = Counter()
        self._outcomes: dict[str, str] = {}
        self._settled: Counter[str] = Counter()
        self._opened: list[str] = []
        self._draws: dict[str, list[Draw]] = {}
        self._drawn: set[tuple[int, int]] = set()
        self._admitted_as: dict[str, str] = {}
        self._training: set[str] = set()
        self._trained: set[str] = set()
        self._closed: list[WindowClosed] = []
        self._unused: list[str] = []
        self._may_halt: set[str] = set()
        self._looked = 0

    # ---- what the model is told ---------------------------------------------------------------------

    def wrote(self, job: Job, name: str, delivery: int) -> None:
        """A worker wrote a unit's columns at the addresses of a delivery: nobody else's."""
        writer = self._written.setdefault((job.claim.stage, name, delivery), job.claim.id)
        assert writer == job.claim.id, f"two claims wrote {name} of {job.claim.stage} at delivery {delivery}"

    def lost(self, hand: Hand) -> None:
        """A claim or a report of the worker was lost: of the one owner, that ends the run."""
        if self._plans[hand.stage].one_owner:
            self._may_halt.add("never reported them")

    def before(self, events: Sequence[Event]) -> None:
        """Note what the events mean, as far as the coordinator has no choice."""
        for event in events:
            if isinstance(event, WorkerJoined):
                self._heard[event.worker] = self._world.now
            elif isinstance(event, WorkerDied):
                self._died(event.worker)
            elif isinstance(event, ClaimWanted | Heartbeat):
                self._listen(event.worker, event.holding)
                if isinstance(event, ClaimWanted):
                    self._waiting[event.ticket] = event.worker
            elif isinstance(event, ClaimWithdrawn):
                self._waiting.pop(event.ticket, None)
            elif isinstance(event, Admitted):
                self._admitted(event)
            elif isinstance(event, Acknowledged | Failed | Dropped):
                self._reported(event)
            elif isinstance(event, Tick):
                self._time_passed()

    def _died(self, worker: str) -> None:
        del self._heard[worker]
        self._waiting = {ticket: name for ticket, name in self._waiting.items() if name != worker}
        for job in self._counting(worker):
            job.counts = False
            for name in job.unheard:
                self._deaths[job.claim.stage, name] += 1
        if self._plans[self._world.hands[worker].stage].one_owner:
            self._may_halt.add("died (killed)")

    def _listen(self, worker: str, holding: Holding) -> None:
        self._heard[worker] = self._world.now
        for job in self._counting(worker):
            if not job.known(holding):
                self._world.happened["claim forgotten"] += 1
                job.counts = False

    def _admitted(self, event: Admitted) -> None:
        job = self.jobs[event.claim]
        job.unheard.clear()
        window, draw = job.claim.window, filling(job.claim)
        if ("source", draw) in self._accepted:
            return
        self._accepted["source", draw] = event.delivery
        self._members.setdefault(window, set())
        for prompt in event.prompts:
            self._admitted_as[prompt.uid] = draw
            key = prompt_key(window, prompt.uid, is_baseline=prompt.is_baseline)
            names = {f"{key}/{session}" for session in range(prompt.sessions)}
            self._members.setdefault(prompt.uid, set()).update(names)
            self._members[window] |= names
            self._kinds["baseline" if prompt.is_baseline else "sampled"] += prompt.sessions

    def _reported(self, event: Acknowledged | Failed | Dropped) -> None:
        job = self.jobs[event.claim]
        if event.worker in self._heard:
            self._heard[event.worker] = self._world.now
        if job.counts:
            job.deadline = max(job.deadline, self._world.now + self._plans[job.claim.stage].deadline_s)
        else:
            self._world.happened["report of a lost claim"] += 1
        name = filling(job.claim) if job.claim.stage == "source" else event.unit
        if isinstance(event, Failed) and event.retry and job.counts and name in job.unheard:
            job.retried.add(name)
        if isinstance(event, Failed) and job.claim.stage == "source" and name in job.unheard:
            self._source_failures[name] += 1
            if self._source_failures[name] >= self._plans["source"].max_attempts:
                self._may_halt.add("could not fill window")
        if isinstance(event, Failed) and self._plans[job.claim.stage].one_owner:
            self._may_halt.add("failed on")
        job.unheard.discard(name)

    def _time_passed(self) -> None:
        now = self._world.now
        for worker, heard in self._heard.items():
            owner = self._plans[self._world.hands[worker].stage].one_owner
            for job in self._counting(worker):
                if owner and now > job.deadline:
                    self._may_halt.add("longer than its deadline")
                elif not owner and now - heard > LEASE_S:
                    self._world.happened["claim of a silent worker lost"] += 1
                    job.counts = False
                elif not owner and now > job.deadline + LEASE_S:
                    self._world.happened["claim overran"] += 1
                    job.counts = False

    def _counting(self, worker: str) -> list[Job]:
        """The claims that the worker has. Those that are over are forgotten here."""
        held = self._held[worker] = [job for job in self._held.get(worker, []) if job.counts and job.unheard]
        return held

    # ---- what is checked ----------------------------------------------------------------------------

    def after(self, events: Sequence[Event], effects: Sequence[Effect]) -> None:
        """Check what came of the events."""
        acknowledged = {event.unit: event for event in events if isinstance(event, Acknowledged)}
        refused = [event for event in events if isinstance(event, Failed | Dropped)]
        current = {event.unit for event in refused if self.jobs[event.claim].counts}
        for effect in effects:
            if isinstance(effect, Grant):
                self._check_grant(effect)
            elif isinstance(effect, Settled) and effect.outcome == "done":
                self._check_done(effect, acknowledged[effect.unit.id])
            elif isinstance(effect, Settled) and effect.outcome == ATTEMPT_FAILED:
                assert effect.unit.id in current, "a failure of an earlier delivery was counted"
            elif isinstance(effect, Settled):
                assert effect.unit.id not in self._outcomes, "settled twice"
                assert effect.outcome != DROPPED or effect.stage == "source" or effect.unit.id in current
                self._outcomes[effect.unit.id] = effect.outcome
                self._settled["baseline" if effect.unit.is_baseline else "sampled"] += 1
            elif isinstance(effect, WindowClosed):
                assert effect.window not in [closed.window for closed in self._closed], "closed twice"
                self._closed.append(effect)
                self._check_filled(effect.window)
                assert effect.metrics.get("refill/draws", 0) == len(self._draws[effect.window]) - 1
            elif isinstance(effect, Unused):
                self._check_unused(effect.window, at_once=any(isinstance(other, WindowClosed) for other in effects))
            elif isinstance(effect, Halt):
                assert any(cause in effect.reason for cause in self._may_halt), effect.reason
            elif isinstance(effect, Finished):
                assert len(self._closed) == self._world.coordinator.windows or self._all_drawn
        self._check_counts()
        if any(isinstance(event, Tick) for event in events):
            self._check_overdue()
        if self._world.events - self._looked >= LOOK_EVERY:
            self._looked = self._world.events
            self._check_that_it_moves()

    def _check_grant(self, grant: Grant) -> None:
        assert self._waiting.pop(grant.ticket) == grant.worker
        assert not self._world.coordinator.halted
        hand, claim = self._world.hands[grant.worker], grant.claim
        assert claim.stage == hand.stage
        if claim.suspend:
            assert not self._works(hand), f"{hand.name} is to free its device, and works"
            return
        assert hand.name not in self._world.coordinator.silent(), "work for a worker that sends no heartbeat"
        self._check_device(hand)
        names = [unit.unit.id for unit in claim.units] or [filling(claim)]
        job = Job(
            hand.name,
            self._world.tickets[grant.ticket][1],
            claim,
            self._world.now + claim.deadline_s,
            list(names),
            set(names),
        )
        self.jobs[claim.id] = job
        self._held.setdefault(hand.name, []).append(job)
        self._check_units(job, names)
        self._check_inputs(claim)
        self._check_companions(claim)

    def _check_device(self, hand: Hand) -> None:
        """Nobody else works on the worker's device, and nobody else has it."""
        device = self._plans[hand.stage].device
        if device is None:
            return
        for other in self._world.hands.values():
            if other.up and other.stage != hand.stage and self._plans[other.stage].device == device:
                assert not self._works(other), f"{other.name} works on the device of {hand.name}"
                assert not other.awake, f"{other.name} has not freed the device of {hand.name}"
        self._world.happened["turn taken"] += 1

    def _works(self, hand: Hand) -> bool:
        """Whether the worker has something to do, or will have as soon as it is told."""
        told = any(answer.hand is hand and not answer.claim.suspend for answer in self._world.answers)
        return told or any(job.left for job in hand.jobs.values())

    def _check_units(self, job: Job, names: Sequence[str]) -> None:
        """The units are nobody else's, have not ended, and will be written where nobody else writes."""
        stage = job.claim.stage
        for name in names:
            place = (stage, name)
            holder = self._holder.get(place)
            assert holder is None or not holder.holds(name), f"{name} of {stage} is held by {holder}"
            assert place not in self._accepted, f"{name} of {stage} is done"
            assert name not in self._outcomes, f"{name} has left: {self._outcomes[name]}"
            self._holder[place] = job
        for unit, delivery in [(unit.unit.id, unit.delivery) for unit in job.claim.units] or [
            (names[0], job.claim.delivery)
        ]:
            address = (stage, unit, delivery)
            assert address not in self._granted, f"{address} was granted before"
            self._granted.add(address)
            self._world.happened["granted again"] += delivery > 0
        orders = [unit.unit.order for unit in job.claim.units]
        assert orders == sorted(orders)
        assert len({unit.unit.window for unit in job.claim.units}) <= 1
        if stage == UPDATE:
            assert job.claim.window not in self._training, "trained twice"
            self._training.add(job.claim.window)
        if job.claim.window not in self._opened:
            self._check_admission(job.claim)
        if job.claim.draw is not None:
            self._check_draw(job.claim, job.claim.draw)

    def _check_admission(self, claim: Claim) -> None:
        """A window is opened in its turn, within the bounds of staleness and credits."""
        assert (claim.stage, claim.window_index) == ("source", len(self._opened))
        self._opened.append(claim.window)
        for window in self._opened[: max(0, claim.window_index - self._world.staleness)]:
            units = self._members[window]
            left = all(name in self._outcomes for name in units if "#greedy" not in name) and self._all_admitted(window)
            assert window in self._trained or left, f"{claim.window} would be too stale beside {window}"
        if self._world.credits is not None:
            assert len(self._opened) - len(self._closed) <= self._world.credits

    def _check_draw(self, claim: Claim, draw: Draw) -> None:
        """No prompt is drawn twice; a window draws again only for groups that its filter, or a loss before, took."""
        made = self._draws.setdefault(claim.window, [])
        if claim.delivery:
            assert made[draw.number] == draw, "another draw under the same number"
            self._world.happened["refill granted again"] += draw.number > 0
            return
        assert draw.number == len(made)
        prompts = {(draw.epoch, draw.first + number) for number in range(draw.count)}
        assert not prompts & self._drawn, "a prompt was drawn twice"
        assert self._world.epochs is None or draw.epoch < self._world.epochs
        if draw.number:
            assert draw.number <= self._world.max_draws
            assert self._all_admitted(claim.window)
            for name in self._members[claim.window]:
                assert ("filter", name) in self._accepted or name in self._outcomes, f"{name} is still to be filtered"
            assert 0 < draw.count <= PER_WINDOW - self._survivors(claim.window)
            self._world.happened["refilled"] += 1
        self._drawn |= prompts
        made.append(draw)

    def _all_admitted(self, window: str) -> bool:
        return all(("source", f"{window}+{draw.number}") in self._accepted for draw in self._draws[window])

    def _survivors(self, window: str) -> int:
        passed = {name for name in self._members[window] if ("filter", name) in self._accepted}
        return len({name.rpartition("/")[0] for name in passed if name not in self._outcomes})

    @property
    def _all_drawn(self) -> bool:
        return self._world.epochs is not None and len(self._drawn) == self._world.epochs * PROMPTS

    def _check_filled(self, window: str) -> None:
        """A window that is given out or closed is filled: it has its groups, or cannot have more."""
        assert self._all_admitted(window), "a draw is outstanding"
        if not self._world.max_draws:
            return
        passed = {name.rpartition("/")[0] for name in self._members[window] if ("filter", name) in self._accepted}
        used_up = len(self._draws[window]) > self._world.max_draws
        assert len(passed) >= PER_WINDOW or used_up or self._world.epochs is not None, "it could have drawn more"
        self._world.happened["window left short" if len(passed) < PER_WINDOW else "window filled up"] += 1

    def _check_inputs(self, claim: Claim) -> None:
        """What a stage reads is what was accepted, and was written by whoever reported it."""
        needed = self._plans[claim.stage].depends_on
        for unit in [*claim.units, *claim.baselines]:
            assert set(needed) <= set(unit.accepted) | {"source"}
            for producer, delivery in unit.accepted.items():
                name = self._admitted_as[unit.unit.uid] if producer == "source" else unit.unit.id
                assert self._accepted[producer, name] == delivery
                assert (producer, name, delivery) in self._written

    def _check_companions(self, claim: Claim) -> None:
        """Joins, groups and windows are whole: each of their units is there or is told to be gone."""
        granularity = self._plans[claim.stage].granularity
        gone = {stone.unit.id for stone in claim.tombstones}
        there = {unit.unit.id for unit in claim.units}
        baselines = {unit.unit.id for unit in claim.baselines}
        assert not there & gone
        for name in gone:
            assert name in self._outcomes
        for uid in {unit.unit.uid for unit in claim.units}:
            greedy = {name for name in self._members[uid] if "#greedy" in name}
            sampled = self._members[uid] - greedy
            if granularity in WHOLE_GROUPS:
                assert sampled <= there | gone, "a group in part"
                assert len(sampled & there) >= MIN_GROUP, "fewer of a group than the rule asks for"
            if granularity in JOINS:
                assert greedy <= baselines | gone, "a join without its greedy unit"
        if granularity == "window":
            sampled = {name for name in self._members[claim.window] if "#greedy" not in name}
            assert sampled <= there | gone, "a window in part"
            self._check_filled(claim.window)

    def _check_done(self, effect: Settled, event: Acknowledged) -> None:
        place = (effect.stage, effect.unit.id)
        assert place not in self._accepted, "accepted twice"
        assert effect.delivery == event.delivery
        assert self._written[(*place, event.delivery)] == event.claim, "somebody else's write was accepted"
        self._accepted[place] = event.delivery
        if effect.stage == UPDATE:
            self._trained.add(effect.unit.window)
        self._world.happened["earlier delivery accepted"] += not self.jobs[event.claim].counts

    def _check_unused(self, window: str, *, at_once: bool) -> None:
        assert window in [closed.window for closed in self._closed]
        assert window not in self._unused
        self._unused.append(window)
        writers = [job for job in self._world.jobs if job.claim.window == window and job.left]
        writers += [self.jobs[answer.claim.id] for answer in self._world.answers if answer.claim.window == window]
        assert not writers, f"{window} is cleared under {writers}"
        self._world.happened["window cleared late"] += not at_once

    def _check_counts(self) -> None:
        ledger = self._world.coordinator.ledger
        assert ledger.balanced
        assert ledger.created == dict(self._kinds)
        for kind, count in self._kinds.items():
            assert ledger.in_flight[kind] == count - self._settled[kind]

    def _check_overdue(self) -> None:
        """Who is silent is listed; nothing is left to them, nor to those that are long over their deadline."""
        silent = {
            worker
            for worker, heard in self._heard.items()
            if self._world.now - heard > LEASE_S and not self._plans[self._world.hands[worker].stage].one_owner
        }
        assert set(self._world.coordinator.silent()) == silent
        self._world.happened["worker silent"] += len(silent)
        for line in self._world.coordinator.blocked(self._world.now):
            if line.until_s is not None and not self._plans[line.stage].one_owner:
                assert line.worker not in silent
                assert line.until_s >= -LEASE_S

    def _check_that_it_moves(self) -> None:
        """A run that is not over has work out or ready; ready work is not kept from who waits for it; all is told."""
        coordinator = self._world.coordinator
        if self._world.over:
            return
        waits = coordinator.waits()
        assert any(states.get("ready") or states.get("leased") for states in waits.values()), waits
        idle = set(self._waiting.values()) - set(coordinator.silent())
        alone = {stage for (stage, _), deaths in self._deaths.items() if deaths >= 2}
        for stage, states in waits.items():
            free = [worker for worker in idle if self._world.hands[worker].stage == stage]
            if states.get("ready") and self._plans[stage].device is None and stage not in alone:
                assert not free, f"{free} wait for work, which is ready"
        told: Counter[tuple[str, str]] = Counter()
        for line in coordinator.blocked(self._world.now):
            told[line.stage, line.state] += line.units
            assert line.uids
            assert line.action
            assert line.seconds >= 0
            assert bool(line.worker) == (line.state == "leased") == (line.until_s is not None)
        there = {(stage, state): n for stage, states in waits.items() for state, n in states.items()}
        assert dict(told) == {place: n for place, n in there.items() if n and place[1] not in ("done", "dead")}

    def _check_dealt(self) -> None:
        """The prompts were dealt out in the order of the epochs, without a gap."""
        dealt = [divmod(number, PROMPTS) for number in range(len(self._drawn))]
        assert sorted(self._drawn) == dealt

    def at_the_end(self) -> None:
        """Every unit is accounted for, and nothing is left behind; or the run stopped for a reason that was given."""
        coordinator = self._world.coordinator
        if coordinator.halted:
            self._world.happened["halted"] += 1
            return
        assert coordinator.finished, f"the run does not end: {coordinator.blocked(self._world.now)}"
        self._world.happened["finished"] += 1
        self._check_dealt()
        windows = [closed.window for closed in self._closed]
        assert sorted(self._unused) == sorted(windows), "a window is never cleared"
        every = {name for window in windows for name in self._members[window]}
        assert set(self._outcomes) == every
        total: Counter[tuple[str, str]] = Counter()
        for closed in self._closed:
            total.update(closed.counts)
        assert dict(total) == coordinator.ledger.settled
        trained = [name for stage, name in self._accepted if stage == UPDATE]
        assert sorted(trained) == sorted(name for name, outcome in self._outcomes.items() if outcome == "trained")
        for outcome in self._outcomes.values():
            self._world.happened[outcome.partition(":")[0]] += 1
        self._world.happened["partial group"] += "dropped: partial group" in self._outcomes.values()
