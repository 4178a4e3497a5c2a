"""Recipes that use every sidecar, and exact attention, with which tests compare results."""

from __future__ import annotations

import math

import torch

RECIPES = {
    "channel scale": "kv=octahedral:b=3,channel_scale=fp16",
    "channel scale of groups": "kv=group:b=2,g=32,rotation=hadamard,token_scale=fp16,channel_scale=fp32",
    "block rotation": "kv=group:b=2,g=32,axis=channel,block_rotation=16",
    "channel order": "k=group:b=2,g=32,axis=channel,block_rotation=32,channel_order=u8;v=scalar:b=3,block_rotation=16,channel_order=u16",
    "qjl": "kv=scalar:b=2,qjl=fp16",
    "outliers": "kv=quaternion:s=24,r=3,outliers=3",
    "key means": "k=octahedral:b=3,mean=32,raw_first=2;v=scalar:b=3,raw_first=2",
    "raw tokens": "kv=group:b=2,g=32,sinks=4,low_norm_tokens=3",
    "raw positions": "kv=group:b=2,g=32,raw_first=4,raw_low_norm=0.9",
    "all": "kv=group:b=2,g=32,rotation=hadamard,channel_scale=fp16,channel_order=u8,block_rotation=8,outliers=3,qjl=fp32,sinks=4,"
    "raw_tokens=fp32;tail=64",
}


def relative_error(decoded: torch.Tensor, x: torch.Tensor) -> float:
    return float((decoded - x).norm() / x.norm())


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Compute causal attention of the newest tokens in binary64."""
    group, queries, tokens = q.shape[1] // k.shape[1], q.shape[2], k.shape[2]
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    scores = q.double() @ k.transpose(-1, -2) / math.sqrt(q.shape[3])
    hidden = torch.arange(tokens) > torch.arange(tokens - queries, tokens)[:, None]
    return scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v
