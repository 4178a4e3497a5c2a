"""kvpack import and kvpack export: prompt caches of mlx-lm to and from kvpack files."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from kvpack.formats.errors import InvalidParameter
from kvpack.output import add_json, print_json, progress

from .convert import RECIPE_HELP, add_basis, add_writing, recipe_of, save
from .dense import DTYPES

if TYPE_CHECKING:
    import argparse

_WINDOW = re.compile(r"(?P<layers>[0-9]{1,4}(,[0-9]{1,4})*)=(?P<tokens>[0-9]{1,9})", re.ASCII)


def add(commands: Any) -> None:
    """Add ``import`` and ``export`` to the command line."""
    parser = commands.add_parser(
        "import", help="read a prompt cache of mlx-lm", description="Read a prompt cache of mlx-lm into a kvpack file."
    )
    parser.add_argument("input", metavar="IN.safetensors")
    parser.add_argument("output", metavar="OUT")
    parser.add_argument("--recipe", default="raw", help=f"{RECIPE_HELP} (default: raw, which keeps every bit)")
    add_basis(parser)
    add_writing(parser)
    add_json(parser)
    parser.set_defaults(run=import_)
    parser = commands.add_parser(
        "export", help="write a prompt cache for mlx-lm", description="Write the cache of a kvpack file as a prompt cache of mlx-lm."
    )
    parser.add_argument("input", metavar="FILE")
    parser.add_argument("output", metavar="OUT.safetensors")
    add_basis(parser)
    parser.add_argument("--dtype", choices=list(DTYPES), help="round values to this dtype (default: the one that they are stored in)")
    parser.add_argument(
        "--window", metavar="LAYERS=TOKENS", action="append", default=[], help="the sliding window of some layers, such as 0,2,4=512"
    )
    add_json(parser)
    parser.set_defaults(run=export)


def import_(arguments: argparse.Namespace) -> int:
    """Read the prompt cache, pack it and save it."""
    from kvpack.integrations.mlx_lm import import_prompt_cache

    with progress("encode", arguments) as callback:
        cache = import_prompt_cache(arguments.input, recipe_of(arguments), progress=callback)
    save(cache, arguments)
    return 0


def export(arguments: argparse.Namespace) -> int:
    """Decode the file and write the prompt cache."""
    import kvpack
    from kvpack.integrations.mlx_lm import export_prompt_cache

    windows: dict[int, int] = {}
    for text in arguments.window:
        if (found := _WINDOW.fullmatch(text)) is None:
            raise InvalidParameter(f"--window is {text!r:.80}, expected numbers of layers and tokens, such as 0,2,4=512")
        windows |= dict.fromkeys(map(int, found["layers"].split(",")), int(found["tokens"]))
    # Truncating a mapped file would end the process, so the command reads a copy.
    cache = kvpack.load(arguments.input, copy=True, basis=arguments.basis)
    with progress("decode", arguments) as callback:
        size = export_prompt_cache(cache, arguments.output, dtype=arguments.dtype, windows=windows, progress=callback)
    if arguments.json:
        print_json({"file": arguments.output, "bytes": size, "layers": len(cache), "tokens": cache.tokens})
    else:
        print(f"{arguments.output}: {size:,} bytes")
    return 0
