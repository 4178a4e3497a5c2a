"""kvpack store: list, check, clean, export and import the prefixes of a store."""

from __future__ import annotations

import argparse
import datetime
import os
import sys
import time
from typing import Any

from kvpack.output import add_json, bytes_text, format_count, print_json, print_report, print_table, printable, progress
from kvpack.store.catalog import Catalog, Prefix

from .command_store import parse_byte_count, parse_duration, parse_positive_byte_count
from .outputs import add_force, check_output

KEY_BYTES = 32
_LAST_TIME = 253_402_300_799
"""End of the year 9999, the last date that datetime supports, in seconds since 1970."""
KEY_FILE_VARIABLE = "KVPACK_KEY_FILE"
"""Environment variable with the path of the key file if ``--key-file`` is not set."""


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "store", help="list, check, clean, export and import stored prefixes", description="Manage a prefix store."
    )
    kinds = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    _add_action(kinds, "ls", run_ls, "list the stored prefixes, most recently used first")
    _add_action(kinds, "stat", run_stat, "count entries, bytes and tokens by model and recipe")
    verify = _add_action(kinds, "verify", run_verify, "check every byte of every entry, and its key")
    verify.add_argument("--delete", action="store_true", help="also delete damaged entries and, with keys, unencrypted entries")
    collect = _add_action(kinds, "gc", run_gc, "remove files of dead writers and unused bases, then evict down to the limits")
    collect.add_argument(
        "--max-bytes",
        type=parse_byte_count,
        metavar="N",
        help="evict until the entries take at most N bytes, such as 10GB (default: no limit)",
    )
    collect.add_argument(
        "--min-free",
        type=parse_byte_count,
        metavar="N",
        help="evict until N bytes of the disk are free, such as 50GB, for a folder (default: 0)",
    )
    unpin = _add_action(kinds, "unpin", run_unpin, "let a pinned prefix be evicted again")
    unpin.add_argument("key", metavar="KEY", help="a pinned key, or its first digits; stat lists them")
    unpin.add_argument("--owner", metavar="NAME", help="only the pin of this owner (default: all)")
    remove = _add_action(kinds, "rm", run_rm, "remove entries by model, recipe, tenant or time since last use")
    remove.add_argument("--model", metavar="NAME", help="only entries of this model, as stat prints it")
    remove.add_argument("--recipe", metavar="RECIPE", help="only entries of this recipe")
    remove.add_argument("--older-than", type=parse_duration, metavar="TIME", help="only entries not used for this long, such as 7d or 12h")
    remove.add_argument("--dry-run", action="store_true", help="only count the entries that would be removed")
    export = _add_action(kinds, "export", run_export, "write one prefix as a single kvpack file")
    export.add_argument("key", metavar="KEY", help="a key, or its first digits; ls lists them")
    export.add_argument("output", metavar="OUT", help="the kvpack file to write")
    export.add_argument("--durable", action="store_true", help="return only after the file has been flushed to the disk")
    add_force(export)
    add = _add_action(kinds, "import", run_import, "store a kvpack file's prefix")
    add.add_argument("input", metavar="FILE", help="an exported prefix, or any kvpack file; one without token ids needs --tokens")
    add.add_argument("--tokens", metavar="JSON", help="a file with the token ids as a JSON array (default: those in FILE)")
    add.add_argument("--basis", metavar="PATH", help="the basis that FILE needs, or a folder that contains it")
    add.add_argument("--chunk", type=int, metavar="N", help="tokens per chunk (default: as in FILE or its stored beginning, otherwise 256)")
    add.add_argument(
        "--trust-names",
        action="store_true",
        help="trust the model, weights and token ids that FILE names: processes that load these ids get the values in FILE",
    )
    demo = _add_action(kinds, "demo", run_demo, "three processes share a prompt: one computes it, two load it and produce the same tokens")
    demo.add_argument("--recipe", default="octopus-4", metavar="RECIPE", help="the recipe of the stored cache (default: octopus-4)")


def _add_action(subparsers: Any, name: str, run: Any, help_text: str) -> Any:
    parser = subparsers.add_parser(name, help=help_text, description=f"{help_text[0].upper()}{help_text[1:]}.")
    parser.add_argument("store", metavar="STORE", help="a folder, or the URL of a Redis server or an object store")
    add_json(parser)
    if name != "demo":
        parser.add_argument(
            "--key-file",
            metavar="FILE",
            default=os.environ.get(KEY_FILE_VARIABLE),
            help="the keys of encrypted entries: one line per key, with its id and its hexadecimal digits; with keys, unencrypted "
            f"entries are refused (default: ${KEY_FILE_VARIABLE})",
        )
        parser.add_argument(
            "--max-entry-bytes",
            type=parse_positive_byte_count,
            metavar="N",
            help="do not read entries of more than N bytes (default: 512 MiB)",
        )
        parser.add_argument(
            "--trusted-group",
            type=_parse_group,
            metavar="GROUP",
            help="trust the members of this group, by number or name, to write the folder",
        )
        parser.add_argument("--tenant", default="", metavar="NAME", help="the tenant that the entries belong to (default: none, shared)")
    parser.set_defaults(run=run)
    return parser


