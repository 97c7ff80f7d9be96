"""The profiler's parts on hand-made input: marks and their regions, phases and peaks, traces, saved tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import pytest
import torch
from torch import Tensor, nn

from lightning_gdn.bench.profile_kernels import read_trace
from lightning_gdn.bench.profile_phases import PHASES, Clock, Moment, Phases, clock_for
from lightning_gdn.bench.profile_probes import OUTSIDE, RANGE, RegionTimes, ReplayMemory, medians
from lightning_gdn.bench.profile_tensors import TensorProbe
from lightning_gdn.callbacks._counters import DeviceCounters, MemoryReading, NoCounters
from lightning_gdn.regions import Mode
from lightning_gdn.tape import RegionFn, Tape


@final
class Ticks(Clock):
    """A clock that advances by one millisecond with every mark."""

    def __init__(self) -> None:
        self.now = 0

    def mark(self) -> int:
        self.now += 1
        return self.now

    def ms(self, start: int, end: int) -> float:
        return float(end - start)

    def settle(self) -> None:
        return None

    def reuse(self) -> None:
        return None


class Owner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(256))


def _exp(owner: Owner, x: Tensor) -> Tensor:
    return (x * owner.weight).exp()


def _sigmoid(owner: Owner, x: Tensor) -> tuple[Tensor, None]:
    return x.sigmoid(), None


def _through(owner: Owner, x: Tensor) -> Tensor:
    return x


EXP = RegionFn(name="first", call=_exp, params=("weight",))
THROUGH = RegionFn(name="through", call=_through)
SIGMOID = RegionFn(name="second", call=_sigmoid)


def tape_step(times: RegionTimes, modes: dict[str, Mode], fns: Sequence[RegionFn] = (EXP, THROUGH, SIGMOID)) -> Tensor:
    owner = Owner()
    x = torch.ones(256).requires_grad_()
    hidden = x * 1.0
    times(Moment.FORWARD)
    with times.watching(nn.Identity()), Tape(modes, x.device, times.probe("block", owner)) as tape:
        assert hidden.grad_fn is not None
        hidden.grad_fn.register_prehook(times.entry(OUTSIDE))
        for fn in fns:
            hidden = tape.run(fn, owner, hidden)
            hidden = hidden[0] if isinstance(hidden, tuple) else hidden
    times(Moment.BACKWARD)
    hidden.sum().backward()
    times(Moment.DONE)
    times(Moment.OPTIMIZER)
    times(Moment.END)
    assert x.grad is not None
    return x.grad


def test_every_interval_goes_to_the_region_that_ran_in_it() -> None:
    times = RegionTimes(Ticks())
    tape_step(times, {})
    found = times.read(1)
    # marks: 1 forward, 2-3 first, 4-5 through, 6-7 second, 8 backward, then entries second 9, first 10, outside 11, done 12
    assert found["forward"] == {("block", "first"): [1], ("block", "through"): [1], ("block", "second"): [1], OUTSIDE: [7 - 3]}
    assert found["backward"] == {OUTSIDE: [2], ("block", "second"): [1], ("block", "first"): [1]}, "a region without a node of its own gets none"
    assert found["replay"] == {}


def test_replays_are_exclusive_of_the_replays_they_need() -> None:
    times = RegionTimes(Ticks())
    plain = tape_step(times, {})
    times.forget()
    grads = tape_step(times, {"first": Mode.RECOMPUTE, "second": Mode.RECOMPUTE})
    replays = times.read(1)["replay"]
    assert replays == {("block", "first"): [1], ("block", "second"): [1]}
    assert torch.equal(grads, plain)


def test_times_of_steps_are_per_micro_batch_and_forgotten_steps_are_gone() -> None:
    clock = Ticks()
    times = RegionTimes(clock)
    tape_step(times, {})
    times.forget()
    for pause in (0, 100, 2):
        times(Moment.FORWARD)
        probe = times.probe("block", Owner())
        probe.called("first")
        clock.now += pause
        probe.ended("first", None)
        times(Moment.BACKWARD)
        times(Moment.DONE)
        times(Moment.END)
    found = times.read(2)
    assert found["forward"][("block", "first")] == pytest.approx([1 / 2, 101 / 2, 3 / 2])
    assert medians(found["forward"])[("block", "first")] == 3 / 2
    assert times.read(1) == {"forward": {}, "backward": {}, "replay": {}}


ROUNDING = 3


@final
class Scripted(DeviceCounters):
    """Counters whose peak grows as the test says."""

    def __init__(self) -> None:
        self.name, self.allocated, self.peak = "scripted", 0, 0

    def use(self, peak: int, left: int) -> None:
        self.peak, self.allocated = max(self.peak, peak), left

    def read(self) -> MemoryReading | None:
        sizes = {"allocated": self.allocated, "requested": self.allocated - ROUNDING, "peak_allocated": self.peak}
        return MemoryReading(**sizes, reserved=0, peak_reserved=0, peak_active=0, alloc_retries=0)

    def reset_peaks(self) -> None:
        self.peak = self.allocated

    def pinned_bytes(self) -> int | None:
        return None

    def mark(self) -> Any:
        return None

    def elapsed_ms(self, start: Any, end: Any) -> float:
        raise NotImplementedError

    def wait(self, mark: Any) -> None:
        return None

    def watch_resets(self, before: Any) -> Any:
        return lambda: None


def test_phases_hold_their_own_peaks() -> None:
    counters = Scripted()
    phases = Phases(Ticks(), counters)
    for _ in range(2):  # steps
        counters.use(10**9, 5)  # between steps: nobody's
        for micro, extra in enumerate((0, 7)):
            phases(Moment.FORWARD)
            counters.use(100, 90)
            phases(Moment.LOSS)
            counters.use(150, 120 + extra)
            phases(Moment.BACKWARD)
            counters.use(400 + extra * micro, 80)
            phases(Moment.BLOCKS)
            counters.use(200, 30)
            phases(Moment.DONE)
        phases(Moment.OPTIMIZER)
        counters.use(300, 20)
        phases(Moment.END)
    assert phases.peaks == {"forward": 100, "loss forward": 150, "loss backward": 407, "backward": 200, "optimizer": 300}
    assert phases.requested_after_forward == 120 - ROUNDING, "of the first micro-batch, what was asked for"
    read = phases.read()
    assert read["step_ms"] == [12.0, 11.0], "to the next step's start, the last one to its own end"
    assert read["phases"] == {"forward": 2.0, "loss forward": 2.0, "loss backward": 2.0, "backward": 4.0, "optimizer": 1.0}
    assert list(read["phases"]) == list(PHASES)


def test_a_device_without_counters_has_no_peaks() -> None:
    device = torch.device("cpu")
    phases = Phases(clock_for(device), NoCounters(device))
    for moment in Moment:
        phases(moment)
    assert phases.peaks == {}
    assert phases.requested_after_forward is None
    assert all(ms >= 0 for ms in phases.read()["phases"].values())


def test_a_replay_s_memory_is_counted_from_what_was_there() -> None:
    counters = Scripted()
    memory = ReplayMemory(counters)
    probe = memory.probe("block", Owner())
    counters.use(1000, 50)
    for peak, left in ((90, 60), (80, 70)):
        probe.replayed("conv")
        counters.use(peak, left)
        probe.replay_ended("conv")
    assert memory.peak_bytes == {"conv": 40}
    assert memory.left_bytes == {"conv": 10}


def event(cat: str, name: str, ts: float, dur: float, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": 1, "args": args}


def test_kernels_belong_to_the_region_that_launched_them() -> None:
    trace = {
        "traceEvents": [
            {"ph": "M", "name": "process_name"},
            event("user_annotation", RANGE + "conv", 0, 10),
            event("user_annotation", RANGE + "prep", 20, 10),
            event("user_annotation", "something else", 0, 100),
            event("cuda_runtime", "cudaLaunchKernel", 2, 1, correlation=1),
            event("cuda_driver", "cuLaunchKernelEx", 4, 1, correlation=2),
            event("cuda_driver", "cuLaunchKernelEx", 21, 1, correlation=3),
            event("cuda_runtime", "cudaLaunchKernel", 40, 1, correlation=4),
            event("cuda_runtime", "cudaDeviceSynchronize", 60, 1),
            event("kernel", "slow", 25, 3000, correlation=1),
            event("kernel", "fast", 3025, 1000, correlation=2),
            event("kernel", "fast", 4000, 500, correlation=3),
            event("kernel", "nobody's", 9000, 250, correlation=4),
            event("gpu_memcpy", "copy", 9500, 250, correlation=99),
            event("cpu_op", "aten::mm", 2, 3),
        ]
    }
    report = read_trace(trace)
    assert report.on_gpu
    assert {region: [(k.name, k.ms, k.share, k.launches) for k in kernels] for region, kernels in report.regions.items()} == {
        "conv": [("slow", 3.0, 0.75, 1), ("fast", 1.0, 0.25, 1)],
        "prep": [("fast", 0.5, 1.0, 1)],
    }
    assert report.busy_ms == pytest.approx((4500 - 25 + 250 + 250) / 1e3), "overlapping kernels count once"


def test_without_a_gpu_operators_count_with_their_own_time() -> None:
    trace = {
        "traceEvents": [
            event("user_annotation", RANGE + "conv", 0, 100),
            event("cpu_op", "aten::conv1d", 10, 50),
            event("cpu_op", "aten::_convolution", 15, 40),
            event("cpu_op", "aten::silu", 70, 20),
            event("cpu_op", "aten::sum", 200, 1000),
        ]
    }
    report = read_trace(trace)
    assert not report.on_gpu
    assert report.busy_ms is None
    assert [(k.name, round(k.ms * 1e3)) for k in report.regions["conv"]] == [("aten::_convolution", 40), ("aten::silu", 20), ("aten::conv1d", 10)]


def test_saved_storages_are_unique_and_say_who_else_holds_them() -> None:
    owner, x = Owner(), torch.ones(256).requires_grad_()
    block_input = x * 1.0
    probe = TensorProbe(owner)

    def pair(owner: Owner, h: Tensor) -> tuple[Tensor, Tensor]:
        both = h.exp()  # saves its result
        return both[:64], both.view(16, 16).t()

    def use(owner: Owner, part: Tensor, square: Tensor) -> Tensor:
        return part.sin().sum() + (square * owner.weight.view(16, 16)).sum()  # saves two views of it

    with Tape({}, x.device, probe) as tape:
        part, square = tape.run(RegionFn(name="pair", call=pair), owner, block_input)
        out = tape.run(RegionFn(name="use", call=use, params=("weight",)), owner, part, square)
    probe.name_nodes(out, block_input)
    (row,) = probe.rows()
    assert (row.region, row.aliases, row.saves) == ("pair", ["use"], 3)
    assert (row.nbytes, row.view_nbytes, row.shape, row.contiguous) == (1024, 1024, (256,), True)
    assert set(row.nodes) == {"ExpBackward0", "SinBackward0", "MulBackward0"}


def test_a_view_is_told_from_its_storage() -> None:
    owner, x = Owner(), torch.ones(64, 8).requires_grad_()
    probe = TensorProbe(owner)

    def columns(owner: Owner, h: Tensor) -> Tensor:
        return (h * 2.0)[:, :2].sin()

    with Tape({}, x.device, probe) as tape:
        tape.run(RegionFn(name="columns", call=columns), owner, x)
    (row,) = probe.rows()
    assert (row.shape, row.stride, row.contiguous) == ((64, 2), (8, 1), False)
    assert (row.view_nbytes, row.nbytes) == (512, 2048)
