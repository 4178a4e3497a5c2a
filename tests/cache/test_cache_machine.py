"""Run random sequences of all cache operations, and compare the results with the input and with values decoded earlier."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import kvpack
from kvpack.cache.cache import Cache
from kvpack.coding.bases import Basis
from kvpack.formats.errors import InvalidParameter, OutOfBounds
from support.caches import random_pairs, unpack_all
from support.klt_bases import normal_tables, random_basis

DIMS = (32, 48)
LAYERS = 2
MODEL = {"name": "machine"}
SCOPES = {(0, "k"): "head", (0, "v"): "layer", (1, "k"): "layer", (1, "v"): "head"}
SHAPES = {(layer, side): (2, DIMS["kv".index(side)]) for layer, side in SCOPES}
BASIS = Basis.from_bytes(random_basis(SHAPES, LAYERS, scopes=SCOPES, model=MODEL, tables=normal_tables()))

RECIPES = {
    "fp32": 0.0,
    "kivi-4": 0.12,
    "kivi-4;tail=32": 0.12,
    "k=group:b=8,axis=channel;v=raw:dtype=fp32": 0.02,
    "k=octahedral:b=4;v=angle:n=256,norm=log8;tail=16": 0.15,
    "kv=quaternion:s=24,r=3,outliers=3": 0.25,
    "k=scalar:b=4,channel_scale=fp16;v=polar:b=4": 0.25,
    "k=octahedral:b=4,raw_first=3,raw_low_norm=0.9;v=group:b=4,g=8,raw_first=3,raw_low_norm=0.9": 0.25,
    "k=group:b=4,g=16,block_rotation=16,channel_order=u8,sinks=2;v=octahedral:b=4,channel_scale=fp16,outliers=3,sinks=1;tail=16": 0.25,
    "kv=group:b=4,g=16,rotation=hadamard,qjl=fp16,low_norm_tokens=2": 0.25,
    "fp8": 0.05,
    "k=minifloat:element=e2m1,scales=e8m0;v=minifloat:element=e5m2,scales=fp16,per=token;tail=16": 0.2,
    "nvfp4": 0.15,
    kvpack.Recipe("klt-7;tail=32", BASIS).text: 0.35,
    kvpack.Recipe("k=klt:bits=7,rows=fp16;v=transform:bits=3,chunk=16", BASIS).text: 0.35,
    kvpack.Recipe("kv=transform:bits=4,chunk=16;tail=16", BASIS).text: 0.3,
}
"""Largest permitted relative error (2-norm over a side) of each recipe for Gaussian values that are encoded once."""


class CacheMachine(RuleBasedStateMachine):
    """A state machine that applies random operations to a cache.

    ``given`` are the tokens that the cache was given, and ``values`` are their decoded values. Packed tokens only change in conversions.
    """

    @initialize(recipe=st.sampled_from(sorted(RECIPES)), tokens=st.integers(0, 70), start=st.integers(0, 5))
    def begin(self, recipe: str, tokens: int, start: int) -> None:
        self.seed, self.start, self.recipe, self.bound = 1, start, recipe, RECIPES[recipe]
        pairs = random_pairs(LAYERS, tokens, dims=DIMS)
        self.given = [x.float() for pair in pairs for x in pair]
        self.cache = kvpack.pack(pairs, kvpack.Recipe(recipe, BASIS), start=start, model=MODEL)
        self._accept(self.cache, 0)

    @rule(tokens=st.integers(1, 50))
    def append(self, tokens: int) -> None:
        packed = self._packed
        pairs = self._new(tokens)
        self._accept(self.cache.append(pairs), packed)

    @precondition(lambda self: self.cache.tokens > 0)
    @rule(data=st.data())
    def take_a_prefix(self, data: st.DataObject) -> None:
        tokens = data.draw(st.integers(0, self.cache.tokens))
        self._keep(0, tokens)
        self._accept(self.cache[:, :tokens], tokens)

    @precondition(lambda self: self.cache.tokens > 0)
    @rule(data=st.data())
    def slice(self, data: st.DataObject) -> None:
        start = data.draw(st.one_of(st.integers(0, self.cache.tokens), st.sampled_from(self._boundaries)))
        stop = data.draw(st.integers(start, self.cache.tokens))
        try:
            cut = self.cache[:, start:stop]
        except OutOfBounds:
            assert start not in self._boundaries, "a slice at the start of a page and token group was refused"
            return
        self._keep(start, stop)
        self.start += start
        self._accept(cut, stop - start)

    @precondition(lambda self: self.cache.tokens > 0)
    @rule(data=st.data())
    def split_and_concat(self, data: st.DataObject) -> None:
        at = data.draw(st.sampled_from(self._boundaries))
        self._accept(kvpack.concat([self.cache[:, :at], self.cache[:, at:]]), self.cache.tokens)

    @rule(tokens=st.integers(1, 40))
    def concat_what_follows(self, tokens: int) -> None:
        before, given, packed = self.cache, self.given, self.cache.tokens
        after = kvpack.pack(self._new(tokens), kvpack.Recipe(before.recipe, BASIS), start=before.stop, model=MODEL)
        raw = max(side.tail.shape[2] for layer in before for side in layer.sides.values())
        if raw:
            with pytest.raises(InvalidParameter, match=f"raw tail of {raw} tokens"):
                kvpack.concat([before, after])
            self.given = given
            return
        self._accept(kvpack.concat([before, after]), packed)

    @rule(recipe=st.sampled_from(sorted(RECIPES)))
    def convert(self, recipe: str) -> None:
        converted = self.cache.convert(kvpack.Recipe(recipe, BASIS))
        assert converted.recipe == kvpack.Recipe(recipe, BASIS).text
        # Another encoding starts from what the one before left.
        self.bound += RECIPES[recipe]
        self._accept(converted, 0)

    @rule(compress=st.booleans())
    def save_and_load(self, compress: bool) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "cache"
            size = kvpack.save(self.cache, path, compress=compress)
            assert size == path.stat().st_size
            assert compress or size == self.cache.nbytes
            loaded = kvpack.load(path, basis=BASIS)
            assert compress or kvpack.save(loaded, Path(folder) / "again") == size
            assert compress or (Path(folder) / "again").read_bytes() == path.read_bytes()
        assert (loaded.recipe, dict(loaded.model)) == (self.cache.recipe, dict(self.cache.model))
        self._accept(loaded, self.cache.tokens)

    @rule()
    def merge(self) -> None:
        layers = tuple(kvpack.Layer(layer.k.merged(), layer.v.merged()) for layer in self.cache)
        self._accept(Cache(layers, self.cache.recipe, self.cache.model, self.cache.start), self.cache.tokens)

    @invariant()
    def holds_what_it_was_given(self) -> None:
        tokens = self.given[0].shape[2]
        assert (self.cache.start, self.cache.tokens, self.cache.stop) == (self.start, tokens, self.start + tokens)
        for values, given in zip(self.values, self.given, strict=True):
            assert values.shape == given.shape
            assert (values - given).norm() <= self.bound * given.norm()

    @property
    def _packed(self) -> int:
        """Return the number of tokens that are packed on both sides of every layer."""
        return min(side.packed_tokens for layer in self.cache for side in layer.sides.values())

    @property
    def _boundaries(self) -> list[int]:
        """Return the positions at which every side can be cut: page starts, and the end of the cache."""
        sides = [side for layer in self.cache for side in layer.sides.values()]
        starts = [{sum(page.tokens for page in side.runs[:n]) for n in range(len(side.runs) + 1)} for side in sides]
        packed_ends = {0, *set.intersection(*starts)}
        return sorted(at for at in packed_ends if at <= self._packed)

    def _new(self, tokens: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Create ``tokens`` new tokens, add them to ``given``, and return them."""
        pairs = random_pairs(LAYERS, tokens, dims=DIMS, seed=self.seed)
        self.seed += 1
        new = [x.float() for pair in pairs for x in pair]
        self.given = [torch.cat([old, more], 2) for old, more in zip(self.given, new, strict=True)]
        return pairs

    def _keep(self, start: int, stop: int) -> None:
        self.given = [x[:, :, start:stop] for x in self.given]
        self.values = [x[:, :, start:stop] for x in self.values]

    def _accept(self, cache: Cache, same: int) -> None:
        """Replace the current cache by ``cache``, whose first ``same`` tokens must decode to the same values as before."""
        values = unpack_all(cache)
        for found, known in zip(values, self.values if same else values, strict=True):
            # How the last elements of an array are rounded may depend on its size.
            allowed = 2.0**-17 * known[:, :, :same].norm(dim=-1, keepdim=True)
            assert ((found[:, :, :same] - known[:, :, :same]).abs() <= allowed).all(), "packed tokens changed"
        self.cache, self.values = cache, values


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(
    max_examples=12, stateful_step_count=12, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