def _parse_group(text: str) -> int | str:
    return int(text) if text.isdecimal() else text


def run_ls(arguments: argparse.Namespace) -> int:
    from .command_store import CommandStore

    store = CommandStore(arguments)
    catalog = store.catalog()
    pinned = store.backend.pinned_keys()
    if store.has_failed(catalog.count):
        return store.exit_code()
    rows = [_prefix_row(prefix, prefix.key in pinned) for prefix in catalog.prefixes()]
    if arguments.json:
        unreadable = {key.hex(): str(error) for key, error in catalog.unreadable.items()}
        undecryptable = [key.hex() for key in catalog.undecryptable]
        print_json({"prefixes": rows, "unreadable": unreadable, "undecryptable": undecryptable, "bases": _basis_rows(catalog)})
        return store.exit_code()
    print_table(
        f"{store.name}: {format_count(len(rows), 'prefix', 'prefixes')} in {_entry_count_text(len(catalog.entries))}",
        ["key", "model", "recipe", "tokens", "chunks", "bytes", "bytes per token", "used", ""],
        (
            [
                row["key"][:16],
                printable(row["model"].get("name", "")),
                _recipe_label(row),
                f"{row['tokens']:,}",
                str(row["chunks"]),
                bytes_text(row["bytes"]),
                f"{row['bytes'] / row['tokens']:,.0f}" if row["tokens"] else "",
                _time_since(row["used"]),
                " ".join(word for word, flag in (("pinned", row["pinned"]), ("beginning missing", not row["whole"])) if flag),
            ]
            for row in rows
        ),
        text_columns=3,
    )
    for line in _notes(catalog, keys=store.cipher is not None):
        print(line)
    return store.exit_code()


def _recipe_label(row: dict[str, Any]) -> str:
    from kvpack.coding.recipes import preset_name

    return printable(preset_name(row["recipe"]) or row["recipe"])


def _entry_count_text(count: int) -> str:
    return format_count(count, "entry", "entries")


def _subset_text(count: int) -> str:
    return f"{count:,} of them {'is' if count == 1 else 'are'}"


def _notes(catalog: Catalog, *, keys: bool) -> list[str]:
    """Return notes on entries that are not listed, and on unencrypted entries if others are encrypted."""
    closed = len(catalog.undecryptable)
    refused = len(catalog.unreadable) - closed
    lines = []
    if catalog.pages:
        size = sum(page.size for page in catalog.pages.values())
        lines.append(f"{format_count(len(catalog.pages), 'page')} of engines, {bytes_text(size)} bytes")
    if catalog.states:
        size = sum(states.stored.size for states in catalog.states.values())
        lines.append(f"{_entry_count_text(len(catalog.states))} of states after chunks, {bytes_text(size)} bytes")
    for basis in _basis_rows(catalog):
        needed = f"needed by {format_count(basis['entries'], 'chunk')}"
        lines.append(
            f"basis {basis['digest'][:16]} of {printable(basis['model'].get('name', ''))}, {bytes_text(basis['bytes'])} bytes, {needed}"
        )
    if closed:
        lines.append(f"{closed:,} encrypted entries not readable {'with the given keys' if keys else 'without keys: pass --key-file'}")
    if refused:
        lines.append(
            f"{_entry_count_text(refused)} refused as damaged{', not encrypted' if keys else ''} or too large: run verify for the reasons"
        )
    if closed and catalog.entries and not keys:
        lines.append("the prefixes above are not encrypted: anyone with write access may have planted them; stores with keys refuse them")
    return lines


def _basis_rows(catalog: Catalog) -> list[dict[str, Any]]:
    """Return the bases in the store, each with the number of entries that need it."""
    return [
        {
            "key": key.hex(),
            "digest": basis.digest.hex(),
            "model": dict(basis.model),
            "bytes": basis.stored.size,
            "used": basis.stored.used_ns / 1e9,
            "entries": catalog.count_dependents(basis.digest),
        }
        for key, basis in catalog.bases.items()
    ]


