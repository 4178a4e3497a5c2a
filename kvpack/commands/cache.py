"""kvpack cache: compute the KV cache of a text and save it."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from kvpack.output import add_json

from .chats import add_compact, add_device, load_chat_model
from .convert import RECIPE_HELP, add_write_options, parse_recipe_option, report_saved
from .outputs import check_output

MAX_PROMPT_BYTES = 2**26
"""Maximum size of a prompt in bytes, which is more than any model supports."""

_LARGE = 1.5
"""Ratio of actual to nominal bits per value above which a hint is printed. Short texts exceed it."""


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "cache",
        help="compute the KV cache of a text and save it",
        description="Run a model over a text, and save its packed KV cache with the text's token ids. kvpack generate continues it.",
    )
    parser.add_argument("--model", metavar="MODEL", required=True, help="a causal language model, by its folder or its name on the hub")
    parser.add_argument("--prompt-file", metavar="FILE", required=True, help="the text, in UTF-8; - reads it from standard input")
    parser.add_argument("--out", dest="output", metavar="FILE", required=True, help="the kvpack file to write")
    parser.add_argument("--recipe", metavar="RECIPE", help=f"{RECIPE_HELP} (default: kvpack-4)")
    parser.add_argument("--basis", metavar="FILE", help="the basis of a recipe that uses the klt or transform codec")
    parser.add_argument(
        "--role",
        choices=("user", "system"),
        default="user",
        help="role of the text in the model's chat template: user, to which later prompts are appended, or system (default: user)",
    )
    add_compact(parser)
    add_device(parser)
    add_write_options(parser, compresses="with --compact")
    add_json(parser)
    parser.hints["--prompt"] = "kvpack cache reads its text from a file or standard input: pass --prompt-file FILE, or --prompt-file -"
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from kvpack.integrations.transformers_version import installed_transformers

    # Raises a clear error if transformers is missing, before the next line imports it.
    installed_transformers()
    from kvpack.integrations.transformers.chat import RECIPE, Chat

    check_output(arguments, arguments.output, arguments.prompt_file, arguments.basis, arguments.recipe)
    arguments.recipe = RECIPE if arguments.recipe is None else arguments.recipe
    recipe, text = parse_recipe_option(arguments, reads_cache=False), read_prompt(arguments.prompt_file)
    model, tokenizer = load_chat_model(arguments.model, arguments)
    chat = Chat(model, tokenizer, recipe)
    chat.read({"role": arguments.role, "content": text})
    compress = arguments.compact if arguments.compress is None else arguments.compress
    size = chat.save(arguments.output, compact=arguments.compact, compress=compress, durable=arguments.durable)
    report_saved(chat.cache, size, arguments)
    if not arguments.compact and 8 * size > _LARGE * chat.cache.nominal_bits * chat.cache.values:
        print("kvpack: note: the newest keys stay raw until 128 are packed together: --compact packs them now", file=sys.stderr)
    return 0


def read_prompt(path: str) -> str:
    """Return the text of the file at ``path``, or of standard input if it is "-". Raises MissingFile or InvalidParameter."""
    from kvpack.file.user_files import read_bytes
    from kvpack.formats.errors import InvalidParameter

    data = sys.stdin.buffer.read(MAX_PROMPT_BYTES + 1) if path == "-" else read_bytes(path, MAX_PROMPT_BYTES, "a prompt")
    if len(data) > MAX_PROMPT_BYTES:
        raise InvalidParameter(f"standard input exceeds the maximum of {MAX_PROMPT_BYTES:,} bytes: pass a shorter prompt")
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise InvalidParameter(f"{path}: byte {error.start} is not valid UTF-8: convert the text, for example with iconv") from None
    if not text:
        raise InvalidParameter(f"{path} is empty: pass a file with the text that the model should read")
    return text
