"""A whole run as a model: honest workers, and an unreliable post between them and the coordinator.

Each event goes through `World.send`, which tells `Promises` what was sent and what came of it. Nothing here draws
numbers: tests and the fuzzer decide what happens next, and by which `way` each message goes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from dataflow.batch import Failure
from dataflow.coordinator import Coordinator
from dataflow.draws import Draws
from dataflow.events import (
    Acknowledged,
    Claim,
    ClaimedUnit,
    ClaimWanted,
    ClaimWithdrawn,
    Dropped,
    Event,
    Failed,
    Grant,
    Heartbeat,
    Holding,
    Prompt,
    Published,
    Suspended,
    Tick,
    WorkerDied,
    WorkerJoined,
)
from dataflow.pipeline import StagePlan
from dataflow.stage import WHOLE_GROUPS
from dataflow.weights import WeightsRef
from tests.dataflow.drive import admitted
from tests.dataflow.promises import (
    LEASE_S,
    MAX_DRAWS,
    MIN_GROUP,
    PER_WINDOW,
    PROMPTS,
    UPDATE,
    Job,
    Promises,
    filling,
)

SAMPLED = frozenset({"sampled"})
WINDOWS, SESSIONS, SOURCE_ATTEMPTS = 4, 3, 3
LOOPS = {"rollout": 2, "reward": 2}
"""Stages whose workers have several claims at a time."""

Way = Literal["straight", "late", "lost", "twice"]
"""How a message goes: at once, at some later time, never, or at once and again later."""
Fate = Literal["done", "fail", "fail for good", "drop"]
"""What a worker says of a unit."""


ROLLOUT = StagePlan("rollout", ("source",), "row", expands=True, max_units=5)
REWARD = StagePlan("reward", ("rollout", "source"), "row", max_units=3)
JUDGE = StagePlan("judge", ("rollout",), "row", max_units=2)
JOIN = StagePlan("join", ("reward", "rollout"), "join", kinds=SAMPLED, max_units=4)


def update(*after: str, device: str | None = None) -> StagePlan:
    return StagePlan(UPDATE, after, "window", kinds=SAMPLED, deadline_s=900, one_owner=True, device=device)


def remax() -> list[StagePlan]:
    """Rows, and a join with the greedy unit."""
    advantage = StagePlan("advantage", ("reward", "join"), "row", kinds=SAMPLED)
    return [ROLLOUT, REWARD, JOIN, advantage, update("advantage", "rollout")]


def grpo() -> list[StagePlan]:
    """Whole groups, and a stage beside the main road that may drop units of them at any time."""
    advantage = StagePlan("advantage", ("reward",), "group", min_group=MIN_GROUP)
    return [ROLLOUT, REWARD, JUDGE, advantage, update("advantage", "judge")]


def grouped() -> list[StagePlan]:
    """Whole groups with their greedy unit, and a stage beside."""
    advantage = StagePlan("advantage", ("reward",), "group_join", kinds=SAMPLED, min_group=MIN_GROUP)
    return [ROLLOUT, REWARD, JUDGE, advantage, update("advantage", "judge")]


def turns() -> list[StagePlan]:
    """Three stages that share one device."""
    shared = [replace(plan, device="gpu", max_units=8) for plan in (ROLLOUT, REWARD)]
    return [*shared, JOIN, update("join", device="gpu")]


def dapo() -> list[StagePlan]:
    """Whole groups, of which a filter drops some, so that windows are refilled."""
    keep = StagePlan("filter", ("reward",), "group", min_group=MIN_GROUP, filters=True)
    advantage = StagePlan("advantage", ("filter", "reward"), "group", min_group=MIN_GROUP)
    return [ROLLOUT, REWARD, JUDGE, keep, advantage, update("advantage", "judge", "filter")]


PIPELINES = {plan.__name__: plan for plan in (remax, grpo, grouped, turns, dapo)}


@dataclass(eq=False)
class Hand:
    """A worker, as it knows itself.

    Attributes:
        asking: Its requests without an answer, with their tickets.
        jobs: Claim -> what it works on.
        freeing: The calls to free its device that it follows, or whose answer is under way.
        awake: Whether it has its device.
        mute: Whether nothing that it says arrives.
    """

    name: str
    stage: str
    loops: int
    up: bool = True
    mute: bool = False
    awake: bool = True
    requests: int = 0
    asking: dict[int, int] = field(default_factory=dict)
    jobs: dict[int, Job] = field(default_factory=dict)
    freeing: set[int] = field(default_factory=set)

    @property
    def idle_loops(self) -> int:
        return self.loops - len(self.asking) - len(self.jobs) - len(self.freeing)

    @property
    def holding(self) -> Holding:
        return Holding(frozenset(self.jobs) | self.freeing, frozenset(self.asking), self.requests)


@dataclass(frozen=True)
class Letter:
    """What a worker said, under way; of a job, if it is a report."""

    hand: Hand
    events: tuple[Event, ...]
    job: Job | None = None
    call: int | None = None


@dataclass(frozen=True)
class Answer:
    """What a worker was granted, under way."""

    hand: Hand
    request: int
    claim: Claim


class World:
    """A coordinator, its workers and the post.

    Args:
        name: One of `PIPELINES`.
        staleness: How far windows may overlap.
        credits: How many windows may be open; None for any number.
        epochs: How often the prompts are there to be drawn; None for any number.
    """

    def __init__(self, name: str, staleness: int, credits: int | None = None, epochs: int | None = None) -> None:
        plans = [StagePlan("source", (), "source", max_attempts=SOURCE_ATTEMPTS), *PIPELINES[name]()]
        self.plans = {plan.name: plan for plan in plans}
        self.staleness, self.credits = staleness, credits
        self.epochs = epochs
        self.max_draws = MAX_DRAWS if any(plan.filters for plan in plans) else 0
        self.greedy = name not in ("grpo", "dapo")
        self.coordinator = self.new_coordinator()
        self.now = 0.0
        self.events = 0
        self.log: list[tuple[Event, ...]] = []
        self.happened: Counter[str] = Counter()
        self.way: Callable[[str], Way] = lambda kind: "straight"
        self.letters: list[Letter] = []
        self.answers: list[Answer] = []
        self.tickets: dict[int, tuple[Hand, int]] = {}
        self._serial = 0
        self.hands = {
            f"{stage}-{number}": Hand(f"{stage}-{number}", stage, LOOPS.get(stage, 1))
            for stage in self.plans
            for number in range(1 if stage in ("source", UPDATE) else 2)
        }
        self.promises = Promises(self)
        for hand in self.hands.values():
            self.send(WorkerJoined(hand.name, hand.stage, self.now))

    def new_coordinator(self) -> Coordinator:
        """A coordinator to which nothing has happened; `log` can be told to it again."""
        return Coordinator(
            self.plans,
            "run",
            WINDOWS,
            Draws(PROMPTS, PER_WINDOW, epochs=self.epochs, max_draws=self.max_draws),
            max_staleness=self.staleness,
            max_open_windows=self.credits,
            lease_s=LEASE_S,
            max_empty_windows=WINDOWS + 1,
        )

    @property
    def over(self) -> bool:
        return bool(self.coordinator.finished or self.coordinator.halted)

    @property
    def jobs(self) -> list[Job]:
        return [job for hand in self.hands.values() for job in hand.jobs.values()]

    def send(self, *events: Event) -> None:
        """Events reach the coordinator; its answers go on their way."""
        stamped = tuple(replace(event, now=self.now) for event in events)
        self.events += len(stamped)
        self.log.append(stamped)
        self.promises.before(stamped)
        effects = self.coordinator.handle(*stamped)
        self.promises.after(stamped, effects)
        for effect in effects:
            if isinstance(effect, Grant):
                self._answer(*self.tickets.pop(effect.ticket), effect.claim)

    # ---- what a worker does -------------------------------------------------------------------------

    def ask(self, hand: Hand) -> None:
        """A loop that has nothing to do asks for work."""
        if hand.up and hand.idle_loops > 0:
            hand.requests += 1
            self._serial += 1
            ticket = self._serial
            hand.asking[hand.requests] = ticket
            self.tickets[ticket] = hand, hand.requests
            self._say(hand, ClaimWanted(hand.name, ticket, hand.requests, 0, hand.holding, 0.0))

    def give_up(self, hand: Hand, *, heard: bool) -> None:
        """A request has waited long enough; the coordinator may not hear of that."""
        if hand.up and hand.asking:
            request, ticket = hand.asking.popitem()
            missed = [answer for answer in self.answers if (answer.hand, answer.request) == (hand, request)]
            if missed:
                self.answers.remove(missed[0])
                self.promises.lost(hand)
            # A request that has not arrived yet is withdrawn before it could be made.
            self.letters = [letter for letter in self.letters if not _asks(letter, ticket)]
            if heard and ticket in self.tickets:
                self.send(ClaimWithdrawn(hand.name, ticket, 0.0))
                self.tickets.pop(ticket, None)
            self.happened["request given up" if heard else "request given up unheard"] += 1

    def beat(self, hand: Hand) -> None:
        if hand.up:
            self._say(hand, Heartbeat(hand.name, hand.holding, 0.0))

    def free(self, hand: Hand) -> None:
        """The worker frees its device, and says so."""
        for call in sorted(hand.freeing):
            if not any(letter.call == call for letter in self.letters):
                hand.awake = False
                self.happened["device freed"] += 1
                self._say(hand, Suspended(hand.name, 0.0), call=call)
                return

    def report(self, job: Job, fate: Callable[[], Fate], first: int = 0, count: int = 1_000) -> None:
        """The worker writes units and reports them: some of them, where the stage's units stand alone."""
        if not job.left:
            return
        units = self._lot(job, first, count)
        job.left = [name for name in job.left if name not in units]
        if job.claim.stage == "source":
            events: list[Event] = [self._fill(job, fate())]
        else:
            events = self._results(job, [unit for unit in job.claim.units if unit.unit.id in units], fate)
        self._say(self.hands[job.worker], *events, job=job)

    def _lot(self, job: Job, first: int, count: int) -> list[str]:
        granularity = self.plans[job.claim.stage].granularity
        if granularity in ("window", "source"):
            return job.left
        if granularity in WHOLE_GROUPS:
            uids = {unit.unit.id: unit.unit.uid for unit in job.claim.units}
            uid = uids[job.left[first % len(job.left)]]
            return [name for name in job.left if uids[name] == uid]
        first %= len(job.left)
        return job.left[first : first + count]

    def _fill(self, job: Job, fate: Fate) -> Event:
        claim = job.claim
        if fate in ("fail", "fail for good"):
            failure = Failure("Error", "boom")
            return Failed(job.worker, claim.id, claim.window, claim.delivery, failure, True, 0.0)
        self.promises.wrote(job, filling(claim), claim.delivery)
        draw = claim.draw
        assert draw is not None
        dropped = "a rule" if fate == "drop" else ""
        prompts = [
            Prompt(f"{draw.epoch}-{draw.first + number}", SESSIONS, False, dropped * (number == 0))
            for number in range(draw.count)
        ]
        if self.greedy:
            prompts += [Prompt(prompt.uid, 1, True, prompt.dropped) for prompt in prompts]
        return admitted(job.worker, claim, *prompts)

    def _results(self, job: Job, units: Sequence[ClaimedUnit], fate: Callable[[], Fate]) -> list[Event]:
        claim, plan = job.claim, self.plans[job.claim.stage]
        events: list[Event] = [Published(WeightsRef(claim.window_index + 1, ""), 0.0)] if plan.one_owner else []
        # A group is tried again whole, and filtered out whole; one of its units alone can be given up.
        common = fate() if plan.granularity in (*WHOLE_GROUPS, "window") else None
        for number, unit in enumerate(units):
            name, place = unit.unit.id, (job.worker, claim.id, unit.unit.id, unit.delivery)
            whole = common == "fail" or (common == "drop" and plan.filters)
            own: Fate = fate() if common is None else common if whole or number == 0 else "done"
            if own == "done":
                self.promises.wrote(job, name, unit.delivery)
                events.append(Acknowledged(*place, 1, 0.0))
            elif own == "drop":
                events.append(Dropped(*place, "a rule", 0.0))
            else:
                events.append(Failed(*place, Failure("Error", "boom"), own == "fail", 0.0))
        return events

    def _say(self, hand: Hand, *events: Event, job: Job | None = None, call: int | None = None) -> None:
        """Send a message by the way that is drawn for it, and take note of its end."""
        kind = "report" if job else "freed" if call is not None else "word"
        way = self.way(kind)
        if hand.mute or (way in ("lost", "twice") and kind == "word"):
            way = "late"
        if way != "straight":
            self.happened[f"{kind} {way}"] += 1
        letter = Letter(hand, events, job, call)
        if way == "late":
            self.letters.append(letter)
            return
        if way == "twice" and job:
            self.letters.append(Letter(hand, events))
        if way == "lost":
            self.promises.lost(hand)
            self._arrived(letter)
        else:
            self._deliver(letter)

    def deliver(self, number: int) -> None:
        """A message that was under way arrives."""
        if self.letters:
            self._deliver(self.letters.pop(number % len(self.letters)))

    def _deliver(self, letter: Letter) -> None:
        self.send(*letter.events)
        self._arrived(letter)

    def _arrived(self, letter: Letter) -> None:
        """The call in which the worker said it has returned."""
        hand, job = letter.hand, letter.job
        if letter.call is not None:
            hand.freeing.discard(letter.call)
        if job is not None and not job.left and not any(other.job is job for other in self.letters):
            hand.jobs.pop(job.claim.id, None)

    # ---- what happens to a worker -------------------------------------------------------------------

    def _answer(self, hand: Hand, request: int, claim: Claim) -> None:
        kind = "call" if claim.suspend else "grant"
        way = self.way(kind)
        if request not in hand.asking:
            self.happened[f"{kind} to nobody"] += 1
            self.promises.lost(hand)
        elif way == "lost":
            self.happened[f"{kind} lost"] += 1
            del hand.asking[request]
            self.promises.lost(hand)
        elif way == "late":
            self.happened[f"{kind} late"] += 1
            self.answers.append(Answer(hand, request, claim))
        else:
            self._receive(Answer(hand, request, claim))

    def hand_over(self, number: int) -> None:
        """A claim that was under way reaches its worker."""
        if self.answers:
            self._receive(self.answers.pop(number % len(self.answers)))

    def _receive(self, answer: Answer) -> None:
        hand, claim = answer.hand, answer.claim
        del hand.asking[answer.request]
        if claim.suspend:
            hand.freeing.add(claim.id)
        else:
            hand.awake = True
            hand.jobs[claim.id] = self.promises.jobs[claim.id]

    def die(self, hand: Hand, *, late: bool) -> None:
        """A process ends; `late`: what it wrote last was reported, and is still under way."""
        if not hand.up:
            return
        self.happened["death at work" if hand.jobs else "death"] += 1
        self.letters = [letter for letter in self.letters if letter.hand is not hand or letter.job]
        self.answers = [answer for answer in self.answers if answer.hand is not hand]
        self.tickets = {ticket: asked for ticket, asked in self.tickets.items() if asked[0] is not hand}
        if late:
            for job in hand.jobs.values():
                self.way, usual = (lambda kind: "late"), self.way
                self.report(job, lambda: "done")
                self.way = usual
        hand.jobs, hand.asking, hand.freeing = {}, {}, set()
        hand.up, hand.mute = False, False
        self.send(WorkerDied(hand.name, "killed", 0.0))

    def start(self, hand: Hand) -> None:
        """A process that ended is started again."""
        if not hand.up:
            hand.up, hand.awake, hand.requests = True, True, 0
            self.send(WorkerJoined(hand.name, hand.stage, 0.0))

    def fall_mute(self, hand: Hand) -> None:
        """From now on, what the worker says is under way for longer."""
        hand.mute = hand.up

    def speak(self, hand: Hand) -> None:
        """All that the worker said arrives, in the order in which it was said."""
        hand.mute = False
        for letter in [letter for letter in self.letters if letter.hand is hand]:
            self.letters.remove(letter)
            self._deliver(letter)

    def tick(self, seconds: float, *, beating: bool = False) -> None:
        """Time passes, with or without heartbeats of those that can be heard."""
        self.now += seconds
        for hand in self.hands.values():
            if beating and not hand.mute:
                self.beat(hand)
        self.send(Tick(0.0))

    def drain(self) -> None:
        """From here on all goes well, and no time passes: the run must come to an end."""
        self.way = lambda kind: "straight"
        while self.letters:
            self.deliver(0)
        while self.answers:
            self.hand_over(0)
        for hand in self.hands.values():
            hand.mute = False
            self.start(hand)
        for _ in range(300):
            if self.over:
                break
            before = self.events
            for hand in self.hands.values():
                self.free(hand)
                while hand.idle_loops > 0:
                    self.ask(hand)
            for job in self.jobs:
                self.report(job, lambda: "done")
            if before == self.events:
                for hand in self.hands.values():
                    self.beat(hand)
        for job in self.jobs:
            self.report(job, lambda: "done")
        for hand in self.hands.values():
            self.beat(hand)
        self.promises.at_the_end()


def _asks(letter: Letter, ticket: int) -> bool:
    return any(isinstance(event, ClaimWanted) and event.ticket == ticket for event in letter.events)
