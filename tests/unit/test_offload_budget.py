"""The share of bytes that moves, and the policy that finds it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_gdn.offload.budget import CONTENTION, AutoFraction, Budget
from lightning_gdn.stayed import share_found


@pytest.mark.parametrize("fraction", [0.0, 0.1, 1 / 3, 0.5, 0.7, 0.999, 1.0])
def test_never_more_than_the_share_and_never_much_less(fraction: float) -> None:
    rng = random.Random(0)
    for sizes in ([7] * 300, [rng.randint(1, 10_000) for _ in range(300)]):
        budget, offered = Budget(fraction), 0
        for size in sizes:
            budget.admit(size)
            offered += size
            assert budget.moved <= fraction * offered + 1e-6 * offered
            assert budget.moved > fraction * offered - 2 * max(sizes), "it lags behind by more than two storages: not spread evenly"
        assert budget.offered == offered
    assert budget.moved == (offered if fraction == 1 else 0 if fraction == 0 else budget.moved)


def test_equal_storages_are_spread_evenly_and_exactly() -> None:
    for share, period in ((0.5, 2), (1 / 3, 3), (0.25, 4), (0.1, 10)):
        budget = Budget(share)
        assert [budget.admit(1 << 20) for _ in range(40)] == [(i + 1) % period == 0 for i in range(40)]


def blocks_of(seed: int) -> list[list[int]]:
    """Sizes of a pass: blocks alike, in fours, or each of its own."""
    rng = random.Random(seed)
    alike = [rng.randint(1, 1000) for _ in range(rng.randint(1, 9))]
    count, kind = rng.randint(2, 60), rng.randrange(3)
    if kind == 0:
        return [alike for _ in range(count)]
    if kind == 1:
        return [[] if index % 4 == 3 else alike for index in range(count)]
    return [[rng.randint(1, 1000) for _ in range(rng.randint(0, 9))] for _ in range(count)]


@pytest.mark.parametrize("fraction", [0.0, 0.01, 0.05, 0.1, 0.3, 1 / 3, 0.5, 0.51, 0.9, 1.0])
def test_block_by_block_never_more_than_the_share_and_no_block_less_than_it(fraction: float) -> None:
    for seed in range(200):
        blocks, budget = blocks_of(seed), Budget(fraction)
        for index, sizes in enumerate(blocks):
            budget.enter(len(blocks) - index)
            for size in sizes:
                budget.admit(size)
            assert budget.moved <= fraction * budget.offered * (1 + 1e-6), "at the end of every block"
        total, largest = sum(map(sum, blocks)), max([sum(sizes) for sizes in blocks])
        assert budget.offered == total
        assert fraction or not budget.moved
        if fraction == 1:
            assert budget.moved == total
        if all(sizes == blocks[0] for sizes in blocks):
            biggest = max(blocks[0], default=0)
            assert budget.moved > fraction * total - 2 * biggest - 1e-6, "what fills no whole block moves storage by storage"
        assert budget.moved >= fraction * total - 2 * largest - 1e-6


@pytest.mark.parametrize(("share", "with_some", "whole"), [(0.5, 11, 9), (1 / 3, 8, 6), (0.25, 8, 4), (0.1, 2, 2), (0.02, 3, 0)])
def test_a_small_share_leaves_most_blocks_alone(share: float, with_some: int, whole: int) -> None:
    """Of 20 equal blocks: so many have something that moves, and so many all that they have."""
    budget, moved = Budget(share), []
    for index in range(20):
        budget.enter(20 - index)
        moved.append(sum(budget.admit(100) for _ in range(9)))
    assert (len([n for n in moved if n]), moved.count(9)) == (with_some, whole), moved
    assert sum(moved) == int(180 * share + 1e-9)


@pytest.mark.parametrize("share", [0.01, 0.0417, 0.05, 0.1, 0.11, 0.3, 0.5])
@pytest.mark.parametrize("every", [1, 2, 4])
def test_equal_blocks_move_the_share_to_within_that_of_one_block(share: float, every: int) -> None:
    """And two storages. Also where resident blocks follow, and others that offer nothing stand between: they are not among those that remain."""
    for blocks in range(1, 50):
        for resident in (0, 1, 2, 5):
            offering = [index for index in range(blocks - resident) if index % every == 0]
            budget = Budget(share)
            for index in range(blocks):
                budget.enter(sum(later >= index for later in offering))
                for _ in range(9 * (index in offering)):
                    budget.admit(100)
            assert share * (budget.offered - 900) - 200 < budget.moved <= share * budget.offered * (1 + 1e-9), (blocks, resident)


def test_above_one_half_it_spreads_over_the_blocks() -> None:
    budget = Budget(0.6)
    assert budget.blocks_per_copy == 1
    for index in range(20):
        budget.enter(20 - index)
        assert sum(budget.admit(100) for _ in range(10)) == 6


def test_what_the_choice_depends_on_is_told() -> None:
    """Two blocks with the same answer of `enter` answer the same offers in the same way, wherever they are."""
    for share in (0.1, 0.3, 0.5, 0.8):
        known: dict[tuple[Any, ...], list[bool]] = {}
        met = 0
        for seed in range(300):
            blocks, budget = blocks_of(seed % 40), Budget(share)
            for index, sizes in enumerate(blocks):
                key = (*budget.enter(len(blocks) - index), *sizes)
                answers = [budget.admit(size) for size in sizes]
                met += key in known
                assert known.setdefault(key, answers) == answers
        assert met > 1000


def sample(
    *,
    rate_out: float = 50.0,
    rate_in: float = 50.0,
    forward: float = 100.0,
    backward: float = 200.0,
    eligible: int,
    moved: int,
    host: float = 0.0,
    wall: float = 0.0,
) -> Any:
    """One step as the engine would report it: rates in 10⁶ bytes per ms, times in ms. What does not hide is a stall; `host` is exposed host time,
    half of it in each direction."""
    out, back = moved / rate_out / 1e6, moved / rate_in / 1e6
    stalls = max(0.0, out - forward), max(0.0, back - backward)
    return SimpleNamespace(
        timed_bytes_out=moved,
        timed_bytes_in=moved,
        copy_out_ms=out,
        copy_in_ms=back,
        stall_out_ms=stalls[0],
        stall_in_ms=stalls[1],
        forward_ms=forward + stalls[0] + host / 2,
        backward_ms=backward + stalls[1] + host / 2,
        exposed_host_out_ms=host / 2,
        exposed_host_in_ms=host / 2,
        timed_eligible_bytes=eligible,
        wall_ms=wall,
    )


@pytest.mark.parametrize(
    ("eligible", "expected"),
    [
        (1_000_000_000, 1.0),  # 20 ms of copies under 100 ms of forward
        (4_000_000_000, 0.6),  # 160 ms of copies beside 300 ms of compute, which they slow down by 3.2 ms
        (10_000_000_000, 0.24),  # 200 ms out under 100 ms; what hides would slow the rest down too much
        (100_000_000_000, 0.024),
    ],
)
def test_it_settles_on_the_largest_share_that_hides(eligible: int, expected: float) -> None:
    auto = AutoFraction()
    seen = [auto.observe(sample(eligible=eligible, moved=int(eligible * auto.fraction))) for _ in range(30)]
    assert seen[:4] == [1.0] * 4
    assert seen[-1] == pytest.approx(expected)
    assert auto.settled
    assert len({round(x, 9) for x in seen[5:]}) == 1, "nothing stalls any more, so nothing changes"


def test_the_slower_direction_decides() -> None:
    auto = AutoFraction()
    for _ in range(5):
        auto.observe(sample(eligible=10**9, moved=10**9, rate_in=20.0, backward=20.0))  # 50 ms back under 20 ms
    assert auto.fraction == pytest.approx(0.8 * 0.4)


def test_after_settling_it_only_goes_down() -> None:
    auto = AutoFraction()
    for _ in range(5):
        auto.observe(sample(eligible=10**9, moved=10**9))
    assert auto.fraction == 1.0
    history = [auto.observe(sample(eligible=10**10, moved=int(10**10 * auto.fraction))) for _ in range(60)]
    assert history == sorted(history, reverse=True)
    assert 0.2 < history[-1] <= 0.3  # 400 ms of copies beside 300 ms of compute: 8 ms of contention at 1, 2.4 ms are tolerated
    assert len(set(history[-10:])) == 1
    for _ in range(20):
        auto.observe(sample(eligible=10**6, moved=10**6))
    assert auto.fraction == history[-1]


def test_warm_up_steps_are_not_measured() -> None:
    auto = AutoFraction(skip=2, measure=1)
    for _ in range(2):
        auto.observe(sample(eligible=10**10, moved=10**10, forward=1e6, backward=1e6))  # kernels being tuned
    assert not auto.settled
    assert auto.observe(sample(eligible=4 * 10**9, moved=4 * 10**9)) == pytest.approx(0.6)


def test_steps_without_times_do_not_settle_it() -> None:
    auto = AutoFraction()
    for _ in range(20):
        auto.observe(sample(eligible=0, moved=0, forward=0.0, backward=0.0))
    assert not auto.settled
    for _ in range(3):
        auto.observe(sample(eligible=0, moved=0))
    assert (auto.settled, auto.fraction) == (True, 1.0), "a rank with nothing to move sets no bound"


def test_all_ranks_agree_in_the_same_step() -> None:
    def five_steps(rate: float, reduce: Callable[[float], float]) -> AutoFraction:
        auto = AutoFraction(reduce)
        for _ in range(5):
            auto.observe(sample(eligible=10**9, moved=10**9, rate_out=rate, forward=10.0))
        return auto

    rates, asked = (50.0, 20.0), ([], [])  # type: tuple[float, float], tuple[list[float], list[float]]
    for rate, values in zip(rates, asked, strict=True):
        five_steps(rate, lambda value, values=values: (values.append(value), value)[1])  # type: ignore[misc]
    assert [len(values) for values in asked] == [1, 1], "the collective is called once, in the same step of both ranks"
    agreed = min(values[0] for values in asked)
    assert [five_steps(rate, lambda value: min(value, agreed)).fraction for rate in rates] == [agreed, agreed]
    assert agreed == pytest.approx(0.8 * 0.2)  # 50 ms out under 10 ms
    waits = five_steps(50.0, lambda value: min(value, -1.0))  # the other rank has timed nothing yet
    assert (waits.settled, waits.fraction) == (False, 1.0)


def with_knee(fraction: float, *, noise: float = 1.0) -> Any:
    """What Qwen3.5-0.8B showed at 16384 tokens: 4.25 GB fit into the compute as a whole, yet above a share of about 0.68 a block's own copies
    outlast its neighbour: 15 ms at 1, 4.4 ms at 0.77."""
    stall = noise * max(0.3, 47 * (fraction - 0.68))
    found = sample(eligible=4_250_000_000, moved=int(4_250_000_000 * fraction), forward=160.0, backward=310.0)
    found.stall_out_ms, found.forward_ms = stall, found.forward_ms + stall
    return found


def test_stalls_of_single_blocks_are_left_behind_in_few_steps() -> None:
    auto = AutoFraction()
    shares = [auto.observe(with_knee(auto.fraction)) for _ in range(30)]
    assert len(set(shares[15:])) == 1, "settled two windows after the first answer"
    assert 0.6 < shares[-1] <= 0.73
    last = with_knee(shares[-1])
    assert last.stall_out_ms + CONTENTION * (last.copy_out_ms + last.copy_in_ms) <= 0.008 * 470


@pytest.mark.parametrize("seed", range(20))
def test_noise_does_not_drive_the_share_to_nothing(seed: int) -> None:
    rng, auto = random.Random(seed), AutoFraction()
    shares = [auto.observe(with_knee(auto.fraction, noise=rng.uniform(0.7, 1.3))) for _ in range(60)]
    assert shares == sorted(shares, reverse=True)
    assert 0.4 < shares[-1] <= 0.74


def host_bound(auto: AutoFraction, *, whole: float, fixed: float = 0.0, noise: float = 1.0, eligible: int = 10**8) -> Any:
    """300 ms of compute, copies that fit well, and exposed host time: `whole` ms at a share of 1, of which `fixed` do not shrink with it."""
    share = auto.fraction
    host = noise * (fixed + (whole - fixed) * share) if share else 0.0  # at rest there is none
    return sample(eligible=eligible if share else 0, moved=int(eligible * share), host=host)


@pytest.mark.parametrize(
    ("whole", "fixed", "expected"),
    [
        (2.2, 0.0, 1.0),  # within the tolerance of 2.4 ms
        (2.2, 2.2, 1.0),
        (4.8, 0.0, 0.4),  # 1.6 % lost, 0.64 % is taken
        (9.6, 0.0, 0.2),
        (4.8, 0.3, 0.4),  # 2.1 ms there
        (40.0, 0.0, 0.0),  # 13 % lost: what is left would be less than a twentieth
        (28.0, 10.0, 0.0),  # the fixed part alone is too much
        (6.0, 3.0, 0.0),
    ],
)
def test_host_time_that_nothing_hides_is_lost_too(whole: float, fixed: float, expected: float) -> None:
    auto = AutoFraction()
    shares = [auto.observe(host_bound(auto, whole=whole, fixed=fixed)) for _ in range(40)]
    assert shares[:4] == [1.0] * 4
    assert shares[-1] == pytest.approx(expected, rel=0.02)
    assert len(set(shares[20:])) == 1, "three windows after the first answer at the latest"
    last = host_bound(auto, whole=whole, fixed=fixed)
    assert last.exposed_host_out_ms + last.exposed_host_in_ms <= 0.008 * 300


@pytest.mark.parametrize("seed", range(20))
def test_noise_of_the_host_neither_shakes_the_share_off_nor_holds_it_up(seed: int) -> None:
    rng = random.Random(seed)

    def settled(whole: float, fixed: float) -> float:
        auto = AutoFraction()
        shares = [auto.observe(host_bound(auto, whole=whole, fixed=fixed, noise=rng.uniform(0.8, 1.2))) for _ in range(60)]
        assert shares == sorted(shares, reverse=True)
        return shares[-1]

    assert settled(1.9, 0.0) == 1.0
    assert 0.2 < settled(4.8, 0.0) < 0.5
    assert settled(9.6, 4.0) == 0.0
    assert settled(48.0, 0.0) == 0.0


def test_the_host_and_the_copies_are_both_respected() -> None:
    auto = AutoFraction()
    for _ in range(5):
        auto.observe(sample(eligible=10**9, moved=10**9, forward=10.0, host=1.0))  # the copies allow 0.42, the host 0.75
    assert auto.fraction == pytest.approx(0.42)
    auto = AutoFraction()
    for _ in range(5):
        auto.observe(sample(eligible=4 * 10**8, moved=4 * 10**8, host=4.0))  # the copies allow all of it, the host 1.92 of 4.32 ms
    assert auto.fraction == pytest.approx(1.92 / 4.32)


def test_a_host_that_decides_only_later_takes_the_share_down_at_once() -> None:
    """Batches became smaller after it had settled."""
    auto = AutoFraction()
    for _ in range(5):
        auto.observe(sample(eligible=10**9, moved=10**9))
    assert (auto.settled, auto.fraction) == (True, 1.0)
    for _ in range(3):
        auto.observe(host_bound(auto, whole=9.6))
    assert auto.fraction == pytest.approx(0.2, rel=0.02)


def test_at_rest_it_goes_on_answering_the_other_ranks() -> None:
    asked: list[float] = []
    auto = AutoFraction(lambda value: (asked.append(value), value)[1])  # type: ignore[func-returns-value]
    for _ in range(5 + 5 + 7 + 15 + 31 + 31):
        auto.observe(host_bound(auto, whole=40.0))
    assert asked == [0.0] * 6, "once per window, as on a rank that moves something"
    assert auto.fraction == 0.0


def test_one_rank_whose_host_decides_takes_all_of_them_down() -> None:
    told = []
    for host in (40.0, 0.0):
        auto = AutoFraction(lambda value: min(value, 0.0))
        for _ in range(5):
            auto.observe(sample(eligible=10**9, moved=10**9, host=host))
        found = auto.take_finding()
        assert found is not None
        told.append((auto.fraction, found.by_host, found.elsewhere, auto.take_finding()))
    assert told == [(0.0, True, False, None), (0.0, False, True, None)]


def test_ranks_that_are_alike_all_say_that_the_host_decides() -> None:
    """Only one of them has the smallest share, and it is seldom rank 0, whose log people read."""
    for smaller, by_host in ((0.97, True), (0.5, False)):
        auto = AutoFraction(lambda value, smaller=smaller: smaller * value)  # type: ignore[misc]
        for _ in range(5):
            auto.observe(host_bound(auto, whole=4.8))
        found = auto.take_finding()
        assert found is not None
        assert (found.by_host, found.elsewhere) == (by_host, not by_host)


def test_what_was_found_is_told_once_per_change() -> None:
    auto, told = AutoFraction(), []
    for _ in range(20):
        auto.observe(host_bound(auto, whole=9.6, fixed=9.0))
        found = auto.take_finding()
        if found is not None:
            told.append((found.before, found.fraction, found.by_host, share_found(**asdict(found), by_host=found.by_host)))
    assert [each[:3] for each in told] == [(1.0, pytest.approx(0.2, rel=0.02), True), (pytest.approx(0.2, rel=0.02), 0.0, True)]
    assert told[0][3] == (
        "offload: fraction=auto settled on 0.2 (the copies alone would allow 1): the host, not the GPU, decides the step time here (9.6 ms of host "
        "work for copies had nothing to hide behind, of 300.0 ms of a step). Take larger micro-batches; or give fraction=1.0 (@1) if "
        "memory matters more than the step time, which is about 3.2 % longer at a share of 1"
    )
    assert told[1][3].startswith("offload: fraction=auto settled on 0, down from 0.2 and moves nothing any more: the host")
    auto = AutoFraction()
    for _ in range(30):
        auto.observe(sample(eligible=10**10, moved=int(10**10 * auto.fraction)))
    found = auto.take_finding()
    assert found is not None
    assert (found.by_host, found.fraction) == (False, pytest.approx(0.24))
    assert share_found(**asdict(found), by_host=found.by_host) == (
        "offload: fraction=auto settled on 0.24: what hides behind compute (before, 100.0 ms of stalls and 0.0 ms of host work were exposed, and "
        "400.0 ms of copies slowed down what ran beside them, of 300.0 ms of a step)"
    )


def test_steps_in_which_buffers_are_pinned_anew_are_not_looked_at() -> None:
    """The share fell, the pool gave its pages back, and the next step pins what is left to move: half a second of host time."""
    auto, since = AutoFraction(), 0
    for _ in range(30):
        before = auto.fraction
        since = since + 1 if before < 1 else 0
        auto.observe(sample(eligible=4 * 10**9, moved=int(4 * 10**9 * before), host=500.0 if since in (1, 2) else 0.0))
    assert auto.fraction == pytest.approx(0.6)


def interrupted(step: Any, ms: float) -> Any:
    """A pause of the host in the middle of offload's work, such as a garbage collection."""
    step.exposed_host_out_ms, step.forward_ms = step.exposed_host_out_ms + ms, step.forward_ms + ms
    return step


