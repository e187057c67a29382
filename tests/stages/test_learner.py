"""The learner on a random Llama of one layer: what a step depends on, and what is published."""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from dataflow.weights import WeightsDirectory
from stages.learner import Learner
from stages.scoring import TokenRow
from stages.training import LearnerConfig

MakeLearner = Callable[..., Learner]


@pytest.fixture
def make(tiny_model: Path) -> Iterator[MakeLearner]:
    """Makes learners, each with a directory of its own for its weights."""
    directories: list[WeightsDirectory] = []

    def begin(**options: Any) -> Learner:
        directories.append(WeightsDirectory(f"test-{uuid.uuid4().hex}"))
        directories[-1].create()
        config = {"model": str(tiny_model), "lr": 1e-3, "horizon": 16, **options}
        return Learner(LearnerConfig.model_validate(config), directories[-1])

    yield begin
    for directory in directories:
        directory.remove()


def fresh_model(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def log_probs(model: Any, prompt: Sequence[int], response: Sequence[int], temperature: float = 1.0) -> list[float]:
    """Log-probabilities of a response, by one plain forward pass of this row alone."""
    ids = torch.tensor([[*prompt, *response]])
    with torch.no_grad():
        logits = model(ids).logits[0, len(prompt) - 1 : -1].float() / temperature
    chosen = torch.log_softmax(logits, -1).gather(-1, torch.tensor(response)[:, None]).squeeze(-1)
    return [float(value) for value in chosen]


def row(
    model: Any,
    prompt: Sequence[int],
    response: Sequence[int],
    advantage: float,
    *,
    group: str = "a",
    mask: Sequence[int] | None = None,
    temperature: float = 1.0,
    current: bool = True,
) -> TokenRow:
    """A row drawn by the model as it is now."""
    return TokenRow(
        group=group,
        prompt_ids=np.array(prompt, np.int32),
        response_ids=np.array(response, np.int32),
        mask=np.array([1] * len(response) if mask is None else mask, np.int8),
        values={
            "rollout_log_probs": np.array(log_probs(model, prompt, response, temperature), np.float32),
            "advantages": np.full(len(response), advantage, np.float32),
        },
        current=current,
    )


@pytest.fixture(scope="module")
def rows(tiny_model: Path) -> list[TokenRow]:
    """Seven rows of many lengths in three groups, with end tokens, pad ids and masked tokens in them."""
    model, dice = fresh_model(tiny_model), np.random.default_rng(1)
    lengths = [(3, 1), (2, 6), (5, 4), (9, 3), (1, 2), (4, 4), (2, 1)]
    made = []
    for number, (prompt, response) in enumerate(lengths):
        ids = dice.integers(0, 32, prompt + response)
        mask = dice.integers(0, 2, response) | (np.arange(response) == 0)
        made.append(
            row(
                model,
                ids[:prompt].tolist(),
                ids[prompt:].tolist(),
                float(dice.normal()),
                group="abc"[number % 3],
                mask=mask.tolist(),
            )
        )
    return made


def weights(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in learner.model.state_dict().items()}


def largest_difference(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> float:
    return max(float((first[name] - second[name]).abs().max()) for name in first)


# The step


@pytest.mark.parametrize(
    "aggregation", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
)
def test_L01_the_step_does_not_depend_on_the_micro_batch_split(
    make: MakeLearner, rows: list[TokenRow], aggregation: str
) -> None:
    learners = [make(aggregation=aggregation, micro_batch_tokens=tokens, lr=1e-4) for tokens in (16, 4096)]
    before = weights(learners[0])
    metrics = [learner.update(rows) for learner in learners]
    assert largest_difference(weights(learners[0]), weights(learners[1])) < 1e-6
    assert largest_difference(weights(learners[0]), before) > 5e-5
    for name in ("loss/policy", "grad_norm", "policy/nll", "update/clipped"):
        assert metrics[0][name] == pytest.approx(metrics[1][name], rel=1e-4, abs=1e-6)


def test_the_step_does_not_depend_on_the_order_of_the_rows(make: MakeLearner, rows: list[TokenRow]) -> None:
    first, second = make(lr=1e-4), make(lr=1e-4)
    first.update(rows)
    second.update(rows[::-1])
    assert largest_difference(weights(first), weights(second)) < 1e-6


def test_two_learners_make_the_same_step_bit_for_bit(make: MakeLearner, rows: list[TokenRow]) -> None:
    first, second = make(), make()
    assert first.update(rows) == second.update(rows)
    assert largest_difference(weights(first), weights(second)) == 0.0


def test_L02_with_no_policy_token_there_is_no_step_and_the_weights_stay_bit_for_bit(
    make: MakeLearner, tiny_model: Path
) -> None:
    learner = make(weight_decay=0.1)
    before = weights(learner)
    masked = [row(fresh_model(tiny_model), [3, 4], [5, 6], 1.0, mask=[0, 0]) for _ in range(2)]
    for batch in (masked, []):
        metrics = learner.update(batch)
        assert (metrics["update/optimizer_steps"], metrics["update/tokens"]) == (0.0, 0.0)
        assert not any(math.isnan(value) for value in metrics.values())
    assert largest_difference(before, weights(learner)) == 0.0
    assert learner.version == 2


def test_L02_a_row_without_policy_tokens_changes_nothing_beside_others(
    make: MakeLearner, rows: list[TokenRow], tiny_model: Path
) -> None:
    masked = row(fresh_model(tiny_model), [3, 4], [5, 6], 1.0, mask=[0, 0])
    empty = row(fresh_model(tiny_model), [3, 4, 5], [6], 1.0, mask=[0])
    with_them, without = make(), make()
    assert with_them.update([masked, *rows, empty]) == without.update(rows)
    assert largest_difference(weights(with_them), weights(without)) == 0.0


def test_on_its_own_rows_every_ratio_is_one_and_the_loss_is_minus_the_mean_advantage(
    make: MakeLearner, rows: list[TokenRow]
) -> None:
    metrics = make().update(rows)
    tokens = sum(int(one.mask.sum()) for one in rows)
    expected = -sum(float(one.values["advantages"][0]) * int(one.mask.sum()) for one in rows) / tokens
    assert metrics["loss/policy"] == pytest.approx(expected, abs=1e-6)
    assert (metrics["update/clipped"], metrics["update/tokens"]) == (0.0, tokens)
    assert metrics["update/old_kl"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["mismatch/max_abs"] < 1e-5


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_O10_the_learner_divides_its_logits_by_the_temperature_of_the_rows(
    make: MakeLearner, tiny_model: Path, temperature: float
) -> None:
    model = fresh_model(tiny_model)
    drawn = [row(model, [3, 4, 5], [6, 7, 8], 1.0, temperature=temperature)]
    assert make(temperature=temperature).update(drawn)["mismatch/max_abs"] < 1e-5
    raw = make(temperature=1.0).update(drawn)["mismatch/max_abs"]
    expected = np.abs(drawn[0].values["rollout_log_probs"] - log_probs(model, [3, 4, 5], [6, 7, 8])).max()
    assert expected > 0.01
    assert raw == pytest.approx(expected, abs=1e-5)


def test_a_step_raises_the_probability_of_what_was_good_and_lowers_that_of_what_was_bad(
    make: MakeLearner, tiny_model: Path
) -> None:
    learner, model = make(), fresh_model(tiny_model)
    good, bad = ([3, 4], [5, 6]), ([7, 8], [9, 10])
    learner.update([row(model, *good, 1.0), row(model, *bad, -1.0)])
    assert sum(log_probs(learner.model, *good)) > sum(log_probs(model, *good))
    assert sum(log_probs(learner.model, *bad)) < sum(log_probs(model, *bad))


def test_rows_of_older_weights_are_counted_as_drift_and_not_as_mismatch(make: MakeLearner, tiny_model: Path) -> None:
    model = fresh_model(tiny_model)
    learner = make()
    stale = row(model, [3, 4], [5, 6], 1.0, current=False)
    learner.update([stale])
    metrics = learner.update([stale, row(learner.model, [7, 8], [9], 1.0)])
    assert metrics["mismatch/max_abs"] < 1e-5
    assert metrics["drift/max_abs"] > 1e-3


@pytest.mark.parametrize(("mini_batches", "epochs", "steps"), [(1, 1, 1), (2, 1, 2), (3, 2, 6), (9, 1, 3)])
def test_mini_batches_and_epochs_decide_the_number_of_steps_and_groups_stay_whole(
    make: MakeLearner, rows: list[TokenRow], mini_batches: int, epochs: int, steps: int
) -> None:
    # Three groups: there are no more mini-batches than that.
    metrics = make(mini_batches=mini_batches, epochs=epochs).update(rows)
    assert metrics["update/optimizer_steps"] == steps


def test_with_several_steps_the_engine_is_compared_before_the_first_of_them(
    make: MakeLearner, rows: list[TokenRow]
) -> None:
    assert make(lr=0.1, mini_batches=3, epochs=3).update(rows)["mismatch/max_abs"] < 1e-5


def test_a_gradient_that_is_not_finite_stops_the_update_before_the_step(make: MakeLearner, tiny_model: Path) -> None:
    learner = make()
    before = weights(learner)
    broken = row(fresh_model(tiny_model), [3, 4], [5, 6], math.nan)
    with pytest.raises((FloatingPointError, ValueError), match=r"finite|nan"):
        learner.update([broken])
    assert largest_difference(before, weights(learner)) == 0.0


# What is published


def test_every_update_makes_a_new_version_and_its_file_holds_the_models_tensors(
    make: MakeLearner, rows: list[TokenRow]
) -> None:
    learner = make()
    learner.update(rows)
    first = learner.publish()
    learner.update(rows)
    second = learner.publish()
    assert (first.version, second.version) == (1, 2)
    saved, held = load_file(second.path), weights(learner)
    assert all(torch.equal(saved[name], held[name]) for name in saved)
    assert set(held) - set(saved) == {"lm_head.weight"}
    older = load_file(first.path)
    assert any(not torch.equal(older[name], saved[name]) for name in saved)


def test_tied_embeddings_are_saved_once(make: MakeLearner) -> None:
    learner = make()
    assert learner.model.lm_head.weight is learner.model.model.embed_tokens.weight
    saved = load_file(learner.publish().path)
    assert "model.embed_tokens.weight" in saved
    assert "lm_head.weight" not in saved


def test_a_published_file_is_private_and_nothing_unfinished_stays_beside_it(make: MakeLearner) -> None:
    path = Path(make().publish().path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_the_published_probe_is_what_a_fresh_model_says_that_loads_the_file(
    make: MakeLearner, rows: list[TokenRow], tiny_model: Path
) -> None:
    learner = make(temperature=0.5)  # the probe is scored at temperature 1 whatever the rows have
    learner.update(rows)
    ref = learner.publish()
    model = fresh_model(tiny_model)
    missing, unexpected = model.load_state_dict(load_file(ref.path), strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    expected = log_probs(model, ref.probe_ids[:1], ref.probe_ids[1:])
    assert list(ref.probe_log_probs) == pytest.approx(expected, abs=1e-5)
    assert len(ref.probe_log_probs) == len(ref.probe_ids) - 1


def test_the_step_of_the_probe_is_its_largest_change_since_the_version_before(
    make: MakeLearner, rows: list[TokenRow]
) -> None:
    learner = make()
    still = learner.publish()
    assert still.probe_step == 0.0
    learner.update(rows)
    moved = learner.publish()
    changes = np.abs(np.array(moved.probe_log_probs) - np.array(still.probe_log_probs))
    assert moved.probe_step == pytest.approx(float(changes.max()))
    assert moved.fingerprints != still.fingerprints


def test_a_saved_model_is_one_that_transformers_loads(make: MakeLearner, rows: list[TokenRow], tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    learner = make()
    learner.update(rows)
    learner.save(tmp_path / "model")
    loaded = fresh_model(tmp_path / "model")
    assert largest_difference(weights(learner), loaded.state_dict()) == 0.0
    assert AutoTokenizer.from_pretrained(tmp_path / "model").pad_token == "<pad>"


# Old log-probabilities, KL, entropy, correction


def test_recomputed_log_probabilities_make_every_ratio_one_whatever_the_engine_said(
    make: MakeLearner, rows: list[TokenRow]
) -> None:
    shifted = [one.with_values(rollout_log_probs=one.values["rollout_log_probs"] - 0.5) for one in rows]
    learner, plain = make(old_log_probs="recomputed", lr=1e-4), make(lr=1e-4)
    metrics = learner.update(shifted)
    plain.update(rows)
    assert metrics["update/old_kl"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["mismatch/mean_abs"] == pytest.approx(0.5, abs=1e-5)  # still told of the engine
    assert largest_difference(weights(learner), weights(plain)) < 1e-6


def test_a_kl_loss_is_zero_at_the_reference_and_pulls_back_to_it(make: MakeLearner, rows: list[TokenRow]) -> None:
    referred = [one.with_values(ref_log_probs=one.values["rollout_log_probs"], advantages=0 * one.mask) for one in rows]
    options = {"kl_loss": {"coef": 1.0, "kind": "k2"}, "lr": 1e-3}
    assert make(**options).update(referred)["policy/ref_kl"] == pytest.approx(0.0, abs=1e-9)
    # Away from the reference: the same rows, of a reference that likes them better.
    likelier = [one.with_values(ref_log_probs=one.values["ref_log_probs"] + 0.5) for one in referred]
    learner = make(**options)
    first, second = learner.update(likelier), learner.update(likelier)
    assert first["policy/ref_kl"] == pytest.approx(0.125, rel=1e-2)
    assert second["policy/ref_kl"] < first["policy/ref_kl"]


def test_the_entropy_bonus_raises_the_entropy(make: MakeLearner, rows: list[TokenRow]) -> None:
    idle = [one.with_values(advantages=0 * one.mask) for one in rows]
    learner = make(entropy_coef=1.0, lr=1e-3)
    first, second = learner.update(idle), learner.update(idle)
    assert second["policy/entropy"] > first["policy/entropy"]


def test_importance_weights_scale_the_step_and_rejected_tokens_leave_it(
    make: MakeLearner, rows: list[TokenRow]
) -> None:
    # Every token is e^0.1 likelier now than when it was drawn, but those of group b, e^2.
    shift = {"a": 0.1, "b": 2.0, "c": 0.1}
    stale = [
        one.with_values(rollout_log_probs=one.values["rollout_log_probs"] - np.float32(shift[one.group]))
        for one in rows
    ]
    correction = {
        "weights": {"level": "token", "high": 1.5},
        "reject": [{"kind": "k1", "level": "token", "high": 2.0}],
    }
    learner = make(old_log_probs="recomputed", correction=correction, lr=1e-4)
    metrics = learner.update(stale)
    tokens = {name: sum(int(one.mask.sum()) for one in rows if one.group == name) for name in "abc"}
    assert metrics["correction/rejected_share"] == pytest.approx(tokens["b"] / sum(tokens.values()), abs=1e-6)
    assert metrics["correction/weight_max"] == pytest.approx(1.5)
    left = [one for one in rows if one.group != "b"]
    scaled = [one.with_values(advantages=one.values["advantages"] * np.float32(math.exp(0.1))) for one in left]
    expected = make(lr=1e-4)
    expected.update(scaled)
    assert largest_difference(weights(learner), weights(expected)) < 2e-6


def test_a_rejected_session_is_in_no_denominator_and_with_all_rejected_there_is_no_step(
    make: MakeLearner, rows: list[TokenRow]
) -> None:
    shift = {"a": 0.0, "b": 2.0, "c": 0.0}
    stale = [
        one.with_values(rollout_log_probs=one.values["rollout_log_probs"] - np.float32(shift[one.group]))
        for one in rows
    ]
    options = {"old_log_probs": "recomputed", "aggregation": "seq-mean-token-sum", "lr": 1e-4}
    rejecting = {"correction": {"reject": [{"kind": "k1", "level": "seq_mean", "high": 1.5}]}}
    learner, expected = make(**options, **rejecting), make(**options)
    got = learner.update(stale)
    assert got["loss/policy"] == pytest.approx(
        expected.update([one for one in rows if one.group != "b"])["loss/policy"], abs=1e-6
    )
    before = weights(learner)
    metrics = learner.update([one for one in stale if one.group == "b"])
    assert metrics["update/optimizer_steps"] == 0.0
    assert metrics["correction/rejected_share"] == 1.0
    assert largest_difference(before, weights(learner)) == 0.0


@pytest.mark.parametrize("loss", ["gspo", "geo_mean", "clip_cov", "kl_cov"])
def test_losses_of_sequences_and_of_selected_tokens_do_not_depend_on_the_micro_batch_split(
    make: MakeLearner, rows: list[TokenRow], loss: str
) -> None:
    # Two turns of one session are one sequence, in one micro-batch however small.
    turns = [
        # Away from the old policy, where |d| of kl_cov has a slope.
        replace(one, session="s" if index < 2 else "").with_values(
            rollout_log_probs=one.values["rollout_log_probs"] - np.float32(0.1)
        )
        for index, one in enumerate(rows)
    ]
    options = {"share": 0.3} if loss.endswith("cov") else {}
    made = [make(loss=loss, loss_options=options, micro_batch_tokens=tokens, lr=1e-4) for tokens in (16, 4096)]
    for learner in made:
        learner.update(turns)
    assert largest_difference(weights(made[0]), weights(made[1])) < 1e-6


# An adapter


def test_an_adapter_changes_nothing_at_first_and_its_merged_weights_are_what_is_published_and_saved(
    make: MakeLearner, rows: list[TokenRow], tiny_model: Path, tmp_path: Path
) -> None:
    initial = fresh_model(tiny_model)
    learner = make(lora={"rank": 4}, kl_loss={"coef": 0.1}, lr=1e-2)
    before = load_file(learner.publish().path)
    assert all(torch.equal(before[name], initial.state_dict()[name]) for name in before)
    metrics = [learner.update(rows) for _ in range(2)]
    assert metrics[0]["mismatch/max_abs"] < 1e-5
    # The policy without its adapter is the reference.
    assert metrics[0]["policy/ref_kl"] == pytest.approx(0.0, abs=1e-6)
    assert metrics[1]["policy/ref_kl"] > 1e-6
    base = learner.model.get_base_model().model.layers[0].self_attn.q_proj.base_layer.weight
    assert torch.equal(base, initial.model.layers[0].self_attn.q_proj.weight)
    after = load_file(learner.publish().path)
    assert set(after) == set(before)
    merged = fresh_model(tiny_model)
    merged.load_state_dict(after, strict=False)
    ids = torch.tensor([[3, 4, 5, 6]])
    with torch.no_grad():
        torch.testing.assert_close(merged(ids).logits, learner.model(ids).logits, atol=1e-5, rtol=1e-5)
        assert float((merged(ids).logits - initial(ids).logits).abs().max()) > 1e-4
    learner.save(tmp_path / "model")
    saved = fresh_model(tmp_path / "model")
    assert largest_difference(saved.state_dict(), merged.state_dict()) == 0.0
