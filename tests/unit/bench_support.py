"""A really small recipe and hand-made records for the tests of recipes, runner and comparison."""

from __future__ import annotations

from pathlib import Path
from typing import Any

TINY = """\
# lightning-gdn run tiny.yaml
model:
  hidden_size: 32
  intermediate_size: 64
  num_hidden_layers: 4
  num_attention_heads: 2
  num_key_value_heads: 1
  head_dim: 16
  linear_num_key_heads: 2
  linear_num_value_heads: 4
  linear_key_head_dim: 8
  linear_value_head_dim: 8
  vocab_size: 256
data: {seq_len: 65, batch_size: 2}
trainer: {accelerator: cpu, max_steps: 3, num_threads: 1, lr: 1e-3}
monitor: {warmup_steps: 1}
compare: {arms: [none, gdn_conv, full], rounds: 1}
"""

TINY_NEXT = TINY.replace(
    "model:\n",
    "model:\n  family: qwen3_next\n  num_experts: 6\n  num_experts_per_tok: 2\n  moe_intermediate_size: 16\n"
    "  shared_expert_intermediate_size: 16\n  mlp_only_layers: [1]\n",
)
TINY_STACK = "".join(
    line
    for line in TINY.replace("model:\n", "model:\n  family: gdn_stack\n").splitlines(keepends=True)
    if line.split(":")[0].strip() not in ("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
)
FAMILIES = {"qwen3_5": TINY, "qwen3_next": TINY_NEXT, "gdn_stack": TINY_STACK}
"""A tiny recipe of each family."""


def tiny_recipe(folder: Path, text: str = TINY) -> Path:
    """Write the tiny recipe and return its path."""
    path = folder / "tiny.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def record(arm: str, round_index: int = 0, **changes: Any) -> dict[str, Any]:
    """A record as an arm writes it, with round figures; `changes` replace top-level fields."""
    made: dict[str, Any] = {
        "schema": 1,
        "arm": arm,
        "round": round_index,
        "status": "ok",
        "error": None,
        "environment": {
            "device": "cpu",
            "cpu": "test",
            "threads": 1,
            "packages": {"torch": "2.13.0"},
            "git_revision": "abc",
            "git_dirty": False,
            "autotune_cache": None,
            "python": "3.11",
            "platform": "Linux",
            "driver": None,
            "cuda": None,
        },
        "recipe": {
            "model": {"hidden_size": 32},
            "data": {"seq_len": 65, "batch_size": 2},
            "trainer": {"accumulate_grad_batches": 1, "precision": "32-true"},
            "plan": {"arm": arm, "kernels": "stock"},
        },
        "text": {"source": "test", "files": 1, "bytes": 1000, "sha256": "0" * 64},
        "plan": f"plan {arm}",
        "kernels": {"conv": "torch.conv", "delta_rule": "torch.rule"},
        "retained_bytes": 1000,
        "losses_hex": [(5.0).hex(), (4.0).hex(), (3.0).hex()],
        "loss_first": 5.0,
        "loss_last": 3.0,
        "weights_sha256": "w",
        "monitor": {"step_ms": {"median": 100.0}, "peak_allocated_mib": None, "tokens_per_s": 10.0, "step_times_ms": [99.0, 101.0]},
    }
    return {**made, **changes}


def timed(arm: str, round_index: int, step_ms: float, **changes: Any) -> dict[str, Any]:
    """A record with this step time."""
    return record(arm, round_index, monitor={"step_ms": {"median": step_ms}, "peak_allocated_mib": step_ms, "tokens_per_s": 1.0}, **changes)
