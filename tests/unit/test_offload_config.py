"""What a user may ask of the offload engine. What is said of mistakes: test_offload_errors.py."""

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


def test_config_and_budget_need_no_torch() -> None:
    code = "import sys, lightning_gdn.offload_config, lightning_gdn.offload.budget; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["False"]