def _prefix_row(prefix: Prefix, pinned: bool) -> dict[str, Any]:
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
        "whole": prefix.is_complete,
    }


def run_stat(arguments: argparse.Namespace) -> int:
    """Print the totals, and one row per identity."""
    from kvpack.store.summary import summarize

    from .command_store import CommandStore

    store = CommandStore(arguments)
    with progress("read") as callback:
        summary = summarize(store.backend, callback, store.cipher, max_entry_bytes=store.max_entry_bytes)
    entries, size = store.backend.size()
    pinned, unreadable, closed = len(store.backend.pinned_keys()), summary.unreadable, summary.undecryptable
    if store.has_failed(summary.count):
        return store.exit_code()
    identities: list[dict[str, Any]] = [{"model": model, "recipe": recipe, **counts} for model, recipe, counts in summary.identities()]
    kinds = {kind: count["entries"] for kind, count in summary.kinds.items()}
    pins: list[dict[str, Any]] = [
        {"key": pin.key.hex(), "owner": pin.owner, "chunks": len(pin.chain), "until": pin.until} for pin in store.backend.pins()
    ]
    if arguments.json:
        total = {"entries": entries, "bytes": size, "pinned": pinned, "unreadable": unreadable, "undecryptable": closed}
        print_json({**total, **kinds, "identities": identities, "pins": pins})
        return store.exit_code()
    print(
        f"{store.name}: {_entry_count_text(entries)}, {size:,} bytes, {pinned:,} pinned, {unreadable:,} unreadable ({closed:,} without a "
        "key)"
    )
    if kinds["pages"]:
        print(f"{_subset_text(kinds['pages'])} pages of engines")
    if kinds["states"]:
        print(f"{_subset_text(kinds['states'])} states after chunks, {bytes_text(summary.kinds['states']['bytes'])} bytes")
    if kinds["bases"]:
        print(f"{_subset_text(kinds['bases'])} bases, {bytes_text(summary.kinds['bases']['bytes'])} bytes")
    if identities:
        print_table(
            "by model and recipe",
            ["model", "weights", "recipe", "entries", "tokens", "bytes", "bytes per token"],
            (
                [
                    printable(row["model"].get("name", "")),
                    printable(row["model"].get("weights", ""))[:20],
                    _recipe_label(row),
                    f"{row['entries']:,}",
                    f"{row['tokens']:,}",
                    bytes_text(row["bytes"]),
                    f"{row['bytes'] / row['tokens']:,.0f}" if row["tokens"] else "",
                ]
                for row in identities
            ),
            text_columns=3,
        )
    if pins:
        print_table(
            "pins",
            ["key", "owner", "chunks", "until"],
            ([pin["key"][:16], printable(pin["owner"]), f"{pin['chunks']:,}", _time_text(pin["until"])] for pin in pins),
            text_columns=2,
        )
    return store.exit_code()


def _time_text(seconds: int) -> str:
    return f"{datetime.datetime.fromtimestamp(min(seconds, _LAST_TIME), datetime.UTC):%Y-%m-%d %H:%M} UTC"


def run_rm(arguments: argparse.Namespace) -> int:
    """Remove the entries that match all filters. Pinned entries are kept."""
    from kvpack.coding.recipes import parse_recipe
    from kvpack.formats.errors import InvalidParameter
    from kvpack.store.removal import EntryFilter, remove

    from .command_store import CommandStore

    filters = (arguments.model, arguments.recipe, arguments.older_than, arguments.tenant or None)
    if filters == (None, None, None, None):
        raise InvalidParameter("no filter is set: pass at least one of --model, --recipe, --older-than and --tenant")
    recipe = None if arguments.recipe is None else parse_recipe(arguments.recipe).canonical
    before = None if arguments.older_than is None else time.time_ns() - arguments.older_than * 10**9
    store = CommandStore(arguments)
    catalog = store.catalog()
    matching = EntryFilter(arguments.model, recipe, arguments.tenant or None, before).keys(catalog)
    if store.has_failed(catalog.count):
        return store.exit_code()
    pinned = len(matching & store.backend.pinned_keys())
    removed = 0 if arguments.dry_run else remove(store.backend, store.counters, matching, pinned=False)
    if arguments.json:
        print_json({"chosen": len(matching), "pinned": pinned, "removed": removed, "entries": catalog.count - removed})
        return store.exit_code()
    outcome = "would be removed" if arguments.dry_run else "removed"
    print(f"{store.name}: {_entry_count_text(len(matching) - pinned if arguments.dry_run else removed)} {outcome}, {pinned:,} pinned")
    if catalog.pages and before is None:
        print(f"{len(catalog.pages):,} pages of engines name no model: only --older-than, without other filters, removes them")
    if catalog.undecryptable:
        print(f"{len(catalog.undecryptable):,} encrypted entries could not be read: pass --key-file")
    return store.exit_code()


