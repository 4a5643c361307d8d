"""Gate functions of feed-forward layers: the registration of an activation (docs/contributing.md, Adding things)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Activation:
    """f(gate, up), by the engine's word for it.

    config_words: what `hidden_act` and its like call it. linear_in_up: f is some function of gate, times up, so that a
    factor of up is a factor of f.
    """

    name: str
    config_words: tuple[str, ...]
    linear_in_up: bool


_ALL: Final = (
    Activation("silu", ("silu", "swish"), linear_in_up=True),
    Activation("gelu_tanh", ("gelu_pytorch_tanh", "gelu_new"), linear_in_up=True),
    # gate * sigmoid(1.702 gate) * (up + 1), both clamped; no word of a config says it, the family does.
    Activation("clamped_silu", (), linear_in_up=False),
)
ACTIVATIONS: Final = {activation.name: activation for activation in _ALL}
CONFIG_WORDS: Final = {word: activation.name for activation in _ALL for word in activation.config_words}
