"""Runs in which anything may happen, drawn from a seed: for the tests, and for `scripts/fuzz`."""

from __future__ import annotations

from random import Random

from tests.dataflow.promises import UPDATE
from tests.dataflow.world import Fate, Hand, Way, World

STEPS = 300
WELL: list[Fate] = ["done"]
ILL: list[Fate] = ["fail", "fail", "fail for good", "drop"]
WAYS: dict[str, list[Way]] = {
    "word": ["late"],
    "report": ["late", "late", "lost", "twice"],
    "grant": ["late", "late", "lost"],
    "call": ["late", "late", "lost"],
    "freed": ["late", "late", "lost"],
}


class Storm:
    """A run through up to `STEPS` random steps, and then, undisturbed, to its end.

    Args:
        name: One of `PIPELINES`.
        seed: Decides everything else.
    """

    def __init__(self, name: str, seed: int) -> None:
        self._dice = dice = Random(seed)
        self.world = World(
            name,
            staleness=dice.randrange(3),
            credits=dice.choice([None, None, 1, 2]),
            epochs=dice.choice([None, 1, 2]),
        )
        self.world.way = self._way
        self._trouble = dice.choice([0.02, 0.1, 0.3])
        self._fates = dice.choice([WELL, WELL * 17 + ILL])
        self._strict = dice.choice([1, 4])  # how many of five groups the stage that filters drops
        self._doomed = dice.choice(["", "", "", "rollout", "reward"])  # every claim of this stage kills its worker
        self._slow = self._draw_slow()
        self._mortal = [hand for hand in self.world.hands.values() if hand.stage != UPDATE]

    def run(self) -> World:
        """Let it rage; raises AssertionError where a promise is broken."""
        world, dice = self.world, self._dice
        steps = [self._ask, self._report, self._deliver, self._free, self._beat, self._rare]
        for step in dice.choices(steps, [30, 36, 10, 8, 6, 10], k=STEPS):
            if world.over:
                break
            step()
        world.drain()
        return world

    def _draw_slow(self) -> set[str]:
        """Workers that seldom do anything: nobody, one of them, or all of a stage."""
        hands = list(self.world.hands.values())
        one = self._dice.choice(hands)
        return self._dice.choice([set(), {one.name}, {hand.name for hand in hands if hand.stage == one.stage}])

    def _dawdles(self, worker: str) -> bool:
        return worker in self._slow and self._dice.random() < 0.9

    def _way(self, kind: str) -> Way:
        if self._dice.random() >= self._trouble:
            return "straight"
        return self._dice.choice(WAYS[kind])

    def _hand(self) -> Hand:
        return self._dice.choice(list(self.world.hands.values()))

    def _ask(self) -> None:
        hand = self._hand()
        if not self._dawdles(hand.name):
            self.world.ask(hand)

    def _report(self) -> None:
        jobs = [job for job in self.world.jobs if not self._dawdles(job.worker)]
        if not jobs:
            self._ask()
            return
        job = self._dice.choice(jobs)
        if job.claim.stage == self._doomed:
            self.world.die(self.world.hands[job.worker], late=False)
            return
        fates = WELL if job.claim.stage == UPDATE else self._fates
        if self.world.plans[job.claim.stage].filters and self._dice.random() < self._strict / 5:
            fates = ["drop"]
        self.world.report(job, lambda: self._dice.choice(fates), self._dice.randrange(8), self._dice.choice([1, 2, 99]))

    def _deliver(self) -> None:
        number = self._dice.randrange(1000)
        if self._dice.random() < 0.5:
            self.world.deliver(number)
        else:
            self.world.hand_over(number)

    def _free(self) -> None:
        for hand in self.world.hands.values():
            self.world.free(hand)

    def _beat(self) -> None:
        self.world.beat(self._hand())

    def _rare(self) -> None:
        world, dice = self.world, self._dice
        hand = self._hand() if dice.random() < 0.01 else dice.choice(self._mortal)
        draw = dice.random()
        if draw < 0.2:
            world.die(hand, late=dice.random() < 0.5)
        elif draw < 0.5:
            for other in world.hands.values():
                world.start(other)
        elif draw < 0.6:
            world.fall_mute(hand)
        elif draw < 0.75:
            for other in world.hands.values():
                if other.mute:
                    world.speak(other)
        elif draw < 0.85:
            world.give_up(hand, heard=dice.random() < 0.7)
        else:
            world.tick(dice.choice([1.0, 30.0, 70.0, 400.0]), beating=dice.random() < 0.5)
