"""Fuzz targets by name, with their seeds, their mutations, and the properties that every input must have.

A target is created in the process that runs it, so that processes without torch stay small.
"""

from __future__ import annotations

import atexit
import importlib
import shutil
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from fuzz import seeds
from fuzz.byte_mutator import mutate_text
from fuzz.file_mutator import Vocabulary, mutate_file
from fuzz.header_mutator import mutate_header

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

CODECS = ("raw", "lossless", "group", "minifloat", "scalar", "octahedral", "angle", "polar", "quaternion", "klt", "transform", "trellis")
_SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class Target:
    """A fuzz target. ``check`` returns True if an input is accepted, and raises if a property does not hold.

    ``compare`` compares one in ``every`` inputs with another reader. Its time does not count as the input's. ``share`` is the target's
    share of a run's time.
    """

    seeds: tuple[bytes, ...]
    mutate: Callable[[bytes, random.Random], bytes]
    check: Callable[[bytes], bool]
    compare: Callable[[bytes], None] | None = None
    every: int = 64
    max_bytes: int = 1 << 14


def _files(files: list[bytes], vocabulary: Vocabulary | None = None) -> tuple[tuple[bytes, ...], Callable[[bytes, random.Random], bytes]]:
    words = Vocabulary.of(files) if vocabulary is None else vocabulary
    return tuple(files), lambda data, source: mutate_file(data, words, source, Target.max_bytes)


def container() -> Target:
    """Return the target for whole files: framing, header, padding, digests, frames, and the rules of codecs."""
    from fuzz.oracles import check_container, compare_container

    return Target(*_files(list(seeds.kvpack_files())), check_container, compare_container)


def header() -> Target:
    """Return the target for the tensor kvpack.header."""
    from fuzz.oracles import check_header, compare_header

    vocabulary = Vocabulary.of(seeds.kvpack_files())
    return Target(
        tuple(seeds.headers()), lambda data, source: mutate_header(data, vocabulary, source), check_header, compare_header, 32, 1 << 13
    )


def codec(codec_id: str) -> Target:
    """Return the target for one codec: its parameters, its streams, and the values that they decode to."""
    from fuzz.value_oracles import check_values, compare_values

    return Target(*_files(seeds.files_with_codec(codec_id)), check_values, compare_values)


def sidecars() -> Target:
    """Return the target for the sidecars of all codecs."""
    from fuzz.value_oracles import check_values, compare_values

    return Target(*_files(seeds.files_with_sidecars()), check_values, compare_values)


def attend() -> Target:
    """Return the target that attends to files of any codec, with any options."""
    from fuzz.cache_oracles import check_attend, compare_attend

    _preload_caches()
    return Target(*_files(list(seeds.kvpack_files())), check_attend, compare_attend)


def append() -> Target:
    """Return the target that appends tokens to files of any codec."""
    from fuzz.cache_oracles import check_append

    _preload_caches()
    return Target(*_files(list(seeds.kvpack_files())), check_append)


def safetensors() -> Target:
    """Return the target that compares accepted files with the official safetensors reader."""
    from fuzz.oracles import check_safetensors

    return Target(*_files(list(seeds.kvpack_files())), check_safetensors)


def entry() -> Target:
    """Return the target for store entries, which are read both by template and by parsing."""
    from fuzz.entry_oracles import EntryOracle, mutate_entry

    oracle = EntryOracle()
    found = [data for chain in oracle.chains.values() for data in chain]
    vocabulary = Vocabulary.of([*found, *seeds.kvpack_files()])
    return Target(tuple(found), lambda data, source: mutate_entry(data, vocabulary, source, Target.max_bytes), oracle.check)


def encrypted_entry() -> Target:
    """Return the target for encrypted entries of a store."""
    from fuzz.sealed_oracles import SEALED, check_sealed, mutate_sealed

    return Target(tuple(SEALED), lambda data, source: mutate_sealed(data, source, 1 << 10), check_sealed, max_bytes=1 << 10)


def record() -> Target:
    """Return the target for pins and usage records, which a store keeps next to its entries."""
    from fuzz.record_oracle import SEEDS, check_record, mutate_record

    max_bytes = 1 << 10
    return Target(SEEDS, lambda data, source: mutate_record(data, source, max_bytes), check_record, max_bytes=max_bytes)


def row() -> Target:
    """Return the target for packed rows of engines' pages: frame, description, and the rules of codecs."""
    from fuzz.row_oracles import RowOracle

    oracle = RowOracle()
    vocabulary = Vocabulary.of(seeds.kvpack_files())
    found = (*oracle.rows, *seeds.rows())
    return Target(found, lambda data, source: oracle.mutate(data, vocabulary, source, Target.max_bytes), oracle.check, oracle.compare)


def slot() -> Target:
    """Return the target for sequence states of llama.cpp."""
    from fuzz.slot_oracle import SEEDS, SlotOracle, mutate_slot

    max_bytes = 1 << 12
    return Target(SEEDS, lambda data, source: mutate_slot(data, source, max_bytes), SlotOracle(_folder()).check, max_bytes=max_bytes)


