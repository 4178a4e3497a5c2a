"""kvpack warm: compile a recipe's kernels before the first call."""

from __future__ import annotations

import argparse
from typing import Any

from kvpack.errors import InvalidParameter
from kvpack.output import add_json, format_count, print_report, print_table, printable, progress

from .recipes import shape_with_basis

OPTIONS = {
    "layers": (1, "layers, for recipes that name some"),
    "q-heads": (32, "query heads"),
    "heads": (8, "KV heads"),
    "dim": (128, "head dim"),
}
"""Options for the model's shape: the default and the help text of each."""
FAILED = 1


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "warm",
        help="compile the GPU kernels of recipes, so that the first calls do not wait",
        description="Compile the kernels that pack, load, unpack, attend and a LiveCache launch, in parallel processes, to Triton's cache "
        "(TRITON_CACHE_DIR, otherwise ~/.triton/cache). For other machines, compile with --capability and copy that folder: they find the "
        "kernels if kvpack, Triton and Python are the same.",
    )
    parser.add_argument("recipes", metavar="RECIPE", nargs="+", help="a preset or a recipe")
    for name, (default, noun) in OPTIONS.items():
        parser.add_argument(f"--{name}", type=int, metavar="N", help=f"{noun} of the model (default: {default})")
    parser.add_argument("--basis", metavar="FILE", help="the basis of recipes such as klt-1.75, which sets layers, KV heads and head dim")
    parser.add_argument(
        "--capability", type=int, metavar="N", help="compile for GPUs of this compute capability times ten, such as 90 (default: this GPU)"
    )
    parser.add_argument("--processes", type=int, metavar="N", help="compile in N processes (default: one per core)")
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Compile the kernels, and print what was compiled. Returns 1 if a kernel does not compile."""
    from kvpack.bench import compile_ahead

    requested = {name: value for name in OPTIONS if (value := getattr(arguments, name.replace("-", "_"))) is not None}
    for name, value in {**requested, "processes": arguments.processes}.items():
        if value is not None and value < 1:
            raise InvalidParameter(f"--{name} is {value}, expected at least 1")
    if arguments.capability not in (None, *compile_ahead.CHIPS):
        raise InvalidParameter(f"--capability is {arguments.capability}, expected one of {', '.join(map(str, compile_ahead.CHIPS))}")
    basis = None
    if arguments.basis is not None:
        from kvpack.coding.basis_sources import load_basis

        basis = load_basis(arguments.basis)
        requested = shape_with_basis(basis, requested)
    shape = compile_ahead.ModelShape(*({name: default for name, (default, _) in OPTIONS.items()} | requested).values())
    with progress("warm") as callback:
        report = compile_ahead.run(arguments.recipes, shape, basis, arguments.capability, arguments.processes, callback)
    print_report(report, _show, arguments)
    return FAILED if any(kernel["error"] for recipe in report["recipes"] for kernel in recipe["kernels"]) else 0


def _show(report: dict[str, Any]) -> None:
    print_table(
        f"kernels for {report['gpu']}, Triton {report['triton']}, in {printable(report['folder'])}",
        ["recipe", "kernels", "compiled now", "seconds", "longest"],
        (
            [
                entry["recipe"],
                str(len(entry["kernels"])),
                str(sum(not kernel["cached"] for kernel in entry["kernels"])),
                f"{sum(kernel['seconds'] for kernel in entry['kernels']):.1f}",
                f"{max(kernel['seconds'] for kernel in entry['kernels']):.1f}",
            ]
            for entry in report["recipes"]
        ),
    )
    print(f"\n{format_count(report['processes'], 'process', 'processes')}, {report['seconds']:.1f} s in all")
    for entry in report["recipes"]:
        for kernel in entry["kernels"]:
            if kernel["error"]:
                print(f"{entry['recipe']}: {kernel['kernel']} does not compile: {printable(kernel['error'])}")
