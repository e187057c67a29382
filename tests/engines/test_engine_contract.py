"""One contract, every engine. Expected values come from a plain transformers forward pass."""

from __future__ import annotations

import asyncio
import copy
import multiprocessing
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from dataflow.weights import WeightsRef
from stages.engines.base import EngineBroken, EngineConfig, GenerateRequest, WeightsRejected
from stages.engines.fingerprint import fingerprint
from stages.engines.gated import EngineState, GatedEngine
from stages.engines.hf import HfEngine
from stages.engines.vllm import VllmEngine, cpu_environment

VOCABULARY, MAX_MODEL_LEN = 64, 96
PROMPTS = [(3, 4, 5), (9, 8, 7, 6, 5, 4, 3), (11,), tuple(range(10, 40))]
PROBE = (5, 17, 40, 3, 22, 61, 8, 30)
# A float32 forward pass of one model in two implementations; nats.
SAME_MODEL = 1e-4


class Served:
    """A running engine and, beside it, the model whose weights it should hold."""

    def __init__(self, engine: GatedEngine, model: Any, folder: Path, run: Callable[..., Any]) -> None:
        self.engine, self.model, self.folder, self.run = engine, model, folder, run

    def generate(self, *requests: GenerateRequest) -> Any:
        async def together() -> Any:
            return await asyncio.gather(*(self.engine.generate(request) for request in requests))

        answers = self.run(together())
        return answers if len(requests) > 1 else answers[0]

    def step(self, size: float) -> Any:
        """A model `size` (standard deviation) away from the one served."""
        model = copy.deepcopy(self.model)
        generator = torch.Generator().manual_seed(self.engine.version + 1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(size * torch.randn(parameter.shape, generator=generator))
        return model

    def publish(self, model: Any) -> WeightsRef:
        """What a learner would publish as the next version."""
        version = self.engine.version + 1
        tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
        path = self.folder / f"{id(self.engine)}-{version:06d}.safetensors"
        save_file(tensors, path)
        new, old = (sequence_log_probs(m, PROBE, 1.0) for m in (model, self.model))
        return WeightsRef(
            version=version,
            path=str(path),
            probe_ids=PROBE,
            probe_log_probs=tuple(new.tolist()),
            probe_step=float((new - old).abs().max()),
            fingerprints=tuple((name, fingerprint(tensor)) for name, tensor in tensors.items()),
        )

    def update(self, ref: WeightsRef, model: Any) -> float:
        difference: float = self.run(self.engine.update_weights(ref))
        self.model = model
        return difference


def sequence_log_probs(model: Any, ids: tuple[int, ...], temperature: float) -> torch.Tensor:
    """[len(ids) - 1] float32: log-probability of each token after the first."""
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, :-1] / temperature
    log_probs: torch.Tensor = logits.log_softmax(-1).gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]
    return log_probs


def response_log_probs(served: Served, prompt: tuple[int, ...], answer: Any, temperature: float) -> torch.Tensor:
    return sequence_log_probs(served.model, prompt + answer.token_ids, temperature)[len(prompt) - 1 :]


def assert_log_probs(served: Served, prompt: tuple[int, ...], answer: Any, temperature: float = 1.0) -> None:
    expected = response_log_probs(served, prompt, answer, temperature)
    torch.testing.assert_close(torch.tensor(answer.log_probs), expected, atol=SAME_MODEL, rtol=0)


def sampled(name: str, prompt: tuple[int, ...] = PROMPTS[0], **given: Any) -> GenerateRequest:
    return GenerateRequest(name, prompt, **{"max_tokens": 12, "greedy": False, "seed": 7} | given)


def greedy(name: str, prompt: tuple[int, ...] = PROMPTS[0], max_tokens: int = 12, **given: Any) -> GenerateRequest:
    return GenerateRequest(name, prompt, max_tokens, greedy=True, **given)


