"""What a user may ask of the offload engine, and what they are told."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from lightning_gdn.offload_config import OffloadConfig, parse_offload


def test_defaults_and_text() -> None:
    config = OffloadConfig(labels=["gdn_core_attn", "mlp", "gdn_core_attn"])  # type: ignore[arg-type]
    assert config.labels == ("gdn_core_attn", "mlp")
    assert (config.fraction, config.min_bytes, config.max_pinned_bytes) == (1.0, 2**20, None)
    assert (config.resident_last_blocks, config.prefetch_blocks, config.release_blocks) == (1, 1, 1)
    assert str(config) == "gdn_core_attn,mlp"
    assert OffloadConfig(labels=("mlp",), max_pinned_gib=0.5).max_pinned_bytes == 2**29
    assert config == OffloadConfig(labels=("gdn_core_attn", "mlp"))


@pytest.mark.parametrize(
    ("text", "labels", "fraction"),
    [
        ("gdn_core_attn", ("gdn_core_attn",), 1.0),
        ("offload:gdn_core_attn@0.5", ("gdn_core_attn",), 0.5),
        ("gdn_core_attn,mlp@auto", ("gdn_core_attn", "mlp"), "auto"),
        ("gdn_core_attn+core_attn@0", ("gdn_core_attn", "core_attn"), 0.0),
    ],
)
def test_text_is_read_and_written_back(text: str, labels: tuple[str, ...], fraction: Any) -> None:
    config = parse_offload(text, min_bytes=7)
    assert (config.labels, config.fraction, config.min_bytes) == (labels, fraction, 7)
    assert parse_offload(str(config), min_bytes=7) == config


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"labels": "gdn_core_attn"}, "offload.labels: expected a list of at least one label, got 'gdn_core_attn'"),
        ({"labels": ()}, "expected a list of at least one label"),
        ({"labels": ("gdn-core-attn",)}, "unknown label 'gdn-core-attn' (did you mean 'gdn_core_attn'?). Valid labels: gdn_core_attn"),
        ({"fraction": 1.5}, "offload.fraction: expected a number from 0 to 1 (a share of the bytes) or 'auto', got 1.5"),
        ({"fraction": "half"}, "got 'half'"),
        ({"fraction": True}, "got True"),
        ({"fraction": float("nan")}, "got nan"),
        ({"min_bytes": -1}, "offload.min_bytes: expected an integer of at least 0, got -1"),
        ({"min_bytes": 1.5}, "got 1.5"),
        ({"prefetch_blocks": 0}, "offload.prefetch_blocks: expected an integer of at least 1, got 0: a reload needs at least one block of lead"),
        ({"resident_last_blocks": -1}, "offload.resident_last_blocks: expected an integer of at least 0"),
        ({"release_blocks": True}, "offload.release_blocks: expected an integer of at least 0, got True"),
        ({"max_pinned_gib": -1}, "offload.max_pinned_gib: expected a number of GiB of at least 0, or nothing for no cap, got -1"),
        ({"max_pinned_gib": "10"}, "got '10'"),
    ],
)
def test_a_bad_field_says_what_to_do(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        OffloadConfig(**{"labels": ("gdn_core_attn",), **fields})
    assert message in str(caught.value)


@pytest.mark.parametrize("text", ["gdn_core_attn@", "gdn_core_attn@x", "gdn_core_attn@0.5,mlp@0.25", "gdn_core_attn@0.5@1", "", "gdn_core_attn@2"])
def test_bad_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="offload"):
        parse_offload(text)


def test_config_and_budget_need_no_torch() -> None:
    code = "import sys, lightning_gdn.offload_config, lightning_gdn.offload.budget; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["False"]