@pytest.mark.parametrize("ms", [5.0, 50.0, 5000.0])
@pytest.mark.parametrize("at", [2, 3, 4, 6])
def test_one_slow_step_says_nothing(at: int, ms: float) -> None:
    """The share never goes up again: what one step took would be lost for the whole training."""
    slow_copies = [sample(eligible=10**9, moved=10**9, **{rate: 100 / ms}) for rate in ("rate_out", "rate_in")]
    for bad in (interrupted(sample(eligible=10**9, moved=10**9), ms), *slow_copies):
        auto = AutoFraction()
        for index in range(60):
            auto.observe(bad if index == at else sample(eligible=10**9, moved=10**9))
        assert (auto.settled, auto.fraction) == (True, 1.0)


@pytest.mark.parametrize("seed", range(3))
def test_slow_steps_now_and_then_do_not_take_the_share_down_over_a_long_training(seed: int) -> None:
    rng, auto = random.Random(seed), AutoFraction()
    for _ in range(10_000):
        usual = host_bound(auto, whole=1.0, noise=rng.uniform(0.7, 1.3))
        auto.observe(interrupted(usual, 50.0) if rng.random() < 0.01 else usual)
    assert auto.fraction == 1.0


def test_windows_grow_while_the_share_stays_and_begin_anew_after_a_change() -> None:
    asked: list[int] = []
    auto, costly = AutoFraction(lambda value: (asked.append(index), value)[1]), 70  # type: ignore[func-returns-value]
    for index in range(1, 150):
        auto.observe(host_bound(auto, whole=1.0 if index < costly else 9.6))
    assert asked == [5, 8, 15, 30, 61, 92, 97, 104, 119]
    assert auto.fraction == pytest.approx(0.2, rel=0.02)


