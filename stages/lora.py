"""Low-rank adapters (LoRA, Hu et al., arXiv 2106.09685) on the policy, by peft."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from stages.training import LoraConfig


def add_adapter(model: Any, config: LoraConfig) -> Any:
    """Freeze a model and give it an adapter that at first changes nothing.

    Raises:
        ValueError: If the model has no module of the names in `target_modules`.
    """
    import peft

    targets = config.target_modules
    return peft.get_peft_model(
        model,
        peft.LoraConfig(
            r=config.rank,
            lora_alpha=config.alpha,
            lora_dropout=0.0,  # a policy that is another with each forward pass has no log-probabilities to compare
            target_modules=targets if isinstance(targets, str) else list(targets),
            task_type="CAUSAL_LM",
        ),
    )


def merged_state(model: Any) -> dict[str, Tensor]:
    """The state dict that the bare model would have with the adapter added to its weights.

    The model stays as it is: to add the adapter and to subtract it again would round its weights a little more with
    each publication.
    """
    layers: dict[str, Any] = {name: module for name, module in model.named_modules() if hasattr(module, "lora_A")}
    merged: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        owner, _, parameter = name.rpartition(".")
        if ".lora_" in name:
            continue
        owner = owner.removesuffix(".base_layer")
        if owner in layers and parameter == "weight":
            layer = layers[owner]
            tensor = tensor + sum(layer.get_delta_weight(adapter) for adapter in layer.active_adapters)
        merged[f"{owner}.{parameter}".removeprefix("base_model.model.")] = tensor
    return merged


def bare(model: Any) -> Any:
    """The model of transformers inside of one with an adapter."""
    return model.get_base_model()
