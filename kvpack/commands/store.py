"""kvpack store: look at, check, clean, export and import the prefixes of a store."""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING, Any

from .output import add_json, bytes_text, print_json, print_table, printable, progress

if TYPE_CHECKING:
    import argparse

    from kvpack.store.backend import Backend
    from kvpack.store.catalog import Prefix
    from kvpack.store.counters import Counters
    from kvpack.store.encryption import Cipher

KEY_FILE_VARIABLE = "KVPACK_KEY_FILE"
"""The environment variable that names the file of keys where no option does."""


def add(commands: Any) -> None:
    """Add ``store`` to the command line."""
    parser = commands.add_parser("store", help="look at, check and move stored prefixes", description="Work on a store of packed prefixes.")
    kinds = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    _action(kinds, "ls", run_ls, "list the stored prefixes, the last used first")
    _action(kinds, "stat", run_stat, "count entries, bytes and tokens by model and recipe")
    verify = _action(kinds, "verify", run_verify, "check every byte of every entry, and its key")
    verify.add_argument("--delete", action="store_true", help="remove the entries that are refused")
    collect = _action(kinds, "gc", run_gc, "remove what dead writers and older versions left, and evict what is above a budget")
    collect.add_argument("--max-bytes", type=int, metavar="N", help="the bytes that the entries may take (default: any)")
    collect.add_argument("--min-free", type=int, metavar="N", help="the bytes of disk that stay free, for a folder (default: 0)")
    export = _action(kinds, "export", run_export, "write one prefix as a single kvpack file")
    export.add_argument("key", metavar="KEY", help="the first digits of the key that ls shows")
    export.add_argument("output", metavar="OUT")
    export.add_argument("--durable", action="store_true", help="return only when the file is on the disk")
    add = _action(kinds, "import", run_import, "store a kvpack file's prefix")
    add.add_argument("input", metavar="FILE", help="an exported prefix, or any kvpack file with --tokens")
    add.add_argument("--tokens", metavar="JSON", help="a file with the token ids as a JSON array (default: those in FILE)")
    add.add_argument("--chunk", type=int, metavar="N", help="tokens of a chunk (default: those that FILE names, or 256)")
    demo = _action(kinds, "demo", run_demo, "three processes share a prompt: one computes it, two load it and produce the same tokens")
    demo.add_argument("--recipe", default="octopus-4", metavar="RECIPE", help="of what is stored (default: octopus-4)")


def _action(kinds: Any, name: str, run: Any, what: str) -> Any:
    parser = kinds.add_parser(name, help=what, description=f"{what[0].upper()}{what[1:]}.")
    parser.add_argument("store", metavar="STORE", help="a folder, or the URL of a Redis server or an object store")
    add_json(parser)
    if name != "demo":
        parser.add_argument(
            "--key-file",
            metavar="FILE",
            default=os.environ.get(KEY_FILE_VARIABLE),
            help=f"the keys of encrypted entries, one a line: its id and its hexadecimal digits (default: ${KEY_FILE_VARIABLE})",
        )
        parser.add_argument("--tenant", default="", metavar="NAME", help="whose entries they are (default: shared by all who name none)")
    parser.set_defaults(run=run)
    return parser


def _cipher(arguments: argparse.Namespace) -> Cipher | None:
    from kvpack.store.encryption import Cipher
    from kvpack.store.key_files import read_key_file

    return Cipher(read_key_file(arguments.key_file), arguments.tenant) if arguments.key_file else None


def _opened(arguments: argparse.Namespace, **options: Any) -> tuple[Backend, Counters]:
    from kvpack.store.counters import Counters
    from kvpack.store.forms import PLAIN
    from kvpack.store.locations import open_existing

    counters = Counters()
    return open_existing(arguments.store, counters, PLAIN, **options), counters


