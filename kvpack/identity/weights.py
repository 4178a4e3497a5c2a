"""The digest of all weights of a model in memory, computed in the background at about the speed of reading each weight once.

Weights can change unnoticed through ``.data``, so they are digested each time that a file or an identity is compared with the model. No
cheaper check could prove that an earlier digest is still valid.
"""

from __future__ import annotations

import hashlib
from functools import cached_property
from typing import TYPE_CHECKING, Any

from kvpack.coding import dispatch
from kvpack.runtime.threads import StartedCalls, usable_cores

from .canonical_text import ALL, json_text, tensor_digest, tensor_text, to_json_value

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    import torch

THREADS = 8
"""Maximum number of threads that read weights in host memory. A single thread cannot use the memory's full bandwidth."""
_ALIGNMENT = 8
"""Required alignment, in bytes, of memory that is digested on a device."""


class Weights:
    """The digest of a model's state, which is computed in the background. ``named`` contains the (name, value) pairs of the state.

    Values must not change before ``wait_until_read`` returns. It waits until tensors in host memory have been read, and makes later work on
    a CUDA device wait until the device's tensors have been read. The constructor and ``text`` raise InvalidParameter for a tensor whose
    values are not in memory or cannot be read.
    """

    def __init__(self, named: Sequence[tuple[str, Any]]) -> None:
        self._names = [name for name, _ in named]
        self._found: dict[int, Any] = {}
        first: dict[Hashable, int] = {}
        # Tied weights are read once.
        self._numbers = [first.setdefault(_memory_of(value) or number, number) for number, (_, value) in enumerate(named)]
        host: list[int] = []
        devices: dict[torch.device, dict[int, torch.Tensor]] = {}
        for number in first.values():
            name, value = named[number]
            if _is_in_host_memory(value):
                host.append(number)
            elif _is_digested_on_device(value):
                devices.setdefault(value.device, {})[number] = value
            else:
                self._found[number] = to_json_value(name, value)
        self._host_numbers = host
        self._host = StartedCalls(lambda number: tensor_digest(*named[number]), host, min(THREADS, usable_cores()))
        self._devices = [_DeviceDigests(device, named, values) for device, values in devices.items()]

    def wait_until_read(self) -> None:
        """Wait until later changes of the weights can no longer affect the digest."""
        for device in self._devices:
            device.wait_until_read()
        self._host.wait()

    @cached_property
    def text(self) -> str:
        """The digest of all names, dtypes, shapes and values, with the prefix ``sha256:``. Blocks until it is known.

        Raises InvalidParameter.
        """
        result = self._found | dict(zip(self._host_numbers, self._host.results(), strict=True))
        for device in self._devices:
            result |= device.texts()
        total = hashlib.sha256()
        for name, number in zip(self._names, self._numbers, strict=True):
            total.update(f"{json_text([name, result[number]])}\n".encode())
        return f"{ALL}:{total.hexdigest()}"


class _DeviceDigests:
    """The digests of the tensors on one CUDA device, which are computed on a separate stream."""

    def __init__(self, device: torch.device, named: Sequence[tuple[str, Any]], values: dict[int, torch.Tensor]) -> None:
        import torch

        self._device, self._stream = device, torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(device))
        # Sort by size, because tensors of the same size share a launch.
        largest_first = sorted(values.items(), key=lambda item: -item[1].nbytes)
        self._described = {number: tensor_text(value) for number, value in largest_first}
        self._memories = [value.detach().flatten().view(torch.uint8) for _, value in largest_first]
        self._texts: dict[int, str] = {}
        try:
            with torch.cuda.stream(self._stream):
                self._digests = dispatch.digests([(memory, 0, memory.numel()) for memory in self._memories])
        except torch.OutOfMemoryError:
            # This needs 64 MiB per 1 GiB of weights, because tensors are copied to host memory one by one.
            self._texts = {number: tensor_digest(*named[number]) for number in values}
        self._read = self._stream.record_event()

    def wait_until_read(self) -> None:
        import torch

        torch.cuda.current_stream(self._device).wait_event(self._read)
        # Only now may the memory be reused.
        self._memories = []

    def texts(self) -> dict[int, str]:
        """Return the ``tensor_digest`` of each tensor, by number."""
        import torch

        if not self._texts:
            with torch.cuda.stream(self._stream):
                digests = [digest.hex() for digest in self._digests()]
            texts = map(" ".join, zip(self._described.values(), digests, strict=True))
            self._texts = dict(zip(self._described, texts, strict=True))
            self._memories = []
        return self._texts


def _memory_of(value: Any) -> Hashable:
    """Return a key that is equal for tensors with the same bytes in memory, or None for values that have no such key."""
    import torch

    if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.layout is not torch.strided or value.is_quantized:
        return None
    if value.device.type == "meta" or not value.numel():
        return None
    return value.device, value.data_ptr(), value.dtype, value.shape, value.stride(), value.is_conj(), value.is_neg()


def _is_in_host_memory(value: Any) -> bool:
    return _memory_of(value) is not None and value.device.type == "cpu"


def _is_digested_on_device(value: Any) -> bool:
    return (
        _memory_of(value) is not None
        and value.device.type == "cuda"
        and value.is_contiguous()
        and value.data_ptr() % _ALIGNMENT == 0
        and not value.is_conj()
        and not value.is_neg()
        and dispatch.supports_digests(value.device)
    )
