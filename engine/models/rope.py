"""Rotary position embedding: one fp32 table, computed once up to the context length.

Sources: RoFormer (arXiv 2104.09864), YaRN (arXiv 2309.00071), LongRoPE (arXiv 2402.13753), and the
Llama 3.1 model card's frequency scaling.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from engine.models.config import RopeConfig


def rope_table(rope: RopeConfig, head_dim: int, context_length: int) -> Tensor:
    """fp32 [context_length, head_dim]: the cosines of each position, then its sines, half and half.

    Both are multiplied by the attention factor of the rope type.
    """
    frequencies = inverse_frequencies(rope, head_dim)
    positions = torch.arange(context_length, dtype=torch.float32)
    # The angle is rounded to fp32 as training code does; cos and sin of it are then exact to fp32.
    angles = (positions[:, None] * frequencies[None, :]).double()
    table = torch.empty(context_length, head_dim, dtype=torch.float32)
    table[:, : head_dim // 2] = angles.cos()
    table[:, head_dim // 2 :] = angles.sin()
    return table.mul_(attention_factor(rope))


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """fp32 [head_dim / 2], in radians a token, scaled as the rope type says."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    base = 1.0 / (rope.theta**exponents)
    if rope.divisors:
        base = base / torch.tensor(rope.divisors, dtype=torch.float32)
    if rope.kind == "linear":
        return base / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, base)
    if rope.kind == "yarn":
        return _yarn(rope, base, head_dim)
    return base  # dynamic and longrope are served within the original context only


def attention_factor(rope: RopeConfig) -> float:
    """The number that multiplies cos and sin (and so, squared, the attention scores)."""
    if rope.attention_factor is not None and rope.kind in ("yarn", "longrope"):
        return rope.attention_factor
    if rope.kind == "yarn":
        if rope.mscale and rope.mscale_all_dim:
            return _mscale(rope.factor, rope.mscale) / _mscale(rope.factor, rope.mscale_all_dim)
        return _mscale(rope.factor, 1.0)
    if rope.kind == "longrope" and rope.factor > 1.0:
        return math.sqrt(1.0 + math.log(rope.factor) / math.log(rope.original_context))
    return 1.0


def _mscale(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * scale * math.log(factor) + 1.0


def _llama3(rope: RopeConfig, base: Tensor) -> Tensor:
    """Long wavelengths are divided by the factor, short ones kept, those between interpolated."""
    wavelength = 2.0 * math.pi / base
    longest_kept = rope.original_context / rope.high_freq_factor
    shortest_scaled = rope.original_context / rope.low_freq_factor
    span = rope.high_freq_factor - rope.low_freq_factor
    share = (rope.original_context / wavelength - rope.low_freq_factor) / span
    between = (1.0 - share) * base / rope.factor + share * base
    scaled = torch.where(wavelength > shortest_scaled, base / rope.factor, between)
    return torch.where(wavelength < longest_kept, base, scaled)


def _yarn(rope: RopeConfig, base: Tensor, head_dim: int) -> Tensor:
    """Dimensions that turn often within the original context are kept, slow ones interpolated."""

    def dimension(turns: float) -> float:
        ratio = rope.original_context / (turns * 2.0 * math.pi)
        return head_dim * math.log(ratio) / (2.0 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)
    interpolated = ramp.clamp(0.0, 1.0)
    return base / rope.factor * interpolated + base * (1.0 - interpolated)
