"""Types of arrays, for annotations, and the numpy dtype of each float that a checkpoint or a container holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.generic]
Bytes = npt.NDArray[np.uint8]
F32Array = npt.NDArray[np.float32]
F64Array = npt.NDArray[np.float64]

# Of each dtype word of a source; BF16 as its bits.
VALUE_DTYPES: Final[Mapping[str, np.dtype[Any]]] = {
    "F16": np.dtype("<f2"), "BF16": np.dtype("<u2"), "F32": np.dtype("<f4"),
}  # fmt: skip
