"""Weights computed from a formula of the tensor's name, so that tests need no stored weights.

The C++ loader's `dummy` format implements the same formula; tests/golden/dummy_weights.json holds unit vectors.

All integer arithmetic is modulo 2^64. i is the flat row-major index in the full, unsharded tensor; name is the full
tensor name on the hub, prefix included, in UTF-8.

    mix64(z):  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;  z = (z ^ (z >> 27)) * 0x94D049BB133111EB;  z ^ (z >> 31)
    u64(name, i) = mix64(fnv1a64(name) + (i + 1) * 0x9E3779B97F4A7C15)
    x(name, i)   = (2 * (u64 >> 41) + 1) / 2^23 - 1           in (-1, 1), exact in float32

Every float operation below is one float32 operation rounded to nearest even, in the order written, never fused
(1 + 0.25*x is the same fused or not; -4.5 + 2.5*x is not). Constants with a root are computed in double precision and
rounded once to float32. in = product of all dimensions but the first.

    tensor                              stored as  value
    *.weight of 2 or more dimensions    bf16       bf16(x * f32(sqrt(3/in)))
    *.weight of 1 dimension ("norm")    bf16       bf16(1 + 0.25*x)
    *e_score_correction_bias            f32        f32(0.1) * x
    *A_log                              f32        (f32(ln 16) * (x + 1)) * 0.5
    *dt_bias                            f32        -4.5 + 2.5*x
  INT4 projection X of shape [out, in]:
    X.weight_packed [out, in/8]         int32      low 32 bits of u64(name, i), i counting words
    X.weight_scale  [out, in/32]        bf16       bf16(s0 * (1 + 0.25*x)), s0 = f32(1/(4.6097722*sqrt(in)))
    X.weight_shape  [2]                 int32      (out, in)
  FP8 projection X of shape [out, in], blocks of 128 x 128:
    X.weight                            e4m3fn     e4m3fn(448*x), nearest even, saturating
    X.weight_scale_inv [ceil, ceil]     f32        s0 * (1 + 0.25*x), s0 = f32(sqrt(3/in)/448)
"""

import math

import numpy as np
import torch

GOLDEN_RATIO = np.uint64(0x9E3779B97F4A7C15)
F32 = np.float32


def fnv1a64(data):
    """64-bit FNV-1a of bytes."""
    value = 0xCBF29CE484222325
    for byte in data:
        value = ((value ^ byte) * 0x100000001B3) % 2**64
    return value


def u64(name, count, first=0):
    """[count] uint64 values of the stream `name`, counters first, first+1, …"""
    counter = np.arange(first + 1, first + count + 1, dtype=np.uint64)
    with np.errstate(over="ignore"):
        z = np.uint64(fnv1a64(name.encode())) + counter * GOLDEN_RATIO
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def uniform(name, shape):
    """x(name, i) as float32 of the given shape."""
    odd = 2 * (u64(name, math.prod(shape)) >> np.uint64(41)).astype(np.int64) + 1
    return ((odd - 2**23).astype(F32) * F32(2.0**-23)).reshape(shape)


def stored(name, shape, kind):
    """The tensor as files store it, a torch tensor. kind: the name of a rule, one of RULES."""
    return RULES[kind](name, tuple(shape))


def _bf16(values):
    return torch.from_numpy(np.ascontiguousarray(values)).to(torch.bfloat16)


def _weight(name, shape):
    return _bf16(uniform(name, shape) * F32(math.sqrt(3 / math.prod(shape[1:]))))


def _norm(name, shape):
    return _bf16(F32(1) + F32(0.25) * uniform(name, shape))


def _correction_bias(name, shape):
    return torch.from_numpy(F32(0.1) * uniform(name, shape))


def _a_log(name, shape):
    return torch.from_numpy(F32(math.log(16)) * (uniform(name, shape) + F32(1)) * F32(0.5))


def _dt_bias(name, shape):
    return torch.from_numpy(F32(-4.5) + F32(2.5) * uniform(name, shape))


def _int4_packed(name, shape):
    rows, columns = shape
    words = (u64(name, rows * columns // 8) & np.uint64(0xFFFFFFFF)).astype(np.uint32)
    return torch.from_numpy(words.view(np.int32).reshape(rows, columns // 8))


def _int4_scale(name, shape):
    rows, columns = shape
    s0 = F32(1 / (4.6097722 * math.sqrt(columns)))
    return _bf16(s0 * (F32(1) + F32(0.25) * uniform(name, (rows, columns // 32))))


def _int4_shape(name, shape):
    return torch.tensor(shape, dtype=torch.int32)


def _fp8(name, shape):
    return torch.from_numpy(F32(448) * uniform(name, shape)).to(torch.float8_e4m3fn)


def _fp8_scale(name, shape):
    rows, columns = shape
    s0 = F32(math.sqrt(3 / columns) / 448)
    return torch.from_numpy(s0 * (F32(1) + F32(0.25) * uniform(name, (-(-rows // 128), -(-columns // 128)))))


# The shape handed to a quantised rule is that of the projection, [out, in].
RULES = {
    "weight": _weight,
    "norm": _norm,
    "e_score_correction_bias": _correction_bias,
    "A_log": _a_log,
    "dt_bias": _dt_bias,
    "int4_packed": _int4_packed,
    "int4_scale": _int4_scale,
    "int4_shape": _int4_shape,
    "fp8": _fp8,
    "fp8_scale_inv": _fp8_scale,
}


def dequantise_int4(packed, scale):
    """int32 [out, in/8] and bf16 [out, in/32] to float32 [out, in] holding bf16 values: bf16(q * scale).

    Element c of a row is bits 4*(c mod 8) … +3 of word c/8, an unsigned nibble with offset 8.
    """
    words = packed.numpy().view(np.uint32)
    nibbles = (words[:, :, None] >> (4 * np.arange(8, dtype=np.uint32))) & np.uint32(15)
    q = (nibbles.astype(np.int64) - 8).astype(F32).reshape(words.shape[0], -1)
    return _bf16(q * np.repeat(scale.float().numpy(), 32, axis=1)).float()


def dequantise_fp8(weight, scale_inv):
    """e4m3fn [out, in] and f32 [ceil(out/128), ceil(in/128)] to float32 [out, in]: weight * scale_inv of its block."""
    rows, columns = weight.shape
    spread = np.repeat(np.repeat(scale_inv.numpy(), 128, axis=0), 128, axis=1)
    return torch.from_numpy(weight.float().numpy() * spread[:rows, :columns])
