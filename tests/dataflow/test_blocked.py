"""What a run waits for: every unit that does not move is told with its place, its holder, and what will happen."""

from __future__ import annotations

from dataflow.coordinator import Coordinator
from dataflow.events import Blocked, Prompt, Suspended, WorkerJoined
from dataflow.pipeline import StagePlan
from tests.dataflow.drive import SAMPLED, Drive, drive, grpo, key, plans, reward, rollout, source, update


def lines(run: Drive) -> dict[tuple[str, str], Blocked]:
    """(Stage, state) -> what is told of it; each once."""
    found = run.coordinator.blocked(run.now)
    by_place = {(line.stage, line.state): line for line in found}
    assert len(by_place) == len(found)
    return by_place


def two_uids(**options: int) -> Drive:
    """Two uids of two sessions at the reward stage, 10 s after they were rolled out."""
    run = drive(plans(source(), rollout(), reward(deadline_s=40.0), update("reward")), **options)
    run.now = 1000.0
    run.admit(Prompt("0-b", 2, False), Prompt("0-a", 2, False))
    run.work("rollout-0")
    run.now += 10
    return run


def test_a_window_that_the_source_has_not_taken_is_told_by_its_name() -> None:
    run = Drive(Coordinator(grpo(), "run", 1), now=1000.0)
    run.join("source-0")
    run.now += 7
    assert lines(run) == {
        ("source", "ready"): Blocked(
            "source", "ready", "", 1, ("run/train/000000",), 7.0, None, "source-0 has to ask for them"
        )
    }


def test_ready_units_are_told_with_who_has_to_ask_for_them() -> None:
    run = two_uids()
    assert lines(run)["reward", "ready"] == Blocked(
        "reward", "ready", "", 4, ("0-a", "0-b"), 10.0, None, "reward-0 has to ask for them"
    )


def test_ready_units_whose_workers_are_busy_are_told_with_who_is() -> None:
    run = drive(plans(source(), rollout(), reward(max_units=1), update("reward")))
    run.admit(Prompt("0-a", 2, False))
    run.work("rollout-0")
    run.claim("reward-0")
    run.join("reward-1")
    assert lines(run)["reward", "ready"].action == "reward-0 has to ask for them"


def test_leased_units_are_told_with_their_worker_and_the_first_thing_that_will_happen() -> None:
    run = two_uids()
    run.claim("reward-0")
    run.now += 5
    leased = lines(run)["reward", "leased"]
    assert leased == Blocked(
        "reward", "leased", "reward-0", 4, ("0-a", "0-b"), 5.0, 35.0, "the claim is cancelled and tried again"
    )
    run.now += 40
    assert lines(run)["reward", "leased"].until_s == -5.0


def test_the_units_of_a_worker_that_is_not_heard_of_are_told_with_when_others_get_them() -> None:
    run = two_uids(lease_s=20)
    run.claim("reward-0")
    run.now += 15
    leased = lines(run)["reward", "leased"]
    assert (leased.until_s, leased.action) == (
        5.0,
        "unless it sends a heartbeat, others get them and its process is ended",
    )


def test_the_units_of_the_one_owner_are_told_with_when_the_run_stops() -> None:
    run = drive(plans(source(), rollout(), update("rollout", deadline_s=900.0)))
    run.admit(Prompt("0-a", 1, False))
    run.work("rollout-0")
    run.claim("update-0")
    run.now = 100.0
    assert lines(run)["update", "leased"] == Blocked(
        "update", "leased", "update-0", 1, ("0-a",), 100.0, 800.0, "the run stops"
    )


def test_each_claim_of_a_stage_is_told_apart() -> None:
    run = drive(plans(source(), rollout(max_units=1), update("rollout")))
    run.admit(Prompt("0-a", 2, False))
    run.join("rollout-1")
    run.claim("rollout-0")
    run.now = 3.0
    run.claim("rollout-1")
    run.now = 5.0
    found = [line for line in run.coordinator.blocked(run.now) if line.stage == "rollout"]
    assert [(line.worker, line.units, line.seconds) for line in found] == [("rollout-0", 1, 5.0), ("rollout-1", 1, 2.0)]


def test_waiting_units_are_told_with_the_stages_that_are_not_done_with_them() -> None:
    run = two_uids()
    waiting = lines(run)["update", "waiting"]
    assert waiting == Blocked("update", "waiting", "", 4, ("0-a", "0-b"), 10.0, None, "they wait for reward")


