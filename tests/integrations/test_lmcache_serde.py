"""The serde for LMCache over stubs of LMCache 0.5.6: its serializer, its processor and its registry."""

from __future__ import annotations

import types
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch

import kvpack
from kvpack.errors import DigestMismatch, InvalidHeader, InvalidParameter, InvalidShape, MissingBasis, NonFinite

from engine_stubs import import_over  # isort: skip
from host_settings import Watched, unusual_host  # isort: skip
from klt_bases import random_basis  # isort: skip

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True)
class ObjectKey:
    chunk_hash: bytes
    model_name: str = "model"
    kv_rank: int = 0
    object_group_id: int = 0
    cache_salt: str = ""


class Processor:
    def __init__(self, serializer: Any, deserializer: Any, max_workers: int = 1) -> None:
        self.serializer, self.deserializer, self.max_workers = serializer, deserializer, max_workers


OPTIONS = {"recipe": "octopus-4", "head_dim": 64, "revision": "abc"}


@pytest.fixture
def create(monkeypatch: pytest.MonkeyPatch) -> Any:
    registered: dict[str, Any] = {}
    stubs = {
        "lmcache.v1.distributed.serde": {
            "AsyncSerdeProcessor": Processor,
            "Deserializer": object,
            "Serializer": object,
            "register_serde_factory": registered.__setitem__,
        }
    }
    import_over(monkeypatch, stubs, "kvpack.integrations.lmcache.serde")
    return registered["kvpack"]


def memory(tensor: torch.Tensor) -> Any:
    return types.SimpleNamespace(tensor=tensor)


def layout_of(*tensors: torch.Tensor) -> Any:
    return types.SimpleNamespace(shapes=[x.shape for x in tensors], dtypes=[x.dtype for x in tensors])


