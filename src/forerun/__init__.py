"""Forerun decodes language models many tokens at a time and says exactly what that costs.

import forerun
model = forerun.load("smollm")
out = model.generate("def fib(n):", method="lookup", max_tokens=64)
print(out.text, out.guarantee, out.stats.tokens_per_forward)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.2.0.dev0"

# Imported when first used, so that `import forerun` and `forerun --help` do not wait for torch.
_WHERE = {
    "custom_generate": "forerun.transformers_generate",
    "load": "forerun.api",
    "from_network": "forerun.api",
    "Model": "forerun.api",
    "Result": "forerun.requests.result",
    "Sampling": "forerun.options",
    "method": "forerun.registry",
    "ForerunError": "forerun.errors",
}
__all__ = [
    "ForerunError",
    "Model",
    "Result",
    "Sampling",
    "custom_generate",
    "from_network",
    "load",
    "method",
]

if TYPE_CHECKING:
    from forerun.api import Model, from_network, load
    from forerun.errors import ForerunError
    from forerun.options import Sampling
    from forerun.registry import method
    from forerun.requests.result import Result
    from forerun.transformers_generate import custom_generate


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'forerun' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_WHERE[name]), name)
