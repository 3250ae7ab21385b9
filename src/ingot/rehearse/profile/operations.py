"""The operations of the profiled steps by shape, with their FLOPs and bytes, and their bounds by a roofline. No torch.

A multiplication and an addition are two FLOPs. Attention counts the causal half, as MFU does (theory/flops.py), and its
backward five products for the two of the forward (Dao 2023, section 3.1.2). Bytes are each input once and the result
once: the least that an operation moves if nothing of it is in a cache.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

from ingot.rehearse.profile.kinds import ATTENTION, PRODUCTS
from ingot.rehearse.profile.trace import TraceSpan
from ingot.schema.cluster import Cluster

_NUMBER_BYTES = {
    **dict.fromkeys(("double", "long int", "long", "long long", "int64"), 8),
    **dict.fromkeys(("float", "int"), 4),
    **dict.fromkeys(("c10::BFloat16", "c10::Half", "short"), 2),
    **dict.fromkeys(("bool", "unsigned char", "signed char", "c10::Float8_e4m3fn", "c10::Float8_e5m2"), 1),
}
_SHORT = {"c10::BFloat16": "bf16", "c10::Half": "fp16", "float": "fp32", "double": "fp64", "long int": "int64"}
_BACKWARD_PRODUCTS = 2.5  # of attention, for one of the forward
# The position of the first matrix among the arguments, and the number of matrices.
_FIRST_MATRIX = {"aten::addmm": 1, "aten::baddbmm": 1, "aten::addbmm": 1, "aten::_addmm_activation": 1}


@dataclass(frozen=True)
class MeasuredOperation:
    """An operation with one set of shapes, of one kind. count, seconds: per step. flops, bytes: of one call; None: not
    known."""

    kind: str
    name: str
    shapes: str
    count: float
    seconds: float
    flops: float | None
    bytes: float | None

    def facts(self) -> dict[str, Any]:
        return asdict(self)


def measured_operations(operations: Mapping[TraceSpan, tuple[str, float]], steps: int) -> list[MeasuredOperation]:
    """Return the operations by kind, name and shapes, the longest first. operations: of DividedTime."""
    groups: dict[tuple, list[tuple[TraceSpan, float]]] = {}
    for span, (kind, microseconds) in operations.items():
        key = kind, span.name, shapes_of(span), str(span.facts.get("Concrete Inputs", ""))
        groups.setdefault(key, []).append((span, microseconds))
    found = [
        MeasuredOperation(
            kind=kind,
            name=name,
            shapes=shapes,
            count=len(own) / steps,
            seconds=sum(microseconds for _, microseconds in own) / steps / 1e6,
            flops=flops_of(own[0][0]),
            bytes=bytes_of(own[0][0]),
        )
        for (kind, name, shapes, _), own in groups.items()
    ]
    return sorted(_merged(found), key=lambda one: -one.seconds)


def _merged(found: Iterable[MeasuredOperation]) -> list[MeasuredOperation]:
    """Return the operations that differ in other arguments than tensors as one, if their FLOPs are equal."""
    merged: dict[tuple, MeasuredOperation] = {}
    for one in found:
        key = one.kind, one.name, one.shapes, one.flops
        before = merged.get(key)
        count, seconds = (before.count, before.seconds) if before else (0.0, 0.0)
        merged[key] = MeasuredOperation(
            one.kind, one.name, one.shapes, count + one.count, seconds + one.seconds, one.flops, one.bytes
        )
    return list(merged.values())


# -- one call --


def _tensors(span: TraceSpan) -> list[tuple[list[int], str]]:
    """Return (sizes, type) of each argument that is a tensor."""
    sizes, types = span.facts.get("Input Dims") or [], span.facts.get("Input type") or []
    return [
        (list(size), str(kind))
        for size, kind in zip(sizes, types, strict=False)
        if str(kind) in _NUMBER_BYTES and all(isinstance(one, int) for one in size)
    ]


def shapes_of(span: TraceSpan) -> str:
    """Return the sizes and the type of the arguments: "128x512 512x64 bf16"; "" if the trace has none."""
    tensors = [(size, kind) for size, kind in _tensors(span) if size]
    kinds = dict.fromkeys(_SHORT.get(kind, kind) for _, kind in tensors)
    return " ".join([*("x".join(map(str, size)) for size, _ in tensors), "/".join(kinds)]).strip()


def flops_of(span: TraceSpan) -> float | None:
    """Return the FLOPs of an operation by its shapes; None if it is none of those that are known."""
    sizes = [size for size, _ in _tensors(span)]
    try:
        if "attention" in span.name:
            return _attention_flops(span, sizes)
        first = _FIRST_MATRIX.get(span.name, 0)
        left, right = sizes[first], sizes[first + 1]
        if span.name in ("aten::mm", "aten::addmm", "aten::_scaled_mm", "aten::_addmm_activation", "aten::_int_mm"):
            return 2.0 * left[0] * left[1] * right[1]
        if span.name in ("aten::bmm", "aten::baddbmm", "aten::addbmm"):
            return 2.0 * prod(left) * right[2]
        if span.name in ("aten::_grouped_mm", "aten::_scaled_grouped_mm"):
            # Each row has the matrix of its group. Only a stack of matrices times one is divided by groups in between.
            return 2.0 * prod(left[-2:] if len(left) > len(right) else left) * right[-1]
        if span.name in ("aten::mv", "aten::addmv", "aten::dot"):
            return 2.0 * prod(left)
    except IndexError:
        pass
    return None


def _attention_flops(span: TraceSpan, sizes: Sequence[Sequence[int]]) -> float | None:
    """Return the FLOPs of attention of sequences of equal length; None for other forms. q: [B, N, T, H]."""
    is_backward = "backward" in span.name
    heads = sizes[1:4] if is_backward else sizes[:3]
    if "scaled_dot_product" not in span.name or [len(one) for one in heads] != [4, 4, 4]:
        return None
    q, k, v = heads
    products = 2.0 * q[0] * q[1] * q[2] * k[2] * (q[3] + v[3])
    is_causal = "True" in _flags(span)
    return products * (_BACKWARD_PRODUCTS if is_backward else 1.0) * (0.5 if is_causal else 1.0)


def _flags(span: TraceSpan) -> list[str]:
    """Return whether attention is causal, of the arguments that are true or false: the first, but the second of
    forwards that are asked for the log-sum-exps before."""
    found = [str(value) for value in span.facts.get("Concrete Inputs") or [] if str(value) in ("True", "False")]
    asked = ("efficient" in span.name or "cudnn" in span.name) and "backward" not in span.name
    return found[1:2] if asked else found[:1]


def bytes_of(span: TraceSpan) -> float | None:
    """Return the least bytes that an operation moves: each tensor among its arguments once, and its result, which is as
    large as a product is, or as the largest argument. None if the trace has no shapes."""
    tensors = _tensors(span)
    if not tensors:
        return None
    sizes = [prod(size) * _NUMBER_BYTES[kind] for size, kind in tensors]
    return float(sum(sizes) + _result_bytes(span, tensors, sizes))


def _result_bytes(span: TraceSpan, tensors: Sequence[tuple[list[int], str]], sizes: Sequence[int]) -> int:
    flops, first = flops_of(span), _FIRST_MATRIX.get(span.name, 0)
    if flops is None or "attention" in span.name or len(tensors[first][0]) < 2:
        return max(sizes)
    (left, kind), (right, _) = tensors[first], tensors[first + 1]
    return prod(left[:-1]) * right[-1] * _NUMBER_BYTES[kind]


# -- the roofline --


@dataclass(frozen=True)
class Roofline:
    """The rates of a device. peak: FLOP/s; bandwidth: bytes/s; 0: not known."""

    peak: float
    bandwidth: float

    @classmethod
    def of(cls, cluster: Cluster, precision: str) -> "Roofline":
        return cls(cluster.peak_flops.get(precision, 0.0), cluster.memory_bandwidth)

    def bound(self, operation: MeasuredOperation) -> float | None:
        """Return the seconds per step below which the device cannot get; None if a rate or an amount is not known.

        Products and attention are bounded by both rates, all others by memory."""
        needs_flops = operation.kind in (PRODUCTS, ATTENTION)
        if operation.bytes is None or not self.bandwidth or (needs_flops and not (operation.flops and self.peak)):
            return None
        moved = operation.bytes / self.bandwidth
        computed = (operation.flops or 0.0) / self.peak if needs_flops else 0.0
        return operation.count * max(moved, computed)


def least_seconds(operations: Iterable[MeasuredOperation], roofline: Roofline) -> float:
    """Return the seconds per step of the operations if each reached its bound. One without a bound, and one that is
    faster than its bound because caches had its inputs, keeps its measured time."""
    total = 0.0
    for one in operations:
        bound = roofline.bound(one)
        total += one.seconds if bound is None else min(bound, one.seconds)
    return total
