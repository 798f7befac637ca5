"""Building blocks of both networks: norms, products in the activations' type, start values (PyTorch)."""

import math

import torch
import torch.nn.functional as F
from torch import nn


def rms_norm(x, weight, eps):
    x32 = x.float()
    normed = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    return normed.to(x.dtype) * weight.to(x.dtype)


def linear(x, weight):
    return F.linear(x, weight.to(x.dtype))


def swiglu(x, gate, up, down):
    return linear(F.silu(linear(x, gate)) * linear(x, up), down)


def matrix(*shape, gain=1.0):
    return nn.Parameter(torch.randn(*shape) * gain / math.sqrt(shape[-1]))


def ones(size):
    return nn.Parameter(torch.ones(size))


def output_gain(config):
    """Start value of what is added to the residual stream."""
    return 0.5 / math.sqrt(config["num_hidden_layers"])