@pytest.fixture(scope="module")
def run() -> Iterator[Callable[..., Any]]:
    """Run a coroutine on the one event loop that all engines of this module live on."""
    with asyncio.Runner() as runner:
        yield runner.run


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory, run: Callable[..., Any]) -> Iterator[Callable[..., Served]]:
    """Hand out running engines. One is started only when there is none, or a test broke the last one."""
    before = {name: os.environ.get(name) for name in cpu_environment()}
    os.environ.update(cpu_environment())
    running: dict[tuple[str, bool], Served] = {}

    def engine(kind: str, tied: bool) -> Served:
        served = running.get((kind, tied))
        if served is None or served.engine.state is not EngineState.READY:
            if served is not None:
                run(served.engine.close())
            folder = tmp_path_factory.mktemp("model")
            model = random_model(tied)
            model.save_pretrained(folder)
            config = EngineConfig(
                str(folder), max_model_len=MAX_MODEL_LEN, max_sequences=8, kv_cache_bytes=16 << 20, colocate=True
            )
            made = HfEngine(config) if kind == "hf" else VllmEngine(config)
            run(made.start())
            served = running[kind, tied] = Served(made, model, folder, run)
        return served

    yield engine
    for served in running.values():
        run(served.engine.close())
    for name, value in before.items():
        os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)


def random_model(tied: bool) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        # initializer_range: large enough for distributions that are far from uniform.
        config = LlamaConfig(
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=32,
            intermediate_size=128,
            vocab_size=VOCABULARY,
            max_position_embeddings=128,
            tie_word_embeddings=tied,
            bos_token_id=1,
            eos_token_id=2,
            initializer_range=0.2,
        )
        llama: Any = LlamaForCausalLM
        return llama(config).eval()


VLLM = pytest.param("vllm", marks=[pytest.mark.vllm, pytest.mark.timeout(300)])
every_engine = pytest.mark.parametrize("kind", ["hf", VLLM])


@pytest.fixture
def served(engines: Callable[..., Served], kind: str) -> Served:
    return engines(kind, True)


# Generation


