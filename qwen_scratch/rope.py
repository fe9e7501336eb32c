"""Rotary position embedding (RoPE, https://arxiv.org/abs/2104.09864).

A query or key head of hd numbers is read as hd/2 points in the plane, and each point is turned by an angle
that grows with the token's position. As far as position is concerned, a dot product of two turned heads then
depends only on the *distance* between their tokens. Point i turns by theta^(-2i/hd) per token: the first ones
fast, the last ones slowly.
"""

import math

import torch
from torch import Tensor

from qwen_scratch.config import QwenConfig, Yarn


class Rope:
    """Cosines and sines for given positions. Not a Module, so that `.to(bfloat16)` can never round its frequencies."""

    def __init__(self, config: QwenConfig) -> None:
        self.inv_freq = inverse_frequencies(config)  # [hd/2] float32
        self.attention_factor = config.yarn.attention_factor if config.yarn else 1.0

    def __call__(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """positions [B, T] → cos, sin [B, 1, T, hd] in `dtype`; computed, not looked up, so no table can be too short."""
        self.inv_freq = self.inv_freq.to(positions.device)  # copies once, where the model is not on the CPU
        angles = positions[:, None, :, None].float() * self.inv_freq  # [B, 1, T, hd/2]
        angles = torch.cat((angles, angles), dim=-1)  # [B, 1, T, hd]: both numbers of a pair turn alike
        cos, sin = angles.cos() * self.attention_factor, angles.sin() * self.attention_factor
        return cos.to(dtype), sin.to(dtype)


def rotate_half(x: Tensor) -> Tensor:
    """[..., hd] → [..., hd]: (a, b) → (-b, a), where Qwen pairs number i with number i + hd/2, not with its neighbour."""
    a, b = x.chunk(2, dim=-1)  # each [..., hd/2]
    return torch.cat((-b, a), dim=-1)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each head of x [B, heads, T, hd] to its token's position; cos, sin [B, 1, T, hd]."""
    return x * cos + rotate_half(x) * sin


def inverse_frequencies(config: QwenConfig) -> Tensor:
    """Radians per token for each of the hd/2 points, float32 [hd/2]. Always made on the CPU: equal on every device."""
    two_i = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device="cpu")
    slowness = config.rope_theta ** (two_i / config.head_dim)  # tokens per radian, from 1 to almost theta
    if config.yarn is None:
        return 1.0 / slowness
    return yarn_frequencies(slowness, config.yarn, config.rope_theta, config.head_dim)


def yarn_frequencies(slowness: Tensor, yarn: Yarn, theta: float, head_dim: int) -> Tensor:
    """YaRN: points that turn fast keep their speed, slow ones are slowed by `factor`, those between are blended."""

    def point_that_turns(
        times: float,
    ) -> float:  # the (fractional) i that makes this many turns in the original context
        tokens_per_radian = yarn.original_max_position_embeddings / (times * 2 * math.pi)
        return (head_dim * math.log(tokens_per_radian)) / (2 * math.log(theta))

    low, high = point_that_turns(yarn.beta_fast), point_that_turns(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)  # hd - 1 where hd / 2 - 1 would do: as the reference has it
    if low == high:
        high += 0.001  # the ramp below must not divide by zero
    i = torch.arange(head_dim // 2, dtype=torch.float32, device="cpu")
    keep = 1 - ((i - low) / (high - low)).clamp(0, 1)  # 1: as it was, 0: slowed down
    return (1.0 / (yarn.factor * slowness)) * (1 - keep) + (1.0 / slowness) * keep