@pytest.mark.parametrize("odd", ["twice a step", "three times a step", "between forward and backward", "and after backward"])
def test_statistics_taken_in_odd_places_decide_nothing_else(odd: str) -> None:
    auto, shares, before = AutoFraction(), list[float](), None
    for _ in range(30):
        whole = sample(eligible=4 * 10**9, moved=int(4 * 10**9 * auto.fraction))
        nothing = sample(eligible=0, moved=0, forward=0.0, backward=0.0)
        forward, backward = SimpleNamespace(**vars(nothing)), SimpleNamespace(**vars(nothing))
        for name, value in vars(whole).items():
            setattr(backward if "_in" in name or name == "backward_ms" else forward, name, value)
        both = SimpleNamespace(**{name: value + getattr(before or nothing, name) for name, value in vars(forward).items()})
        told = {"twice a step": [whole, nothing], "three times a step": [whole, nothing, nothing], "between forward and backward": [both]}
        for each in told.get(odd, [forward, backward]):
            auto.observe(each)
        shares.append(auto.fraction)
        before = backward
    assert shares[5] == shares[-1] == pytest.approx(0.6)


@pytest.mark.parametrize(("backward", "expected"), [(7.0, 0.0), (0.0, 0.0), (50.0, 0.02)])
def test_a_share_that_moves_next_to_nothing_is_0(backward: float, expected: float) -> None:
    """Hooks and contexts cost the host what they cost, whatever moves."""
    auto = AutoFraction()
    for _ in range(5):
        auto.observe(sample(eligible=10**11, moved=10**11, forward=1e5, backward=backward))
    assert auto.fraction == pytest.approx(expected)


def test_hooks_that_cost_the_host_its_time_while_nothing_moves_end_as_well() -> None:
    """The share lets no storage through: 20 equal ones at a share of less than a twentieth, or all of them small."""
    auto = AutoFraction()
    for _ in range(5):
        auto.observe(sample(eligible=10**9, moved=10**9))
    for _ in range(40):
        auto.observe(sample(eligible=10**9, moved=0, host=6.0 if auto.fraction else 0.0))
    assert auto.fraction == 0.0


def test_what_is_lost_is_a_share_of_the_whole_step_not_of_the_blocks_alone() -> None:
    """Head, loss and optimizer take time as well: 300 ms of blocks in a step of 600 ms may lose twice as much."""
    shares = []
    for wall in (0.0, 250.0, 609.6):  # not known; a clock that cannot be, since the blocks took longer; known, with 9.6 ms of host time in it
        auto = AutoFraction()
        for _ in range(5):
            auto.observe(sample(eligible=10**8, moved=10**8, host=9.6, wall=wall))
        shares.append(auto.fraction)
    assert shares == pytest.approx([0.2, 0.2, 0.4], rel=0.02)