def test_a_group_that_waits_for_its_last_unit_is_told_so() -> None:
    run = drive(grpo())
    run.admit(Prompt("0-a", 2, False))
    run.work("rollout-0")
    run.acknowledge("reward-0", run.claim("reward-0"), {key("0-a", 0)})
    waiting = lines(run)["advantage", "waiting"]
    assert waiting.units == 2
    assert waiting.action == "they wait for reward, the other units that are taken with them (group)"


def test_the_greedy_witness_of_a_join_is_nobodys_work_and_is_not_told() -> None:
    table = plans(source(), rollout(), StagePlan("join", ("rollout",), "join", kinds=SAMPLED), update("join"))
    run = drive(table)
    run.admit(Prompt("0-a", 2, False), Prompt("0-a", 1, True))
    assert lines(run)["join", "waiting"].units == 2


def test_a_stage_whose_worker_is_not_up_is_told_so() -> None:
    run = two_uids()
    run.die("reward-0")
    assert lines(run)["reward", "ready"].action == "no worker of the stage is up; its process is being started"
    run.join("reward-0")
    assert lines(run)["reward", "ready"].action == "reward-0 has to ask for them"


def test_units_that_wait_for_a_device_are_told_with_who_has_it() -> None:
    run = drive(plans(source(), rollout(device="gpu"), update("rollout", device="gpu")))
    run.admit(Prompt("0-a", 1, False))
    run.want("rollout-0")
    action = "update-0 is to free the device 'gpu' first"
    assert lines(run)["rollout", "ready"].action == action  # it has not asked for work
    run.want("update-0")
    assert lines(run)["rollout", "ready"].action == action  # it was called
    run.send(Suspended("update-0", run.now))
    assert ("rollout", "ready") not in lines(run)
    assert lines(run)["rollout", "leased"].worker == "rollout-0"


def test_a_unit_that_has_to_run_alone_is_told_with_the_process_it_waits_for() -> None:
    table = plans(source(), rollout(), reward(), StagePlan("count", ("rollout",), "row"), update("reward", "count"))
    run = drive(table, workers=["source-0", "rollout-0", "update-0"])
    run.admit(Prompt("0-a", 1, False))
    run.work("rollout-0")
    for life in range(2):
        run.join(f"reward-{life}")
        run.claim(f"reward-{life}")
        run.die(f"reward-{life}")
    for worker in ("count-0", "reward-2"):
        run.send(WorkerJoined(worker, worker.split("-")[0], run.now, "light"))
    run.claim("count-0")
    run.want("reward-2")
    assert lines(run)["reward", "ready"].action == (
        "what killed its worker twice runs alone, once the process of reward-2 holds nothing else"
    )


def test_the_uids_that_have_waited_longest_are_told_first_and_not_all_of_them() -> None:
    run = drive(plans(source(), rollout(), reward(), update("reward")))
    run.admit(*(Prompt(f"0-{name}", 1, False) for name in "abcdefgh"))
    rolled = run.claim("rollout-0")
    for name in "hgfedcba":
        run.now += 1
        run.acknowledge("rollout-0", rolled, {key(f"0-{name}")})
    ready = lines(run)["reward", "ready"]
    assert (ready.units, ready.uids, ready.seconds) == (8, ("0-h", "0-g", "0-f", "0-e", "0-d"), 7.0)


def test_what_is_told_comes_in_the_order_of_the_data() -> None:
    run = drive(grpo(), windows=2, max_staleness=1)
    run.admit(Prompt("0-a", 2, False))
    rolled = run.claim("rollout-0")
    run.acknowledge("rollout-0", rolled, {key("0-a", 0)})
    told = [(line.stage, line.state) for line in run.coordinator.blocked(run.now)]
    assert told == [
        ("source", "ready"),
        ("rollout", "leased"),
        ("reward", "ready"),
        ("reward", "waiting"),
        ("advantage", "waiting"),
        ("update", "waiting"),
    ]


def test_a_run_that_is_over_waits_for_nothing() -> None:
    run = drive(plans(source(), rollout(), update("rollout")))
    run.admit(Prompt("0-a", 1, False))
    run.work("rollout-0")
    run.work("update-0")
    assert lines(run) == {}