@every_engine
def test_greedy_decoding_is_that_of_transformers_in_a_mixed_batch(served: Served) -> None:
    noise = [sampled(f"noise-{i}", PROMPTS[i], seed=i) for i in range(3)]
    answers = served.generate(*(greedy(f"g{i}", prompt) for i, prompt in enumerate(PROMPTS)), *noise)

    for prompt, answer in zip(PROMPTS, answers[: len(PROMPTS)], strict=True):
        expected = served.model.generate(
            torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        assert answer.token_ids == tuple(expected[0, len(prompt) :].tolist())
        assert_log_probs(served, prompt, answer)


@every_engine
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_O10_log_probs_are_of_the_logits_divided_by_the_temperature(served: Served, temperature: float) -> None:
    requests = [sampled(f"r{i}", p, seed=i, temperature=temperature) for i, p in enumerate(PROMPTS)]

    for prompt, answer in zip(PROMPTS, served.generate(*requests), strict=True):
        assert len(answer.token_ids) == len(answer.log_probs) == 12
        assert_log_probs(served, prompt, answer, temperature)


@every_engine
def test_log_probs_are_renormalised_over_what_top_k_and_top_p_keep(served: Served) -> None:
    request = sampled("masked", temperature=0.7, top_k=5, top_p=0.8, max_tokens=16)
    answer = served.generate(request)

    ids = request.prompt_ids + answer.token_ids
    with torch.no_grad():
        logits = served.model(torch.tensor([ids])).logits[0, len(request.prompt_ids) - 1 : -1] / 0.7
    for token, log_prob, row in zip(answer.token_ids, answer.log_probs, logits, strict=True):
        likely = row.topk(5)
        probabilities = likely.values.softmax(-1)
        # Nucleus: the fewest of the most likely tokens that reach 0.8 together.
        size = int((probabilities.cumsum(-1) < 0.8).sum()) + 1
        kept = likely.indices[:size].tolist()
        assert token in kept
        expected = probabilities[kept.index(token)] / probabilities[:size].sum()
        assert log_prob == pytest.approx(float(expected.log()), abs=SAME_MODEL)


@every_engine
def test_a_seed_gives_the_same_sample_alone_and_among_others(served: Served) -> None:
    alone = [served.generate(sampled("alone", prompt, seed=100)) for prompt in PROMPTS]
    requests = [sampled(f"r{i}", prompt, seed=100) for i, prompt in enumerate(PROMPTS)]
    others = [sampled(f"o{i}", PROMPTS[-1], seed=i, max_tokens=3 + i) for i in range(4)]
    together = served.generate(*others, *reversed(requests))[len(others) :][::-1]

    assert [answer.token_ids for answer in together] == [answer.token_ids for answer in alone]


@every_engine
def test_O02_different_seeds_give_different_samples_of_one_prompt(served: Served) -> None:
    answers = served.generate(*(sampled(f"s{seed}", seed=seed) for seed in range(8)))

    assert len({answer.token_ids for answer in answers}) == 8


@every_engine
def test_O07_each_end_token_stops_and_is_kept_also_exactly_at_the_budget(served: Served) -> None:
    free = served.generate(sampled("free", max_tokens=20)).token_ids
    first = {token: free.index(token) for token in set(free)}
    early, late = sorted(first, key=first.__getitem__)[2], sorted(first, key=first.__getitem__)[6]
    unused = next(token for token in range(VOCABULARY) if token not in free)

    def ends(name: str, budget: int, *stops: int) -> tuple[tuple[int, ...], str]:
        answer = served.generate(sampled(name, max_tokens=budget, stop_token_ids=stops))
        return answer.token_ids, answer.finish_reason

    assert ends("early", 20, unused, early) == (free[: first[early] + 1], "stop")
    assert ends("either", 20, late, early) == (free[: first[early] + 1], "stop")
    assert ends("late", 20, unused, late) == (free[: first[late] + 1], "stop")
    assert ends("at the budget", first[late] + 1, unused, late) == (free[: first[late] + 1], "stop")
    assert ends("one short", first[late], unused, late) == (free[: first[late]], "length")


@every_engine
def test_only_the_requests_own_end_tokens_stop_it(served: Served) -> None:
    # The model's generation_config.json names 2 as its end token.
    answers = served.generate(*(sampled(f"s{seed}", seed=seed, max_tokens=40) for seed in range(8)))

    assert any(2 in answer.token_ids[:-1] for answer in answers)
    assert all(len(answer.token_ids) == 40 and answer.finish_reason == "length" for answer in answers)


@every_engine
def test_a_response_ends_where_the_model_length_ends(served: Served) -> None:
    answer = served.generate(sampled("long", PROMPTS[-1], max_tokens=1000))

    assert len(PROMPTS[-1]) + len(answer.token_ids) == MAX_MODEL_LEN
    assert answer.finish_reason == "length"


INVALID: dict[str, Any] = {
    "empty prompt": {"prompt": ()},
    "O03 prompt as long as the model allows": {"prompt": (1,) * MAX_MODEL_LEN},
    "token beyond the vocabulary": {"prompt": (1, VOCABULARY)},
    "negative token": {"prompt": (1, -1)},
    "no budget": {"max_tokens": 0},
    "O11 temperature 0": {"temperature": 0.0},
    "temperature that vLLM would raise": {"temperature": 0.001},
    "top_p": {"top_p": 0.0},
    "top_k": {"top_k": 0},
    "negative seed": {"seed": -1},
    "end token beyond the vocabulary": {"stop_token_ids": (VOCABULARY,)},
}


@every_engine
@pytest.mark.parametrize("fault", list(INVALID))
def test_O04_an_invalid_request_is_refused_by_name_and_its_neighbours_are_answered(served: Served, fault: str) -> None:
    async def mixed() -> Any:
        requests = [sampled("before"), sampled("culprit", **INVALID[fault]), sampled("after")]
        return await asyncio.gather(*map(served.engine.generate, requests), return_exceptions=True)

    before, culprit, after = served.run(mixed())

    assert isinstance(culprit, ValueError)
    assert "culprit" in str(culprit)
    assert before.token_ids == after.token_ids == served.generate(sampled("later")).token_ids


@every_engine
def test_O08_the_log_probs_are_of_the_very_ids_that_are_returned(served: Served) -> None:
    prompt = PROMPTS[1]
    answer = served.generate(sampled("ids", prompt))
    scores = served.run(served.engine.score(prompt + answer.token_ids))

    torch.testing.assert_close(torch.tensor(scores[len(prompt) - 1 :]), torch.tensor(answer.log_probs))


@every_engine
def test_score_is_a_forward_pass_at_temperature_1(served: Served) -> None:
    expected = sequence_log_probs(served.model, PROBE, 1.0)

    torch.testing.assert_close(torch.tensor(served.run(served.engine.score(PROBE))), expected, atol=SAME_MODEL, rtol=0)
    assert served.run(served.engine.score((3,))) == []
    with pytest.raises(ValueError, match="0 token ids"):
        served.run(served.engine.score(()))


def test_B04_a_greedy_request_records_that_nothing_is_drawn() -> None:
    given: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9, "top_k": 50, "seed": 3, "stop_token_ids": (2,)}
    fixed = {"n": 1, "max_tokens": 12, "stop_token_ids": [2]}
    drawn = {"greedy": False, "temperature": 0.8, "top_p": 0.9, "top_k": 50, "seed": 3}
    taken = {"greedy": True, "temperature": 0.0, "top_p": 1.0, "top_k": -1, "seed": None}

    assert sampled("row 0", **given).effective == drawn | fixed
    assert greedy("row 4", **given).effective == taken | fixed


