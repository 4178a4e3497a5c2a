"""Tests of ``kvpack view``: access to its server, and the page that shows any kind of file in a browser."""

from __future__ import annotations

import http.client
import json
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import kvpack
from kvpack import cli
from kvpack.commands.view import FOLDERS, POLICY, Viewer
from kvpack.file import container
from kvpack.file.header import Contents, LayerEntry
from support import chromium
from support.caches import random_pairs
from support.small_files import arrays_of, contents, side

MARKUP = "<img src=x onerror=document.title='taken'><script>document.title='taken'</script>"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "cache <b>.kvpack"
    kvpack.save(kvpack.pack(random_pairs(2, 40), "octopus-4", model={"name": MARKUP}), path)
    return path


@pytest.fixture
def viewer(file: Path) -> Iterator[Viewer]:
    yield from served(file)


def served(path: Path) -> Iterator[Viewer]:
    with Viewer(path) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def ask(
    viewer: Viewer, place: str, method: str = "GET", token: str | None = None, **headers: str
) -> tuple[http.client.HTTPResponse, bytes]:
    """Send a request for a path below the token and return the response."""
    connection = http.client.HTTPConnection("127.0.0.1", viewer.server_port, timeout=60)
    try:
        path = f"/{viewer.token if token is None else token}/{place}"
        connection.putrequest(method, path, skip_host="Host" in headers, skip_accept_encoding=True)
        for name, value in headers.items():
            connection.putheader(name.replace("_", "-"), value)
        connection.endheaders()
        response = connection.getresponse()
        return response, response.read()
    finally:
        connection.close()


def raw(viewer: Viewer, request: bytes) -> bytes:
    """Send the bytes of a request and return everything that the server replies."""
    with socket.create_connection(("127.0.0.1", viewer.server_port), timeout=60) as connection:
        connection.sendall(request)
        connection.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: connection.recv(1 << 16), b""))


def test_page_reader_and_file_are_served(viewer: Viewer, file: Path) -> None:
    assert ask(viewer, "file")[1] == file.read_bytes()
    for place, folder in FOLDERS.items():
        for path in folder.iterdir():
            if path.suffix in (".html", ".css", ".js"):
                response, content = ask(viewer, f"{place}/{path.name}".removesuffix("index.html"))
                assert (response.status, content) == (200, path.read_bytes())
    url = urllib.parse.urlsplit(viewer.url)
    assert (url.hostname, url.port, url.path) == ("127.0.0.1", viewer.server_port, f"/{viewer.token}/viewer/")
    assert url.fragment == f"file={urllib.parse.quote(file.name)}"
    assert viewer.server_address[0] == "127.0.0.1"
    assert len(viewer.token) >= 32


@pytest.mark.parametrize("token", ["", "viewer", "x" * 32, "é"])
def test_any_other_token_is_refused(viewer: Viewer, token: str) -> None:
    for place in ("file", "viewer/", ""):
        assert ask(viewer, place, token=urllib.parse.quote(token))[0].status == 404
    assert ask(viewer, "file", token=viewer.token[:-1])[0].status == 404
    with Viewer(FOLDERS["viewer"] / "index.html") as other:
        assert other.token != viewer.token


@pytest.mark.parametrize(
    "place",
    ["", "viewer", "viewer/index.html", "file/", "file?x", "viewer/../file", "../etc/passwd", "viewer/%2e%2e/file", "viewer//", "file%00"],
)
def test_any_other_path_is_refused(viewer: Viewer, place: str) -> None:
    response, content = ask(viewer, place)
    assert (response.status, content) == (404, b"404 Not Found\n")


def test_only_requests_with_the_servers_own_host_names_are_answered(viewer: Viewer) -> None:
    port = viewer.server_port
    for host in (f"127.0.0.1:{port}", f"localhost:{port}"):
        assert ask(viewer, "file", Host=host)[0].status == 200
    others = (f"example.com:{port}", f"127.0.0.1:{port}.example.com", f"[::1]:{port}", f"localhost.:{port}", "")
    for host in ("127.0.0.1", f"127.0.0.1:{port + 1}", *others):
        assert ask(viewer, "file", Host=host)[0].status == 403
    path = f"/{viewer.token}/file"
    assert raw(viewer, f"GET {path} HTTP/1.1\r\nConnection: close\r\n\r\n".encode()).startswith(b"HTTP/1.1 403")
    twice = f"Host: 127.0.0.1:{port}\r\n" * 2
    assert raw(viewer, f"GET {path} HTTP/1.1\r\n{twice}Connection: close\r\n\r\n".encode()).startswith(b"HTTP/1.1 403")
    absolute = f"GET http://127.0.0.1:{port}{path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n\r\n"
    assert raw(viewer, absolute.encode()).startswith(b"HTTP/1.1 404")


