"""Prints the tables of ``kvpack bench serve``: decode steps, and times to the first token."""

from __future__ import annotations

from typing import Any

from kvpack.output import bytes_text, print_table

from .serve import DENSE_FILE
from .serve_cpu import ROUNDS, STEPS
from .serve_rows import DYNAMIC, FLASH, OUT_OF_MEMORY_ERROR


def show(report: dict[str, Any]) -> None:
    _show_decode(report)
    _show_first_tokens(report)


def _milliseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{1e3 * seconds:.2f}"


def _ratio(value: float | None, *peers: float | None) -> str:
    return " / ".join(f"{value / peer:.2f}" for peer in peers if value is not None and peer is not None)


def _show_decode(report: dict[str, Any]) -> None:
    rows = []
    errors: dict[str, str] = {}
    dense: list[dict[str, Any]] = []
    for row in report["decode"]:
        if row["cache"] in (DYNAMIC, FLASH):
            dense = [*(dense if row["cache"] != DYNAMIC else []), row]
        error = row.get("error")
        if error is not None and error != OUT_OF_MEMORY_ERROR:
            errors.setdefault(f"{row['cache']}: {error}", f"{row['batch']} x {row['tokens']:,}")
        rows.append(_decode_cells(row, dense, report["weights_bytes"]))
    on_cpu, dtype = report["device"] == "cpu", report["dtype"]
    title = f"Decode steps of {report['shape']}, {report['layers']} layers, random weights in {dtype}, on {report['device']}"
    beside = "x Dynamic-\nCache" + (" / flash" if len(dense) > 1 else "")
    columns = [
        "batch x tokens", "cache", "cache\nbytes", "step\nms", beside, "without\ngraphs, ms", beside,
        "generate\nms/token", beside, f"x {dtype}\nin a graph",
        "graph\nms", f"x {dtype}\nin a graph", "tokens/s\nin graphs", "peak memory x\nweights + cache",
    ]  # fmt: skip
    # Columns for GPUs are empty on a CPU.
    shown = [number for number in range(len(columns)) if not on_cpu or any(row[number] for row in rows)]
    print_table(title, [columns[number] for number in shown], [[row[number] for number in shown] for row in rows])
    for error, place in errors.items():
        print(f"{place}, {error}")
    if on_cpu:
        print(f"\nProcess CPU times in one thread: means of {ROUNDS} rounds, each with {STEPS} steps (or tokens) of every cache.")
    else:
        print("\nA step is one call of the model with a new cache length, as in generate. With packed caches, calls replay graphs,")
        print("or run eagerly with graphs=False; generate is timed after its kernels are compiled.")
        print(f"The {dtype} graph uses preallocated states, no mask, and the faster of SDPA's flash and cuDNN attention.")


def _decode_cells(row: dict[str, Any], dense: list[dict[str, Any]], weights_bytes: int) -> list[str]:
    """Return the cells of a cache's row. ``dense`` contains the rows of uncompressed caches with the same batch and tokens."""
    static = dense[0]["graph_seconds"]
    known = row["peak_bytes"] is not None and row["cache_bytes"] is not None
    peak = row["peak_bytes"] / (weights_bytes + row["cache_bytes"]) if known else None
    graph, step, eager, generated = (row[f"{name}_seconds"] for name in ("graph", "step", "eager", "generate"))
    steps = [peer["step_seconds"] for peer in dense]
    size = "" if row["cache_bytes"] is None else bytes_text(row["cache_bytes"])
    if generated is None:
        size = OUT_OF_MEMORY_ERROR if row.get("error") == OUT_OF_MEMORY_ERROR else "not timed"
    return [
        f"{row['batch']} x {row['tokens']:,}", row["cache"], size,
        _milliseconds(step), _ratio(step, *steps),
        _milliseconds(eager), _ratio(eager, *steps),
        _milliseconds(generated), _ratio(generated, *(peer["generate_seconds"] for peer in dense)), _ratio(generated, static),
        _milliseconds(graph), _ratio(graph, static), "" if graph is None else f"{row['batch'] / graph:.0f}",
        "" if peak is None else f"{peak:.3f}",
    ]  # fmt: skip


def _show_first_tokens(report: dict[str, Any]) -> None:
    rows = []
    for row in report["first_token"]:
        same_length = [other for other in report["first_token"] if other["tokens"] == row["tokens"]]
        seconds = {other["from"]: other["seconds"] for other in same_length}
        rows.append([
            f"{row['tokens']:,} + {row['suffix']}", row["from"], "" if "file_bytes" not in row else bytes_text(row["file_bytes"]),
            _milliseconds(row.get("load_seconds")), _milliseconds(row["seconds"]), _ratio(row["seconds"], seconds["recompute"]),
            _ratio(row["seconds"], seconds[DENSE_FILE]),
        ])  # fmt: skip
    columns = ["prefix +\nsuffix", "from", "file", "load\nms", "first token\nms", "x recompute", f"x {report['dtype']}\nfile"]
    print_table("Time to the first token; files are in the page cache", columns, rows)
    for row in report["first_token"]:
        if "error" in row:
            print(f"{row['tokens']:,} + {row['suffix']}, {row['from']}: {row['error']}")
