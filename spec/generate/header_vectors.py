"""The conformance vectors whose header tensor a reader refuses for its fields, layers or tensors: each breaks one rule."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgpack

from spec.generate.invalid_vectors import GROUP, RAW, add, add_header
from support.file_parts import Parts, changed, edit, file_of, one_side, place, random_side, reorder

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvpack.formats.base import Codec


def add_all() -> None:
    add_fields()
    add_layers()
    add_alone()


def add_fields() -> None:
    side = "layers.0.k"
    for name, path, value, shows in (
        ("format-0", "format", 0, "format is 0"),
        ("required-map", "required", {}, "required is a map"),
        ("required-integer", "required", [1], "required holds an integer"),
        ("ignorable-string", "ignorable", {"x": "1"}, "an ignorable feature is a string"),
        ("model-bytes", "model", {"name": b"x"}, "a value of model is bytes"),
        ("recipe-integer", "recipe", 1, "recipe is an integer"),
        ("start-nil", "start", None, "start is nil"),
        ("codecs-map", "codecs", {}, "codecs is a map"),
        ("codec-nil", "codecs.0", None, "a codec is nil"),
        ("codec-without-id", "codecs.0", {"dim": 3}, "a codec has no id"),
        ("codec-id-integer", "codecs.0.id", 1, "the id of a codec is an integer"),
        ("layers-map", "layers", {}, "layers is a map"),
        ("layer-nil", "layers.0", None, "a layer is nil"),
        ("side-array", side, [], "a side is an array"),
        ("codec-index", f"{side}.codec", 1, "a side names a codec beyond the last"),
        ("batch-0", f"{side}.batch", 0, "batch is 0"),
        ("heads-0", f"{side}.heads", 0, "heads is 0"),
        ("heads-string", f"{side}.heads", "2", "heads is a string"),
        ("run-0", f"{side}.runs", [2, 0], "a run of no tokens"),
        ("run-nil", f"{side}.runs", [2, None], "a run is nil"),
        ("runs-integer", f"{side}.runs", 2, "runs is an integer"),
        ("tail-string", f"{side}.tail", "1", "tail is a string"),
        ("tail-dtype", f"{side}.tail_dtype", "F16", "tail_dtype is the name of a stored dtype"),
        ("window-nil", f"{side}.window", None, "window is nil"),
        ("tensors-map", "tensors", {}, "tensors is a map"),
    ):
        add(f"header-{name}", "container-11", "InvalidHeader", shows, lambda p=path, v=value: broken_header(GROUP, edit(p, v)))
    top = list(Parts.of(one_side(GROUP)).header)
    keys = list(Parts.of(one_side(GROUP)).header["layers"][0]["k"])
    for name, path, order, shows in (
        ("key-missing", "", [key for key in top if key != "recipe"], "the header lacks recipe"),
        ("key-unknown", "", [*top, "more"], "the header has a key too many"),
        ("keys-swapped", "", ["required", "format", *top[2:]], "the header's first keys are in another order"),
        ("layer-key-missing", "layers.0", ["k"], "a layer lacks v"),
        ("layer-keys-swapped", "layers.0", ["v", "k"], "a layer has v before k"),
        ("side-key-missing", side, keys[:-1], "a side lacks window"),
        ("side-key-unknown", side, [*keys, "more"], "a side has a key too many"),
        ("side-keys-swapped", side, [*keys[:3], "tail", "runs", *keys[5:]], "a side has tail before runs"),
        ("entries-without-a-stream", side, [*keys, "entries"], "a side has entries, and no stream with a row an entry"),
    ):
        add(f"header-{name}", "container-11", "InvalidHeader", shows, lambda p=path, o=order: broken_header(GROUP, reorder(p, *o)))
    for name, at, value, shows in (
        ("filter", 3, "lz4", "an unknown filter"),
        ("stored-bytes-string", 4, "0", "stored_bytes is a string"),
        ("digest-15", 5, bytes(15), "a digest of 15 bytes"),
        ("shape-string", 2, "1", "a shape is a string"),
    ):
        add(
            f"tensor-{name}",
            "container-11",
            "InvalidHeader",
            shows,
            lambda p=at, v=value: broken_header(GROUP, edit(f"tensors.0.{p}", v)),
        )
    add(
        "tensor-five-places",
        "container-11",
        "InvalidHeader",
        "the entry of a tensor has no digest",
        lambda: broken_header(GROUP, lambda parts: parts.header["tensors"][0].pop()),
    )


def broken_header(codec: Codec, change: Callable[[Parts], Any]) -> bytes:
    """A file of one side whose JSON header is that of the correct header, except for the digest of the broken one."""
    data = one_side(codec)
    right, wrong = Parts.of(data), Parts.of(data)
    change(wrong)
    return right.joined(msgpack.packb(wrong.header))


def add_layers() -> None:
    add("batch-of-two-sides", "container-13", "InvalidHeader", "k has one sequence and v two", lambda: two_sides(batch=2))
    add("tokens-of-two-sides", "container-14", "InvalidHeader", "k has three tokens and v four", lambda: two_sides(tokens=4))
    add_header(
        "window-within-a-token-group", "container-15", GROUP, "layers.0.k.window", 24, "a window of 24 tokens, and a token group of 16"
    )
    add_header("tensor-name", "container-16", GROUP, "tensors.0.0", "0.v.codes.0", "a tensor of another name")
    add_header("tensor-dtype", "container-16", GROUP, "tensors.0.1", "F16", "a tensor of another dtype of equal size")
    add_header("tensor-shape", "container-16", GROUP, "tensors.0.2", [2, 1, 2, 1], "a tensor of another shape of equal size")
    add_header("runs-of-fewer-tokens", "container-16", GROUP, "layers.0.k.runs", [1], "tensors have a token more than runs say")
    add(
        "tensors-too-few",
        "container-16",
        "InvalidHeader",
        "the tail is not listed",
        lambda: one_side(GROUP, lambda parts: (parts.header["tensors"].pop(), parts.tensors.pop())),
    )
    add(
        "tensors-too-many",
        "container-16",
        "InvalidHeader",
        "a tensor that no layer has",
        lambda: one_side(
            GROUP, lambda parts: (parts.header["tensors"].append(["1.k.tail", "U8", [0], "none", 0, b""]), parts.tensors.append(b""))
        ),
    )
    add(
        "tensors-swapped",
        "container-16",
        "InvalidHeader",
        "the tail comes first",
        lambda: one_side(GROUP, lambda parts: (parts.header["tensors"].reverse(), parts.tensors.reverse())),
    )
    add(
        "stored-bytes-more",
        "container-17",
        "InvalidHeader",
        "a tensor takes more bytes than its shape",
        lambda: one_side(GROUP, lambda parts: parts.store("0.k.tail", parts.tensors[-1] + b"\0\0")),
    )
    add(
        "stored-bytes-less",
        "container-17",
        "InvalidHeader",
        "a tensor takes fewer bytes than its shape",
        lambda: one_side(GROUP, lambda parts: parts.store("0.k.tail", parts.tensors[-1][:-2])),
    )
    for name, number in (("4096", 4096), ("64-bits", 2**64 - 1)):
        shows = f"a side names codec {number}, far beyond the last"
        add_header(f"codec-index-of-{name}", "container-11", GROUP, "layers.0.k.codec", number, shows)
    add_header("two-runs", "container-18", RAW, "layers.0.k.runs", [1, 1], "two runs of a codec that encodes tokens one by one")


def add_alone() -> None:
    """Fields whose value is the only fault: the tensors and the JSON header match that value."""
    for name in ("batch", "heads"):
        add(
            f"header-{name}-0-alone",
            "container-11",
            "InvalidHeader",
            f"{name} is 0, and so is the size of tensors",
            lambda n=name: no_rows(n),
        )
    empty: list[Any] = []
    for name, path, value, shows in (
        ("required-string", "required", "new", "required is a string"),
        ("model-array", "model", empty, "model is an array"),
        ("codecs-nil", "codecs", None, "codecs is nil"),
        ("layers-nil", "layers", None, "layers is nil"),
        ("tensors-nil", "tensors", None, "tensors is nil"),
        ("codec-index-string", "layers.0.k.codec", "0", "a side names its codec by a string"),
        ("tail-dtype-array", "layers.0.k.tail_dtype", empty, "tail_dtype is an array"),
    ):
        add(f"header-{name}", "container-11", "InvalidHeader", shows, lambda p=path, v=value: broken_header(GROUP, edit(p, v)))
    for name, value in (("nil", None), ("shape-nil", ["0.k.codes.0", "U16", None, "none", 8, bytes(16)])):
        shows = f"the entry of a tensor is {value}" if value is None else "a shape is nil"
        add(f"tensor-{name}", "container-11", "InvalidHeader", shows, lambda v=value: broken_header(GROUP, edit("tensors.0", v)))
    add(
        "tensor-filter-lz4",
        "container-11",
        "InvalidHeader",
        "an unknown filter, which the JSON header tells too",
        lambda: with_entry(3, "lz4"),
    )
    add("tensor-digest-string", "container-11", "InvalidHeader", "a digest that is a string", lambda: with_entry(5, "0" * 16))
    shows = "stored_bytes of a zstd frame is a string"
    add("tensor-stored-bytes-string-zstd", "container-11", "InvalidHeader", shows, lambda: with_entry(4, "24", "zstd"))
    for name, at, value in (
        ("shape-float", 2, [1.0, 2, 2, 1]),
        ("shape-true", 2, [True, 2, 2, 1]),
    ):
        add(f"msgpack-{name}", "container-10", "InvalidHeader", f"a shape holds {value[0]!r}", lambda p=at, v=value: with_entry(p, v))
    for path in ("layers.0.k.codec", "layers.0.k.tail", "layers.0.k.window", "layers.0.k.batch", "tensors.0.4"):
        name = path.rpartition(".")[2].replace("4", "stored-bytes")
        value = -16 if name == "window" else -1
        shows = f"{name} is {value}"
        add(f"msgpack-negative-{name}", "container-10", "InvalidHeader", shows, lambda p=path, v=value: broken_header(GROUP, edit(p, v)))
    for name, path in (("codec", "codecs.0"), ("model", "model"), ("side", "layers.0.k")):
        shows = f"a key of a map of {name} is bytes"
        add(f"msgpack-key-bytes-of-{name}", "container-10", "InvalidHeader", shows, lambda p=path: broken_header(GROUP, bytes_key(p)))
    add_header(
        "limit-of-ignorable",
        "container-29",
        GROUP,
        "ignorable",
        {f"{n:03}": b"" for n in range(257)},
        "257 ignorable features",
        "LimitExceeded",
    )
    add_header("limit-of-a-key", "container-29", GROUP, "model", {"x" * 4097: ""}, "a key of model above its limit", "LimitExceeded")


def bytes_key(path: str) -> Callable[[Parts], None]:
    """Makes the last key of the map of the header at ``path`` bytes."""

    def apply(parts: Parts) -> None:
        at = place(parts, path)
        key, value = at.popitem()
        at[key.encode()] = value

    return apply


def with_entry(at: int, value: Any, chosen: str = "none") -> bytes:
    """A file of one side whose first tensor is listed with another value, which its JSON header repeats."""
    right, wrong = Parts.of(one_side(GROUP)), Parts.of(one_side(GROUP))
    for parts in (right, wrong):
        parts.header["tensors"][0][3] = value if at == 3 else chosen
    wrong.header["tensors"][0][at] = value
    return right.joined(msgpack.packb(wrong.header))


def no_rows(name: str) -> bytes:
    """A side without sequences or heads."""
    parts = Parts.of(one_side(GROUP))
    parts.header["layers"][0]["k"][name] = 0
    for number, tensor in enumerate(parts.header["tensors"]):
        tensor[2][("batch", "heads").index(name)] = 0
        parts.tensors[number] = b""
    return parts.joined()


def two_sides(batch: int = 1, tokens: int = 3) -> bytes:
    """A file whose two sides differ."""
    one = changed(file_of((random_side(RAW, (3,), 0), random_side(RAW, (3,), 0))))
    parts, other = Parts.of(one), Parts.of(one_side(RAW, runs=(tokens,), tail=0, batch=batch))
    parts.header["layers"][0]["v"] = other.header["layers"][0]["k"]
    parts.header["tensors"][1] = ["0.v.values", *other.header["tensors"][0][1:]]
    parts.tensors[1] = other.tensors[0]
    return parts.joined()