def test_a_request_body_is_not_parsed_as_another_request(viewer: Viewer) -> None:
    line = f"GET /{viewer.token}/file HTTP/1.1\r\nHost: 127.0.0.1:{viewer.server_port}\r\n"
    for head in (f"Content-Length: {len(line) + 2}", "Transfer-Encoding: chunked"):
        answer = raw(viewer, f"{line}{head}\r\n\r\n{line}\r\n".encode())
        assert answer.startswith(b"HTTP/1.1 200")
        assert answer.count(b"HTTP/1.1 ") == 1


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "CONNECT", "PROPFIND"])
def test_files_are_opened_read_only(viewer: Viewer, method: str) -> None:
    response, _ = ask(viewer, "file", method, Origin="http://example.com")
    assert (response.status, response.headers["Allow"]) == (405, "GET, HEAD")


@pytest.mark.parametrize(
    ("place", "method", "headers"),
    [
        ("file", "GET", {}),
        ("viewer/", "GET", {}),
        ("viewer/worker.js", "HEAD", {}),
        ("file", "GET", {"Range": "bytes=1-2"}),
        ("x", "GET", {}),
        ("file", "POST", {}),
        ("file", "GET", {"Host": "example.com"}),
    ],
)
def test_every_response_has_the_strict_headers(viewer: Viewer, place: str, method: str, headers: dict[str, str]) -> None:
    response, _ = ask(viewer, place, method, Origin="http://example.com", **headers)
    assert response.headers["Content-Security-Policy"] == POLICY
    assert response.headers["X-Content-Type-Options"] == "nosniff"
    assert response.headers["Cross-Origin-Resource-Policy"] == "same-origin"
    assert response.headers["Referrer-Policy"] == "no-referrer"
    assert response.headers["Cache-Control"] == "no-store"
    assert not [name for name in response.headers if name.lower().startswith("access-control-")]


def test_the_policy_forbids_external_and_inline_content() -> None:
    policy = dict(part.split(" ", 1) for part in POLICY.split("; "))
    assert policy["default-src"] == "'none'"
    assert {name: value for name, value in policy.items() if value not in ("'self'", "'none'")} == {"img-src": "'self' data:"}
    page = (FOLDERS["viewer"] / "index.html").read_text(encoding="utf-8")
    assert POLICY.removesuffix("; frame-ancestors 'none'") in page
    assert not re.search(r"<script(?![^>]*src=)|\son[a-z]+=|style=|https?://", page)
    for script in FOLDERS["viewer"].glob("*.js"):
        unsafe = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function"
        assert not re.search(unsafe, script.read_text(encoding="utf-8"))


def test_malformed_requests_get_strict_headers_and_are_not_echoed(viewer: Viewer) -> None:
    for request in (b"GET\r\n\r\n", b"<b>x</b> / HTTP/9.9\r\n\r\n", b"GET /" + b"a" * 70000 + b" HTTP/1.1\r\n\r\n"):
        answer = raw(viewer, request)
        assert answer.startswith((b"HTTP/1.1 4", b"HTTP/1.1 5"))
        assert POLICY.encode() in answer
        assert b"<b>" not in answer


@pytest.mark.parametrize(
    ("asked", "first", "end"),
    [("bytes=0-0", 0, 1), ("bytes=5-9", 5, 10), ("bytes=7-", 7, None), ("bytes=0-999999999999999999", 0, None)],
)
def test_ranges_of_the_file_are_served(viewer: Viewer, file: Path, asked: str, first: int, end: int | None) -> None:
    data = file.read_bytes()
    response, content = ask(viewer, "file", Range=asked)
    assert (response.status, content) == (206, data[first:end])
    assert response.headers["Content-Range"] == f"bytes {first}-{first + len(content) - 1}/{len(data)}"
    head, nothing = ask(viewer, "file", "HEAD", Range=asked)
    assert (head.status, head.headers["Content-Length"], nothing) == (206, str(len(content)), b"")


