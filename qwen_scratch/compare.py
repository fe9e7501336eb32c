"""Our forward and the reference's, run in step and compared op by op."""

import math
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from qwen_scratch.model import Qwen
from qwen_scratch.observe import observe
from qwen_scratch.reference import Reference


def finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


@dataclass
class Difference:
    """How far two tensors, or all tensors of one op, are apart."""

    equal: bool = True  # all bits, the sign of a zero included; NaN equals NaN
    max_abs: float = 0.0
    max_ulp: float = 0.0  # in units in the last place of the largest number in the same row
    max_rel: float = 0.0  # as a share of that number

    def as_json(self) -> dict[str, Any]:
        """The fields, None for what is not finite: JSON knows no infinity."""
        return {"equal": self.equal} | {name: finite(getattr(self, name)) for name in ("max_abs", "max_ulp", "max_rel")}

    def widen(self, other: "Difference") -> None:
        self.equal = self.equal and other.equal
        self.max_abs = max(self.max_abs, other.max_abs)
        self.max_ulp = max(self.max_ulp, other.max_ulp)
        self.max_rel = max(self.max_rel, other.max_rel)


@dataclass
class Way:
    """One way of use, compared."""

    name: str
    ops: dict[str, Difference] = field(default_factory=dict)
    first: str | None = None  # where the first difference was seen
    kl_sum: float = 0.0
    positions: int = 0
    same_top: int = 0

    def add(self, op: str, layer: int | None, ours: Tensor, theirs: Tensor) -> None:
        difference = compare(ours, theirs)
        self.ops.setdefault(op, Difference()).widen(difference)
        if not difference.equal and self.first is None:
            self.first = op if layer is None else f"layer {layer}, {op}"
        if op == "logits" and ours.shape == theirs.shape:
            self._add_distribution(ours, theirs)

    def _add_distribution(self, ours: Tensor, theirs: Tensor) -> None:
        for a, b in row_slices(ours, theirs):
            p, q = b.float().log_softmax(-1), a.float().log_softmax(-1)
            self.kl_sum += float((p.exp() * (p - q)).sum())
            self.same_top += int((a.argmax(-1) == b.argmax(-1)).sum())
            self.positions += len(a)

    @property
    def equal(self) -> bool:
        return all(difference.equal for difference in self.ops.values())

    @property
    def mean_kl(self) -> float:
        """Mean over positions of KL(reference ‖ ours), in nats."""
        if not math.isfinite(self.kl_sum):
            return math.inf
        return max(0.0, self.kl_sum / self.positions) if self.positions else 0.0  # rounding can go below 0

    @property
    def top1_agreement(self) -> float:
        return self.same_top / self.positions if self.positions else 1.0


def compare(ours: Tensor, theirs: Tensor) -> Difference:
    """Two tensors of one op; another shape or dtype is an infinite difference."""
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return Difference(False, math.inf, math.inf, math.inf)
    total = Difference()
    for a, b in row_slices(ours, theirs):
        differ = (bits(a) != bits(b)) & ~(a.isnan() & b.isnan())
        if not differ.any():
            continue
        distance = (a.double() - b.double()).abs().nan_to_num(nan=math.inf, posinf=math.inf)
        distance[~differ] = 0  # inf - inf is not a difference
        largest = distance.amax(-1)  # [rows]
        limits = torch.finfo(b.dtype)
        scale = b.double().abs().amax(-1).nan_to_num(nan=limits.max).clamp(limits.tiny, limits.max)
        unit = limits.eps * torch.exp2(scale.log2().floor())
        total.widen(
            Difference(False, float(largest.max()), float((largest / unit).max()), float((largest / scale).max()))
        )
    return total


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int32 if x.dtype == torch.float32 else torch.int16)


def row_slices(ours: Tensor, theirs: Tensor, numbers: int = 2**24) -> list[tuple[Tensor, Tensor]]:
    """Both as [rows, last dimension], cut so that the working copies of a comparison stay small."""
    a, b = ours.reshape(-1, ours.shape[-1]), theirs.reshape(-1, theirs.shape[-1])
    rows = max(1, numbers // a.shape[-1])
    return list(zip(torch.split(a, rows), torch.split(b, rows), strict=True))


def lockstep(way: Way, model: Qwen, ours: Callable[[], Any], reference: Reference, theirs: Callable[[], Any]) -> None:
    """Run both sides in turn, op by op, and compare: only the tensors of the op at hand are alive, however long the prompt.

    The reference runs in a thread of its own, which works only while this one waits for its next op.
    """
    made: queue.Queue[Any] = queue.Queue()
    turn = threading.Semaphore(0)
    stopped = False

    def tell(*item: Any) -> None:
        made.put(item)
        turn.acquire()
        if stopped:
            raise InterruptedError

    def work() -> None:
        turn.acquire()
        if stopped:  # our side failed before its first op
            return
        try:
            with reference.observe(tell):
                theirs()
            made.put((None, None, None))
        except InterruptedError:
            pass
        except Exception as error:
            made.put(error)

    def next_of_theirs() -> Any:
        turn.release()
        item = made.get()
        if isinstance(item, Exception):
            raise item
        return item

    def take(op: str | None, layer: int | None, tensor: Tensor | None) -> None:
        their_op, their_layer, their_tensor = next_of_theirs()
        if (their_op, their_layer) != (op, layer):
            raise RuntimeError(
                f"the order of operations differs: {op} in layer {layer} here, {their_op} in {their_layer} there"
            )
        if op is not None and tensor is not None:
            way.add(op, layer, tensor, their_tensor)

    worker = threading.Thread(target=work, daemon=True)
    worker.start()
    try:
        with torch.inference_mode(), observe(model, take):
            ours()
        take(None, None, None)  # both must be at their end
    finally:
        stopped = True
        turn.release()
        worker.join()
