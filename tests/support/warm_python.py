"""Start Python programs for tests without importing torch and transformers each time.

``python()`` is the path of a program that is used like ``sys.executable``. It accepts the interpreter's arguments, and runs with the
environment, streams and working folder of its caller. Each test worker has one server process that has imported torch and kvpack and forks
for every program. Tests of imports, of memory and of installed packages use ``sys.executable`` instead.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import random
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

TRANSFORMERS = ("transformers.models.llama.modeling_llama", "transformers.generation.utils")
"""Modules that programs with a model import, except kvpack's integration, which each program must import itself."""
MODELS = ("kvpack.integrations.transformers", *TRANSFORMERS)
"""Modules that programs with a model and kvpack's integration import."""
LAUNCHING = tuple(f"kvpack.kernels.{name}" for name in ("attend.many_queries", "attend.growing", "decode.sides", "encode.encode"))
"""Modules that programs which launch kernels import."""

CLIENT = """\
#!{interpreter} -IS
import json, os, signal, socket, sys
folder, name = os.path.split(sys.argv[0])
words = [{script!r}, *sys.argv[1:]] if name == "kvpack" else sys.argv[1:]
request = {{"words": words, "folder": os.getcwd(), "environment": dict(os.environ)}}
request |= {{"program": f"{{folder}}/python", "modules": {modules!r}}}
with socket.socket(socket.AF_UNIX) as server:
    server.connect({path!r})
    socket.send_fds(server, [b"+"], [0, 1, 2])
    server.sendall(json.dumps(request).encode() + b"\\n")
    reply = server.recv(9)
if not reply:
    sys.exit("the forking process exited")
code = int(reply)
if code < 0:
    if code != -signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
"""
"""The program that takes the place of Python and of the command ``kvpack``."""


@functools.cache
def _server(*, integrated: bool) -> Path:
    """Start a server that forks for each program and ends with this process. Return its folder.

    With ``integrated``, the server may import kvpack's integrations. Otherwise it never does, so that tests can check which ones a program
    imports.
    """
    folder = Path(tempfile.mkdtemp(prefix="warm-"))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-P", __file__, str(folder / "socket"), *(["integrated"] if integrated else [])]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, env=environment, cwd="/")

    def end() -> None:
        process.communicate()
        shutil.rmtree(folder)

    atexit.register(end)
    while not (folder / "socket").exists():
        assert process.poll() is None, "the forking process exited"
        time.sleep(0.01)
    return folder


@functools.cache
def commands(*modules: str) -> Path:
    """Return a folder with the programs ``python`` and ``kvpack``, which start with torch, kvpack and ``modules`` imported."""
    server = _server(integrated=modules != TRANSFORMERS)
    folder = Path(tempfile.mkdtemp(dir=server))
    script = Path(sys.executable).with_name("kvpack")
    path = str(server / "socket")
    for name in ("python", "kvpack"):
        (folder / name).write_text(CLIENT.format(interpreter=sys.executable, script=str(script), modules=modules, path=path))
        (folder / name).chmod(0o700)
    return folder


def python(*modules: str) -> str:
    """Return the path of a program that takes the place of ``sys.executable``."""
    return str(commands(*modules) / "python")


def serve(path: str) -> dict[str, Any]:
    """Fork for each request on a socket, and return the request in the child. The server ends with the process that started it."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{path}.new")
    listener.listen(64)
    os.rename(f"{path}.new", path)
    running: dict[int, tuple[int, socket.socket]] = {}
    """For each running child: its process id, and the socket of the process that waits for it.

    The keys are the file descriptors that signal the end of a child.
    """
    while True:
        waiting = {client: number for number, client in running.values()}
        ready, _, _ = select.select([0, listener, *running, *waiting], [], [])
        if 0 in ready:
            for number, _ in running.values():
                os.kill(number, signal.SIGKILL)
            os._exit(0)
        for ended in running.keys() & set(ready):
            number, client = running.pop(ended)
            os.close(ended)
            _, status = os.waitpid(number, 0)
            with client, contextlib.suppress(BrokenPipeError):
                client.sendall(str(os.waitstatus_to_exitcode(status)).encode())
            waiting.pop(client)
        for client in waiting.keys() & set(ready):
            # A client sends nothing after its request, so a readable socket means that the client has ended.
            os.kill(waiting[client], signal.SIGKILL)
        if listener in ready:
            client, _ = listener.accept()
            _, streams, _, _ = socket.recv_fds(client, 1, 3)
            request: dict[str, Any] = json.loads(client.makefile("rb").readline())
            for module in request["modules"]:
                importlib.import_module(module)
            gc.freeze()
            number = os.fork()
            if not number:
                for target, stream in enumerate(streams):
                    os.dup2(stream, target)
                for descriptor in (*streams, *running, *(other.detach() for other in (listener, client, *waiting))):
                    os.close(descriptor)
                return request
            for stream in streams:
                os.close(stream)
            running[os.pidfd_open(number)] = number, client


def run_request(request: dict[str, Any]) -> None:
    """Run the program that the interpreter's arguments in ``request`` specify, in this process."""
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.path[:0] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    sys.executable = request["program"]
    # Create new stream objects, because the old ones have the settings of the server's streams.
    encoding = os.environ.get("PYTHONIOENCODING", "utf-8")
    sys.stdin, sys.stdout = open(0, encoding=encoding, closefd=False), open(1, "w", encoding=encoding, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, encoding=encoding, errors="backslashreplace", closefd=False)  # noqa: SIM115
    random.seed()
    sys.modules["numpy"].random.seed()
    words, safe = request["words"], False
    while words[0] in ("-P", "-W"):
        safe |= words[0] == "-P"
        if words.pop(0) == "-W":
            warnings.simplefilter(words.pop(0))  # type: ignore[arg-type]
    main = sys.modules["__main__"] = ModuleType("__main__")
    first = "" if words[0] in ("-c", "-m") else str(Path(words[0]).resolve().parent)
    sys.path[:0] = [] if safe else [first]
    if words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        exec(compile(words[1], "<string>", "exec"), vars(main))
    elif words[0] == "-m":
        sys.argv = words[1:]
        # The program must import its main module again, even if the server has imported it.
        sys.modules.pop(words[1], None)
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        assert not words[0].startswith("-"), f"{words[0]} is not an option that this program supports"
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")


def run_and_exit(work: Callable[[], None]) -> None:
    """Do ``work`` and exit as the interpreter does, but without a final garbage collection.

    That would copy all memory that forked processes share.
    """
    code = 0
    try:
        work()
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
        if code and not isinstance(ending.code, int):
            print(ending.code, file=sys.stderr)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
    except OSError:
        code = 120
    os._exit(code)


if __name__ == "__main__":
    import torch

    import kvpack

    torch.set_num_threads(1)
    for name in kvpack.__all__:
        if name not in ("evaluate", "prefill") or "integrated" in sys.argv:
            getattr(kvpack, name)
    run_and_exit(functools.partial(run_request, serve(sys.argv[1])))
