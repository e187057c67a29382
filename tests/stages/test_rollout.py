"""Rollout on the transformers engine and a random model: one request per session, each with a seed of its own."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from dataflow.batch import Batch
from dataflow.errors import RowError
from dataflow.stage import StageContext
from dataflow.testing import make_batch
from stages.rollout import Rollout, RolloutConfig, session_seed


def seeds(run_seed: int) -> list[int]:
    return [session_seed(run_seed, uid, session, 0) for uid in ("0-a", "0-b") for session in range(4)]


def test_O02_every_session_has_a_seed_of_its_own_that_the_run_seed_decides() -> None:
    assert len(set(seeds(7))) == 8
    assert seeds(7) == seeds(7)
    assert not set(seeds(7)) & set(seeds(8))


def test_O02_turns_have_seeds_of_their_own_and_separators_do_not_make_two_units_one() -> None:
    assert len({session_seed(0, "0-a", 1, turn) for turn in range(5)}) == 5
    assert session_seed(0, "0-a1", 2, 0) != session_seed(0, "0-a", 12, 0)
    assert all(0 <= seed < 2**31 for seed in seeds(0))


def test_a_seed_is_the_same_in_every_version_of_this_project() -> None:
    # sha256 of the JSON text [7, "0-a", 1, 0], first four bytes, without the sign bit.
    assert session_seed(7, "0-a", 1, 0) == 455976357


def roll(model: Path, batch: Batch, **options: Any) -> dict[str, Any]:
    """Unit -> what rollout yields for it, on an engine of its own."""
    config = {"engine": "hf", "model": str(model), "max_tokens": 6, "max_model_len": 24, **options}
    stage = Rollout(RolloutConfig.model_validate(config))

    async def run() -> dict[str, Any]:
        await stage.setup(StageContext("run", Path("."), "rollout-0", seed=7))
        try:
            return {unit.id: outcome async for unit, outcome in stage.process(batch)}
        finally:
            await stage.close()

    return asyncio.run(run())


def prompts(*uids: str, sessions: int = 3, ids: tuple[int, ...] = (3, 4, 5)) -> list[dict[str, Any]]:
    rows = [{"uid": uid, "session": n, "prompt_ids": list(ids)} for uid in uids for n in range(sessions)]
    return rows + [{"uid": uid, "session": 0, "prompt_ids": list(ids), "is_baseline": True} for uid in uids]


@pytest.fixture(scope="module")
def rolled(tiny_model: Path) -> tuple[Batch, dict[str, Any]]:
    batch = make_batch(prompts("0-a", "0-b"))
    return batch, roll(tiny_model, batch)


def test_O01_every_session_is_one_request_and_one_row_of_its_declared_columns(
    rolled: tuple[Batch, dict[str, Any]],
) -> None:
    batch, rows = rolled
    assert sorted(rows) == sorted(unit.id for unit in batch.units)
    assert len(rows) == 8
    for columns in rows.values():
        assert {column.name: len(column.cast(columns[column.name])) for column in Rollout.writes} == dict.fromkeys(
            columns, 1
        )
        assert json.loads(columns["sampling"][0])["n"] == 1


def test_O05_every_drawn_token_has_a_mask_of_one_and_a_log_probability_the_end_token_too(
    rolled: tuple[Batch, dict[str, Any]],
) -> None:
    for columns in rolled[1].values():
        (ids,), (mask,), (log_probs,) = (
            columns[name] for name in ("response_ids", "response_mask", "rollout_log_probs")
        )
        assert len(ids) == len(mask) == len(log_probs)
        assert set(mask) == {1}
        assert all(value <= 0 for value in log_probs)
        ended = columns["finish_reason"] == ["stop"]
        assert ended == (ids[-1] == 0)
        assert ended or len(ids) == 6


def test_O02_sampled_sessions_record_their_seeds_and_greedy_ones_that_they_are_greedy(
    rolled: tuple[Batch, dict[str, Any]],
) -> None:
    batch, rows = rolled
    for unit in batch.units:
        sampling = json.loads(rows[unit.id]["sampling"][0])
        if unit.is_baseline:
            assert (sampling["greedy"], sampling["temperature"], sampling["seed"]) == (True, 0.0, None)
        else:
            assert sampling["seed"] == session_seed(7, unit.uid, unit.session, 0)
            assert sampling["temperature"] == 1.0


def test_sessions_of_a_prompt_differ_and_greedy_ones_of_equal_prompts_do_not(
    rolled: tuple[Batch, dict[str, Any]],
) -> None:
    batch, rows = rolled
    sampled = {tuple(rows[unit.id]["response_ids"][0]) for unit in batch.units if not unit.is_baseline}
    greedy = {tuple(rows[unit.id]["response_ids"][0]) for unit in batch.units if unit.is_baseline}
    assert len(sampled) > 3
    assert len(greedy) == 1


def test_a_response_depends_on_its_own_identity_and_not_on_what_else_is_in_the_batch(
    rolled: tuple[Batch, dict[str, Any]], tiny_model: Path
) -> None:
    alone = roll(tiny_model, make_batch(prompts("0-b")[::-1]))
    assert {unit: row["response_ids"] for unit, row in alone.items()} == {
        unit: row["response_ids"] for unit, row in rolled[1].items() if "0-b" in unit
    }


def test_what_was_generated_is_reported_greedy_sessions_apart(rolled: tuple[Batch, dict[str, Any]]) -> None:
    batch, rows = rolled
    lengths = {unit.id: len(rows[unit.id]["response_ids"][0]) for unit in batch.units}
    sampled = [lengths[unit.id] for unit in batch.units if not unit.is_baseline]
    assert batch.metrics["response/length_mean"] == (sum(sampled), 6.0)
    assert batch.metrics["rollout/tokens_per_row"] == (sum(lengths.values()), 8.0)
    cut = [rows[unit.id]["finish_reason"] == ["length"] for unit in batch.units if not unit.is_baseline]
    assert batch.metrics["response/truncated_share"] == (sum(cut), 6.0)


def test_O03_a_prompt_that_the_engine_refuses_fails_alone_and_is_not_tried_again(tiny_model: Path) -> None:
    rows = [
        {"uid": "0-a", "prompt_ids": [3, 4, 5]},
        {"uid": "0-long", "prompt_ids": [3] * 24},
        {"uid": "0-b", "prompt_ids": [5, 6]},
    ]
    outcomes = list(roll(tiny_model, make_batch(rows)).values())
    (failed,) = [outcome for outcome in outcomes if isinstance(outcome, RowError)]
    assert not failed.retry
    assert "24" in str(failed)
    assert len(outcomes) == 3