def test_an_object_takes_its_estimate_to_the_byte_and_comes_back(create: Any) -> None:
    made = create(OPTIONS)
    x = torch.randn(2, 3, 32, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    size = made.serializer.estimate_serialized_size(layout_of(x))
    assert size < x.nbytes / 3
    stored, key = torch.zeros(size, dtype=torch.uint8), ObjectKey(b"hash")
    assert made.serializer.serialize(memory(x), memory(stored), key) == size
    found = torch.zeros_like(x)
    made.deserializer.deserialize(memory(stored), memory(found), key)
    error = (found.float() - x.float()).norm() / x.float().norm()
    assert 0.02 < error < 0.1
    exact = create({**OPTIONS, "recipe": "raw", "max_workers": 3})
    assert exact.max_workers == 3
    stored = torch.zeros(exact.serializer.estimate_serialized_size(layout_of(x)), dtype=torch.uint8)
    exact.serializer.serialize(memory(x), memory(stored), key)
    exact.deserializer.deserialize(memory(stored), memory(found), key)
    assert torch.equal(found, x)


@pytest.mark.parametrize("planes", [[1], []], ids=["four axes", "three axes"])
def test_fused_objects_are_pages_of_keys_and_values(planes: list[int], create: Any) -> None:
    """A head's key is followed by its value; their rows are those of the same keys and values apart."""
    x = torch.randn(2, 3, 32, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    heads = x.view(2, 3, 32, 2, 64)
    fused = torch.stack([heads[0], heads[1]], 3).reshape(*planes, 3, 32, 256)
    made, key = create({**OPTIONS, "fused": True}), ObjectKey(b"hash")
    rows = []
    for given in (x, fused):
        rows.append(torch.zeros(made.serializer.estimate_serialized_size(layout_of(given)), dtype=torch.uint8))
        made.serializer.serialize(memory(given), memory(rows[-1]), key)
    assert torch.equal(*rows)
    apart, together = torch.zeros_like(x), torch.zeros_like(fused)
    for row, found in zip(rows, (apart, together), strict=True):
        made.deserializer.deserialize(memory(row), memory(found), key)
    found = together.view(3, 32, 2, 2, 64)
    assert torch.equal(torch.stack([found[:, :, :, 0], found[:, :, :, 1]]).reshape(x.shape), apart)
    with pytest.raises(InvalidShape, match=r"or with fused \[1, layer, token, head \* 128\], which engines have"):
        create(OPTIONS).serializer.estimate_serialized_size(layout_of(fused))
    latents = torch.zeros(*planes, 3, 32, 576)
    with pytest.raises(InvalidShape, match="latents, recurrent states and other objects are not packed"):
        made.serializer.estimate_serialized_size(layout_of(latents))
    with pytest.raises(InvalidParameter, match="fused is 'yes', expected true or false"):
        create({**OPTIONS, "fused": "yes"})


def test_damage_and_other_keys_raise_before_anything_is_written(create: Any) -> None:
    made = create({**OPTIONS, "recipe": "raw"})
    x = torch.randn(2, 1, 16, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    stored = torch.zeros(made.serializer.estimate_serialized_size(layout_of(x)), dtype=torch.uint8)
    made.serializer.serialize(memory(x), memory(stored), ObjectKey(b"hash"))
    found = torch.zeros_like(x)
    others = [ObjectKey(b"hash2"), ObjectKey(b"hash", "m"), ObjectKey(b"hash", kv_rank=1), ObjectKey(b"hash", object_group_id=1)]
    for other in [*others, ObjectKey(b"hash", cache_salt="s")]:
        with pytest.raises(InvalidHeader):
            made.deserializer.deserialize(memory(stored), memory(found), other)
    with pytest.raises(InvalidHeader):
        create({**OPTIONS, "recipe": "raw", "revision": "other"}).deserializer.deserialize(
            memory(stored), memory(found), ObjectKey(b"hash")
        )
    stored[-1] ^= 128
    with pytest.raises(DigestMismatch):
        made.deserializer.deserialize(memory(stored), memory(found), ObjectKey(b"hash"))
    assert not found.any()
    x[0, 0, 0, 0] = float("nan")
    with pytest.raises(NonFinite):
        create(OPTIONS).serializer.serialize(memory(x), memory(torch.zeros(10**5, dtype=torch.uint8)), ObjectKey(b"hash"))


def test_every_call_leaves_the_hosts_settings(create: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(2, 3, 32, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    bad, found, row = x.clone(), torch.zeros_like(x), torch.zeros(10**5, dtype=torch.uint8)
    bad[0, 0, 0, 0] = float("nan")
    with unusual_host(monkeypatch):
        made = Watched(None).call("made", create)(OPTIONS)
        serializer, deserializer = Watched(made.serializer), Watched(made.deserializer)
        assert serializer.estimate_serialized_size(layout_of(x)) <= len(row)
        serializer.serialize(memory(x), memory(row), ObjectKey(b"a"))
        deserializer.deserialize(memory(row), memory(found), ObjectKey(b"a"))
        with pytest.raises(NonFinite):
            serializer.serialize(memory(bad), memory(row.clone()), ObjectKey(b"a"))
        with pytest.raises(InvalidHeader):
            deserializer.deserialize(memory(row), memory(found), ObjectKey(b"b"))
        with pytest.raises(InvalidShape):
            serializer.estimate_serialized_size(layout_of(x[0]))
    assert found.any()


def test_a_row_is_never_written_to_a_copy(create: Any) -> None:
    made = create(OPTIONS)
    x = torch.randn(2, 3, 32, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    turned = torch.zeros(64, made.serializer.estimate_serialized_size(layout_of(x)) // 64, dtype=torch.uint8).T
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        made.serializer.serialize(memory(x), memory(turned), ObjectKey(b"hash"))


def test_what_cannot_be_served_is_refused(create: Any) -> None:
    with pytest.raises(InvalidParameter, match="the serde kvpack got recipe, expected recipe, head_dim and revision"):
        create({"recipe": "raw"})
    serializer = create(OPTIONS).serializer
    for shape in ((2, 3, 32, 100), (1, 3, 32, 576), (3, 32, 576)):
        with pytest.raises(InvalidShape, match=r"expected \[2, layer, token, head \* 64\]"):
            serializer.estimate_serialized_size(layout_of(torch.zeros(shape).bfloat16()))
    with pytest.raises(InvalidShape, match="an object has 2 tensors"):
        serializer.estimate_serialized_size(layout_of(torch.zeros(1), torch.zeros(1)))
    with pytest.raises(InvalidParameter, match="names layers by 'boundary-1', and LMCache's objects do not tell which layers"):
        create(OPTIONS | {"recipe": "octopus-4;boundary-1"})
    with pytest.raises(MissingBasis, match="the recipe 'klt-2' needs a basis: set basis to the path of the file"):
        create(OPTIONS | {"recipe": "klt-2"})


def test_a_recipe_takes_the_basis_of_a_whole_model(create: Any, tmp_path: Path) -> None:
    shapes = {(layer, side): (2, 64) for layer in range(3) for side in "kv"}
    made = []
    for seed in ("", "other"):
        (tmp_path / f"m{seed}.kvbasis").write_bytes(random_basis(shapes, 3, seed=seed, model={"name": "m"}))
        made.append(create(OPTIONS | {"recipe": "kv=klt:bits=4", "basis": str(tmp_path / f"m{seed}.kvbasis")}))
    x = torch.randn(2, 3, 32, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    row = memory(torch.zeros(made[0].serializer.estimate_serialized_size(layout_of(x)), dtype=torch.uint8))
    found = torch.zeros_like(x)
    made[0].serializer.serialize(memory(x), row, ObjectKey(b"a", "m"))
    made[0].deserializer.deserialize(row, memory(found), ObjectKey(b"a", "m"))
    layers = [tuple(side[None].unflatten(-1, (2, 64)).transpose(1, 2) for side in x[:, number]) for number in range(3)]
    expected = kvpack.pack(layers, "kv=klt:bits=4", basis=tmp_path / "m.kvbasis").unpack()
    for number, pair in enumerate(expected):
        for side, values in enumerate(pair):
            assert values is not None
            error = found[side, number] - values[0].transpose(0, 1).flatten(1)
            assert error.float().norm() < 0.01 * x.float().norm()
    with pytest.raises(InvalidHeader, match=r"is the row of another page: recipe is .*, expected "):
        made[1].deserializer.deserialize(row, memory(found), ObjectKey(b"a", "m"))
    for call in (made[0].serializer.serialize, made[0].deserializer.deserialize):
        with pytest.raises(InvalidParameter, match="is the basis of a model whose name is 'm', and that of the cache is 'model'"):
            call(memory(x), row, ObjectKey(b"a"))
    with pytest.raises(InvalidParameter, match="is the basis of a model of 3 layers, and the cache has 2"):
        made[0].serializer.estimate_serialized_size(layout_of(x[:, :2]))


def test_bytes_need_the_name_of_their_dtype(create: Any) -> None:
    x = torch.zeros(2, 3, 32, 128, dtype=torch.uint8)
    raw = OPTIONS | {"recipe": "raw"}
    with pytest.raises(InvalidParameter, match="give kv_dtype, such as fp8_e4m3"):
        create(raw).serializer.estimate_serialized_size(layout_of(x))
    made = [create(raw | {"kv_dtype": dtype}) for dtype in ("fp8_e4m3", "fp8_e5m2")]
    row = memory(torch.zeros(made[0].serializer.estimate_serialized_size(layout_of(x)), dtype=torch.uint8))
    made[0].serializer.serialize(memory(x), row, ObjectKey(b"a"))
    made[0].deserializer.deserialize(row, memory(x), ObjectKey(b"a"))
    with pytest.raises(InvalidHeader, match="namespace"):
        made[1].deserializer.deserialize(row, memory(x), ObjectKey(b"a"))
