"""Stages that share a device take turns: none works while another has it, and none waits for ever."""

from __future__ import annotations

from dataflow.events import Claim, Grant, Prompt, Suspended
from dataflow.pipeline import StagePlan
from tests.dataflow.drive import Drive, drive, ids, key, plans, reward, rollout, source, update


def sharing() -> dict[str, StagePlan]:
    return plans(source(), rollout(device="gpu"), reward(), update("reward", device="gpu"))


def calls(run: Drive) -> list[str]:
    """Who was asked to free its device, in order."""
    return [effect.worker for effect in run.of(Grant) if effect.claim.suspend]


def call(run: Drive, worker: str) -> int:
    """Number of the newest call to a worker to free its device."""
    return [effect.claim.id for effect in run.of(Grant) if effect.claim.suspend and effect.worker == worker][-1]


def free(run: Drive, worker: str) -> None:
    run.send(Suspended(worker, run.now))


def rolled(staleness: int = 0) -> Drive:
    """Window 0 is ready for the update; with staleness, window 1 for rollout, whose idle worker has the device."""
    run = drive(sharing(), windows=2, max_staleness=staleness)
    run.admit(Prompt("0-a", 1, False))
    rolling = first_turn(run)
    if staleness:
        run.admit(Prompt("0-a", 1, False))
    run.acknowledge("rollout-0", rolling)
    run.work("reward-0")
    run.effects.clear()
    return run


def first_turn(run: Drive) -> Claim:
    """Every worker has the device when it comes up; here the update gives it up for rollout."""
    rolling = run.want("rollout-0")
    run.want("update-0")
    free(run, "update-0")
    return run.granted[rolling]


def test_a_stage_that_wants_the_device_asks_once_for_it_and_has_it_when_it_is_free() -> None:
    run = rolled()
    run.want("rollout-0")
    ticket = run.want("update-0")
    assert (calls(run), ticket in run.granted) == (["rollout-0"], False)
    run.wait(1)
    run.beat("rollout-0", claims={call(run, "rollout-0")})
    assert (calls(run), ticket in run.granted) == (["rollout-0"], False)
    free(run, "rollout-0")
    assert ids(run.granted[ticket]) == [key("0-a")]
    assert calls(run) == ["rollout-0"]


def test_the_device_goes_back_the_same_way() -> None:
    run = rolled()
    run.want("rollout-0")
    training = run.want("update-0")
    free(run, "rollout-0")
    run.acknowledge("update-0", run.granted[training])
    run.admit(Prompt("1-a", 1, False))
    rolling = run.want("rollout-0")
    assert rolling not in run.granted
    run.want("update-0")
    assert calls(run) == ["rollout-0", "update-0"]
    free(run, "update-0")
    assert ids(run.granted[rolling]) == [key("1-a", window=1)]


def test_a_stage_that_works_is_not_asked_to_free_its_device() -> None:
    run = drive(sharing(), windows=2, max_staleness=1)
    for _ in range(2):
        run.admit(Prompt("0-a", 1, False))
    run.acknowledge("rollout-0", first_turn(run))
    rolling = run.claim("rollout-0")
    run.work("reward-0")
    run.effects.clear()
    training, spare = run.want("update-0"), run.want("rollout-0")
    assert (calls(run), training in run.granted) == ([], False)
    run.acknowledge("rollout-0", rolling)
    assert calls(run) == ["rollout-0"]
    assert run.granted[spare].suspend


def test_a_rival_that_has_not_asked_for_work_is_asked_as_soon_as_it_does() -> None:
    run = rolled()
    training = run.want("update-0")
    assert calls(run) == []
    ticket = run.want("rollout-0")
    assert run.granted[ticket].suspend
    free(run, "rollout-0")
    assert training in run.granted


