"""Selection of the implementation that encodes, decodes and attends: PyTorch operations, Triton kernels or C kernels.

The environment variable KVPACK_KERNELS selects "torch", "triton" or "cpu". By default, tensors on a CUDA device use the Triton kernels if
Triton is installed (``triton_version.MIN_VERSION`` or newer), and tensors on the CPU use the C kernels if they were built. Otherwise,
kvpack uses PyTorch operations and warns once. With TRITON_INTERPRET=1, Triton kernels also run on the CPU.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import warnings
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import xxhash

from kvpack.file import row
from kvpack.formats import rans, token_norms
from kvpack.formats.errors import InvalidParameter, KvpackWarning
from kvpack.formats.foreign import check_decoded, is_foreign
from kvpack.formats.lossless import Lossless
from kvpack.formats.runs import Run
from kvpack.formats.sidecars import CodecWithSidecars
from kvpack.formats.token_norms import norms_per_head
from kvpack.runtime.threads import outer

from . import triton_version

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import numpy
    import torch

    from kvpack.formats.base import Codec
    from kvpack.formats.raw_positions import RawPositions
    from kvpack.kernels.cpu.sides import Side as _CSide
    from kvpack.kernels.tiles.layers import Side as _TritonSide

    class Side(_CSide, _TritonSide, Protocol):
        """The keys or values of a layer, with all attributes that the C and the Triton kernels need."""


VARIABLE = "KVPACK_KERNELS"
BACKENDS = ("torch", "triton", "cpu")

ASSEMBLY_VARIABLE = "KVPACK_INLINE_ASSEMBLY"
"""Environment variable that disables inline PTX in the kernels if it is set to 0."""


class TokenSizes(NamedTuple):
    """Tensors into which encoders write the sizes of tokens in the coded frame. Each is contiguous float32 ``[batch, kv_head, token]``, or
    None.

    ``norms`` are as ``codec.coded_norms`` returns them. ``errors`` are the norms of the tokens' errors, divided by ``norms``. They may
    ignore the rounding of stored norms, and exist only for codecs with ``direction_spread``.
    """

    norms: torch.Tensor | None = None
    errors: torch.Tensor | None = None


UNMEASURED = TokenSizes()


class ValueSizes(NamedTuple):
    """Sizes of tokens in each head: their norms, and their largest magnitudes if these are known. Each is float32 ``[batch, kv_head,
    token]``.
    """

    norms: torch.Tensor
    largest: torch.Tensor | None = None

    def before(self, token: int) -> ValueSizes:
        """Return the sizes of the tokens before ``token``."""
        return ValueSizes(self.norms[:, :, :token], None if self.largest is None else self.largest[:, :, :token])


_C_KERNELS = "the C kernels, which are missing or outdated (to build them, reinstall kvpack with a C compiler)"


def encode(
    codec: Codec,
    x: torch.Tensor,
    previous: Mapping[str, torch.Tensor] | None = None,
    sizes: TokenSizes = UNMEASURED,
    skipped: torch.Tensor | None = None,
    largest: torch.Tensor | None = None,
) -> dict[str, torch.Tensor] | None:
    """Encode ``x``, ``[batch, kv_head, token, dim]``, with a kernel, and return the streams.

    Returns None if kernels are disabled or do not support the call, or if the codec may reject some values. The codec itself then encodes.

    ``previous`` contains the streams of the run that ``x`` continues. Sizes of tokens are written into the tensors in ``sizes``. Tokens in
    the mask ``skipped``, contiguous bool ``[batch, token]``, are encoded as zeros. ``largest`` contains the largest magnitudes of tokens as
    in ``ValueSizes``, if known. Raises the same errors as ``uses_triton`` and ``uses_c``.
    """
    if uses_c(x.device):
        from kvpack.kernels.cpu import encode as c_encode
        from kvpack.kernels.cpu import lossless

        if isinstance(codec, Lossless) and skipped is None and lossless.supports_encoding(codec, x):
            return lossless.encode(codec, x, previous)
        return c_encode.encode(codec, x, previous, norms=sizes.norms, errors=sizes.errors, skipped=skipped, largest=largest)
    if skipped is not None or not uses_triton(x.device):
        return None
    from kvpack.kernels.encode import encode

    streams = encode.encode(codec, x, previous, sizes.errors)
    if streams is not None and isinstance(codec, Lossless) and not _decodes_to(codec, streams, x):
        return None
    if sizes.norms is not None and streams is not None:
        sizes.norms.copy_(codec.coded_norms(Run((*x.shape,), x.device, lambda: iter([x.float()])), previous))
    return streams


def _decodes_to(codec: Lossless, streams: Mapping[str, torch.Tensor], x: torch.Tensor) -> bool:
    """Return True if Triton decodes ``streams`` to the bits of ``x``.

    Every run is checked, because one wrong word would corrupt all values after it, and not every compiler version has been tested.
    """
    import torch

    from kvpack.kernels.decode import decode
    from kvpack.kernels.decode.rows import PackedPart

    decoded = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    is_decoded = decode.decode_into(codec, [PackedPart(streams, x.shape[2], 0)], decoded, True)
    return is_decoded and torch.equal(decoded.view(torch.int16), x.view(torch.int16))


@contextlib.contextmanager
def serial_operations(codecs: Sequence[Codec | None], sides: Sequence[Any]) -> Iterator[None]:
    """Return a context manager that limits PyTorch in this thread to one thread if C encodes all ``sides``, which are tensors, or None.

    The threads of C are not limited. For milliseconds after an operation, PyTorch's threads wait for the next one in a loop, and would
    share the cores with those of C. PyTorch's operations between calls of C are short.
    """
    import torch

    threads = torch.get_num_threads()
    serial = threads > 1 and not outer.threads
    for codec, x in zip(codecs, sides, strict=True):
        if serial and codec is not None:
            serial = isinstance(x, torch.Tensor) and uses_c(x.device)
            if serial:
                from kvpack.kernels.cpu import encode as c_encode

                serial = c_encode.supports(codec.without_raw_positions)
    if not serial:
        yield
        return
    restored = _thread.allocate_lock()

    def restore() -> None:
        # A thread that uses PyTorch for the first time gets the number that any thread has set last.
        torch.set_num_threads(threads)
        restored.release()

    torch.set_num_threads(1)
    outer.threads = threads
    restored.acquire()
    try:
        _thread.start_new_thread(restore, ())
    except (RuntimeError, MemoryError):
        restored.release()
    try:
        yield
    finally:
        outer.threads = 0
        with restored:
            torch.set_num_threads(threads)


def decode_frame(codec: Codec, streams: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Decode to float32 ``[batch, kv_head, token, dim]`` in the codec's rotated frame, with Triton kernels if possible.

    Raises InvalidParameter if a stream does not have the layout in ``codec.layout``, and the same errors as ``uses_triton``.
    """
    if isinstance(codec, CodecWithSidecars):
        return codec.complete(decode_frame(codec.codec, streams), streams)
    if uses_triton(next(iter(streams.values())).device):
        from kvpack.kernels.decode import decode

        values = decode.decode_frame(codec, streams)
    else:
        values = codec.decode_frame(streams)
    if is_foreign(codec):
        check_decoded(codec, values)
    return values