def run_ls(arguments: argparse.Namespace) -> int:
    """Print one row a prefix."""
    from kvpack.store.catalog import read_catalog

    backend, _ = _opened(arguments)
    with progress("read", arguments) as callback:
        catalog = read_catalog(backend, callback, _cipher(arguments))
    pinned = backend.pinned()
    rows = [_described(prefix, prefix.key in pinned) for prefix in catalog.prefixes()]
    if arguments.json:
        print_json({"prefixes": rows, "unreadable": {key.hex(): why for key, why in catalog.unreadable.items()}})
        return 0
    print_table(
        f"{arguments.store}: {len(rows)} prefixes in {len(catalog.entries)} entries",
        ["key", "model", "recipe", "tokens", "chunks", "bytes", "bytes a token", "used", ""],
        (
            [
                row["key"][:16],
                printable(row["model"].get("name", "")),
                printable(row["recipe"]),
                f"{row['tokens']:,}",
                str(row["chunks"]),
                bytes_text(row["bytes"]),
                f"{row['bytes'] / row['tokens']:,.0f}" if row["tokens"] else "",
                _ago(row["used"]),
                " ".join(word for word, said in (("pinned", row["pinned"]), ("beginning missing", not row["whole"])) if said),
            ]
            for row in rows
        ),
        left=3,
    )
    if catalog.unreadable:
        print(f"{len(catalog.unreadable)} entries cannot be read: encrypted ones need --key-file, others show in verify")
    return 0


def _described(prefix: Prefix, pinned: bool) -> dict[str, Any]:
    last = prefix.entries[-1]
    return {
        "key": prefix.key.hex(),
        "model": dict(last.model),
        "recipe": last.recipe,
        "tokens": prefix.tokens,
        "chunks": len(prefix.entries),
        "bytes": prefix.size,
        "used": last.stored.used_ns / 1e9,
        "pinned": pinned,
        "whole": prefix.whole,
    }


def run_stat(arguments: argparse.Namespace) -> int:
    """Print totals and one row an identity."""
    from kvpack.store.catalog import read_catalog

    backend, _ = _opened(arguments)
    with progress("read", arguments) as callback:
        catalog = read_catalog(backend, callback, _cipher(arguments))
    entries, size = backend.size()
    identities: list[dict[str, Any]] = [{"model": model, "recipe": recipe, **counts} for model, recipe, counts in catalog.identities()]
    if arguments.json:
        total = {"entries": entries, "bytes": size, "pinned": len(backend.pinned()), "unreadable": len(catalog.unreadable)}
        print_json({**total, "identities": identities})
        return 0
    pinned, unreadable = len(backend.pinned()), len(catalog.unreadable)
    print(f"{arguments.store}: {entries:,} entries, {size:,} bytes, {pinned:,} pinned, {unreadable:,} unreadable")
    print_table(
        "by model and recipe",
        ["model", "weights", "recipe", "entries", "tokens", "bytes", "bytes a token"],
        (
            [
                printable(row["model"].get("name", "")),
                printable(row["model"].get("weights", ""))[:20],
                printable(row["recipe"]),
                f"{row['entries']:,}",
                f"{row['tokens']:,}",
                bytes_text(row["bytes"]),
                f"{row['bytes'] / row['tokens']:,.0f}" if row["tokens"] else "",
            ]
            for row in identities
        ),
        left=3,
    )
    return 0


def run_verify(arguments: argparse.Namespace) -> int:
    """Check all entries; 1 when one is refused."""
    from kvpack.formats.errors import Undecryptable
    from kvpack.store.catalog import verify

    backend, _ = _opened(arguments)
    refused: list[dict[str, Any]] = []
    unopened: list[str] = []
    count = 0
    with progress("verify", arguments) as callback:
        for stored, why in verify(backend, callback, _cipher(arguments)):
            count += 1
            if why is None:
                continue
            if isinstance(why, Undecryptable):
                # Whole, as far as anybody can tell who has not its key.
                unopened.append(stored.key.hex())
                continue
            removed = bool(arguments.delete and backend.delete([stored.key]))
            refused.append({"key": stored.key.hex(), "bytes": stored.size, "message": str(why), "deleted": removed})
            print(f"kvpack: {why}", file=sys.stderr)
    if arguments.json:
        print_json({"entries": count, "refused": refused, "undecryptable": unopened})
    else:
        print(f"{arguments.store}: {count:,} entries checked, {len(refused):,} refused, {len(unopened):,} that no key given opens")
    return 1 if refused else 0


