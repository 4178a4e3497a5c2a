"""Choose the code that encodes, decodes and attends: torch operations on any device, the Triton kernels, or the C kernels of the CPU.

The environment variable KVPACK_KERNELS selects "torch", "triton" or "cpu". If unset: Triton for tensors on a CUDA
device if a Triton is installed on which the kernels run (``triton_version.OLDEST`` or newer), the C kernels for tensors on the
CPU where they were built, else torch, with one warning. On the CPU Triton's kernels run in its interpreter (TRITON_INTERPRET=1).
"""

from __future__ import annotations

import os
import warnings
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

import xxhash

from kvpack.file import row
from kvpack.formats import head_norms, rans
from kvpack.formats.base import Run
from kvpack.formats.errors import InvalidParameter, KvpackWarning
from kvpack.formats.head_norms import norms_of
from kvpack.formats.lossless import Lossless
from kvpack.formats.side_cars import WithSideCars

from . import triton_version

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy
    import torch

    from kvpack.formats.base import Codec
    from kvpack.kernels.cpu.sides import Side as _CSide
    from kvpack.kernels.tiles.layers import Side as _TritonSide

    class Side(_CSide, _TritonSide, Protocol):
        """The keys or the values of a layer, as both kinds of kernels see them."""


VARIABLE = "KVPACK_KERNELS"
BACKENDS = ("torch", "triton", "cpu")

ASSEMBLY_VARIABLE = "KVPACK_INLINE_ASSEMBLY"
"""True if kernels use inline PTX: not if it is 0."""

_SHORTFALL = "the C kernels, which are missing or were built from other sources (reinstall kvpack with a C compiler)"


def encode(
    codec: Codec, x: torch.Tensor, before: Mapping[str, torch.Tensor] | None = None, coded: torch.Tensor | None = None
) -> dict[str, torch.Tensor] | None:
    """Encode ``x`` ``[batch, kv_head, token, dim]`` with a kernel; None if the codec itself must encode it.

    ``before`` contains the streams of the run that it continues. For a codec that changes norms, ``coded``, contiguous float32 ``[batch,
    kv_head, token]``, receives ``codec.coded_norms`` if there are streams. The codec itself must encode if no kernels run, if they do not
    support it, and for values that it may refuse. Raises the errors of ``uses_triton`` and ``uses_c``.
    """
    if uses_c(x.device):
        from kvpack.kernels.cpu import encode as c_encode
        from kvpack.kernels.cpu import lossless

        if isinstance(codec, Lossless) and lossless.supports_encoding(codec, x):
            return lossless.encode(codec, x, before)
        return c_encode.encode(codec, x, before, coded=coded) if c_encode.supports(codec, x) else None
    if not uses_triton(x.device):
        return None
    from kvpack.kernels.encode import encode

    streams = encode.encode(codec, x, before)
    if coded is not None and streams is not None:
        coded.copy_(codec.coded_norms(Run((*x.shape,), x.device, lambda: iter([x.float()])), before))
    return streams


