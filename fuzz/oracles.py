"""Checks of arbitrary bytes passed to the readers of containers, headers and recipes. They do not need torch.

A check reads an input as a program would, and returns True if it is accepted. A KvpackError means that it is refused, and any other
exception is a failure. Comparisons with another reader are separate functions, because they take longer and run on fewer inputs.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import safetensors

from fuzz.reader_oracles import check_readers
from kvpack.coding.recipes import Recipe, parse_recipe
from kvpack.file import container
from kvpack.file.front import make_front, pack_header, parse_header
from kvpack.file.header import layout_bytes
from kvpack.file.limits import MAX_FILE_BYTES, MAX_JSON_BYTES
from kvpack.formats import codec_from_params
from kvpack.formats.errors import InvalidParameter, KvpackError
from spec.decoder.header import parse_msgpack, take_header
from spec.decoder.json_header import json_header, tensor_spans
from support.second_decoder import decoder, decompress

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvpack.file.container import File

MAX_DECODED_BYTES = 1 << 20
"""``memory_limit`` of the readers for one input, as a program would set it for untrusted files."""
MAX_COMPARED_BYTES = 1 << 15
"""Maximum number of decoded bytes of inputs to compare. The second decoder is slow."""


def open_verified(data: bytes) -> File | None:
    """Return the verified file, or None if it is refused."""
    try:
        file = container.open_bytes(data, memory_limit=MAX_DECODED_BYTES)
        file.verify()
    except KvpackError:
        return None
    return file


def check_container(data: bytes) -> bool:
    """Check that rewriting an accepted file results in the same bytes, so that no other file has its contents."""
    file = open_verified(data)
    if file is None:
        return False
    arrays = {name: file.tensor(name) for name in file.tensors}
    again = container.to_bytes(file.header, arrays)
    if all(tensor.filter == "none" for tensor in file.header.tensors):
        assert again == data, "writing the file again gives different bytes"
    else:
        other = container.open_bytes(again)
        other.verify()
        assert all(other.tensor(name) == content for name, content in arrays.items()), "a tensor differs when stored unfiltered"
    return True


def compare_container(data: bytes) -> None:
    """Check that the second decoder and the readers in other languages accept exactly the files that the library accepts."""
    try:
        file = container.open_bytes(data, memory_limit=MAX_DECODED_BYTES)
        if sum(map(layout_bytes, file.header.layouts.values())) > MAX_COMPARED_BYTES:
            return
    except KvpackError:
        file = None
    accepted = file is not None and open_verified(data) is not None and not needs_basis(file)
    decoded, rule = read_by_decoder(data)
    assert accepted == (not rule), f"the library {'accepts' if accepted else 'refuses'} it; the second decoder: {rule or 'accepts it'}"
    check_readers(data, ".kvpack", (), decoded, rule)


def needs_basis(file: File) -> bool:
    """Return True if a file uses a basis that it does not embed. Only targets that check values pass bases to readers."""
    used = {side.codec for layer in file.header.layers for _, side in layer.sides()}
    return any(file.header.codecs[number].bases_needed for number in used)


def read_by_decoder(data: bytes, bases: Sequence[bytes] = ()) -> tuple[Any, str]:
    """Return the file as read by the second decoder with ``bases``, and an empty string, or None and the rule that the file breaks."""
    try:
        return decoder.read(data, decompress, bases), ""
    except decoder.Refused as refused:
        return None, str(refused)


def check_header(data: bytes) -> bool:
    """Check that an accepted header is canonical, and that its tensors do not overlap."""
    try:
        header = parse_header(data)
    except KvpackError:
        return False
    assert pack_header(header) == data, "packing the header again gives different bytes"
    try:
        front = make_front(header)
    except KvpackError:
        return True
    assert front.tensor == data
    ends = [place.end for place in front.places.values()]
    assert ends == sorted(ends), "tensors overlap"
    return True


def compare_header(data: bytes) -> None:
    """Check that the second decoder accepts exactly the headers that the library accepts, and writes the same JSON headers."""
    error = rule = None
    text, size = b"", 0
    try:
        front = make_front(parse_header(data))
        text, size = front.text, front.file_bytes
    except KvpackError as refusal:
        error = refusal
    try:
        file = take_header(parse_msgpack(data))
    except decoder.Refused as refusal:
        rule = refusal
    else:
        assert error is not None or list(parse_header(data).starts) == file.starts, "the positions of layers differ"
        json_bytes, spans = json_header(data, file.tensors), tensor_spans(len(data), file.tensors)
        end = 8 + len(json_bytes) + (spans[-1].end if spans else len(data))
        # A reader of whole files would check these against the file, which does not exist here.
        if end > MAX_FILE_BYTES or len(json_bytes) > MAX_JSON_BYTES:
            rule = "limits"
        elif error is None:
            assert (text, size) == (len(json_bytes).to_bytes(8, "little") + json_bytes, end), "the JSON headers differ"
    assert (error is None) == (rule is None), f"the library: {error or 'accepts it'}; the second decoder: {rule or 'accepts it'}"


def check_safetensors(data: bytes) -> bool:
    """Check that the official safetensors reader accepts every accepted file, with the same names, dtypes, shapes and offsets."""
    file = open_verified(data)
    if file is None:
        return False
    theirs = dict(safetensors.deserialize(data))
    start = len(file.front.text)
    ours: dict[str, tuple[str, list[int], int, int]] = {"kvpack.header": ("U8", [len(file.front.tensor)], 0, len(file.front.tensor))}
    for name, place in file.front.places.items():
        tensor = file.tensors[name]
        size = place.end - place.begin
        pads = sum(other.startswith("kvpack.pad.") for other in ours)
        if place.begin > place.pad:
            ours[f"kvpack.pad.{pads}"] = ("U8", [place.begin - place.pad], place.pad, place.begin)
        dtype, shape = (tensor.dtype, list(tensor.shape)) if tensor.filter == "none" else ("U8", [size])
        ours[name] = (dtype, shape, place.begin, place.end)
    assert list(theirs.keys() - ours.keys()) == list(ours.keys() - theirs.keys()) == [], "the tensors have different names"
    listed = json.loads(data[8:start], object_pairs_hook=_without_duplicates)
    for name, (dtype, shape, begin, end) in ours.items():
        parsed = theirs[name]
        assert (parsed["dtype"], list(parsed["shape"])) == (dtype, shape), (
            f"{name}: {parsed['dtype']} {parsed['shape']}, not {dtype} {shape}"
        )
        assert bytes(parsed["data"]) == data[start + begin : start + end], f"{name} has different bytes"
        assert listed[name]["data_offsets"] == [begin, end], f"{name} has different offsets"
    return True


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    assert len({name for name, _ in pairs}) == len(pairs), "a name occurs twice in the JSON header"
    return dict(pairs)


def check_recipe(data: bytes) -> bool:
    """Check that a parsed recipe round-trips through its text, and that its codecs can be rebuilt from their parameters."""
    text = data.decode("utf-8", "surrogateescape")
    if "/" in text or text.lstrip().startswith("@"):
        # This is a path to a recipe file, for which there is another target.
        return False
    try:
        recipe = parse_recipe(text)
    except KvpackError:
        return False
    _check_parsed(recipe)
    return True


def check_recipe_file(data: bytes, path: str) -> bool:
    """Check that a recipe file, written to ``path``, parses to the recipe of its clauses, or is refused by name."""
    with open(path, "wb") as file:
        file.write(data)
    recipe, refusal = None, ""
    try:
        recipe = parse_recipe(f"@{path}")
    except KvpackError as error:
        refusal = str(error)
    if recipe is None:
        assert os.path.basename(path) in refusal, f"the message does not name the file: {refusal}"
        return False
    _check_parsed(recipe)
    return True


def _check_parsed(recipe: Recipe) -> None:
    again = Recipe(recipe.text)
    assert again.text == recipe.text, f"the canonical text {recipe.text!r} parses to a recipe with the text {again.text!r}"
    for layer, side, dim in ((0, "k", 64), (3, "v", 128), (1, "k", 6)):
        try:
            codec = recipe.codec(layer, 4, side, dim)
        except InvalidParameter:
            continue
        assert again.codec(layer, 4, side, dim) == codec
        assert recipe.window % codec.group_tokens == 0, f"tail={recipe.window} is not a multiple of the token group, {codec.group_tokens}"
        assert codec_from_params(codec.params()).params() == codec.params()
        assert sum(map(layout_bytes, codec.layout(1, 2, 33).values())) > 0