def run_unpin(arguments: argparse.Namespace) -> int:
    """Unpin the prefix whose key starts with the digits in ``arguments.key``. Raises InvalidParameter unless exactly one matches."""
    from kvpack.formats.errors import InvalidParameter
    from kvpack.store.pins import validate_owner

    from .command_store import CommandStore

    store = CommandStore(arguments)
    digits, owner = arguments.key.lower(), validate_owner(arguments.owner)
    keys = {pin.key for pin in store.backend.pins() if pin.key.hex().startswith(digits)}
    if len(digits) == 2 * KEY_BYTES and set(digits) <= set("0123456789abcdef"):
        keys = {bytes.fromhex(digits)}
    if len(keys) != 1 or not digits:
        if not keys or not digits:
            raise InvalidParameter(f"no pinned key starts with {arguments.key!r:.100}: kvpack store stat lists the pinned keys")
        raise InvalidParameter(f"{len(keys)} pinned keys start with {arguments.key!r:.100}: pass more digits to select one")
    (key,) = keys
    done = store.backend.unpin([key], owner)
    if not done and not store.faults:
        raise InvalidParameter(
            f"key {key.hex()} is not pinned{'' if owner is None else f' by {printable(owner)}'}: kvpack store stat lists the pinned keys"
        )
    text = f"{store.name}: {key.hex()[:16]} is {'no longer' if done else 'still'} pinned"
    print_report({"key": key.hex(), "unpinned": done}, text, arguments)
    return store.exit_code()


def run_verify(arguments: argparse.Namespace) -> int:
    """Check all entries. Returns the worst exit code of the rejected entries, or 3 if the store does not respond."""
    from kvpack.formats.errors import Undecryptable
    from kvpack.store.catalog import verify
    from kvpack.store.entry_kind import means_damage

    from .command_store import CommandStore

    store = CommandStore(arguments)
    refused: list[dict[str, Any]] = []
    unopened: list[str] = []
    codes: list[int] = []
    count = 0
    with progress("verify") as callback:
        for stored, why in verify(store.backend, callback, store.cipher, max_entry_bytes=store.max_entry_bytes):
            count += 1
            if why is None:
                continue
            if isinstance(why, Undecryptable):
                # Damage cannot be detected without the key.
                unopened.append(stored.key.hex())
                continue
            removed = bool(arguments.delete and means_damage(why) and store.backend.delete([stored.key]))
            refused.append({"key": stored.key.hex(), "bytes": stored.size, "message": str(why), "deleted": removed})
            codes.append(why.exit_code)
            print(f"kvpack: {printable(str(why))}", file=sys.stderr)
    if store.has_failed(count):
        return store.exit_code(*codes)
    text = f"{store.name}: {_entry_count_text(count)} checked, {len(refused):,} refused, {len(unopened):,} not readable with the given keys"
    print_report({"entries": count, "refused": refused, "undecryptable": unopened}, text, arguments)
    if refused and not arguments.delete:
        print("kvpack: note: --delete deletes damaged entries; the next process that computes them saves them again", file=sys.stderr)
    return store.exit_code(*codes)


def run_gc(arguments: argparse.Namespace) -> int:
    """Remove garbage, and print the removed and the remaining entries."""
    from kvpack.store.directory import Directory
    from kvpack.store.removal import reclaim

    from .command_store import CommandStore

    store = CommandStore(arguments, skip_sweep=False, max_bytes=arguments.max_bytes, min_free=arguments.min_free)
    reclaim(store.backend, store.counters, store.cipher, max_entry_bytes=store.max_entry_bytes)
    if isinstance(store.backend, Directory) and arguments.max_bytes is not None:
        store.backend.forget_budgets()
    store.backend.collect()
    entries, size = store.backend.size()
    if store.has_failed(entries):
        return store.exit_code()
    counts: dict[str, Any] = store.counters.as_dict()
    if arguments.json:
        print_json({**counts, "entries": entries, "bytes": size})
    else:
        evicted = (
            f"{_entry_count_text(counts['evicted_entries'])} ({counts['evicted_bytes']:,} bytes) and "
            f"{format_count(counts['swept_files'], 'unfinished file')}"
        )
        bases = f" and {counts['reclaimed_entries']:,} unused bases" if counts["reclaimed_entries"] else ""
        print(f"{store.name}: removed {evicted}{bases}; {_entry_count_text(entries)} ({size:,} bytes) left")
        if pinned := len(store.backend.pinned_keys()):
            print(f"{_subset_text(pinned)} pinned: kvpack store stat lists the owners, and kvpack store unpin removes a pin")
    return store.exit_code()


