"""The critic, and the stages that look at responses with a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dataflow.stage import StageContext
from dataflow.testing import make_batch
from dataflow.weights import WeightsRef
from stages.critic import Critic, ValueModel
from stages.scores import RefLogProbs, ScoringConfig, SumPiSquared, Values
from stages.scoring import TokenRow, count_sequences, micro_batches, unpad
from stages.training import CriticConfig
from tests.stages.test_learner import fresh_model, log_probs

SEQUENCES = [([3, 4], [5, 6, 7]), ([8], [9]), ([10, 11, 12], [6, 7])]


def rows(**values: list[Any]) -> list[TokenRow]:
    made = []
    for index, (prompt, response) in enumerate(SEQUENCES):
        numbers = {name: np.asarray(of[index], np.float32) for name, of in values.items()}
        made.append(TokenRow(np.array(prompt), np.array(response), np.ones(len(response)), numbers))
    return made


def batch(weights: WeightsRef | None = None) -> Any:
    made = make_batch(
        [
            {
                "uid": f"u{index}",
                "prompt_ids": np.array(prompt),
                "response_ids": np.array(response),
                "response_mask": np.ones(len(response)),
            }
            for index, (prompt, response) in enumerate(SEQUENCES)
        ]
    )
    made.weights = weights
    return made


def stage(cls: Any, model: Path, **options: Any) -> Any:
    built = cls(ScoringConfig(model=str(model), **options))
    built.setup(StageContext("test", Path(), f"{built.name}-0", 0))
    return built


def test_what_is_padded_comes_back_in_the_order_and_length_of_the_rows() -> None:
    given = rows(numbers=[[1, 2, 3], [4], [5, 6]])
    parts = micro_batches(given, most_tokens=6)
    assert len(parts) > 1
    found = unpad(((micro, micro.values["numbers"]) for micro in parts), len(given))
    assert [values.tolist() for values in found] == [[1, 2, 3], [4], [5, 6]]


def test_the_turns_of_a_session_stay_in_one_micro_batch_and_are_one_sequence() -> None:
    given = [TokenRow(np.array([1]), np.array([2] * size), np.ones(size), session=name)
             for size, name in ((1, "a"), (9, "b"), (8, "a"))]  # fmt: skip
    parts = micro_batches(given, most_tokens=1)
    assert sorted(sorted(micro.indices) for micro in parts) == [[0, 2], [1]]
    (together,) = [micro for micro in parts if len(micro.rows) == 2]
    assert together.sequences.tolist() == [0, 0]
    assert count_sequences(given) == 2


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_the_reference_says_what_a_plain_forward_pass_says(tiny_model: Path, temperature: float) -> None:
    found = stage(RefLogProbs, tiny_model, temperature=temperature, micro_batch_tokens=8).process(batch())
    model = fresh_model(tiny_model)
    for (prompt, response), values in zip(SEQUENCES, found["ref_log_probs"], strict=True):
        assert values.tolist() == pytest.approx(log_probs(model, prompt, response, temperature), abs=1e-5)


def test_sum_pi_squared_is_that_of_the_newest_policy(tiny_model: Path, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    scored = stage(SumPiSquared, tiny_model)
    model = fresh_model(tiny_model)

    def expected(prompt: list[int], response: list[int]) -> list[float]:
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1]
        found: list[float] = torch.softmax(logits, -1).square().sum(-1).tolist()
        return found

    first = scored.process(batch())["sum_pi_squared"]
    assert first[0].tolist() == pytest.approx(expected(*SEQUENCES[0]), abs=1e-6)
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.add_(1.0)
    save_file({"model.layers.0.mlp.down_proj.weight": model.model.layers[0].mlp.down_proj.weight}, tmp_path / "w")
    second = scored.process(batch(WeightsRef(3, str(tmp_path / "w"))))["sum_pi_squared"]
    assert scored.loaded_version == 3
    assert second[0].tolist() == pytest.approx(expected(*SEQUENCES[0]), abs=1e-6)
    assert second[0].tolist() != pytest.approx(first[0].tolist(), abs=1e-4)


def test_a_fresh_critic_expects_nothing_and_learns_what_the_returns_are(tiny_model: Path, tmp_path: Path) -> None:
    critic = Critic(CriticConfig(lr=1e-2, clip=10.0), str(tiny_model), "float32", "cpu", micro_batch_tokens=8)
    returns = [[1.0, 1.0, 1.0], [0.0], [0.5, 0.5]]
    assert all(not values.any() for values in critic.values.score(rows(), 64))
    losses = []
    for _ in range(40):
        values = critic.values.score(rows(), 64)
        metrics = critic.update(rows(returns=returns, values=values))
        losses.append(metrics["critic/loss"])
    assert losses[0] == pytest.approx((3 * 1 + 0 + 2 * 0.25) / 6 / 2)
    assert losses[-1] < losses[0] / 10
    assert metrics["critic/explained_variance"] > 0.8

    # Its weights travel by file to the stage that writes the values.
    critic.values.save(tmp_path / "critic")
    published = WeightsRef(1, "", others={"critic": str(tmp_path / "critic")})
    fresh = stage(Values, tiny_model)
    assert all(not values.any() for values in fresh.process(batch())["values"])
    served = fresh.process(batch(published))["values"]
    assert fresh.loaded_version == 1
    for got, expected in zip(served, critic.values.score(rows(), 64), strict=True):
        assert got.tolist() == pytest.approx(expected.tolist(), abs=1e-6)


def test_the_critic_does_not_depend_on_the_micro_batch_split(tiny_model: Path) -> None:
    targets = rows(returns=[[1.0, 1.0, 1.0], [0.0], [0.5, 0.5]], values=[[0, 0, 0], [0], [0, 0]])
    made = [Critic(CriticConfig(lr=1e-3), str(tiny_model), "float32", "cpu", tokens) for tokens in (4, 64)]
    for critic in made:
        critic.update(targets)
    one, other = (critic.values.model.state_dict() for critic in made)
    assert all(torch.allclose(one[name], other[name], atol=1e-6) for name in one)


def test_a_value_is_of_what_comes_before_the_token(tiny_model: Path) -> None:
    model = ValueModel(str(tiny_model), "float32", "cpu")
    torch.nn.init.normal_(model.model.score.weight, generator=torch.Generator().manual_seed(1))
    changed = [TokenRow(np.array([3, 4]), np.array([5, 6, token]), np.ones(3)) for token in (7, 20)]
    first, second = model.score(changed, 64)
    assert first.tolist() == pytest.approx(second.tolist(), abs=1e-6)  # the last token is not seen by its own value
