"""The contract of a rollout engine. Imports neither torch nor vllm."""

from __future__ import annotations

import abc
from dataclasses import asdict, dataclass, field
from typing import Literal

from dataflow.errors import WorkerBroken
from dataflow.waits import Waits
from dataflow.weights import WeightsRef


class EngineBroken(WorkerBroken):
    """Raised when the engine process is dead or in an unknown state; only a new engine helps."""


class WeightsRejected(EngineBroken):
    """Raised when an update's verification failed: the engine does not hold the weights it was given."""


@dataclass(frozen=True)
class EngineConfig:
    """How to start an engine.

    Attributes:
        model: Directory with config.json and safetensors (Hugging Face layout).
        dtype: "float32" on a CPU, "bfloat16" on a GPU.
        device: "cpu" or "cuda". vLLM decides by its build.
        max_model_len: Longest prompt plus response, in tokens.
        max_sequences: Most sequences decoded at one time.
        kv_cache_bytes: Memory for the key-value cache, in bytes.
        probe_bound: Largest accepted difference, in nats, between the learner's and the engine's
            log-probability of a probe token after a weight update.
        name: What rows record as their engine.
        colocate: Another process takes turns with this one on a GPU, so that `sleep` must free its memory.
        drain_s: How long an update or a sleep waits for the requests in flight before it aborts them, in seconds.
        load_s: Longest loading of weights, and longest way into or out of sleep, in seconds; then the engine is
            broken.
        wait_s: How long a request, an update or a sleep waits for its turn, in seconds.
        waits: Where the engine registers what it waits for.
    """

    model: str
    dtype: str = "float32"
    device: str = "cpu"
    max_model_len: int = 512
    max_sequences: int = 128
    kv_cache_bytes: int = 256 << 20
    probe_bound: float = 1e-3
    name: str = "engine-0"
    colocate: bool = False
    drain_s: float = 120.0
    load_s: float = 300.0
    wait_s: float = 600.0
    waits: Waits = field(default_factory=Waits, compare=False, repr=False)


@dataclass(frozen=True)
class GenerateRequest:
    """One session's request: one prompt, one response.

    Attributes:
        request_id: Unique among the requests in flight.
        prompt_ids: Token ids; at least one, fewer than `max_model_len`.
        max_tokens: Response budget in tokens; at least one.
        greedy: Take the most likely token at each step; temperature, top_p, top_k and seed then have no effect.
        temperature: Divides the logits; above 0.
        top_p: Nucleus mass in (0, 1]; 1 is off.
        top_k: Keep the k most likely tokens; -1 is off.
        seed: Decides the sample, whatever else runs in the batch.
        stop_token_ids: Token ids that end the response; the one drawn is kept in it.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    max_tokens: int
    greedy: bool
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()

    @property
    def effective(self) -> dict[str, object]:
        """What the engine is really given; the `sampling` column holds it as JSON text."""
        if self.greedy:
            sampling: dict[str, object] = {
                "greedy": True,
                "temperature": 0.0,
                "top_p": 1.0,
                "top_k": -1,
                "seed": None,
            }
        else:
            names = ("greedy", "temperature", "top_p", "top_k", "seed")
            sampling = {name: value for name, value in asdict(self).items() if name in names}
        return sampling | {"n": 1, "max_tokens": self.max_tokens, "stop_token_ids": list(self.stop_token_ids)}


@dataclass(frozen=True)
class Completion:
    """What an engine returns for one request.

    Attributes:
        token_ids: Length T, stop token included.
        log_probs: Length T, nats: of each token under the distribution it was drawn from
            (after temperature, top-p and top-k; for greedy decoding, at temperature 1).
        finish_reason: "stop", "length", or "abort": an update or a sleep did not wait for it any longer; what is
            there of it, which may be nothing, is no response.
        version_min: Oldest policy version that drew one of the tokens.
        version_max: Newest policy version that drew one of the tokens.
    """

    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    finish_reason: Literal["stop", "length", "abort"]
    version_min: int
    version_max: int


class Engine(abc.ABC):
    """One replica of the policy, for generation.

    Call order: `start` once, then any number of `generate`, `score`, `update_weights`, `sleep` and `wake`, all of
    which may be called concurrently, then `close`, which may be called at any time and ends all that waits, and
    may not run if the process dies. Not guaranteed: the order in which concurrent requests finish.
    """

    config: EngineConfig

    @property
    @abc.abstractmethod
    def version(self) -> int:
        """Policy version of the weights loaded now."""

    @abc.abstractmethod
    async def start(self) -> None:
        """Load the model and become ready. Slow: half a minute for vLLM on a small machine."""

    @abc.abstractmethod
    async def generate(self, request: GenerateRequest) -> Completion:
        """Generate one response. May be called concurrently; requests share one continuous batch.

        A request that arrives during an update waits for it and is answered under the new weights; one that
        arrives while the engine sleeps waits until it is woken, and for an update that waits too.

        Raises:
            ValueError: This request can never be served (empty prompt, prompt as long as `max_model_len`,
                token id outside the vocabulary). The engine goes on.
            Overdue: The engine was not ready within `wait_s`. The request may be sent again.
            EngineBroken: The engine died; nothing more can be served.
        """

    @abc.abstractmethod
    async def update_weights(self, ref: WeightsRef) -> float:
        """Drain the requests in flight (for `drain_s`, then abort them), load the weights, verify them.

        A sleeping engine is not woken by it, since the device is another's then: the update waits.

        Returns:
            Largest absolute difference, in nats, to the learner's probe log-probabilities.

        Raises:
            WeightsRejected: The file did not load, the difference exceeds `probe_bound`, or a fingerprint differs.
            Overdue: The engine was not ready within `wait_s`; it keeps the weights it has.
            EngineBroken: The engine died, was closed, or took longer than `load_s`.
        """

    @abc.abstractmethod
    async def sleep(self) -> None:
        """Let no request in, drain (for `drain_s`, then abort), free the device's memory; then requests wait.

        Does nothing when asleep; waits for an update. Cancelled while it drains, it leaves the engine ready; later,
        asleep.

        Raises:
            Overdue: An update did not end within `wait_s`.
            EngineBroken: The engine died, was closed, or took longer than `load_s`.
        """

    @abc.abstractmethod
    async def wake(self) -> None:
        """Take the device again, with the weights the engine fell asleep with. Does nothing when ready.

        Of what waits, an update goes first. Cancelled, it still wakes the engine.

        Raises:
            Overdue: An update, or the way into sleep, did not end within `wait_s`.
            EngineBroken: The engine died, was closed, or took longer than `load_s`.
        """

    @abc.abstractmethod
    async def score(self, token_ids: tuple[int, ...]) -> list[float]:
        """Log-probability (nats, temperature 1) of each token after the first, under the loaded weights."""

    @abc.abstractmethod
    async def close(self) -> None:
        """Stop and free everything, child processes included."""
