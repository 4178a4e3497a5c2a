"""Inspection of a file's header, and verification of a whole file."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, Any

from kvpack.file.container import File, open_file
from kvpack.file.header import FORMAT, SideEntry
from kvpack.file.inputs import Inputs
from kvpack.file.metadata import FEATURE, from_bytes
from kvpack.formats.arguments import check_callback
from kvpack.formats.transform import Transform

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Sequence

    from kvpack.formats.base import Codec

    from .bases import Basis


def inspect(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Describe the contents of a file, as ``kvpack inspect --json`` does.

    Reads and checks only the header; ``verify`` also checks the values.

    Args:
        path: A cache or a basis.

    Returns:
        A dict of JSON values. For a basis, it includes the file's ``sha256``.

    Raises:
        MissingFile: The file does not exist or cannot be read.
        NotKvpack, Truncated, DigestMismatch, InvalidHeader: The file is damaged or another kind of file.
        UnsupportedVersion, UnknownCodec: A newer kvpack wrote the file.
        LimitExceeded: The file exceeds a limit of the format.

    >>> kvpack.inspect("prompt.kvpack")["stop"]
    64
    """
    with open_file(path) as file:
        summary = summarize(file)
    if summary["is_basis"]:
        # Imported here because it needs numpy.
        from .basis_files import open_basis

        with open_basis(path) as basis:
            summary["sha256"] = basis.digest().hex()
    return summary


def summarize(file: File) -> dict[str, Any]:
    """Describe the header of ``file`` as JSON values, except for bytes, which are not converted."""
    header = file.header
    inputs = Inputs.from_features(header.ignorable, header.hidden, header.min_batch, start=header.start, tokens=header.tokens)
    stored: Counter[tuple[int, str]] = Counter()
    streams: Counter[str] = Counter()
    for tensor in header.tensors:
        number, name, stream = tensor.name.split(".", 2)
        stored[int(number), name] += tensor.stored_bytes
        streams[f"{name}.{stream}"] += tensor.stored_bytes
    layers = [
        {name: _side_summary(header.codecs[side.codec], side, header.starts[number], stored[number, name]) for name, side in layer.sides()}
        for number, layer in enumerate(header.layers)
    ]
    sides = [side for layer in layers for side in layer.values()]
    states = [
        {"name": state.where, "dtype": state.dtype, "shape": list(state.shape), "stored_bytes": file.tensors[state.where].stored_bytes}
        for state in header.states
    ]
    packed = sum(side["values"] for side in sides)
    values = packed + sum(math.prod(state.shape) for state in header.states)
    payload = sum(streams.values())
    return {
        "file": file.where,
        "format": FORMAT,
        "bytes": file.size,
        "values": values,
        "bits_per_value": 8 * file.size / values if values else 0.0,
        "nominal_bits": sum(side["nominal_bits"] * side["values"] for side in sides) / packed if packed else 0.0,
        "recipe": header.recipe,
        "model": dict(header.model),
        "start": header.start,
        "stop": max((side["stop"] for side in sides), default=header.start),
        "token_ids": 0 if inputs is None else inputs.tokens,
        "undetermined": [] if inputs is None else list(inputs.undetermined),
        "metadata": from_bytes(header.ignorable.get(FEATURE, b"")),
        "is_basis": header.is_basis,
        "bases": sorted(frozenset().union(*(codec.bases_needed for codec in header.codecs))),
        "codecs": [codec.params() for codec in header.codecs],
        "layers": layers,
        "states": states,
        "streams": {**streams, "header and padding": file.size - payload},
        "tensors": [
            {"name": t.name, "dtype": t.dtype, "shape": t.shape, "filter": t.filter, "stored_bytes": t.stored_bytes, "xxh3_128": t.digest}
            for t in header.tensors
        ],
    }


def _side_summary(codec: Codec, side: SideEntry, start: int, stored: int) -> dict[str, Any]:
    values = side.batch * side.heads * side.tokens * codec.dim
    return {
        "codec": side.codec,
        "batch": side.batch,
        "heads": side.heads,
        "start": start,
        "stop": start + side.tokens,
        "tokens": side.tokens,
        "packed_tokens": side.packed,
        "tail_tokens": side.tail,
        "tail_dtype": side.tail_dtype,
        "window": side.window,
        "dim": codec.dim,
        "values": values,
        "stored_bytes": stored,
        "bits_per_value": 8 * stored / values if values else 0.0,
        "nominal_bits": codec.nominal_bits,
    }


def verify(
    path: str | os.PathLike[str],
    *,
    basis: Basis | str | os.PathLike[str] | Sequence[Basis | str | os.PathLike[str]] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Check a whole file: its digests, and that every stored code, scale and padding bit is valid.

    Args:
        path: A cache or a basis.
        basis: As for ``kvpack.load``. Needed only to check codes of the codec transform.
        progress: Called as ``progress(done, total)``, both in tensors.

    Returns:
        A dict with the keys ``file``, ``bytes``, ``layers`` (the number of layers) and ``needs_basis``, which is True if some codes could
        not be checked without the file's basis.

    Raises:
        InvalidPayload: A stored tensor breaks a rule of its codec.
        MissingBasis: The file needs a basis that ``basis`` does not contain.

    Also raises the same errors as ``inspect``.

    >>> kvpack.verify("prompt.kvpack")["needs_basis"]
    False
    """
    check_callback(progress)
    with open_file(path) as file:
        if basis is not None:
            # Imported here because it needs torch.
            from .basis_sources import bind_bases

            file.header = bind_bases(file.where, file.header, basis)
        file.verify(progress)
        plain_codecs = (codec.without_sidecars for codec in file.header.codecs)
        unchecked = any(isinstance(codec, Transform) and codec.source is None for codec in plain_codecs)
        return {"file": file.where, "bytes": file.size, "layers": len(file.header.layers), "needs_basis": unchecked}