def test_unsatisfiable_and_malformed_ranges_are_refused(viewer: Viewer, file: Path) -> None:
    size = file.stat().st_size
    for asked in (f"bytes={size}-", "bytes=5-4", f"bytes={10**18}-"):
        response, _ = ask(viewer, "file", Range=asked)
        assert (response.status, response.headers["Content-Range"]) == (416, f"bytes */{size}")
    for asked in ("bytes=-5", "bytes=0-1,3-4", "lines=0-1", "bytes=x-y"):
        response, content = ask(viewer, "file", Range=asked)
        assert (response.status, len(content)) == (200, size)


def test_a_file_that_is_replaced_or_truncated_while_served_is_noticed(viewer: Viewer, file: Path) -> None:
    data = file.read_bytes()
    file.rename(file.with_name("old"))
    file.write_bytes(b"another")
    assert ask(viewer, "file")[1] == data
    with file.with_name("old").open("r+b") as opened:
        opened.truncate(10)
    with pytest.raises(http.client.IncompleteRead):
        ask(viewer, "file")
    assert ask(viewer, "viewer/")[0].status == 200


def test_files_that_cannot_be_shown_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["view", str(tmp_path / "missing")]) == 3
    assert cli.main(["view", str(tmp_path)]) == 3
    printed = capsys.readouterr().err
    assert "No such file or directory: check the path" in printed
    assert "is a folder, expected a regular file" in printed
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        path = FOLDERS["viewer"] / "index.html"
        for port in (taken.getsockname()[1], 70000):
            assert cli.main(["view", str(path), "--port", str(port)]) == 2
            assert "omit --port to use a free one" in capsys.readouterr().err


@pytest.mark.scenario
def test_ctrl_c_ends_the_command(file: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "kvpack", "view", file],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Tests in the background of a shell, and their children, would ignore it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    url = line.partition(": open ")[2].strip()
    assert re.fullmatch(r"http://127\.0\.0\.1:[0-9]+/[\w-]{32}/viewer/#file=.*", url)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")


browser_tests = pytest.mark.skipif(chromium.PROGRAM is None, reason="chromium is not installed")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[chromium.Page]:
    with chromium.page(tmp_path_factory.mktemp("browser")) as found:
        yield found


def text(page: chromium.Page, name: str) -> str:
    return str(page.evaluate(f"document.getElementById('{name}').innerText"))


def shown(page: chromium.Page, path: Path) -> None:
    """Open a file in the page, and wait until the page shows its header or an error."""
    for server in served(path):
        page.errors.clear()
        page.open("about:blank")
        page.open(server.url)
        page.wait("document.getElementById('contents') && (!contents.hidden || !document.getElementById('error').hidden)")


@pytest.mark.scenario
@browser_tests
def test_the_page_shows_verifies_and_draws(page: chromium.Page, viewer: Viewer, file: Path) -> None:
    page.open(viewer.url)
    page.wait("document.getElementById('contents')?.hidden === false")
    assert MARKUP in text(page, "header")
    assert file.name in text(page, "header")
    assert page.evaluate("document.querySelectorAll('main img, main script').length") == 0
    assert page.evaluate("document.title") == f"{file.name} - kvpack viewer"
    cache = kvpack.load(file)
    for name, kind in (("k", "keys"), ("v", "values")):
        page.evaluate(f"(side.value = '{name}', layer.value = 1, show.click())")
        page.wait(f"document.getElementById('values-status').innerText.startsWith('Layer 1, {kind}')")
        values = cache[1].sides[name].unpack(torch.float32)
        page.evaluate("(token.value = 39, head.value = 1, channel.value = 63, cell.dispatchEvent(new Event('input')))")
        cell = "Token 39, head 1, channel 63: "
        page.wait(f"document.getElementById('value').innerText.startsWith('{cell}')")
        assert float(text(page, "value").removeprefix(cell)) == pytest.approx(float(values[0, 1, 39, 63]), rel=1e-5)
        assert f"{values.numel():,}" in text(page, "statistics")
    page.evaluate("document.getElementById('verify').click()")
    page.wait("document.getElementById('verify-status').className === 'good'")
    assert page.errors == []


@pytest.mark.scenario
@browser_tests
@pytest.mark.parametrize("size", [0, 7, 60, 5000, -1])
def test_the_page_refuses_truncated_files(page: chromium.Page, file: Path, size: int) -> None:
    file.write_bytes(file.read_bytes()[:size])
    shown(page, file)
    assert page.evaluate("contents.hidden")
    assert text(page, "status") == "The file is refused."
    assert re.match("(Truncated|NotKvpack): ", text(page, "error"))