def decode_frame(codec: Codec, streams: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Decode to float32 ``[batch, kv_head, token, dim]`` in the coded frame, like ``codec.decode_frame``, with kernels if ``uses_triton``.

    Raises InvalidParameter if a stream is not laid out as the codec says, and the errors of ``uses_triton``.
    """
    if isinstance(codec, WithSideCars):
        return codec.complete(decode_frame(codec.codec, streams), streams)
    if not uses_triton(next(iter(streams.values())).device):
        return codec.decode_frame(streams)
    from kvpack.kernels.decode import decode

    return decode.decode_frame(codec, streams)


def decode(codec: Codec, streams: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Decode to ``[batch, kv_head, token, dim]`` in the original frame: in the codec's exact dtype, or float32."""
    if codec.exact_dtype is not None:
        return codec.stored_values(streams)
    if isinstance(codec, WithSideCars):
        return codec.complete_original(decode_frame(codec.codec, streams), streams)
    return codec.original(decode_frame(codec, streams), streams)


def checks_values(codec: Codec, device: torch.device) -> bool:
    """Return True if ``check_values`` performs the checks of ``codec`` on ``device``. Raises the errors of ``uses_triton``."""
    if not uses_triton(device):
        return False
    from kvpack.kernels import codecs
    from kvpack.kernels.bitpack import rules

    if isinstance(codec, WithSideCars):
        # The signs of a residual are too many to be copied back.
        if codec.sketches:
            return False
        codec = codec.codec
    return codecs.of_codec(codec).has_rules(codec) and rules.rules_of(codec) is not None


def check_values(sides: Sequence[tuple[Codec, Mapping[str, torch.Tensor], Sequence[int], str]]) -> Callable[[], None]:
    """Start to check sides, each given as ``(codec, streams, runs, where)``, on a device that ``checks_values`` supports.

    The streams are contiguous, and ``runs`` are the token counts of their runs. The streams of side-cars, which are small, are copied to
    the host and checked there. Returns a function that waits for the device and raises InvalidPayload, as ``codec.check`` and
    ``codec.check_runs`` do, naming the first side that breaks a rule.
    """
    if not sides:
        return lambda: None
    from kvpack.kernels.bitpack import rules

    wrong_sides = rules.wrong_sides(
        [(codec.codec if isinstance(codec, WithSideCars) else codec, streams) for codec, streams, _, _ in sides]
    )
    places = [
        (number, name)
        for number, (codec, *_) in enumerate(sides)
        if isinstance(codec, WithSideCars)
        for name in codec.side_car_layout(1, 1, 0)
    ]
    arrays = _to_host([sides[number][1][name] for number, name in places])

    def refuse() -> None:
        wrong = set(wrong_sides())
        of_side: dict[int, dict[str, numpy.ndarray[Any, Any]]] = {}
        for (number, name), array in zip(places, arrays(), strict=True):
            of_side.setdefault(number, {})[name] = array
        for number, (codec, streams, runs, where) in enumerate(sides):
            if number in wrong:
                codec.check(dict(zip(streams, _to_host([*streams.values()])(), strict=True)), where)
            if isinstance(codec, WithSideCars):
                codec.check_side_cars(of_side.get(number, {}), runs, codec.batch_of(streams), where)

    return refuse


def _to_host(tensors: Sequence[torch.Tensor]) -> Callable[[], list[numpy.ndarray[Any, Any]]]:
    """Start to copy ``tensors`` of one device to host memory together.

    Returns a function that waits for the copy and returns numpy arrays of their shapes; bfloat16 as its bits, uint16.
    """
    if not tensors:
        return list
    import torch

    shapes = [(tensor.shape, torch.int16 if tensor.dtype == torch.bfloat16 else tensor.dtype, tensor.nbytes) for tensor in tensors]
    memory = torch.cat([tensor.flatten().view(torch.uint8) for tensor in tensors])

    def arrays() -> list[numpy.ndarray[Any, Any]]:
        parts = memory.cpu().split([nbytes for _, _, nbytes in shapes])  # type: ignore[no-untyped-call]
        # Copies begin at multiples of their items.
        result = [part.clone().view(dtype).view(shape).numpy() for part, (shape, dtype, _) in zip(parts, shapes, strict=True)]
        return [array.view("<u2") if array.dtype == "<i2" else array for array in result]

    return arrays


def checks_chunks(codec: Codec, device: torch.device) -> bool:
    """Return True if ``check_chunks`` performs the checks of ``codec.check_chunks`` on ``device``. Raises the errors of ``uses_triton``."""
    if not uses_triton(device):
        return False
    from kvpack.kernels import codecs

    return codecs.of_codec(codec).check_chunks is not None


def check_chunks(codec: Codec, streams: Mapping[str, torch.Tensor], where: str) -> None:
    """Run the checks of ``codec.check_chunks`` for streams on a device that ``checks_chunks`` supports. The host waits for them.

    Raises InvalidPayload, naming ``where``.
    """
    from kvpack.kernels import codecs

    check = codecs.of_codec(codec).check_chunks
    assert check is not None
    check(codec, streams, where)


def checks_digests(device: torch.device) -> bool:
    """Return True if ``digests`` supports tensors on ``device``. Raises the errors of ``uses_triton``."""
    return uses_triton(device)


def digests(places: Sequence[tuple[torch.Tensor, int, int]]) -> Callable[[], list[bytes]]:
    """Start to compute the digests of byte ranges ``[begin, end)`` of memory, uint8, on a device that ``checks_digests`` supports."""
    if not places:
        return list
    from kvpack.kernels.bitpack import digests

    large = [number for number, (_, begin, end) in enumerate(places) if end - begin >= digests.MIN_BYTES]
    small = [number for number, (_, begin, end) in enumerate(places) if end - begin < digests.MIN_BYTES]
    results = digests.digests([places[number] for number in large]) if large else None
    arrays = _to_host([memory[begin:end] for memory, begin, end in map(places.__getitem__, small)])

    def wait() -> list[bytes]:
        result = dict(zip(small, (xxhash.xxh3_128_digest(array.tobytes()) for array in arrays()), strict=True))
        if results is not None:
            result.update(zip(large, (digest.tobytes() for digest in results.cpu().numpy().astype(">i8")), strict=True))
        return [result[number] for number in range(len(places))]

    return wait


def norms(x: torch.Tensor) -> torch.Tensor:
    """Compute ``head_norms.norms_of``, in C if available; the last bits depend on the order of sums."""
    if uses_c(x.device):
        from kvpack.kernels.cpu import encode as c_encode

        if c_encode.measures(x):
            return c_encode.norms(x)
    return norms_of(x)


def choice() -> tuple[str | None, str | None]:
    """Return the environment's choice of kernels, as far as a call depends on it."""
    return os.environ.get(VARIABLE), os.environ.get(ASSEMBLY_VARIABLE)


def unpack_into(side: Side, out: torch.Tensor) -> list[tuple[int, int]]:
    """Decode ``side`` into ``out`` ``[batch, kv_head, token, dim]``, whole rows, in the original frame, if kernels can in one pass.

    Returns the ranges of tokens still to be written: all of them if no kernels run, none if C decodes the side. Raises InvalidParameter if
    a stream does not have the codec's layout, and the errors of ``uses_triton`` and ``uses_c``.
    """
    if uses_c(out.device):
        from kvpack.kernels.cpu import lossless, unpack
        from kvpack.kernels.cpu.sides import RAW_DTYPES

        if lossless.supports(side, out.dtype):
            lossless.unpack_into(side, out)
            return []
        # Values that are stored in the dtype of ``out`` are copied: a conversion would change the bits of NaN.
        copied = side.codec.exact_dtype is not None and side.codec.exact_dtype == RAW_DTYPES.get(out.dtype)
        if not copied and unpack.unpack_into(side, out):
            return []
    if not uses_triton(out.device):
        return [(0, side.tokens)]
    from kvpack.kernels.decode import sides

    return sides.unpack_into(side, 0, side.tokens, out)


def _decode_chunks(chunks: rans.Chunks, lengths: rans.Numbers, tables: rans.Numbers, table: rans.Numbers) -> rans.Decoded | None:
    """Run ``rans.decode`` in C; None if C does not run."""
    if os.environ.get(VARIABLE, "") not in ("", "cpu") or not c_is_built():
        return None
    from kvpack.kernels.cpu import rans as c_rans

    return c_rans.decode(chunks, lengths, tables, table)


def _encode_chunks(symbols: rans.Numbers, lengths: rans.Numbers, tables: rans.Numbers, table: rans.Numbers) -> rans.Chunks | None:
    """Run ``rans.encoded`` in C; None if C does not run."""
    if os.environ.get(VARIABLE, "") not in ("", "cpu") or not c_is_built():
        return None
    from kvpack.kernels.cpu import rans as c_rans

    return c_rans.encode(symbols, lengths, tables, table)


rans.compiled, rans.compiled_encoder = _decode_chunks, _encode_chunks


def _add_words(data: memoryview, sum_: int) -> int | None:
    """Run ``row.checksum`` in C; None if C does not run."""
    if os.environ.get(VARIABLE, "") not in ("", "cpu") or not c_is_built():
        return None
    from kvpack.kernels.cpu import checksum

    return checksum.added(data, sum_)


row.compiled = _add_words


def _has_large(sizes: torch.Tensor, ratio: float) -> bool | None:
    """Run ``head_norms.has_large`` in C, None if C does not run."""
    if not _compares(sizes.device):
        return None
    from kvpack.kernels.cpu import encode as c_encode

    return c_encode.has_large(sizes, ratio)


def has_large_error(codec: Codec, streams: Mapping[str, torch.Tensor], ratio: float) -> bool:
    """Return ``head_norms.has_large`` of ``codec.error_sizes(streams)``, without computing these if C reads the streams.

    If one is large by less than rounding, it may be True.
    """
    if _compares(streams[next(iter(streams))].device):
        from kvpack.kernels.cpu import encode as c_encode

        answer = c_encode.has_large_error(codec, streams, ratio)
        if answer is not None:
            return answer
    return head_norms.has_large(codec.error_sizes(streams), ratio)


def _compares(device: torch.device) -> bool:
    return device.type == "cpu" and os.environ.get(VARIABLE, "") in ("", "cpu") and c_is_built()


head_norms.compiled = _has_large


def uses_triton(device: torch.device) -> bool:
    """Return True if tensors on ``device`` are encoded and decoded by Triton kernels.

    Issues a KvpackWarning, once, if Triton is missing for tensors on a CUDA device. Raises InvalidParameter if KVPACK_KERNELS is unknown,
    or is "triton" although the kernels cannot run.
    """
    backend = _backend()
    if backend != "triton":
        wanted = not backend and device.type == "cuda"
        if wanted and not triton_version.supported():
            triton_version.warn_unsupported()
        return wanted and triton_version.supported()
    if not triton_version.supported():
        raise InvalidParameter(f"the environment variable {VARIABLE} is 'triton', which needs {triton_version.shortfall()}")
    if device.type != "cuda" and not (device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"):
        raise InvalidParameter(
            f"the environment variable {VARIABLE} is 'triton', which needs tensors on cuda (on cpu: with TRITON_INTERPRET=1); "
            f"this one is on {device.type}"
        )
    return True


def uses_c(device: torch.device) -> bool:
    """Return True if the C kernels handle tensors on ``device``, provided that they support the codec.

    Issues a KvpackWarning, once, if they are missing for tensors on the CPU. Raises InvalidParameter if KVPACK_KERNELS is unknown, or is
    "cpu" although the C kernels were not built.
    """
    backend = _backend()
    if device.type != "cpu" or backend not in ("", "cpu"):
        return False
    if not c_is_built():
        if backend == "cpu":
            raise InvalidParameter(f"the environment variable {VARIABLE} is 'cpu', which needs {_SHORTFALL}")
        _warn_missing()
        return False
    return True


def c_is_built() -> bool:
    """Return True if the C kernels were built and run on this machine; without a compiler, kvpack installs without them."""
    from kvpack.kernels.cpu.library import library

    return library() is not None


@cache
def _warn_missing() -> None:
    """Warn, once per process, that PyTorch operations handle tensors on the CPU (KvpackWarning)."""
    warnings.warn(
        f"attention and unpacking on the CPU use PyTorch operations, several times slower than with {_SHORTFALL}; set "
        "KVPACK_KERNELS=torch to turn this warning off",
        KvpackWarning,
        stacklevel=3,
    )


def _backend() -> str:
    backend = os.environ.get(VARIABLE, "")
    if backend not in ("", *BACKENDS):
        raise InvalidParameter(f"the environment variable {VARIABLE} is {backend!r}, expected one of {', '.join(BACKENDS)}")
    return backend


def backends() -> dict[str, str]:
    """Return, for each kind of device ("cpu", "cuda"), a description of the code that encodes, decodes and attends there.

    PyTorch operations do what the kernels do not support. Raises InvalidParameter if the environment variable KVPACK_KERNELS is not valid.

    >>> sorted(kvpack.backends())
    ['cpu', 'cuda']
    """
    chosen = _backend()
    forced = f"PyTorch operations ({VARIABLE}={chosen})"
    by_triton = f"Triton kernels, Triton {triton_version.installed()}"
    if chosen == "triton" and os.environ.get("TRITON_INTERPRET") == "1":
        cpu = f"{by_triton}, interpreted"
    elif chosen in ("torch", "triton"):
        cpu = forced
    elif c_is_built():
        from kvpack.kernels.cpu.library import levels

        cpu = f"C kernels for {levels()[0]}"
    else:
        cpu = "PyTorch operations (the C kernels were not built)"
    if chosen in ("torch", "cpu"):
        cuda = forced
    else:
        cuda = by_triton if triton_version.supported() else f"PyTorch operations (the kernels need {triton_version.shortfall()})"
    return {"cpu": cpu, "cuda": cuda}
