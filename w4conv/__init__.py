"""w4conv: language-model checkpoints to `.w4`, a memory-mapped 4-bit container, with proof.

w4conv.quantize("in/", "out.w4")        convert; returns a ConversionReport
w4conv.open("out.w4")                   the mapping: tensors, parts as numpy views, dequantize(name)
w4conv.verify("out.w4", against="in/")  integrity, round trip, perplexity; returns a VerifyReport
w4conv.Model("out.w4")                  logits(token_ids), generate(prompt_ids, max_tokens=...)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from w4conv.commands.diff import diff
    from w4conv.commands.quantize import quantize
    from w4conv.commands.verify import verify
    from w4conv.container import open_container as open
    from w4conv.runtime.engine import Model

__version__ = "0.1.0"
__all__ = ["Model", "__version__", "diff", "open", "quantize", "verify"]

# Loaded when first used, so that `import w4conv` is instant.
_HOMES = {
    "Model": ("w4conv.runtime.engine", "Model"),
    "diff": ("w4conv.commands.diff", "diff"),
    "open": ("w4conv.container", "open_container"),
    "quantize": ("w4conv.commands.quantize", "quantize"),
    "verify": ("w4conv.commands.verify", "verify"),
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'w4conv' has no attribute {name!r}")
    module, attribute = _HOMES[name]
    return getattr(importlib.import_module(module), attribute)