@pytest.mark.scenario
@browser_tests
def test_the_page_names_the_damaged_tensor(page: chromium.Page, file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    for server in served(file):
        page.open(server.url)
        page.wait("document.getElementById('contents')?.hidden === false")
        page.evaluate("document.getElementById('verify').click()")
        page.wait("document.getElementById('verify-status').className === 'bad'")
        last = list(container.open_file(file).tensors)[-1]
        assert f"{last}" in text(page, "verify-table")
        assert "DigestMismatch" in text(page, "verify-table")


@pytest.mark.scenario
@browser_tests
def test_the_page_stays_usable_with_huge_tables(page: chromium.Page, tmp_path: Path) -> None:
    path = tmp_path / "huge.kvpack"
    raw_codec = contents("raw").codecs[0]
    metadata = {f"{MARKUP}{i:03}": MARKUP * 30 for i in range(200)}
    narrowest = "Math.min(...[...document.querySelectorAll('#header dd')].map((one) => one.clientWidth))"
    many = Contents(
        codecs=(raw_codec,), layers=(LayerEntry(side(0), None),) + (LayerEntry(None, None),) * 4095, model=metadata, recipe="‮<b>x"
    )
    path.write_bytes(container.to_bytes(many, arrays_of(many)))
    shown(page, path)
    assert text(page, "error") == ""
    assert "\\u202e<b>x" in text(page, "header")
    assert page.evaluate("document.querySelectorAll('#layers tbody tr').length") == 500
    assert page.evaluate("document.querySelectorAll('main img, main script').length") == 0
    page.evaluate("document.querySelector('#layers button').click()")
    assert page.evaluate("document.querySelectorAll('#layers tbody tr').length") == 1000
    page.size(390, 844, phone=True)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.evaluate(narrowest) > 150
    page.call("Emulation.clearDeviceMetricsOverride")
    assert page.evaluate("document.title") != "taken"


def with_ids(path: Path, count: int, **options: Any) -> None:
    """Write a file whose token ids are 0 to ``count`` - 1."""
    inputs = kvpack.Inputs(struct.pack(f"<{count}I", *range(count)))
    kvpack.save(kvpack.pack(random_pairs(1, count), "raw", inputs=inputs), path, **options)


@pytest.mark.scenario
@browser_tests
@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("[" * 100_000, "not valid JSON"),
        ("[1]", "no model.vocab"),
        ('{"model": {"vocab": "x"}}', "no model.vocab"),
        ('{"model": {"vocab": {"x": "y"}}}', "not a text with an id"),
        ('{"model": {"vocab": {"x": -1}}}', "not a text with an id"),
        ('{"model": {"vocab": [1, null]}}', "not a text with an id"),
        ('{"model": {"vocab": {}}, "added_tokens": {"id": 1}}', "not an array"),
        ('{"model": {"vocab": {}}, "added_tokens": [null]}', "not a text with an id"),
        (None, "has at most"),
    ],
)
def test_a_tokenizer_of_another_form_is_refused(page: chromium.Page, tmp_path: Path, content: str | None, reason: str) -> None:
    path, tokenizer = tmp_path / "x.kvpack", tmp_path / f"{MARKUP.replace('/', '')}.json"
    with_ids(path, 4)
    with tokenizer.open("w") as opened:
        opened.write(content or "")
        if content is None:
            opened.truncate(300 << 20)
    for server in served(path):
        page.errors.clear()
        page.open(server.url)
        page.wait("document.getElementById('contents')?.hidden === false")
        page.choose("#tokenizer", tokenizer)
        page.wait("!document.getElementById('error').hidden")
        assert reason in text(page, "error")
        page.wait("document.getElementById('tokens').textContent.trim() !== ''")
        assert text(page, "tokens").split() == ["0", "1", "2", "3"]
        assert page.evaluate("document.querySelectorAll('main img, main script').length") == 0
        assert page.errors == []


@pytest.mark.scenario
@browser_tests
def test_long_token_texts_are_truncated_and_markup_is_escaped(page: chromium.Page, tmp_path: Path) -> None:
    path, tokenizer = tmp_path / "x.kvpack", tmp_path / "tokenizer.json"
    with_ids(path, 3)
    tokenizer.write_text(json.dumps({"model": {"vocab": {MARKUP: 0, "x" * 10_000_000: 1, "\u202e\n": 2}}}), encoding="utf-8")
    for server in served(path):
        page.open(server.url)
        page.wait("document.getElementById('contents')?.hidden === false")
        page.choose("#tokenizer", tokenizer)
        page.wait("document.getElementById('tokens').innerText.includes('<img')")
        texts = page.evaluate("[...document.querySelectorAll('#tokens span')].map((one) => one.textContent)")
        assert texts == [MARKUP, "x" * 200, "\\u202e⏎\n"]
        assert page.evaluate("document.title") != "taken"