@every_engine
def test_B04_sampling_parameters_belong_to_one_request(served: Served) -> None:
    given: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9, "top_k": 50}
    rows = [sampled(f"row {seed}", seed=seed, **given) for seed in range(4)]
    first = served.generate(*rows, greedy("row 4", **given))
    changed = served.generate(replace(rows[0], temperature=2.0, top_k=-1, top_p=1.0), *rows[1:], greedy("row 4"))

    assert changed[0].token_ids != first[0].token_ids
    assert [a.token_ids for a in changed[1:]] == [a.token_ids for a in first[1:]]
    assert_log_probs(served, PROMPTS[0], first[4])


# Weight updates


@every_engine
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_an_update_serves_the_new_model_and_numbers_its_rows(
    engines: Callable[..., Served], kind: str, tied: bool
) -> None:
    served = engines(kind, tied)
    for _ in range(2):
        version, old, new = served.engine.version, served.model, served.step(0.05)
        warm = served.generate(greedy("warms the prefix cache", PROMPTS[-1]))
        assert (warm.version_min, warm.version_max) == (version, version)

        difference = served.update(served.publish(new), new)

        assert 0 <= difference <= SAME_MODEL
        assert served.engine.version == version + 1
        answer = served.generate(sampled("new", PROMPTS[-1]))
        assert (answer.version_min, answer.version_max) == (version + 1, version + 1)
        assert_log_probs(served, PROMPTS[-1], answer)
        # The step is large enough for the old weights to fail the comparison above.
        moved = sequence_log_probs(new, PROBE, 1.0) - sequence_log_probs(old, PROBE, 1.0)
        assert float(moved.abs().max()) > 100 * SAME_MODEL


@every_engine
def test_requests_before_and_during_an_update_are_each_answered_by_one_version(served: Served) -> None:
    version, old, new = served.engine.version, served.model, served.step(0.05)
    ref = served.publish(new)

    async def crossing() -> Any:
        # The tasks begin in this order: the first is in flight when the update begins.
        return await asyncio.gather(
            served.engine.generate(sampled("early", max_tokens=40)),
            served.engine.update_weights(ref),
            served.engine.generate(sampled("late", max_tokens=40)),
        )

    early, _, late = served.run(crossing())

    assert (early.version_min, early.version_max) == (version, version)
    assert_log_probs(served, PROMPTS[0], early)
    served.model = new
    assert (late.version_min, late.version_max) == (version + 1, version + 1)
    assert_log_probs(served, PROMPTS[0], late)
    assert old is not new


@every_engine
def test_a_step_too_small_for_the_probe_is_accepted_by_its_fingerprints(served: Served) -> None:
    new = served.step(1e-7)
    ref = served.publish(new)
    assert ref.probe_step < served.engine.config.probe_bound

    served.update(ref, new)

    assert served.engine.version == ref.version


# Sleep


@every_engine
def test_B08_a_request_sent_after_the_engine_fell_asleep_is_answered_when_it_wakes_by_the_same_weights(
    served: Served,
) -> None:
    requests = [greedy("greedy", PROMPTS[1]), sampled("sampled", PROMPTS[-1])]
    before = served.generate(*requests)

    async def sleep_and_wake() -> Any:
        await served.engine.sleep()
        waiting = asyncio.gather(*map(served.engine.generate, requests))
        scoring = asyncio.create_task(served.engine.score(PROBE))
        assert served.engine.state is EngineState.ASLEEP
        await served.engine.wake()
        return await waiting, await scoring

    after, scores = served.run(sleep_and_wake())

    assert [answer.token_ids for answer in after] == [answer.token_ids for answer in before]
    assert_log_probs(served, PROMPTS[1], after[0])
    expected = sequence_log_probs(served.model, PROBE, 1.0)
    torch.testing.assert_close(torch.tensor(scores), expected, atol=SAME_MODEL, rtol=0)


