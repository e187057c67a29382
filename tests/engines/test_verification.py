"""Whether an update is accepted, decided from numbers alone."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dataflow.weights import WeightsRef
from stages.engines.base import WeightsRejected
from stages.engines.fingerprint import SAMPLED_ELEMENTS, fingerprint
from stages.engines.verification import check_names, verify_update

BOUND = 0.01
REF = WeightsRef(
    version=3,
    path="3.safetensors",
    probe_ids=(1, 2, 3),
    probe_log_probs=(-1.0, -2.0),
    probe_step=0.5,
    fingerprints=(("a", 1.5), ("b", -2.0)),
)
RECEIVED = {"a": 1.5, "b": -2.0}


def test_an_update_within_the_bound_gives_its_largest_difference() -> None:
    # |-1.004 + 1| = 0.004, |-1.997 + 2| = 0.003
    assert verify_update(REF, [-1.004, -1.997], RECEIVED, BOUND) == pytest.approx(0.004)


@pytest.mark.parametrize("scores", [[-1.0, -2.02], [-1.0, math.nan], [math.nan, -2.0], [-1.0], []])
def test_scores_that_differ_or_are_missing_are_refused(scores: list[float]) -> None:
    with pytest.raises(WeightsRejected, match="version 3"):
        verify_update(REF, scores, RECEIVED, BOUND)


def test_an_update_without_a_probe_is_refused() -> None:
    with pytest.raises(WeightsRejected, match="no probe"):
        verify_update(replace(REF, probe_ids=(), probe_log_probs=()), [], RECEIVED, BOUND)


@pytest.mark.parametrize(
    ("received", "named"),
    [
        ({"a": 1.5, "b": -2.0000001}, "b"),
        ({"a": 1.5}, "b"),
        (RECEIVED | {"c": 0.0}, "c"),
        ({"a": math.nan, "b": -2.0}, "a"),
    ],
)
def test_fingerprints_decide_when_the_step_is_below_the_bound(received: dict[str, float], named: str) -> None:
    small = replace(REF, probe_step=0.5 * BOUND)

    assert verify_update(small, [-1.0, -2.0], RECEIVED, BOUND) == 0.0
    assert verify_update(REF, [-1.0, -2.0], received, BOUND) == 0.0
    with pytest.raises(WeightsRejected, match=f"'{named}'"):
        verify_update(small, [-1.0, -2.0], received, BOUND)


def test_a_small_step_without_published_fingerprints_is_refused() -> None:
    with pytest.raises(WeightsRejected):
        verify_update(replace(REF, probe_step=0.0, fingerprints=()), [-1.0, -2.0], RECEIVED, BOUND)


def test_missing_and_unknown_parameters_are_named() -> None:
    check_names(REF, ["b", "a"], {"a", "b"})
    with pytest.raises(WeightsRejected, match=r"missing parameters \['b'\], unknown parameters \['c'\]"):
        check_names(REF, ["a", "c"], {"a", "b"})


def test_a_fingerprint_is_the_sum_of_a_small_tensor() -> None:
    # 0.5 - 2 + 8 + 0.25 = 6.75, whatever the shape
    assert fingerprint(torch.tensor([[0.5, -2.0], [8.0, 0.25]])) == 6.75
    assert fingerprint(torch.tensor([])) == 0.0


def test_a_fingerprint_samples_a_large_tensor_evenly() -> None:
    # Elements 0, 4, 8, ... of 1024: 4 * (0 + 1 + ... + 255) = 4 * 32640
    assert SAMPLED_ELEMENTS == 256
    assert fingerprint(torch.arange(1024.0)) == 130560.0


def test_a_fingerprint_of_infinite_weights_equals_nothing() -> None:
    assert math.isnan(fingerprint(torch.tensor([1.0, math.inf, -math.inf])))


@given(
    values=st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=300),
    seed=st.integers(0, 99),
)
def test_a_fingerprint_sees_the_smallest_change_of_a_sampled_element(values: list[float], seed: int) -> None:
    tensor = torch.tensor(values, dtype=torch.float32)
    sampled = seed % min(len(values), SAMPLED_ELEMENTS) * len(values) // min(len(values), SAMPLED_ELEMENTS)
    changed = tensor.clone()
    changed[sampled] += 1.0

    assert fingerprint(tensor.clone()) == fingerprint(tensor)
    assert fingerprint(changed) == pytest.approx(fingerprint(tensor) + 1.0, abs=1e-4)
    assert fingerprint(changed) != fingerprint(tensor)


ORPHAN = """
import multiprocessing, os, sys, time
from stages.engines.parent import exit_with_parent

def child(ready):
    exit_with_parent()
    ready.send(os.getpid())
    time.sleep(600)

if __name__ == "__main__":
    here, there = multiprocessing.get_context("spawn").Pipe()
    multiprocessing.get_context("spawn").Process(target=child, args=(there,)).start()
    print(here.recv(), flush=True)
    sys.stdin.read()
"""


def test_a_child_ends_when_its_parent_is_killed(tmp_path: Any) -> None:
    script = tmp_path / "orphan.py"
    script.write_text(ORPHAN)
    with subprocess.Popen(
        [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        assert int(parent.stdout.readline()) > 0
        parent.kill()
        # The child holds the other end of the pipe: it reads as ended when the child is gone as well.
        assert parent.stdout.read() == ""
