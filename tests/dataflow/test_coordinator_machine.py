"""The coordinator under arbitrary orders of work, failures, deaths, silences, losses and repeated reports.

`promises.py` says what is checked after every event, and `scripts/fuzz` does the same for as long as one likes.
"""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from tests.dataflow.storms import ILL, WAYS, WELL, Storm
from tests.dataflow.world import PIPELINES, Fate, Hand, Way, World

SEEDS, EVENTS = 190, 200_000

# How often each must have happened in the storms of one pipeline: a promise that nothing tries is not tested.
EVERYWHERE = {
    "finished": 150,
    "trained": 2000,
    "failed": 100,
    "granted again": 1000,
    "claim forgotten": 100,
    "claim of a silent worker lost": 80,
    "claim overran": 20,
    "worker silent": 1000,
    "death": 500,
    "death at work": 300,
    "grant late": 100,
    "grant lost": 40,
    "grant to nobody": 20,
    "word late": 1000,
    "report late": 200,
    "report lost": 50,
    "report twice": 50,
    "report of a lost claim": 200,
    "earlier delivery accepted": 80,
    "request given up": 100,
    "request given up unheard": 50,
    "halted": 1,
}
CLEARED = {"window cleared late": 3}  # where a device is shared, who holds it holds up the update too
GREEDY = {"used as baseline": 500}
GROUPS = {"dropped": 100, "partial group": 10}
REFILL = {"refilled": 100, "refill granted again": 20, "window filled up": 100, "window left short": 20}
TURNS = {"turn taken": 1500, "device freed": 1500, "call late": 50, "call lost": 20, "freed late": 50, "freed lost": 20}
AT_LEAST = {
    "remax": EVERYWHERE | CLEARED | GREEDY,
    "grpo": EVERYWHERE | CLEARED | GROUPS,
    "grouped": EVERYWHERE | CLEARED | GREEDY | GROUPS,
    "turns": EVERYWHERE | GREEDY | TURNS,
    "dapo": EVERYWHERE | GROUPS | REFILL,
}


@pytest.mark.parametrize("name", sorted(PIPELINES))
def test_every_promise_holds_in_random_storms(name: str) -> None:
    happened: Counter[str] = Counter()
    events = 0
    for seed in range(SEEDS):
        world = Storm(name, seed).run()
        happened += world.happened
        events += world.events
    assert events >= EVENTS / len(PIPELINES)
    assert {what: happened[what] for what, least in AT_LEAST[name].items() if happened[what] < least} == {}


class CoordinatorMachine(RuleBasedStateMachine):
    """The same world, with every step chosen by hypothesis, which makes what it finds as short as it can."""

    world: World

    def hand(self, number: int) -> Hand:
        hands = list(self.world.hands.values())
        return hands[number % len(hands)]

    @initialize(
        name=st.sampled_from(sorted(PIPELINES)),
        staleness=st.integers(0, 2),
        credits=st.sampled_from([None, 1, 2]),
        epochs=st.sampled_from([None, 1, 2]),
    )
    def start(self, name: str, staleness: int, credits: int | None, epochs: int | None) -> None:
        self.world = World(name, staleness, credits, epochs)
        self.ways: list[Way] = []
        self.world.way = lambda kind: next((way for way in self.ways if way in WAYS[kind]), "straight")

    @rule(ways=st.lists(st.sampled_from(["late", "lost", "twice"]), max_size=2))
    def post(self, ways: list[Way]) -> None:
        """How messages go from now on."""
        self.ways = ways

    @rule(number=st.integers(0, 20))
    def ask(self, number: int) -> None:
        self.world.ask(self.hand(number))

    @rule()
    def everybody_asks(self) -> None:
        for hand in self.world.hands.values():
            self.world.ask(hand)

    @rule(
        number=st.integers(0, 20),
        first=st.integers(0, 7),
        count=st.sampled_from([1, 2, 99]),
        fates=st.lists(st.sampled_from(WELL + ILL)),
    )
    def report(self, number: int, first: int, count: int, fates: list[Fate]) -> None:
        jobs = self.world.jobs
        if jobs:
            left = list(fates)
            self.world.report(jobs[number % len(jobs)], lambda: left.pop() if left else "done", first, count)

    @rule()
    def everybody_reports(self) -> None:
        for job in self.world.jobs:
            self.world.report(job, lambda: "done")

    @rule(number=st.integers(0, 20))
    def deliver(self, number: int) -> None:
        self.world.deliver(number)

    @rule(number=st.integers(0, 20))
    def hand_over(self, number: int) -> None:
        self.world.hand_over(number)

    @rule(number=st.integers(0, 20))
    def free(self, number: int) -> None:
        self.world.free(self.hand(number))

    @rule(number=st.integers(0, 20))
    def beat(self, number: int) -> None:
        self.world.beat(self.hand(number))

    @rule(number=st.integers(0, 20), heard=st.booleans())
    def give_up(self, number: int, heard: bool) -> None:
        self.world.give_up(self.hand(number), heard=heard)

    @rule(number=st.integers(0, 20), late=st.booleans())
    def die(self, number: int, late: bool) -> None:
        self.world.die(self.hand(number), late=late)

    @rule(number=st.integers(0, 20))
    def start_again(self, number: int) -> None:
        self.world.start(self.hand(number))

    @rule(number=st.integers(0, 20))
    def fall_mute(self, number: int) -> None:
        self.world.fall_mute(self.hand(number))

    @rule(number=st.integers(0, 20))
    def speak(self, number: int) -> None:
        self.world.speak(self.hand(number))

    @rule(seconds=st.sampled_from([1.0, 30.0, 70.0, 400.0]), beating=st.booleans())
    def tick(self, seconds: float, beating: bool) -> None:
        self.world.tick(seconds, beating=beating)

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.drain()


CoordinatorMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, derandomize=True, deadline=None, database=None
)
TestCoordinatorMachine = CoordinatorMachine.TestCase
