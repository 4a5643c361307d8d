"""A forward pass in numpy that follows docs/numerics.md and nothing else; headings are those of the page.

    arithmetic   0, 4.1, 4.2   fma, sums, RMSNorm, exp, tanh, soft caps
    gemm         2, 3          a matrix times activations
    rope         4.4           frequencies, cosines and sines, rotation
    config       4.7           what the families are, from a config.json
    attention    5             KV cache, scores, KV splits
    model        4             the layer, experts, logits

Read them in this order. It shares no arithmetic with w4conv: of a container it takes the stored bytes, unpacked.
"""

from __future__ import annotations

from reference_forward.model import ReferenceModel

__all__ = ["ReferenceModel"]