@pytest.mark.scenario
@browser_tests
def test_a_file_that_changes_while_it_is_open_is_noticed(page: chromium.Page, tmp_path: Path) -> None:
    path = tmp_path / "x.kvpack"
    with_ids(path, 40)
    for server in served(path):
        page.open(server.url)
        page.wait("document.getElementById('contents')?.hidden === false")
        with path.open("r+b") as opened:
            opened.truncate(5000)
        page.evaluate("document.getElementById('show').click()")
        page.wait("document.getElementById('values-status').innerText.includes('cut short')")
        page.choose("#file", path)
        page.wait("!document.getElementById('error').hidden")
        assert text(page, "error").startswith("Truncated: ")
    with_ids(path, 40)
    page.evaluate("document.getElementById('file').dispatchEvent(new Event('click'))")
    page.choose("#file", path)
    page.wait("document.getElementById('contents').hidden === false")
    path.write_bytes(b"another file")
    page.evaluate("document.getElementById('show').click()")
    page.wait("document.getElementById('values-status').innerText.includes('choose it again')")


@pytest.mark.scenario
@browser_tests
def test_another_file_replaces_one_that_is_being_processed(page: chromium.Page, viewer: Viewer, tmp_path: Path) -> None:
    path = tmp_path / "next.kvpack"
    with_ids(path, 4)
    page.errors.clear()
    page.open(viewer.url)
    page.wait("document.getElementById('contents')?.hidden === false")
    page.evaluate("(document.getElementById('verify').click(), document.getElementById('show').click())")
    page.choose("#file", path)
    page.wait("document.getElementById('status').innerText.startsWith('next.kvpack')")
    page.wait("!document.getElementById('show').disabled && !document.getElementById('verify').disabled")
    assert text(page, "error") == text(page, "verify-status") == ""
    assert page.errors == []


@pytest.mark.scenario
@browser_tests
def test_positions_outside_the_side_are_refused(page: chromium.Page, viewer: Viewer) -> None:
    page.open(viewer.url)
    page.wait("document.getElementById('contents')?.hidden === false")
    # The browser already refuses most of these before it submits the form.
    page.evaluate("(document.getElementById('pick').noValidate = true)")
    for field, value in (("layer", -1), ("layer", 2), ("layer", 0.5), ("sequence", -1), ("sequence", 1)):
        page.evaluate(f"(layer.value = 0, sequence.value = 0, {field}.value = {value}, show.click())")
        page.wait("document.getElementById('show').disabled === false")
        assert re.search("has no keys|sequences, counted from 0", text(page, "values-status")), (field, value)
    page.evaluate("(layer.value = 0, sequence.value = 0, show.click())")
    page.wait("document.getElementById('values-status').innerText.startsWith('Layer 0')")
    for field, value in (("token", -1), ("token", 40), ("head", -1), ("channel", 0.5)):
        page.evaluate(f"(token.value = head.value = channel.value = 0, {field}.value = {value}, cell.dispatchEvent(new Event('input')))")
        page.wait("document.getElementById('value').innerText.endsWith('no value')")


@pytest.mark.scenario
@browser_tests
def test_token_ids_are_shown_as_text_with_a_tokenizer(page: chromium.Page, tmp_path: Path) -> None:
    path, tokenizer = tmp_path / "x.kvpack", tmp_path / "tokenizer.json"
    kvpack.save(kvpack.pack(random_pairs(1, 4), "raw", inputs=kvpack.Inputs(struct.pack("<4I", 0, 1, 2, 9))), path)
    vocabulary = {"Ġ<b>": 0, "Ã": 1, "©": 2}
    tokenizer.write_text(json.dumps({"model": {"type": "BPE", "vocab": vocabulary}, "decoder": {"type": "ByteLevel"}}), encoding="utf-8")
    for server in served(path):
        page.open(server.url)
        page.wait("document.getElementById('contents')?.hidden === false")
        page.choose("#tokenizer", tokenizer)
        page.wait("document.getElementById('tokens').innerText.includes('<b>')")
        assert page.evaluate("[...document.querySelectorAll('#tokens span')].map((one) => one.textContent)") == [" <b>", "", "é", "[9]"]
