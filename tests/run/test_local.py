"""Whole runs in one process: real models, the in-memory queue."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

import dataflow
from dataflow.run import main
from stages.algorithms.catalog import ESTIMATORS

SMALL = ["engine=hf", "--local", "windows=2", "data.prompts_per_window=6", "rollout.n=4", "run.save_model=false"]


def run(tmp_path: Path, name: str, *arguments: str) -> dataflow.inspect.RunView:
    code = main([*SMALL, f"run.dir={tmp_path}", f"run.name={name}", *arguments])
    assert code == 0
    return dataflow.connect(tmp_path / name)


# Those that read no column of a model beside the policy, and no named rewards.
PLAIN = [
    name
    for name, needs in ESTIMATORS.items()
    if not {"values", "ref_log_probs", "sum_pi_squared", "components"} & set(needs.inputs)
]


@pytest.mark.parametrize("estimator", PLAIN)
def test_every_estimator_runs_the_same_config(tmp_path: Path, estimator: str) -> None:
    view = run(tmp_path, estimator, f"estimator={estimator}")
    ledger = view.ledger()
    assert ledger["balanced"]
    greedy = {"baseline used as baseline": 12} if ESTIMATORS[estimator].greedy_baseline else {}
    assert ledger["settled"] == {"sampled trained": 48, **greedy}


def test_gdpo_compares_the_numbers_that_a_users_reward_returns_beside_its_score(tmp_path: Path) -> None:
    path = tmp_path / "two.py"
    path.write_text(
        "def reward(response, ground_truth):\n"
        "    right, short = response.strip() == str(ground_truth), 1 / (1 + len(response))\n"
        "    return {'score': right + short, 'right': right, 'short': short}\n"
    )
    names = ["estimator=gdpo", "reward_keys={right: 1.0, short: 0.5}", f"reward.function={path}:reward"]
    view = run(tmp_path, "gdpo", *names)
    assert view.ledger()["settled"] == {"sampled trained": 48}
    values = [value for row in view.table("train/000000")["advantages"].to_pylist() for value in row]
    assert sum(values) == pytest.approx(0, abs=1e-4)  # whitened over the window
    assert max(values) > 0.5


def test_rae_compares_a_window_with_the_running_mean_of_those_before_it(tmp_path: Path) -> None:
    view = run(tmp_path, "rae", "estimator=rae", "baseline.ema_decay=0.5")
    columns = ["reward", "advantages", "data_source"]
    first, second = (view.table(f"train/00000{window}", columns).to_pylist() for window in range(2))
    assert all(row["advantages"][0] == pytest.approx(row["reward"]) for row in first)
    sources = {row["data_source"] for row in first}
    means = {
        source: statistics.fmean(row["reward"] for row in first if row["data_source"] == source) for source in sources
    }
    assert all(row["advantages"][0] == pytest.approx(row["reward"] - means[row["data_source"]]) for row in second)
    assert any(means.values())


def test_two_runs_give_the_same_rewards_advantages_and_weights(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    views = [run(tmp_path, name, "run.save_model=true") for name in ("one", "two")]
    tables = [view.table("train/000001", ["response_ids", "reward", "advantages"]).drop(["unit"]) for view in views]
    assert tables[0].equals(tables[1])
    weights = [load_file(view.path / "model" / "model.safetensors") for view in views]
    assert all((weights[0][name] == weights[1][name]).all() for name in weights[0])


def test_a_users_jsonl_and_custom_stage_run_in_the_same_graph(tmp_path: Path, prompts: Path, count_stage: Path) -> None:
    view = run(tmp_path, "mine", f"data.train={prompts}", f'stages=[{{use: "{count_stage}:count_words"}}]')
    table = view.table("train/000000", ["response_text", "response_words", "extra", "ground_truth"])
    assert table["response_words"].to_pylist() == [len(text.split()) for text in table["response_text"].to_pylist()]
    assert json.loads(table["extra"][0].as_py()) == {"topic": "sums"}
    assert isinstance(json.loads(table["ground_truth"][0].as_py()), int)


def test_a_users_parquet_is_trained_on(tmp_path: Path, prompts: Path) -> None:
    rows = [json.loads(line) for line in prompts.read_text().splitlines()]
    pq.write_table(dataflow.inspect.pa.Table.from_pylist(rows), tmp_path / "mine.parquet")
    view = run(tmp_path, "parquet", f"data.train={tmp_path / 'mine.parquet'}")
    assert view.ledger()["created"] == {"sampled": 48, "baseline": 12}


def test_greedy_rows_are_recorded_as_greedy_and_never_trained_on(tmp_path: Path) -> None:
    table = run(tmp_path, "greedy").table("train/000000")
    greedy = table.filter(table["is_baseline"])
    assert greedy.num_rows == 6
    for sampling in greedy["sampling"].to_pylist():
        recorded = json.loads(sampling)
        assert (recorded["temperature"], recorded["top_p"], recorded["top_k"], recorded["n"]) == (0.0, 1.0, -1, 1)
    assert greedy["trained_version"].null_count == 6
    sampled = table.filter(pc.invert(table["is_baseline"]))
    assert set(sampled["baseline_source"].to_pylist()) == {"greedy"}
    assert sampled["trained_version"].null_count == 0


def test_R12_a_reward_that_raises_drops_its_rows_by_name_and_the_run_goes_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text(
        "def reward(response, ground_truth, *, prompt):\n"
        "    if prompt.startswith('1'):\n"
        "        raise ValueError('cannot grade ' + prompt)\n"
        "    return float(response == ground_truth)\n"
    )
    view = run(tmp_path, "raises", f"reward.function={reward}:reward", "windows=3", "data.prompts_per_window=8")
    settled = view.ledger()["settled"]
    assert settled["sampled dropped: reward error"] > 0
    assert settled["sampled trained"] > 0
    assert view.ledger()["balanced"]
    printed = capfd.readouterr().out
    assert printed.count("error: ValueError: cannot grade 1") == 1
    bad = view.table("train/000000", ["reward", "reward_status", "reward_info"])
    bad = bad.filter(pc.equal(bad["reward_status"], "error"))
    assert bad["reward"].null_count == bad.num_rows
    assert all("cannot grade 1" in json.loads(info)["error"] for info in bad["reward_info"].to_pylist())


def test_O03_a_prompt_that_is_too_long_is_dropped_by_name(tmp_path: Path, prompts: Path) -> None:
    with prompts.open("a") as file:
        file.write(json.dumps({"prompt": "1+1+1+1+1+1+1+1+1+1=", "ground_truth": 10}) + "\n")
    view = run(tmp_path, "long", f"data.train={prompts}", "windows=3", "data.prompts_per_window=5")
    settled = view.ledger()["settled"]
    assert settled["sampled dropped: prompt too long"] == 4
    assert settled["baseline dropped: prompt too long"] == 1
    assert settled["sampled trained"] == 48


def test_D01_fewer_prompts_than_a_window_make_one_short_window(tmp_path: Path, prompts: Path) -> None:
    view = run(tmp_path, "few", f"data.train={prompts}", "windows=null", "data.prompts_per_window=64")
    assert view.metrics().num_rows == 1
    assert view.ledger()["settled"]["sampled trained"] == 48


def test_a_second_run_of_the_same_name_gets_a_directory_of_its_own(tmp_path: Path) -> None:
    run(tmp_path, "again", "windows=1")
    run(tmp_path, "again", "windows=1")
    assert sorted(path.name for path in tmp_path.glob("again*")) == ["again", "again-2"]


def test_nothing_left_to_train_on_ends_the_run_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text("def reward(response, ground_truth):\n    raise RuntimeError('no grader')\n")
    code = main([*SMALL, f"run.dir={tmp_path}", f"reward.function={reward}:reward", "windows=5"])
    assert code == 1
    error = capsys.readouterr().err
    assert "windows in a row had nothing to train on" in error
    assert "dropped: reward error\n" in error


def test_I01_tables_are_read_inside_a_running_event_loop(tmp_path: Path) -> None:
    import asyncio

    view = run(tmp_path, "loop", "windows=1")

    async def look() -> int:
        return int(view.table("train/000000").num_rows)

    assert asyncio.run(look()) == view.table("train/000000").num_rows == 30


def test_a_unit_that_a_side_stage_drops_is_never_trained_on(tmp_path: Path) -> None:
    stage = tmp_path / "side.py"
    stage.write_text(
        "import time\n"
        "import pyarrow as pa\n"
        "from dataflow import Column, Drop, stage\n\n"
        "@stage(reads=['response_text'], writes=[Column('long_enough', pa.bool_())])\n"
        "def side(batch):\n"
        "    time.sleep(0.05)  # later than the road to the update would be\n"
        "    return {'long_enough': [True if unit.session else Drop('first session') for unit in batch.units]}\n"
    )
    view = run(tmp_path, "side", f'stages=[{{use: "{stage}:side"}}]', "estimator=reinforce")
    assert view.ledger()["settled"] == {"sampled dropped: first session": 12, "sampled trained": 36}
    table = view.table("train/000000")
    assert all(row["trained_version"] is None for row in table.to_pylist() if row["outcome"] != "trained")


def test_C03_a_scorer_that_is_always_zero_trains_nothing_and_says_so(tmp_path: Path) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text("def reward(response, ground_truth):\n    return 0.0\n")
    view = run(tmp_path, "zero", "estimator=grpo", f"reward.function={reward}:reward")
    assert view.metrics()["advantage/zero_group_share"].to_pylist() == [1.0, 1.0]
    assert view.metrics()["loss/policy"].to_pylist() == [0.0, 0.0]


# Graded by which prompt it is, so that the test knows which groups have spread: every third does.
THIRD = """\
import hashlib

