"""The worker's side of a weight update: a vLLM weight-transfer backend that reads one safetensors file.

vLLM imports this module in every worker process because `worker_extension_cls` names a class in it. The
four calls (init, start, update in chunks, finish) are those of vLLM's own backends, so that weights may come
over NCCL on another day with another backend name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from stages.engines.fingerprint import fingerprint
from stages.engines.parent import exit_with_parent

BACKEND = "safetensors_file"


@dataclass
class FileInit(WeightTransferInitInfo):
    """Nothing to agree on before the first update."""


@dataclass
class FileChunk(WeightTransferUpdateInfo):
    """Some parameters of one file.

    Attributes:
        path: safetensors file with Hugging Face parameter names; must stay as it is until finish.
        names: The parameters to load from it, in this order.
    """

    path: str
    names: list[str]


class FileWeights(WeightTransferEngine[FileInit, FileChunk]):
    """Loads chunks of a safetensors file through vLLM's layer-wise reload.

    The reload path is the one that knows how this machine packs its weights (on a CPU in float32 vLLM
    re-packs every matrix when it loads; `model.load_weights` alone fails or is wrong there).
    """

    init_info_cls = FileInit
    update_info_cls = FileChunk

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fingerprints: dict[str, float] = {}
        exit_with_parent()

    def init_transfer_engine(self, init_info: FileInit) -> None:
        """Nothing to connect: the file system is the transport."""

    def start_weight_update(self) -> None:
        """Prepare every layer for its new weights."""
        self.fingerprints = {}
        with torch.device(self.device):
            initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: FileChunk) -> None:
        """Hand the chunk's tensors (memory-mapped, not copied) to the model's loaders."""
        with safe_open(update_info.path, framework="pt") as file, torch.device(self.device):
            tensors = [(name, file.get_tensor(name)) for name in update_info.names]
            self.fingerprints |= {name: fingerprint(tensor) for name, tensor in tensors}
            model: Any = self.model
            model.load_weights(tensors)

    def finish_weight_update(self) -> None:
        """Pack what was loaded, and the tied head with it."""
        with torch.device(self.device):
            finalize: Any = finalize_layerwise_reload  # has no annotations
            finalize(self.model, self.model_config)
            self._pack_tied_head()

    def shutdown(self) -> None:
        """Nothing is held open."""

    def _pack_tied_head(self) -> None:
        # The reload gives the embedding new values, but a tied head that was packed on its own at load (CPU)
        # keeps its packed copy of the old ones.
        head = getattr(self.model, "lm_head", None)
        embedding = getattr(getattr(self.model, "model", None), "embed_tokens", None)
        if head is None or embedding is None or head is embedding:
            return
        if self.model_config.hf_config.tie_word_embeddings:
            head.weight = embedding.weight
            head.quant_method.process_weights_after_loading(head)


class WeightsExtension:
    """Mixed into vLLM's worker class; its methods can be called through `collective_rpc`."""

    def received_fingerprints(self) -> dict[str, float]:
        """Parameter name -> fingerprint of each tensor received since the last start."""
        engine: FileWeights = self.weight_transfer_engine  # type: ignore[attr-defined]
        return engine.fingerprints


# At import: it is all that vLLM does with this module before it asks for the backend by name.
WeightTransferEngineFactory.register_engine(BACKEND, FileWeights)
