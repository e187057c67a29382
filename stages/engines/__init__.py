"""Rollout engines under one contract: tokens in, tokens out."""

from stages.engines.base import (
    Completion,
    Engine,
    EngineBroken,
    EngineConfig,
    GenerateRequest,
    WeightsRejected,
)

__all__ = ["Completion", "Engine", "EngineBroken", "EngineConfig", "GenerateRequest", "WeightsRejected"]
