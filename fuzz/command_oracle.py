"""Checks of the command line on arbitrary files: exit codes, messages and partial outputs. Commands run in this process."""

from __future__ import annotations

import contextlib
import io
import json
import os
from pathlib import Path
from unittest import mock

from fuzz.oracles import open_verified
from kvpack import cli
from kvpack.store.counters import Counters
from kvpack.store.folder import Folder

REFUSED = (1, 2, 3)
_COMMANDS = (
    ("inspect", "FILE"),
    ("inspect", "FILE", "--json"),
    ("verify", "FILE"),
    ("verify", "FILE", "--json"),
    ("unpack", "FILE", "OUT"),
    ("unpack", "FILE", "OUT", "--dtype", "fp32", "--json"),
    ("convert", "FILE", "OUT", "kv=group:b=4,g=4", "--compress"),
    ("convert", "FILE", "OUT", "raw", "--json"),
    ("store", "ls", "STORE"),
    ("store", "ls", "STORE", "--json"),
    ("store", "stat", "STORE"),
    ("store", "verify", "STORE"),
)
_PACK = ("pack", "FILE", "OUT", "--recipe", "kv=group:b=4,g=4")


class CommandOracle:
    """Oracle that runs one command on each input in ``folder``. The input determines the command."""

    def __init__(self, folder: Path) -> None:
        self.file, self.out, self.store = folder / "input", folder / "output", folder / "store"
        self._parser = cli.parser()
        self.written = b""
        self.entry = Path(Folder(str(self.store), Counters(), durable=False).path(bytes(32)))
        os.makedirs(self.entry.parent, mode=0o700, exist_ok=True)

    def check(self, data: bytes) -> bool:
        """Return True if the command succeeded.

        Fails for an unknown exit code, for output after a refusal, and for terminal control characters.
        """
        return self._run(_COMMANDS[(sum(data[:4096]) + len(data)) % len(_COMMANDS)], data)

    def check_pack(self, data: bytes) -> bool:
        """Return True if the file was packed. Fails as ``check`` does, or if the packed file is refused."""
        packed = self._run(_PACK, data)
        assert not packed or open_verified(self.written) is not None, "the file that pack wrote is refused"
        return packed

    def _run(self, command: tuple[str, ...], data: bytes) -> bool:
        self.file.write_bytes(data)
        self.entry.write_bytes(data if "STORE" in command else b"")
        words = {"FILE": str(self.file), "OUT": str(self.out), "STORE": str(self.store)}
        stdout, stderr = io.StringIO(), io.StringIO()
        # Building the parser takes ten times as long as most commands on a small file, so all commands share one.
        parser = mock.patch.object(cli, "parser", return_value=self._parser)
        with parser, contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
            code = cli.main([words.get(word, word) for word in command])
        self._check_run(command, code, stdout.getvalue(), stderr.getvalue())
        if command[0] == "verify":
            assert (code == 0) == (open_verified(data) is not None), f"verify exits with {code}"
        self.written = self.out.read_bytes() if self.out.exists() else b""
        self.out.unlink(missing_ok=True)
        return code == 0

    def _check_run(self, command: tuple[str, ...], code: int, stdout: str, stderr: str) -> None:
        obeyed = [char for char in stdout + stderr if not char.isprintable() and char != "\n"]
        assert not obeyed, f"{command[0]} prints {obeyed[:4]!r}"
        if code == 0:
            assert "OUT" not in command or self.out.stat().st_size > 0, f"{command[0]} wrote nothing"
            assert "--json" not in command or json.loads(stdout) is not None
            return
        assert code in REFUSED, f"{command[0]} exits with {code}"
        assert command[0] == "store" or stderr.startswith("kvpack: "), f"{command[0]} prints {stderr[:80]!r}, expected a kvpack error"
        assert not self.out.exists(), f"{command[0]} exits with {code} but leaves an output file"
        left = [path.name for path in self.file.parent.iterdir() if path not in (self.file, self.store)]
        assert not left, f"{command[0]} leaves {left}"