def run_export(arguments: argparse.Namespace) -> int:
    from kvpack.store.transfer import export_prefix

    from .command_store import CommandStore

    check_output(arguments, arguments.output, arguments.store, arguments.key_file)
    store = CommandStore(arguments)
    catalog = store.catalog()
    if store.has_failed(catalog.count):
        return store.exit_code()
    prefix, states = catalog.truncate_to_states(catalog.find(arguments.key))
    basis = store.basis(prefix.entries[-1])
    size = export_prefix(store.backend, prefix, arguments.output, store.cipher, durable=arguments.durable, basis=basis, states=states)
    text = f"{arguments.output}: {prefix.tokens:,} tokens, {size:,} bytes"
    print_report({"file": arguments.output, "bytes": size, "key": prefix.key.hex(), "tokens": prefix.tokens}, text, arguments)
    return store.exit_code()


def run_import(arguments: argparse.Namespace) -> int:
    """Add the prefix in a file to the store. Returns 3 if the store reports faults or refuses chunks."""
    from kvpack import Store
    from kvpack.formats.errors import InvalidParameter
    from kvpack.store.backend import MAX_ENTRY_BYTES
    from kvpack.store.encryption import read_key_file
    from kvpack.store.options import StoreOptions
    from kvpack.store.redaction import redacted_location
    from kvpack.store.store import CHUNK_TOKENS
    from kvpack.store.transfer import read_exported, stored_chunk_size

    exported = read_exported(arguments.input, arguments.tokens, arguments.tenant, arguments.basis)
    identity = exported.identity
    if not identity.model and not identity.weights:
        raise InvalidParameter(
            f"{arguments.input} names no model, so its prefix might not be found, or might be loaded for another model: pass model= to "
            "kvpack.pack or KvpackCache when you compute the cache"
        )
    if not arguments.trust_names:
        source = f"of the model {identity.model!r}, weights {identity.weights!r}, adapter {identity.adapter!r}"
        raise InvalidParameter(
            f"{arguments.input} claims to contain the keys and values of {len(exported.ids):,} token ids {source}, which cannot be "
            "verified: processes that load these ids get the values in the file. Pass --trust-names if you trust its writer"
        )
    keys = read_key_file(arguments.key_file) if arguments.key_file else None
    largest = arguments.max_entry_bytes or MAX_ENTRY_BYTES
    options: dict[str, Any] = {"encryption": keys, "max_entry_bytes": largest, "trusted_group": arguments.trusted_group}
    chunk = arguments.chunk
    if chunk is None:
        chunk = exported.chunk or stored_chunk_size(arguments.store, exported, StoreOptions(**options)) or CHUNK_TOKENS
    if exported.inputs and chunk != exported.chunk:
        raise InvalidParameter(
            f"{arguments.input} has input digests for chunks of {exported.chunk} tokens, but --chunk is {chunk}: omit --chunk"
        )
    with Store(arguments.store, exported.identity, chunk=chunk, **options) as store:
        stored = store.save(exported.ids, exported.cache, inputs=exported.inputs)
        counts = store.counters()
    name = redacted_location(arguments.store)
    text = f"{name}: {stored:,} of {len(exported.ids):,} tokens stored, {counts['saved_chunks']:,} new"
    print_report({"store": name, "tokens": stored, "of": len(exported.ids), "new_entries": counts["saved_chunks"]}, text, arguments)
    if len(exported.ids) < chunk:
        hint = f"a store keeps only whole chunks, here of {chunk:,} tokens (--chunk)"
        print(f"kvpack: note: {arguments.input} has {len(exported.ids):,} tokens: {hint}", file=sys.stderr)
    for fault, count in counts["faults"].items():
        print(f"kvpack: {fault}: {format_count(count, 'time')}", file=sys.stderr)
    return 3 if counts["faults"] or counts["refused_chunks"] else 0


def run_demo(arguments: argparse.Namespace) -> int:
    """Run the processes and print their table. Returns 1 if their tokens differ."""
    from kvpack.demo import store as demo

    with progress("demo") as callback:
        report = demo.run(arguments.store, arguments.recipe, progress=callback)
    print_report(report, demo.show, arguments)
    return 0 if report["same"] else 1


def _time_since(used_at: float) -> str:
    seconds = max(0, time.time() - used_at)
    for size, name in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {name} ago"
    return f"{seconds:.0f} s ago"
