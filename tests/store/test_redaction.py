"""No message, report or representation of a location shows a password."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import kvpack
from kvpack.demo import store as demo_store
from kvpack.formats.errors import InvalidParameter, MissingFile
from kvpack.store.counters import Counters
from kvpack.store.entry_kind import UNENCRYPTED
from kvpack.store.locations import open_existing
from kvpack.store.options import LocationOptions, StoreOptions
from kvpack.store.redaction import redacted_location
from support.store_caches import IDENTITY

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("location", "shown"),
    [
        ("redis://user:secret@host:1/2", "redis://***@host:1/2"),
        ("redis://:sec@ret@host", "redis://***@host"),
        ("redis://user:sec/ret?a#b@host", "redis://***@host"),
        ("REDISS://user:secret@host", "REDISS://***@host"),
        ("redis://host/0?db=1&password=secret&timeout=2", "redis://host/0?db=1&password=***&timeout=2"),
        ("redis://host?username=secret&ssl_password=sec@ret", "redis://host?username=***&ssl_password=***"),
        ("unix://user:sec@ret/1@/run/a@b.sock?db=1", "unix://***@/run/a@b.sock?db=1"),
        ("s3://key:secret@bucket/a@b", "s3://***@bucket/a@b"),
        ("az://box/blob?sv=1&sig=secret", "az://box/blob?sv=1&sig=***"),
        ("cannot connect to redis://:secret@host: it is 'x@y'", "cannot connect to redis://***@host: it is 'x@y'"),
        (["redis://:secret@a", "/folder", "redis://:secret@b"], "[redis://***@a, /folder, redis://***@b]"),
        ("/folder/a@b?password", "/folder/a@b?password"),
        ("s3://bucket/user@host", "s3://bucket/user@host"),
    ],
)
def test_users_and_passwords_are_hidden(location: Any, shown: str) -> None:
    assert redacted_location(location) == shown


def test_secret_options_are_not_in_reprs() -> None:
    secrets = {"secret_access_key": "secret"}
    tier = kvpack.Tier("redis://:secret@host", max_bytes=10, storage_options=secrets)
    assert repr(tier) == "Tier('redis://***@host', max_bytes=10)"
    assert redacted_location([tier]) == f"[{tier!r}]"
    options = StoreOptions(max_bytes=10, storage_options=secrets, encryption={"a": b"secret"})
    assert "max_bytes=10" in repr(options)
    assert "secret" not in repr(options)


@pytest.mark.parametrize(
    ("location", "message"),
    [
        ("file://user:secret@host/folder", r"'file://\*\*\*@host/folder' names the host 'host'"),
        ("s3://user:secret@/prefix?token=secret", r"'s3://\*\*\*@"),
        ("redis://user:sec/ret@host", "contains '/', '[?]' or '#': write %2F, %3F or %23"),
        ("redis://user:sec?ret@host", "contains '/', '[?]' or '#'"),
        ("rediss://user:sec#ret@host", "contains '/', '[?]' or '#'"),
    ],
)
def test_error_messages_contain_no_password(location: str, message: str) -> None:
    pytest.importorskip("redis")
    pytest.importorskip("obstore")
    with pytest.raises(InvalidParameter, match=message) as refusal:
        kvpack.Store(location, IDENTITY)
    assert "ret" not in str(refusal.value)


def test_correctly_escaped_passwords_are_accepted() -> None:
    pytest.importorskip("redis")
    for location in ("redis://user:p%2Fw%3F%23@127.0.0.1:1", "redis://127.0.0.1:1?password=p@ss", "redis://user:p@ss@127.0.0.1:1"):
        kvpack.Store(location, IDENTITY).close()


def test_the_error_for_a_missing_folder_hides_its_password() -> None:
    with pytest.raises(MissingFile) as refusal:
        open_existing("file:///no/folder?token=secret", Counters(), UNENCRYPTED, LocationOptions())
    assert "secret" not in str(refusal.value)


def test_the_demo_report_contains_no_password(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("transformers")

    class Done:
        returncode, stdout, stderr = 0, '{"tokens": [1]}', ""

    monkeypatch.setattr(demo_store.subprocess, "run", lambda *_, **__: Done)
    assert demo_store.run("redis://:secret@host")["store"] == "redis://***@host"