def basis() -> Target:
    """Return the target for basis files, and for data encoded with them."""
    from fuzz.basis_oracle import SEEDS, check_basis

    _preload_caches()
    mutate = _files([*SEEDS, *seeds.bases()])[1]
    return Target((*SEEDS, *seeds.bases()), mutate, check_basis)


def prompt_cache() -> Target:
    """Return the target for prompt caches of mlx-lm."""
    from fuzz.prompt_cache_oracle import SEEDS, PromptCacheOracle, mutate_prompt_cache

    max_bytes = 1 << 13
    _preload_caches()
    check = PromptCacheOracle(_folder()).check
    return Target(SEEDS, lambda data, source: mutate_prompt_cache(data, source, max_bytes), check, max_bytes=max_bytes)


def recipe() -> Target:
    """Return the target for recipes as text."""
    from fuzz.oracles import check_recipe

    texts, words = _recipe_words()
    return Target(tuple(texts), lambda data, source: mutate_text(data, words, source), check_recipe, max_bytes=1 << 12)


def recipe_file() -> Target:
    """Return the target for recipe files."""
    from fuzz.oracles import check_recipe_file

    texts, words = _recipe_words()
    found = tuple(b"# a comment\n" + text.replace(b";", b"\n") + b"\n" for text in texts)
    path = str(_folder() / "recipe.txt")
    words = [*words, b"#", b"\n", b"\r\n", b"\xef\xbb\xbf", b"@other.txt"]
    return Target(found, lambda data, source: mutate_text(data, words, source), partial(check_recipe_file, path=path), max_bytes=1 << 12)


def command() -> Target:
    """Return the target for the command line on a kvpack file: inspect, verify, unpack, convert, store."""
    from fuzz.command_oracle import CommandOracle

    _preload_commands()
    return Target(*_files(list(seeds.kvpack_files())), CommandOracle(_folder()).check)


def dense_file() -> Target:
    """Return the target for the command line on a safetensors file of dense keys and values: pack."""
    from fuzz.command_oracle import CommandOracle
    from fuzz.dense_mutator import SEEDS, mutate_dense

    _preload_commands()
    return Target(SEEDS, lambda data, source: mutate_dense(data, source, 1 << 13), CommandOracle(_folder()).check_pack, max_bytes=1 << 13)


def _preload_commands() -> None:
    """Import the modules that commands import lazily, so that their memory is not attributed to an input."""
    for module in ("rich.console", "rich.table", "safetensors.torch", "kvpack.cache.packing", "kvpack.store.catalog"):
        importlib.import_module(module)
    _preload_caches()


def _preload_caches() -> None:
    """Run PyTorch code that is mapped on first use, so that its memory is not attributed to an input."""
    import torch

    import kvpack

    x = torch.randn(1, 2, 40, 64, generator=torch.Generator().manual_seed(0))
    for recipe in ("octopus-3", "kivi-2", "k=quaternion:s=4096,r=4;v=angle:n=64", "k=scalar:b=3;v=polar:b=4.2.2"):
        cache = kvpack.pack([(x, x)], recipe).append([(x, x)])
        kvpack.attend(x[:, :, :1], cache[0])
        cache.unpack()


def _recipe_words() -> tuple[list[bytes], list[bytes]]:
    from kvpack.coding.presets import ADDITIONS, PUBLISHED
    from kvpack.formats import sidecar_option_names

    texts = [preset.recipe.encode() for preset in PUBLISHED.values()]
    texts += [f"{name};{addition};tail=32".encode() for name in list(PUBLISHED)[:6] for addition in ADDITIONS]
    options = {word for text in texts for part in text.replace(b";", b":").replace(b",", b":").split(b":") for word in (part, b"," + part)}
    known = [*PUBLISHED, *ADDITIONS, *CODECS, *sidecar_option_names()]
    return texts, sorted(options | {name.encode() for name in known} | {b"layers=0,-1:", b"layers=1-2:k=", b"tail=", b";", b"k=", b"v="})


def _folder() -> Path:
    """Return a temporary folder of this process, in memory if the system has a file system in memory."""
    folder = Path(tempfile.mkdtemp(prefix="kvpack-fuzz-", dir=_SHARED_MEMORY if _SHARED_MEMORY.is_dir() else None))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


TARGETS: dict[str, Callable[[], Target]] = {
    "container": container,
    "header": header,
    **{f"codec-{name}": partial(codec, name) for name in CODECS},
    "sidecars": sidecars,
    "attend": attend,
    "append": append,
    "safetensors": safetensors,
    "entry": entry,
    "encrypted-entry": encrypted_entry,
    "record": record,
    "row": row,
    "slot": slot,
    "prompt-cache": prompt_cache,
    "basis": basis,
    "recipe": recipe,
    "recipe-file": recipe_file,
    "command": command,
    "dense-file": dense_file,
}
