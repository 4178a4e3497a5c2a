"""Choose the code that encodes and decodes: torch operations on any device, or the Triton kernels.

The environment variable KVPACK_KERNELS selects "torch" or "triton". If unset: Triton for tensors on a CUDA
device where a Triton is installed on which the kernels run (``triton_version.OLDEST`` or newer), else torch, with one warning.
On the CPU the kernels run in Triton's interpreter (TRITON_INTERPRET=1).
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from kvpack.formats.errors import InvalidParameter
from kvpack.formats.side_cars import WithSideCars

from . import triton_version

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from kvpack.formats.base import Codec

VARIABLE = "KVPACK_KERNELS"
BACKENDS = ("torch", "triton")


def encode(codec: Codec, x: torch.Tensor) -> dict[str, torch.Tensor] | None:
    """The streams of ``x`` ``[batch, kv_head, token, dim]`` from a kernel, None where the codec itself is to encode it.

    That is so where not ``uses_triton``, for what the kernels do not take, and for values that the codec may refuse. Raises what
    ``uses_triton`` raises.
    """
    if not uses_triton(x.device):
        return None
    from kvpack.kernels.encode import encode

    return encode.encode(codec, x)


def decode_frame(codec: Codec, streams: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Decode to float32 ``[batch, kv_head, token, dim]`` in the coded frame: ``codec.decode_frame``, on kernels where ``uses_triton``.

    Raises InvalidShape when a stream is not laid out as the codec says, and what ``uses_triton`` raises.
    """
    if isinstance(codec, WithSideCars):
        return codec.complete(decode_frame(codec.codec, streams), streams)
    if not uses_triton(next(iter(streams.values())).device):
        return codec.decode_frame(streams)
    from kvpack.kernels.decode import decode

    return decode.decode_frame(codec, streams)


def decode(codec: Codec, streams: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Decode to float32 ``[batch, kv_head, token, dim]`` in the original frame, as ``decode_frame``."""
    if isinstance(codec, WithSideCars):
        return codec.complete_original(decode_frame(codec.codec, streams), streams)
    return codec.original(decode_frame(codec, streams), streams)


def uses_triton(device: torch.device) -> bool:
    """Whether tensors on ``device`` are encoded and decoded by Triton kernels.

    Issues a KvpackWarning, once, where tensors on a CUDA device lack a Triton for their kernels. Raises InvalidParameter when
    KVPACK_KERNELS is unknown, or is "triton" where the kernels cannot run.
    """
    backend = os.environ.get(VARIABLE, "")
    if backend not in ("", *BACKENDS):
        raise InvalidParameter(f"the environment variable {VARIABLE} is {backend!r}, expected one of {', '.join(BACKENDS)}")
    if backend != "triton":
        wanted = not backend and device.type == "cuda"
        if wanted and not triton_version.supported():
            triton_version.warn_unsupported()
        return wanted and triton_version.supported()
    if not triton_version.supported():
        raise InvalidParameter(f"the environment variable {VARIABLE} is 'triton', which needs {triton_version.shortfall()}")
    if device.type != "cuda" and not (device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"):
        raise InvalidParameter(
            f"the environment variable {VARIABLE} is 'triton', which takes tensors on cuda (on cpu: with TRITON_INTERPRET=1); "
            f"this one is on {device.type}"
        )
    return True