@every_engine
def test_an_update_sent_to_a_sleeping_engine_is_loaded_when_it_wakes_before_what_waits(served: Served) -> None:
    version, new = served.engine.version, served.step(0.05)
    ref = served.publish(new)

    async def sleep_and_update() -> Any:
        await served.engine.sleep()
        waiting = asyncio.create_task(served.engine.generate(sampled("waits", PROMPTS[-1])))
        updating = asyncio.create_task(served.engine.update_weights(ref))
        await asyncio.sleep(0)
        await served.engine.wake()
        await updating
        return await waiting, await served.engine.generate(sampled("later", PROMPTS[-1]))

    answers = served.run(sleep_and_update())

    served.model = new
    for answer in answers:
        assert (answer.version_min, answer.version_max) == (version + 1, version + 1)
        assert_log_probs(served, PROMPTS[-1], answer)


@every_engine
def test_sleep_lets_what_is_in_flight_finish(served: Served) -> None:
    async def sleep() -> Any:
        asking = asyncio.gather(*(served.engine.generate(sampled(f"r{i}", max_tokens=40)) for i in range(10)))
        await asyncio.sleep(0)  # they are in flight now
        await served.engine.sleep()
        assert asking.done()
        await served.engine.sleep()
        await served.engine.wake()
        await served.engine.wake()
        return await asking

    answers = served.run(sleep())

    assert {answer.finish_reason for answer in answers} == {"length"}
    assert_log_probs(served, PROMPTS[0], answers[-1])


@every_engine
@pytest.mark.parametrize("change", ["sleep", "update"])
def test_what_a_drain_does_not_wait_for_is_aborted_and_answered_when_it_is_sent_again(
    served: Served, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served.engine, "config", replace(served.engine.config, drain_s=0.0))
    requests = [sampled(f"r{i}", seed=i, max_tokens=60) for i in range(10)]
    ref = served.publish(served.model)

    async def abort_and_ask_again() -> Any:
        asking = asyncio.gather(*map(served.engine.generate, requests))
        await asyncio.sleep(0)  # they are in flight now, two of them behind the eight that fit
        await (served.engine.sleep() if change == "sleep" else served.engine.update_weights(ref))
        assert asking.done()
        await served.engine.wake()
        return await asking, await asyncio.gather(*map(served.engine.generate, requests))

    aborted, answers = served.run(abort_and_ask_again())

    assert {(answer.finish_reason, answer.token_ids) for answer in aborted} == {("abort", ())}
    for answer in answers:
        assert (answer.finish_reason, len(answer.token_ids)) == ("length", 60)
        assert_log_probs(served, PROMPTS[0], answer)


# Weights that are not what they should be


def wrong_probe(served: Served) -> WeightsRef:
    # The file of one model, the probe of another.
    other = served.publish(served.step(0.1))
    return replace(served.publish(served.model), probe_step=1.0, probe_log_probs=other.probe_log_probs)


def wrong_fingerprint(served: Served) -> WeightsRef:
    # Both files pass the probe; only the fingerprints say that this is not the file meant.
    meant = served.publish(served.step(1e-7))
    return replace(served.publish(served.model), fingerprints=meant.fingerprints)


def missing_tensor(served: Served) -> WeightsRef:
    ref = served.publish(served.model)
    tensors = {name: p.detach() for name, p in served.model.named_parameters() if "norm" not in name}
    save_file(tensors, ref.path)
    return ref


def other_shape(served: Served) -> WeightsRef:
    ref = served.publish(served.model)
    tensors = {name: p.detach()[:1].clone() for name, p in served.model.named_parameters()}
    save_file(tensors, ref.path)
    return ref


def not_a_number(served: Served) -> WeightsRef:
    # A learner that diverged: file, probe and fingerprints agree that it is NaN.
    model = copy.deepcopy(served.model)
    with torch.no_grad():
        model.model.norm.weight[3] = float("nan")
    return served.publish(model)


def no_file(served: Served) -> WeightsRef:
    ref = served.publish(served.model)
    Path(ref.path).unlink()
    return ref