def decode(codec: Codec, streams: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Decode to the original values, ``[batch, kv_head, token, dim]``. Their dtype is the one that the codec stores exactly, or float32."""
    if codec.exact_dtype is not None:
        return codec.stored_values(streams)
    if isinstance(codec, CodecWithSidecars):
        return codec.finish_decoding(decode_frame(codec.codec, streams), streams)
    return codec.original(decode_frame(codec, streams), streams)


def supports_value_checks(codec: Codec, device: torch.device) -> bool:
    """Return True if ``check_values`` supports ``codec`` on ``device``. Raises the same errors as ``uses_triton``."""
    if not uses_triton(device):
        return False
    from kvpack.kernels import codecs
    from kvpack.kernels.bitpack import rules

    # A sketch has too many signs to copy to the host.
    if isinstance(codec, CodecWithSidecars) and codec.sketches:
        return False
    plain = codec.without_sidecars
    return codecs.codec_kernels(plain).has_rules(plain) and rules.stream_rules(plain) is not None


def check_values(sides: Sequence[tuple[Codec, Mapping[str, torch.Tensor], Sequence[int], str]]) -> Callable[[], None]:
    """Start checking stored keys and values on a device. ``supports_value_checks`` must be True for each codec.

    Each of ``sides`` is ``(codec, streams, runs, where)``: contiguous streams, the number of tokens in each run, and a name for messages.
    Streams of sidecars are small, and are checked on the host. Returns a function that waits for the device. It raises the InvalidPayload
    of ``codec.check`` or ``codec.check_runs`` about the first invalid side.
    """
    if not sides:
        return lambda: None
    from kvpack.kernels.bitpack import rules

    wrong_sides = rules.find_invalid_sides([(codec.without_sidecars, streams) for codec, streams, _, _ in sides])
    sidecar_streams = [
        (number, name)
        for number, (codec, *_) in enumerate(sides)
        if isinstance(codec, CodecWithSidecars)
        for name in codec.sidecar_layout(1, 1, 0)
    ]
    arrays = _to_host([sides[number][1][name] for number, name in sidecar_streams])

    def raise_invalid() -> None:
        wrong = set(wrong_sides())
        arrays_by_side: dict[int, dict[str, numpy.ndarray[Any, Any]]] = {}
        for (number, name), array in zip(sidecar_streams, arrays(), strict=True):
            arrays_by_side.setdefault(number, {})[name] = array
        for number, (codec, streams, runs, where) in enumerate(sides):
            if number in wrong:
                codec.check(dict(zip(streams, _to_host([*streams.values()])(), strict=True)), where)
            if isinstance(codec, CodecWithSidecars):
                codec.check_sidecars(arrays_by_side.get(number, {}), runs, codec.batch_size(streams), where)

    return raise_invalid


def _to_host(tensors: Sequence[torch.Tensor]) -> Callable[[], list[numpy.ndarray[Any, Any]]]:
    """Start copying ``tensors``, all on one device, to host memory in a single transfer.

    Returns a function that waits for the copy and returns numpy arrays of the same shapes. bfloat16 values are returned as uint16 bit
    patterns.
    """
    if not tensors:
        return list
    import torch

    shapes = [(tensor.shape, torch.int16 if tensor.dtype == torch.bfloat16 else tensor.dtype, tensor.nbytes) for tensor in tensors]
    memory = torch.cat([tensor.flatten().view(torch.uint8) for tensor in tensors])

    def arrays() -> list[numpy.ndarray[Any, Any]]:
        parts = memory.cpu().split([nbytes for _, _, nbytes in shapes])  # type: ignore[no-untyped-call]
        # A view needs memory that is aligned to its item size, so each part is copied.
        result = [part.clone().view(dtype).view(shape).numpy() for part, (shape, dtype, _) in zip(parts, shapes, strict=True)]
        return [array.view("<u2") if array.dtype == "<i2" else array for array in result]

    return arrays


def supports_chunk_checks(codec: Codec, device: torch.device) -> bool:
    """Return True if ``check_chunks`` supports ``codec`` on ``device``. Raises the same errors as ``uses_triton``."""
    if not uses_triton(device):
        return False
    from kvpack.kernels import codecs

    return codecs.codec_kernels(codec).check_chunks is not None


def check_chunks(codec: Codec, streams: Mapping[str, torch.Tensor], where: str) -> None:
    """Run ``codec.check_chunks`` on a device and wait for it. ``supports_chunk_checks`` must be True.

    Raises InvalidPayload with ``where`` in its message.
    """
    from kvpack.kernels import codecs

    check = codecs.codec_kernels(codec).check_chunks
    assert check is not None
    check(codec, streams, where)


def supports_digests(device: torch.device) -> bool:
    """Return True if ``digests`` supports tensors on ``device``. Raises the same errors as ``uses_triton``."""
    return uses_triton(device)


def digests(ranges: Sequence[tuple[torch.Tensor, int, int]]) -> Callable[[], list[bytes]]:
    """Start computing XXH3-128 digests on a device. Each range is (uint8 tensor, begin, end).

    ``supports_digests`` must be True for the device. Returns a function that waits for the digests and returns them in order.
    """
    if not ranges:
        return list
    from kvpack.kernels.bitpack import digests

    large = [number for number, (_, begin, end) in enumerate(ranges) if end - begin >= digests.MIN_BYTES]
    small = [number for number, (_, begin, end) in enumerate(ranges) if end - begin < digests.MIN_BYTES]
    results = digests.digests([ranges[number] for number in large]) if large else None
    arrays = _to_host([memory[begin:end] for memory, begin, end in map(ranges.__getitem__, small)])

    def wait() -> list[bytes]:
        result = dict(zip(small, (xxhash.xxh3_128_digest(array.tobytes()) for array in arrays()), strict=True))
        if results is not None:
            result.update(zip(large, (digest.tobytes() for digest in results.cpu().numpy().astype(">i8")), strict=True))
        return [result[number] for number in range(len(ranges))]

    return wait


def norms(x: torch.Tensor) -> torch.Tensor:
    """Return the norm of each token and head, float32 ``[batch, kv_head, token]``, computed in C if possible.

    C adds in a different order than ``token_norms.norms_per_head``, so the last bits may differ.
    """
    return measure_sizes(x).norms


def measure_sizes(x: torch.Tensor) -> ValueSizes:
    """Return the ``norms`` of tokens. In C, their largest magnitudes are measured in the same pass over ``x``."""
    if uses_c(x.device):
        from kvpack.kernels.cpu import encode as c_encode

        compiled = c_encode.measure_sizes(x)
        if compiled is not None:
            return ValueSizes(*compiled)
    return ValueSizes(norms_per_head(x))


def choose_raw_tokens(
    raw: RawPositions, key_norms: torch.Tensor, value_norms: torch.Tensor | None, packed: int, position: int
) -> torch.Tensor:
    """Return a mask of the raw tokens among the first ``packed`` tokens, bool ``[batch, packed]``, chosen in C if possible.

    The norms of keys and, if known, of values are ``[batch, kv_head, token]``. ``position`` is the position of the first token. C may
    choose other tokens than ``RawPositions.choose`` if a norm is within rounding error of a bound.
    """
    if uses_c(key_norms.device):
        from kvpack.kernels.cpu import encode as c_encode

        return c_encode.choose_raw_tokens(raw, key_norms, value_norms, packed, position)
    return raw.choose(raw.selection_norms(key_norms, value_norms)[:, :, :packed], position)


def environment_key() -> tuple[str | None, str | None]:
    """Return the values of the environment variables that select kernels, as part of a cache key."""
    return os.environ.get(VARIABLE), os.environ.get(ASSEMBLY_VARIABLE)


def unpack_into(side: Side, out: torch.Tensor) -> list[tuple[int, int]]:
    """Decode the tokens of ``side`` that kernels support into ``out``, ``[batch, kv_head, token, dim]``.

    Returns the ranges of tokens that the caller still has to decode, as (start, stop) pairs. Raises InvalidParameter if a stream does not
    have the codec's layout, and the same errors as ``uses_triton`` and ``uses_c``.
    """
    if uses_c(out.device):
        from kvpack.kernels.cpu import lossless, unpack
        from kvpack.kernels.cpu.sides import RAW_DTYPES

        if lossless.supports(side, out.dtype):
            lossless.unpack_into(side, out)
            return []
        # Values stored in the dtype of ``out`` are copied, because a conversion would change the bits of NaN.
        copied = side.codec.exact_dtype is not None and side.codec.exact_dtype == RAW_DTYPES.get(out.dtype)
        if not copied and unpack.unpack_into(side, out):
            return []
    if not uses_triton(out.device):
        return [(0, side.tokens)]
    from kvpack.kernels.decode import sides

    return sides.unpack_into(side, 0, side.tokens, out)


def _decode_chunks(
    chunks: rans.Chunks, lengths: rans.Numbers, tables: rans.Numbers, table_indices: rans.Numbers
) -> rans.DecodedChunks | None:
    """Decode chunks in C, as ``rans.decode`` does. Returns None if the C kernels are unavailable or disabled."""
    if not _c_is_enabled():
        return None
    from kvpack.kernels.cpu import rans as c_rans

    return c_rans.decode(chunks, lengths, tables, table_indices)


def _encode_chunks(
    symbols: rans.Numbers, lengths: rans.Numbers, tables: rans.Numbers, table_indices: rans.Numbers
) -> rans.Chunks | None:
    """Encode symbols in C, as ``rans.encode_in_numpy`` does. Returns None if the C kernels are unavailable or disabled."""
    if not _c_is_enabled():
        return None
    from kvpack.kernels.cpu import rans as c_rans

    return c_rans.encode(symbols, lengths, tables, table_indices)


rans.compiled_decoder, rans.compiled_encoder = _decode_chunks, _encode_chunks


def _add_words(data: memoryview, sum_: int) -> int | None:
    """Add words to a row's checksum in C. Returns None if the C kernels are unavailable or disabled."""
    if not _c_is_enabled():
        return None
    from kvpack.kernels.cpu.library import add_words

    return add_words(data, sum_)


row.compiled = _add_words


def _has_large_size(sizes: torch.Tensor, ratio: float) -> bool | None:
    """Compare sizes in C, as ``token_norms.has_large_size`` does. Returns None if the C kernels are unavailable or disabled."""
    if not uses_c(sizes.device):
        return None
    from kvpack.kernels.cpu import encode as c_encode

    return c_encode.has_large(sizes, ratio)


def has_large_error(codec: Codec, streams: Mapping[str, torch.Tensor], ratio: float, device: torch.device) -> bool:
    """Return True if an error size (see ``codec.error_sizes``) exceeds ``ratio`` times the typical size.

    Sizes are rounded, so the result may also be True for a size slightly below the limit. ``streams`` are on ``device``.
    """
    if uses_c(device):
        from kvpack.kernels.cpu import encode as c_encode

        has_large = c_encode.has_large_error(codec, streams, ratio)
        if has_large is not None:
            return has_large
    return token_norms.has_large_size(codec.without_sidecars.error_sizes(streams), ratio)


def _c_is_enabled() -> bool:
    return os.environ.get(VARIABLE, "") in ("", "cpu") and c_is_built()


token_norms.compiled_has_large_size = _has_large_size


def uses_triton(device: torch.device) -> bool:
    """Return True if Triton kernels encode and decode tensors on ``device``.

    Issues a KvpackWarning, once, if ``device`` is a CUDA device and Triton is missing. Raises InvalidParameter if KVPACK_KERNELS is
    invalid, or if it is "triton" and the kernels cannot run.
    """
    backend = _checked_backend(os.environ.get(VARIABLE, ""))
    if backend != "triton":
        wanted = not backend and device.type == "cuda" and not _in_transform()
        if wanted and not triton_version.is_supported():
            triton_version.warn_unsupported()
        return wanted and triton_version.is_supported()
    if not triton_version.is_supported():
        raise InvalidParameter(f"the environment variable {VARIABLE} is 'triton', which requires {triton_version.requirement()}: unset it")
    if device.type != "cuda" and not (device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"):
        raise InvalidParameter(
            f"the environment variable {VARIABLE} is 'triton', which supports only tensors on cuda, but got one on {device.type}: unset it"
            + (", or set TRITON_INTERPRET=1" if device.type == "cpu" else "")
        )
    return True


def uses_c(device: torch.device) -> bool:
    """Return True if the C kernels process tensors on ``device``, for codecs that they support.

    Issues a KvpackWarning, once, if ``device`` is the CPU and the C kernels are missing. Raises InvalidParameter if KVPACK_KERNELS is
    invalid, or if it is "cpu" and the C kernels were not built.
    """
    backend = _checked_backend(os.environ.get(VARIABLE, ""))
    if device.type != "cpu" or backend not in ("", "cpu") or _in_transform():
        return False
    if not c_is_built():
        if backend == "cpu":
            raise InvalidParameter(f"the environment variable {VARIABLE} is 'cpu', which needs {_C_KERNELS}")
        _warn_missing()
        return False
    return True


def _in_transform() -> bool:
    """Return True within a transform of ``torch.func``, whose tensors have no memory that kernels could read."""
    import torch

    return torch._C._functorch.peek_interpreter_stack() is not None


@cache
def c_is_built() -> bool:
    """Return True if the C kernels were built and run on this machine. Installing kvpack without a C compiler leaves them out."""
    from kvpack.kernels.cpu.library import library

    return library() is not None


@cache
def _warn_missing() -> None:
    warnings.warn(
        f"attention and unpacking on the CPU use PyTorch operations and are several times slower than with {_C_KERNELS}; "
        "set KVPACK_KERNELS=torch to turn this warning off",
        KvpackWarning,
        stacklevel=3,
    )


@cache
def _checked_backend(backend: str) -> str:
    if backend not in ("", *BACKENDS):
        raise InvalidParameter(f"the environment variable {VARIABLE} is {backend!r}, expected one of {', '.join(BACKENDS)}")
    return backend


def backends() -> dict[str, str]:
    """Describe the implementation that encodes, decodes and attends, by kind of device ("cpu" and "cuda").

    For codecs that kernels do not support, PyTorch operations are used instead. Raises InvalidParameter if the environment variable
    KVPACK_KERNELS has an unknown value.

    >>> sorted(kvpack.backends())
    ['cpu', 'cuda']
    """
    chosen = _checked_backend(os.environ.get(VARIABLE, ""))
    forced = f"PyTorch operations ({VARIABLE}={chosen})"
    by_triton = f"Triton kernels, Triton {triton_version.installed_version()}"
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
        cuda = by_triton if triton_version.is_supported() else f"PyTorch operations (the kernels need {triton_version.requirement()})"
    import torch  # not at the top: commands that only read headers do without it

    if not torch.cuda.is_available():
        cuda = f"no CUDA device (with one: {cuda})"
    return {"cpu": cpu, "cuda": cuda}
