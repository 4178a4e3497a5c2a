"""Tests of the tables that ``kvpack bench kernels`` prints for unpacking and for many queries."""

from __future__ import annotations

import pytest

from kvpack.bench import query_kernels, unpack_kernels
from kvpack.bench.query_kernels import QueryShape


def test_the_table_for_unpacking_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    row = {"recipe": "octopus-3", "bytes": 1 << 20, "k_seconds": 1e-4, "v_seconds": 2e-4, "seconds": 3e-4, "of_copy_speed": 0.5}
    rows = [row | {"device_seconds": 2e-4, "device_of_copy_speed": 0.75}, row | {"device_seconds": None, "device_of_copy_speed": None}]
    unpack_kernels.show({**unpack_kernels.SHAPE._asdict(), "bytes": 3 << 27, "copy_seconds": 1.5e-4, "rows": rows}, "a device")
    shown = capsys.readouterr().out
    assert "unpack to bf16: 1 x 8 heads x 128, 65,536 tokens, on a device" in shown
    assert [row.split() for row in shown.splitlines() if "octopus-3" in row] == [
        ["octopus-3", "1,048,576", "100", "200", "300", "1342", "0.50", "200", "0.75"],
        ["octopus-3", "1,048,576", "100", "200", "300", "1342", "0.50"],
    ]
    assert "takes 150 us" in shown


def test_the_table_for_many_queries_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    row = {"recipe": "octopus-3", "seconds": 1e-3, "decoded_seconds": 2e-3, "of_sdpa": 1.25, "error": 1e-3}
    report = {
        **QueryShape(1, 32, 8, 128, 65536)._asdict(),
        "peers": [{"queries": 64, "flash": 8e-4}, {"queries": 2048, "flash": 4e-3, "cudnn": 3e-3}],
        "rows": [row | {"queries": 64}, row | {"queries": 2048}],
    }
    query_kernels.show(report, "a device")
    shown = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["SDPA", "flash,", "us", "800", "4000"] in shown
    assert ["SDPA", "cudnn,", "us", "3000"] in shown
    assert ["octopus-3,", "us", "1.0e-03", "1000", "1000"] in shown
    assert ["x", "best", "SDPA", "1.25", "1.25"] in shown


@pytest.mark.cuda
def test_both_kernels_are_measured() -> None:
    unpacked = unpack_kernels.run(["octopus-3"], unpack_kernels.KeyValueShape(1, 2, 2048, 64))
    assert unpacked["rows"][0]["of_copy_speed"] > 0
    queries = query_kernels.run(["octopus-3"], QueryShape(1, 4, 2, 64, 2048), [2, 256])
    assert [row["queries"] for row in queries["rows"]] == [2, 256]
    assert all(row["error"] < 1e-2 for row in queries["rows"])
