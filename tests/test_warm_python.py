"""The tests' replacement of Python behaves like Python."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support import warm_python

PROGRAMS = {
    "arguments": ["-c", "import sys; print(sys.argv[1:], sys.path[0] in ('', sys.argv[1]))", "one", "--two"],
    "a module": ["-m", "json.tool", "--help"],
    "a script": ["script.py", "x"],
    "an exit code": ["-c", "import sys; sys.exit(7)"],
    "a message": ["-c", "import sys; sys.exit('the end')"],
    "a signal": ["-c", "import os, signal; os.kill(os.getpid(), signal.SIGTERM)"],
    "SIGKILL": ["-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"],
    "the last output": ["-c", "import atexit; atexit.register(print, 'at the end'); print('before', end='')"],
    "a thread": ["-c", "import threading, time; threading.Timer(0.05, print, ['later']).start()"],
    "input": ["-c", "import sys; print(sys.stdin.read().upper(), file=sys.stderr)"],
    "warnings": ["-W", "error", "-c", "import sys, warnings\ntry:\n    warnings.warn('x')\nexcept UserWarning as error:\n    print(error)"],
    "environment and folder": ["-c", "import os; print(os.getcwd(), os.environ['NAME'], 'HOME' in os.environ)"],
    "a fork": ["-c", "import os\nif os.fork():\n    os.wait()\n    print('parent')\nelse:\n    os.write(1, b'child')\n    os._exit(0)"],
}


@pytest.mark.parametrize("arguments", PROGRAMS.values(), ids=PROGRAMS)
def test_a_program_runs_as_in_a_new_process(arguments: list[str], tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import sys, helper\nprint(__name__, sys.argv, helper.VALUE)\n")
    (tmp_path / "helper.py").write_text("VALUE = 5\n")
    environment = {"NAME": "value", "PATH": os.environ["PATH"]}

    def run(python: str) -> tuple[int, str, str]:
        done = subprocess.run([python, *arguments], input="text", capture_output=True, text=True, cwd=tmp_path, env=environment)
        return done.returncode, done.stdout, done.stderr

    assert run(warm_python.python()) == run(sys.executable)


def test_an_exception_is_shown() -> None:
    done = subprocess.run([warm_python.python(), "-c", "print('out')\n1 / 0"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "out\n")
    assert done.stderr.endswith('File "<string>", line 2, in <module>\nZeroDivisionError: division by zero\n')


def test_programs_start_with_imported_modules_and_share_no_state() -> None:
    code = "import random, sys; print('torch' in sys.modules, 'json.tool' in sys.modules, random.random()); sys.modules.clear()"
    outputs = [subprocess.run([warm_python.python("json.tool"), "-c", code], capture_output=True, text=True).stdout for _ in range(2)]
    assert [output.split()[:2] for output in outputs] == [["True", "True"]] * 2
    assert outputs[0] != outputs[1]


def test_a_program_ends_with_the_process_that_waits_for_it() -> None:
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    process = subprocess.Popen([warm_python.python(), "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    number = int(process.stdout.readline())
    process.kill()
    process.communicate()
    deadline = time.monotonic() + 60
    while Path(f"/proc/{number}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert process.returncode == -signal.SIGKILL


def test_the_kvpack_command_is_available() -> None:
    done = subprocess.run([warm_python.commands() / "kvpack", "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("kvpack ")
