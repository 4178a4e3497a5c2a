"""kvpack generate: continue a file with a prompt, and print the model's answer token by token."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from kvpack.file.atomic import check_output_path
from kvpack.formats.errors import InvalidParameter
from kvpack.output import add_json, parse_seed, print_json

from .chats import add_compact, add_device, load_chat_model
from .outputs import add_force, check_output


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "generate",
        help="continue a saved cache with a prompt",
        description="Continue a file of kvpack cache or Chat.save with a prompt: the model computes only the tokens that the file lacks, "
        "and its answer is printed as it is generated.",
    )
    parser.add_argument("file", metavar="FILE", help="a file of kvpack cache or Chat.save")
    parser.add_argument("--prompt", metavar="TEXT", required=True, help="the new message; - reads it from standard input")
    parser.add_argument(
        "--model",
        metavar="MODEL",
        help="the model that made the file, by its folder or its name on the hub (default: the hub name in FILE)",
    )
    parser.add_argument("--max-tokens", type=int, default=512, metavar="N", help="write at most N tokens (default: 512)")
    parser.add_argument(
        "--temperature",
        type=float,
        metavar="T",
        help="sample at this temperature; 0 picks the most likely token (default: the model's own)",
    )
    parser.add_argument("--seed", type=parse_seed, default=0, metavar="N", help="random seed for sampling (default: 0)")
    parser.add_argument(
        "--basis", metavar="FILE", help="the basis of a file that uses the klt or transform codec, or a folder that contains it"
    )
    parser.add_argument("--update", action="store_true", help="save the longer cache in FILE, so that the next prompt continues the chat")
    parser.add_argument("--out", dest="output", metavar="OUT", help="save the longer cache in OUT")
    add_compact(parser)
    add_device(parser)
    add_force(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from kvpack.integrations.transformers_version import installed_transformers

    # Raises a clear error if transformers is missing, before the next line imports it.
    installed_transformers()
    import torch

    from kvpack.integrations.transformers.chat import Chat

    from .cache import read_prompt

    options = _generate_options(arguments)
    if arguments.output is not None:
        check_output(arguments, arguments.output, arguments.file, arguments.basis)
    if arguments.update:
        check_output_path(arguments.file)
    prompt = read_prompt("-") if arguments.prompt == "-" else arguments.prompt
    name = model_name(arguments.file, arguments.model)
    model, tokenizer = load_chat_model(name, arguments)
    chat = Chat.load(arguments.file, model, tokenizer, basis=arguments.basis)
    torch.manual_seed(arguments.seed)
    before = len(chat.cache.token_ids[0])
    reply = chat.send(prompt, **options, **({} if arguments.json else {"streamer": _create_streamer(tokenizer)}))
    path = arguments.file if arguments.update else arguments.output
    saved = None if path is None else chat.save(path, compact=arguments.compact)
    if arguments.json:
        counts = {"held_tokens": before, "reused_tokens": chat.reused, "prompt_tokens": chat.prompt_tokens}
        print_json({"text": reply, **counts, "file": path, "bytes": saved})
    else:
        note = f"{chat.reused:,} of {chat.prompt_tokens:,} tokens of the prompt came from {arguments.file}"
        print(f"kvpack: note: {note}{'' if saved is None else f'; {path}: {saved:,} bytes'}", file=sys.stderr)
    return 0


def _generate_options(arguments: argparse.Namespace) -> dict[str, Any]:
    if arguments.max_tokens < 1:
        raise InvalidParameter(f"--max-tokens is {arguments.max_tokens}, expected at least 1")
    if arguments.update and arguments.output is not None:
        raise InvalidParameter("--update saves to FILE, and --out to another file: pass only one of them")
    options: dict[str, Any] = {"max_new_tokens": arguments.max_tokens}
    if arguments.temperature is None:
        return options
    if not 0 <= arguments.temperature < float("inf"):
        raise InvalidParameter(f"--temperature is {arguments.temperature}, expected a finite, non-negative number")
    return options | ({"do_sample": True, "temperature": arguments.temperature} if arguments.temperature else {"do_sample": False})


def model_name(path: str, model: str | None) -> str:
    """Return ``model``, or the hub name recorded in the file at ``path``. Raises InvalidParameter unless that name has an owner.

    A name without an owner may be the name of a local folder, and another model on the hub may have the same name. A file that is not valid
    is refused before a model is loaded.
    """
    from kvpack.file.container import open_file

    with open_file(path) as file:
        name = file.header.model.get("name", "")
    if model:
        return model
    if "/" not in name.strip("/."):
        fault = f"names the model {name!r:.80}, which is not a hub name" if name else "names no model"
        raise InvalidParameter(f"{path}: {fault}: pass --model with the folder or the hub name of the model that made the file")
    return name


def _create_streamer(tokenizer: Any) -> Any:
    """Return a streamer that prints new text as it arrives, without control characters."""
    from transformers import TextStreamer

    class Printer(TextStreamer):  # type: ignore[misc]
        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            print("".join(char for char in text if char.isprintable() or char in "\n\t"), end="\n" if stream_end else "", flush=True)

    return Printer(tokenizer, skip_prompt=True, skip_special_tokens=True)