def reward(response, ground_truth, *, prompt, extra):
    spread = extra["number"] % 3 == 2
    return hashlib.sha256(response.encode()).digest()[0] / 256 if spread else 0.0
"""
REFILLED = ["estimator=grpo", "filter.groups=true", "rollout.n=8", "data.prompts_per_window=2", "data.shuffle=false"]


@pytest.fixture
def thirds(tmp_path: Path) -> list[str]:
    """Settings of a run whose prompts teach something every third time."""
    reward, data = tmp_path / "third.py", tmp_path / "thirds.jsonl"
    reward.write_text(THIRD)
    rows = [{"prompt": f"{n}+1=", "ground_truth": n + 1, "prompt_id": str(n), "number": n} for n in range(10, 31)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [*REFILLED, f"data.train={data}", f"reward.function={reward}:reward", "rollout.max_sequences=1"]


def trained_prompts(view: dataflow.inspect.RunView, window: str) -> dict[str, int]:
    """Uid -> the draw of its window with which it came, of the groups that were trained on."""
    table = view.table(window, ["uid", "draw", "outcome"]).to_pylist()
    return {row["uid"]: row["draw"] for row in table if row["outcome"] == "trained"}


def test_C03_windows_are_refilled_until_each_trains_on_its_number_of_groups(
    tmp_path: Path, thirds: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    view = run(tmp_path, "refilled", *thirds, "windows=3")
    # Window 0 draws 10 and 11, then 12, 13 and 14; window 1 draws 15 and 16, then 17 and 18, then 19 and 20.
    for window, expected in enumerate([{"0-11": 0, "0-14": 3}, {"0-17": 1, "0-20": 3}, {"0-23": 1, "0-26": 3}]):
        assert trained_prompts(view, f"train/{window:06d}") == expected
    ledger = view.ledger()
    assert ledger["balanced"]
    assert ledger["settled"] == {"sampled trained": 48, "sampled dropped: no spread": 88}
    assert view.metrics()["refill/draws"].to_pylist() == [3, 3, 3]
    assert view.metrics()["filter/dropped_groups"].to_pylist() == [3, 4, 4]
    printed = capfd.readouterr().out
    assert "reproducible: yes" in printed
    assert "groups to train on" not in printed


def test_a_refilled_run_gives_the_same_prompts_rewards_and_advantages_again(tmp_path: Path, thirds: list[str]) -> None:
    views = [run(tmp_path, name, *thirds) for name in ("one", "two")]
    names = ["uid", "draw", "response_ids", "reward", "advantages"]
    first, second = ([view.table(f"train/{window:06d}", names).drop(["unit"]) for window in range(2)] for view in views)
    assert first == second


def test_a_refilled_run_ends_with_its_epochs_and_its_last_window_takes_what_is_there(
    tmp_path: Path, thirds: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    view = run(tmp_path, "used-up", *thirds, "windows=null")
    # 21 prompts, of which 11, 14, .. 29 have spread: seven groups in windows of two.
    assert [len(trained_prompts(view, f"train/{window:06d}")) for window in range(4)] == [2, 2, 2, 1]
    assert view.metrics().num_rows == 4
    assert view.ledger()["created"] == {"sampled": 21 * 8}
    assert capfd.readouterr().out.count("1 of 2 groups to train on") == 1


def test_I04_each_unit_has_a_line_that_says_how_far_it_came_and_why_it_stopped(tmp_path: Path) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text(
        "def reward(response, ground_truth, *, prompt):\n"
        "    if prompt == '11+21=':\n"
        "        raise ValueError('no key')\n"
        "    return 1.0\n"
    )
    data = tmp_path / "two.jsonl"
    rows = [("11+21=", 32), ("12+22=", 34), ("1+1+1+1+1+1+1+1+1=", 9)]
    data.write_text("".join(json.dumps({"prompt": p, "ground_truth": t, "prompt_id": p}) + "\n" for p, t in rows))
    view = run(tmp_path, "why", f"data.train={data}", f"reward.function={reward}:reward", "windows=1", "estimator=rloo")
    lines = {row["uid"]: row for row in view.table("train/000000").to_pylist()}
    assert lines["0-12+22="]["outcome"] == "trained"
    assert lines["0-12+22="]["done"] == ["rollout", "reward", "advantage", "update"]
    assert lines["0-11+21="]["outcome"] == "dropped: reward error"
    assert "no key" in lines["0-11+21="]["reward_info"]
    assert lines["0-1+1+1+1+1+1+1+1+1="]["outcome"] == "dropped: prompt too long"
    assert lines["0-1+1+1+1+1+1+1+1+1="]["response_ids"] is None


def test_a_table_has_every_column_from_the_first_moment_on(tmp_path: Path, prompts: Path) -> None:
    stage = tmp_path / "look.py"
    stage.write_text(
        "import pyarrow as pa\n"
        "from pathlib import Path\n"
        "from dataflow import Column, Stage, connect\n\n"
        "class Look(Stage):\n"
        "    name = 'look'\n"
        "    reads = ('response_text',)\n"
        "    writes = (Column('columns_seen', pa.int32()),)\n"
        "    def setup(self, context):\n"
        "        self.run_dir = context.run_dir\n"
        "    def process(self, batch):\n"
        "        table = connect(self.run_dir).table(batch.window)\n"
        "        assert table['trained_version'].null_count == table.num_rows\n"
        "        return {'columns_seen': [table.num_columns] * len(batch)}\n"
    )
    view = run(tmp_path, "look", f"data.train={prompts}", f'stages=[{{use: "{stage}:Look"}}]', "windows=1")
    table = view.table("train/000000")
    assert set(table["columns_seen"].to_pylist()) == {table.num_columns}
    assert view.ledger()["settled"] == {"sampled trained": 24, "baseline used as baseline": 6}


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("lr=1", "did you mean 'update.lr' or 'critic.lr'?"),
        ("engine=vlm", "did you mean 'vllm'?"),
        ('stages=[{use: "a.py:f", batchrows: 3}]', "did you mean 'batch_rows'?"),
        ("reward.function=builtins:len", "called as function(response, ground_truth)"),
        ("run.name=a/b", "run.name"),
        ("model.path=./nothing", "there is no directory './nothing'"),
        ("queue.timeout_s=-1", "queue.timeout_s"),
    ],
)
def test_C01_what_is_mistyped_is_refused_with_what_was_meant(
    argument: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--check", argument]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("declared", "said"),
    [
        ("reads='response_text', writes=[]", "reads is a list of column names"),
        ("reads=[], writes=['c']", "writes is a list of dataflow.Column"),
    ],
)
def test_a_stage_whose_declaration_is_no_list_of_columns_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], declared: str, said: str
) -> None:
    stage = tmp_path / "bad.py"
    stage.write_text(f"from dataflow import stage\n\n@stage({declared})\ndef bad(batch):\n    return {{}}\n")
    assert main(["--check", f'stages=[{{use: "{stage}:bad"}}]']) == 2
    assert said in capsys.readouterr().err


def test_D08_messages_for_a_model_without_a_chat_template_are_refused_before_the_first_window(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "chat.jsonl"
    data.write_text(json.dumps({"prompt": [{"role": "user", "content": "1+1="}], "ground_truth": 2}) + "\n")
    assert main([*SMALL, f"run.dir={tmp_path}", f"data.train={data}"]) == 2
    assert "has no chat template" in capsys.readouterr().err