@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        ("hf", wrong_probe),
        ("hf", wrong_fingerprint),
        ("hf", missing_tensor),
        ("hf", other_shape),
        ("hf", not_a_number),
        ("hf", no_file),
        pytest.param(*VLLM.values, wrong_probe, marks=VLLM.marks),
    ],
)
def test_weights_that_fail_verification_break_the_engine_for_good(
    served: Served, fault: Callable[[Served], WeightsRef]
) -> None:
    version, ref = served.engine.version, fault(served)

    async def update_and_ask() -> Any:
        return await asyncio.gather(
            served.engine.update_weights(ref),
            served.engine.generate(sampled("waits for the update")),
            return_exceptions=True,
        )

    rejected, waiting = served.run(update_and_ask())

    assert isinstance(rejected, WeightsRejected)
    assert isinstance(waiting, EngineBroken)
    assert (served.engine.state, served.engine.version) == (EngineState.BROKEN, version)
    with pytest.raises(EngineBroken, match=f"version {ref.version}"):
        served.generate(sampled("later"))
    with pytest.raises(EngineBroken):
        served.run(served.engine.update_weights(ref))


@pytest.mark.vllm
@pytest.mark.timeout(300)
def test_a_file_that_vanishes_while_it_is_loaded_breaks_the_engine_for_good(engines: Callable[..., Served]) -> None:
    served = engines("vllm", False)
    version, ref = served.engine.version, served.publish(served.step(0.05))

    async def update_and_unlink() -> Any:
        updating = asyncio.create_task(served.engine.update_weights(ref))
        waiting = asyncio.create_task(served.engine.generate(sampled("waits for the update")))
        for _ in range(5):
            await asyncio.sleep(0)  # the file was opened, and the engine pauses before the first chunk
        os.unlink(ref.path)
        return await asyncio.gather(updating, waiting, return_exceptions=True)

    rejected, waiting = served.run(update_and_unlink())

    assert isinstance(rejected, WeightsRejected)
    assert "collective_rpc" in str(rejected)  # vLLM's worker had begun
    assert isinstance(waiting, EngineBroken)
    assert (served.engine.state, served.engine.version) == (EngineState.BROKEN, version)
    with pytest.raises(EngineBroken, match=f"version {ref.version}"):
        served.generate(sampled("later"))


# The end of an engine


def children() -> set[Any]:
    return set(multiprocessing.active_children())


@pytest.mark.vllm
@pytest.mark.timeout(300)
def test_when_the_core_process_dies_every_request_says_so(engines: Callable[..., Served]) -> None:
    served = engines("vllm", False)

    async def die() -> Any:
        requests = [sampled(f"r{i}", max_tokens=60) for i in range(4)]
        asking = asyncio.gather(*map(served.engine.generate, requests), return_exceptions=True)
        await asyncio.sleep(0)  # they are in flight now
        for child in children():
            child.kill()
        return await asking

    assert all(isinstance(answer, EngineBroken) for answer in served.run(die()))
    with pytest.raises(EngineBroken):
        served.generate(sampled("later"))
    with pytest.raises(EngineBroken):
        served.run(served.engine.update_weights(served.publish(served.model)))


@every_engine
def test_close_fails_what_is_in_flight_and_leaves_no_process(engines: Callable[..., Served], kind: str) -> None:
    served = engines(kind, True)

    async def close() -> Any:
        requests = [sampled(f"r{i}", max_tokens=60) for i in range(20)]
        asking = asyncio.gather(*map(served.engine.generate, requests), return_exceptions=True)
        await asyncio.sleep(0)  # they are in flight now
        await served.engine.close()
        return await asking

    assert all(isinstance(answer, EngineBroken) for answer in served.run(close()))
    assert not children()
    with pytest.raises(EngineBroken, match="closed"):
        served.generate(sampled("later"))
    served.run(served.engine.close())


@every_engine
def test_close_ends_what_waits_for_a_sleeping_engine_and_leaves_no_process(
    engines: Callable[..., Served], kind: str
) -> None:
    served = engines(kind, True)

    async def close() -> Any:
        await served.engine.sleep()
        works = [served.engine.generate(sampled("waits")), served.engine.score(PROBE)]
        works.append(served.engine.update_weights(served.publish(served.model)))
        waiting = asyncio.gather(*works, return_exceptions=True)
        await asyncio.sleep(0)  # they wait now
        await served.engine.close()
        return await waiting

    assert [type(answer) for answer in served.run(close())] == [EngineBroken] * 3
    assert not children()