def test_of_two_stages_with_work_the_later_one_goes_first() -> None:
    run = rolled(staleness=1)
    rolling = run.want("rollout-0")  # there is work for it, and it has the device
    assert rolling not in run.granted
    training = run.want("update-0")
    assert run.granted[rolling].suspend
    free(run, "rollout-0")
    run.acknowledge("update-0", run.granted[training])
    again = run.want("rollout-0")
    run.want("update-0")
    free(run, "update-0")
    assert ids(run.granted[again]) == [key("0-a", window=1)]


def test_a_rival_that_died_while_it_was_to_free_the_device_holds_nobody_up() -> None:
    run = rolled()
    run.want("rollout-0")
    training = run.want("update-0")
    run.die("rollout-0")
    assert training in run.granted


def test_a_rival_that_came_up_anew_has_the_device_and_is_asked_for_it() -> None:
    run = rolled()
    run.want("rollout-0")
    training = run.want("update-0")
    run.join("rollout-0")  # started again, and its death was not told
    assert training not in run.granted
    run.want("rollout-0")
    assert calls(run) == ["rollout-0", "rollout-0"]
    free(run, "rollout-0")
    assert training in run.granted


def test_all_workers_of_a_rival_are_asked() -> None:
    run = rolled()
    run.join("rollout-1")
    run.want("rollout-0")
    training = run.want("update-0")
    run.want("rollout-1")
    assert calls(run) == ["rollout-0", "rollout-1"]
    free(run, "rollout-1")
    assert training not in run.granted
    free(run, "rollout-0")
    assert training in run.granted


def test_a_worker_that_is_freeing_the_device_is_given_no_work_until_it_has() -> None:
    run = rolled()
    run.want("rollout-0")
    run.want("update-0")
    spare = run.want("rollout-0")
    run.wait(1)
    assert spare not in run.granted


def test_a_worker_that_lost_its_claim_but_still_works_on_it_keeps_the_device() -> None:
    """It overran its deadline, or was not heard of: asked now, it would free the device under its own work."""
    run = drive(sharing(), windows=2, max_staleness=1)
    for _ in range(2):
        run.admit(Prompt("0-a", 1, False))
    run.acknowledge("rollout-0", first_turn(run))
    overran = run.claim("rollout-0")
    run.work("reward-0")
    run.effects.clear()
    run.now = 400
    for worker in ("source-0", "reward-0", "update-0"):
        run.beat(worker)
    run.beat("rollout-0", claims={overran.id})
    run.wait(0)
    run.want("rollout-0")
    training = run.want("update-0")
    assert calls(run) == []
    run.beat("rollout-0", asking={run.tickets - 1})
    assert calls(run) == ["rollout-0"]
    free(run, "rollout-0")
    assert training in run.granted


def test_a_call_that_was_lost_on_the_way_is_made_again() -> None:
    run = rolled()
    run.want("rollout-0")
    training = run.want("update-0")
    run.beat("rollout-0")  # it neither works on the call nor waits for an answer
    run.want("rollout-0")
    assert calls(run) == ["rollout-0", "rollout-0"]
    free(run, "rollout-0")
    assert training in run.granted


def test_a_late_word_of_an_earlier_turn_does_not_free_a_device_that_is_in_use() -> None:
    run = rolled()
    run.want("rollout-0")
    training = run.want("update-0")
    free(run, "rollout-0")
    run.acknowledge("update-0", run.granted[training])
    run.admit(Prompt("1-a", 1, False))
    rolling = run.want("rollout-0")
    run.want("update-0")
    free(run, "update-0")
    free(run, "rollout-0")  # said twice
    run.acknowledge("rollout-0", run.granted[rolling])
    run.work("reward-0")
    assert run.idle("update-0")


def test_stages_of_different_devices_do_not_wait_for_each_other() -> None:
    table = plans(source(), rollout(device="a"), reward(), update("reward", device="b"))
    run = drive(table, windows=2, max_staleness=1)
    run.admit(Prompt("0-a", 1, False))
    run.admit(Prompt("1-a", 1, False))
    run.work("rollout-0")
    run.work("reward-0")
    run.claim("rollout-0")
    run.claim("update-0")
    assert calls(run) == []
