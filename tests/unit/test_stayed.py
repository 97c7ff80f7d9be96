"""Why nothing moved, in words: each reason with its value, and what to write that is not what was written already."""

from __future__ import annotations

import itertools
import re

import pytest

from lightning_gdn.offload_config import OffloadConfig
from lightning_gdn.stayed import size, why_stayed

REASONS = ("min_bytes", "resident", "budget", "pool full", "held")
CONFIG = OffloadConfig(labels=("mlp",), fraction=0.5, min_bytes=4096, resident_last_blocks=2, max_pinned_gib=0.25)
MEANINGS = {
    "min_bytes": " (below offload.min_bytes=4096, the largest 1.5 KiB)",
    "resident": " (of the last blocks, offload.resident_last_blocks=2)",
    "budget": " (beyond the share @0.5)",
    "pool full": " (beyond offload.max_pinned_gib=0.25)",
    "held": " (used outside the block or held by the graph itself: moving it would free nothing)",
}


@pytest.mark.parametrize("reasons", [c for n in range(1, 6) for c in itertools.combinations(REASONS, n)])
def test_every_combination_of_reasons_is_a_sentence(reasons: tuple[str, ...]) -> None:
    told = why_stayed(dict.fromkeys(reasons, 3) | {"edited": 0}, CONFIG, largest_small=1536)
    found, _, remedies = told.partition("; ")
    assert found == "stayed per step: " + ", ".join(f"{reason} 3 B{MEANINGS[reason]}" for reason in reasons)
    if reasons == ("held",):
        assert remedies == "no option moves that: leave the label out"
        return
    parts = re.fullmatch(r"write (offload\S+=\w+(?: offload\S+=\w+)*)?( and )?(a larger share after @)?(, or take larger sizes)?", remedies)
    assert parts is not None, remedies
    overrides, both, share, larger = parts.groups()
    wanted = {"min_bytes": "offload.min_bytes=0", "resident": "offload.resident_last_blocks=0", "pool full": "offload.max_pinned_gib=null"}
    assert (overrides or "").split() == [wanted[reason] for reason in wanted if reason in reasons], "words for the command line, as they stand"
    assert bool(share) == ("budget" in reasons)
    assert bool(both) == bool(share and overrides)
    assert bool(larger) == ("min_bytes" in reasons)


def test_what_is_not_known_is_not_named() -> None:
    saved = "nothing that its offload labels name was saved: "
    plain = why_stayed({"min_bytes": 0}, CONFIG)
    assert plain.startswith(saved + "frozen weights and passes without gradients save nothing")
    assert "another dtype" in plain
    assert "recompute" not in plain
    assert why_stayed({}, CONFIG, recomputes=True).startswith(saved + "what a recompute label replays is not there to be moved: leave that label out")
    unknown = why_stayed(dict.fromkeys(REASONS[:4], 2**20), None, when="in all")
    assert unknown.startswith("stayed in all: min_bytes 1.0 MiB (below offload.min_bytes), resident 1.0 MiB (of the last blocks, ")
    assert not re.search(r"None|the largest", unknown)
    assert why_stayed({"new": 2048.0}, CONFIG) == "stayed per step: new 2.0 KiB; no option moves that: leave the label out"


def test_a_cap_that_was_not_set_is_not_to_be_lifted() -> None:
    told = why_stayed({"pool full": 5}, OffloadConfig(labels=("mlp",), fraction="auto"))
    assert "no more pinned memory was to be had" in told
    assert "free host memory" in told
    assert "max_pinned_gib" not in told
    assert "that auto settled on" in why_stayed({"budget": 5}, OffloadConfig(labels=("mlp",), fraction="auto"))


def test_sums_over_several_labels_are_said_to_be_that() -> None:
    told = why_stayed({"resident": 3}, OffloadConfig(labels=("mlp", "gdn_in_proj")))
    assert told.startswith("stayed per step, of all offload labels together (one by itself has its own figures): resident 3 B (of the last blocks, ")
    assert told.endswith("; for these write offload.resident_last_blocks=0")


def test_small_storages_of_resident_blocks_need_both_options() -> None:
    """Of none that is small alone: lifting `min_bytes` would move nothing either."""
    told = why_stayed({"min_bytes": 3}, CONFIG, largest_small=0)
    assert told == (
        "stayed per step: min_bytes 3 B (below offload.min_bytes=4096, and all of the last blocks, offload.resident_last_blocks=2); "
        "write offload.min_bytes=0 offload.resident_last_blocks=0"
    )


def test_sizes_are_never_a_rounded_zero() -> None:
    assert [size(nbytes) for nbytes in (1, 1023, 1536, 2**20, 3 * 2**30)] == ["1 B", "1023 B", "1.5 KiB", "1.0 MiB", "3,072.0 MiB"]
