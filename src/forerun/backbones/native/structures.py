"""What C++ is given, as `model.h`, `writing.cpp` and `rounds.cpp` have it."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_double, c_int64, c_void_p

from torch import Tensor


def pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


class MatrixFields(ctypes.Structure):
    _fields_ = [
        ("blocks", c_void_p), ("bias", c_void_p),
        ("outputs", c_int64), ("inputs", c_int64), ("bits", c_int64),
    ]  # fmt: skip


class LayerFields(ctypes.Structure):
    _fields_ = [
        ("norm_attn", c_void_p), ("qkv", MatrixFields), ("q_norm", c_void_p), ("k_norm", c_void_p),
        ("out", MatrixFields), ("norm_mlp", c_void_p), ("gate_up", MatrixFields),
        ("down", MatrixFields),
    ]  # fmt: skip


class ModelFields(ctypes.Structure):
    _fields_ = [
        ("layers", c_int64), ("heads", c_int64), ("key_heads", c_int64), ("head_dim", c_int64),
        ("hidden", c_int64), ("inner", c_int64), ("eps", c_double), ("layer", POINTER(LayerFields)),
        ("embed", c_void_p), ("turns", c_void_p), ("norm", c_void_p), ("head", MatrixFields),
    ]  # fmt: skip


class RowsFields(ctypes.Structure):
    _fields_ = [
        ("rows", c_int64), ("reads", c_int64), ("threads", c_int64), ("tokens", c_void_p),
        ("positions", c_void_p), ("slots", c_void_p), ("lanes", c_void_p), ("horizon", c_void_p),
        ("lo", c_void_p), ("hi", c_void_p), ("read", c_void_p), ("pages", c_void_p),
        ("page_size", c_int64), ("pages_per_lane", c_int64), ("kept", c_void_p),
        ("features", c_void_p), ("memory", c_void_p), ("logits", c_void_p),
    ]  # fmt: skip


class TextsFields(ctypes.Structure):
    _fields_ = [
        ("steps", c_int64), ("vocab", c_int64), ("keeps", c_int64), ("tokens", c_void_p),
        ("positions", c_void_p), ("slots", c_void_p), ("horizon", c_void_p), ("wanted", c_void_p),
        ("ends", c_void_p), ("ends_until", c_void_p), ("impossible", c_void_p),
        ("impossible_count", c_int64), ("drawn", c_void_p), ("logits", c_void_p),
        ("stop", c_void_p),
    ]  # fmt: skip


class FusionFields(ctypes.Structure):
    _fields_ = [
        ("states", c_int64), ("norms", c_void_p), ("fuse", MatrixFields), ("norm", c_void_p),
        ("kept", POINTER(MatrixFields)),
    ]  # fmt: skip


class ContextFields(ctypes.Structure):
    _fields_ = [
        ("rows", c_int64), ("threads", c_int64), ("positions", c_void_p), ("slots", c_void_p),
        ("sources", c_void_p), ("states", c_void_p), ("kept", c_void_p), ("memory", c_void_p),
    ]  # fmt: skip


class LookingDrafterFields(ctypes.Structure):
    _fields_ = [
        ("fusion", c_void_p), ("states", c_void_p), ("target", c_void_p), ("block", c_int64),
        ("mask", c_int64), ("drafted", c_int64), ("tokens", c_void_p), ("gathers", c_int64),
        ("rank", c_int64), ("before", c_void_p), ("after", c_void_p), ("moved", c_void_p),
        ("memory", c_void_p),
    ]  # fmt: skip
