"""The contract of a rollout engine. Imports neither torch nor vllm."""

from __future__ import annotations

import abc
from dataclasses import asdict, dataclass
from typing import Literal

from dataflow.errors import WorkerBroken
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
    """

    model: str
    dtype: str = "float32"
    device: str = "cpu"
    max_model_len: int = 512
    max_sequences: int = 128
    kv_cache_bytes: int = 256 << 20
    probe_bound: float = 1e-3
    name: str = "engine-0"


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
        finish_reason: "stop", "length" or "abort".
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

    Call order: `start` once, then any number of `generate` (concurrently) and `update_weights`, then
    `close`, which may not run if the process dies. Not guaranteed: the order in which concurrent requests
    finish.
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

        A request that arrives during an update waits for it and is answered under the new weights.

        Raises:
            ValueError: This request can never be served (empty prompt, prompt as long as `max_model_len`,
                token id outside the vocabulary). The engine goes on.
            EngineBroken: The engine died; nothing more can be served.
        """

    @abc.abstractmethod
    async def update_weights(self, ref: WeightsRef) -> float:
        """Drain the requests in flight, load the weights, verify them.

        Returns:
            Largest absolute difference, in nats, to the learner's probe log-probabilities.

        Raises:
            WeightsRejected: The difference exceeds `probe_bound`, or a fingerprint differs.
        """

    @abc.abstractmethod
    async def score(self, token_ids: tuple[int, ...]) -> list[float]:
        """Log-probability (nats, temperature 1) of each token after the first, under the loaded weights."""

    @abc.abstractmethod
    async def close(self) -> None:
        """Stop and free everything, child processes included."""