def run_gc(arguments: argparse.Namespace) -> int:
    """Collect, and print what went and what stays."""
    from kvpack.store.reclaim import reclaim

    backend, counters = _opened(arguments, max_bytes=arguments.max_bytes, min_free=arguments.min_free)
    reclaim(backend, counters, _cipher(arguments))
    backend.collect()
    entries, size = backend.size()
    counts = counters.as_dict()
    if arguments.json:
        print_json({**counts, "entries": entries, "bytes": size})
    else:
        gone = f"{counts['evicted_entries']:,} entries of {counts['evicted_bytes']:,} bytes and {counts['swept_files']:,} unfinished files"
        old = f", {counts['reclaimed_entries']:,} entries of older layouts" if counts["reclaimed_entries"] else ""
        print(f"{arguments.store}: removed {gone}{old}; {entries:,} entries of {size:,} bytes stay")
    return 3 if counts["faults"] else 0


def run_export(arguments: argparse.Namespace) -> int:
    """Write one prefix."""
    from kvpack.store.catalog import read_catalog
    from kvpack.store.transfer import export_prefix

    backend, _ = _opened(arguments)
    with progress("read", arguments) as callback:
        catalog = read_catalog(backend, callback, _cipher(arguments))
    prefix = catalog.find(arguments.key)
    size = export_prefix(backend, prefix, arguments.output, _cipher(arguments), durable=arguments.durable)
    if arguments.json:
        print_json({"file": arguments.output, "bytes": size, "key": prefix.key.hex(), "tokens": prefix.tokens})
    else:
        print(f"{arguments.output}: {prefix.tokens:,} tokens, {size:,} bytes")
    return 0


def run_import(arguments: argparse.Namespace) -> int:
    """Store a file's prefix; 3 when not all of its whole chunks are stored."""
    from kvpack import Store
    from kvpack.formats.errors import InvalidParameter
    from kvpack.store.key_files import read_key_file
    from kvpack.store.transfer import read_exported

    exported = read_exported(arguments.input, arguments.tokens, arguments.tenant)
    chunk = exported.chunk or 256 if arguments.chunk is None else arguments.chunk
    if exported.inputs and chunk != exported.chunk:
        raise InvalidParameter(f"{arguments.input}: has digests of inputs for chunks of {exported.chunk} tokens, --chunk is {chunk}")
    keys = read_key_file(arguments.key_file) if arguments.key_file else None
    with Store(arguments.store, exported.identity, chunk=chunk, encryption=keys) as store:
        stored = store.save(exported.ids, exported.cache, inputs=exported.inputs)
        counts = store.counters()
    if arguments.json:
        print_json({"store": arguments.store, "tokens": stored, "of": len(exported.ids), "new_entries": counts["saved_chunks"]})
    else:
        print(f"{arguments.store}: {stored:,} of {len(exported.ids):,} tokens stored, {counts['saved_chunks']:,} new entries")
    for fault, count in counts["faults"].items():
        print(f"kvpack: {fault}: {count} times", file=sys.stderr)
    return 3 if counts["faults"] else 0


def run_demo(arguments: argparse.Namespace) -> int:
    """Run the processes and print their table; 1 when they differ."""
    from kvpack.store import demo

    with progress("demo", arguments) as callback:
        report = demo.run(arguments.store, arguments.recipe, progress=callback)
    if arguments.json:
        print_json(report)
    else:
        demo.show(report)
    return 0 if report["same"] else 1


def _ago(used: float) -> str:
    seconds = max(0, time.time() - used)
    for size, name in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {name} ago"
    return f"{seconds:.0f} s ago"
