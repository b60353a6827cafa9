"""The model of a worker."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path

from forerun.api import Model, load
from forerun.checkpoints import resolve
from forerun.checkpoints.placement import device_named, dtype_named
from forerun.engine.cache import available_bytes
from forerun.errors import ForerunError, NoRoom

GIBIBYTE = 2**30


@dataclass(frozen=True)
class LoadPlan:
    """How a worker loads its model: the arguments of `forerun.load`."""

    model_name: str
    device: str | None = None
    dtype: str | None = None
    lanes: int | None = None
    max_context: int | None = None
    quantize: str | None = None

    def model(self) -> Model:
        """Loaded here; an error says on which machine."""
        try:
            self._check_room()
            return load(
                self.model_name,
                device=self.device,
                dtype=self.dtype,
                lanes=self.lanes,
                max_context=self.max_context,
                quantize=self.quantize,
            )
        except ForerunError as error:
            raise type(error)(f"a worker on {socket.gethostname()}: {error}") from error

    def _check_room(self) -> None:
        """Refuse a model that memory has no room for, instead of being killed while it loads."""
        where = device_named(self.device)
        kind = dtype_named(self.dtype, where)
        base, _ = resolve.split_adapters(self.model_name)
        weights = weights_in(Path(base))
        if not weights or self.quantize is not None:
            return
        width = kind.itemsize if kind is not None else 2
        needed = weights * width
        free = available_bytes(where)
        if needed > free:
            raise NoRoom(
                f"{self.model_name!r} takes {needed / GIBIBYTE:.1f} GiB in {width * 8} bits, and "
                f"{free / GIBIBYTE:.1f} are free: use a smaller --dtype, fewer --workers on one "
                "machine, or larger machines."
            )


def weights_in(folder: Path) -> int:
    """How many numbers the safetensors files of a checkpoint hold; 0 where there are none."""
    from safetensors import safe_open

    total = 0
    for file in folder.glob("*.safetensors") if folder.is_dir() else ():
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - no mapping
                size = 1
                for side in opened.get_slice(name).get_shape():
                    size *= side
                total += size
    return total
