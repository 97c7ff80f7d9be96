"""A process of `offload_matrix.py` or `offload_pairs.py`: runs the job of a specification (JSON) and writes its result.

Jobs: `tune` (fills the autotune cache), `trace` (bits and memory of every step), `time` (a timed run). With `wait` in the specification the
process imports what needs no GPU, prints READY, and touches the GPU once a line arrives on its standard input; a timed run prints WARM
before its measured steps and waits once more, so that nothing else need run beside them.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from offload_trace import Trace, probe
from offload_trainees import Qwen, Stack, around_of, in_force, lead_blocks, ledger_sums, medians, optimizer_step, settled, synchronize, timed_step
from rates import bare_rates
from rounds import CONTROL

from lightning_gdn.bench.environment import autotune_hash, collect
from lightning_gdn.bench.garbage import frozen_garbage
from lightning_gdn.bench.parity_rig import KernelSetting, kernel_setting
from lightning_gdn.bench.records import write_json
from lightning_gdn.callbacks._warmup import _find_autotuners

Gate = Callable[[str], None]
"""Says a word to the parent and waits for its answer."""
AUTO_WARM = 6
"""Further steps that `auto` needs to settle: two ignored, three measured, and one under what it chose."""
AUTO_CAP = 60
"""Steps after which a timed run no longer waits for `auto` to leave the share alone."""


def chosen_configs() -> dict[str, str]:
    """Kernel and tuning key -> the configuration that this process runs, of every autotuner that ran."""
    found = {}
    for tuner in _find_autotuners():
        fn = getattr(tuner, "base_fn", tuner.fn)
        for key, config in tuner.cache.items():
            found[f"{getattr(fn, '__module__', '')}.{getattr(fn, '__name__', fn)} {key}"] = str(config)
    return dict(sorted(found.items()))


def warm_up(trainee: Any, applied: Any, spec: Mapping[str, Any]) -> tuple[list[dict[str, Any]], bool | None]:
    """`warm` steps, with `auto` until its share has settled and was left alone for twelve. The steps; whether it was (None without `auto`)."""
    auto = spec["arm"].endswith("@auto")
    least, cap = (spec["warm"] + AUTO_WARM, AUTO_CAP) if auto else (spec["warm"],) * 2
    rows: list[dict[str, Any]] = []
    for index in range(max(least, cap)):
        if index >= least and settled(applied) and len({row["fraction"] for row in rows[-12:]}) == 1:
            return rows, True
        rows.append(timed_step(trainee, index, applied if "offload:" in spec["arm"] else None, spec["device"], around_of(applied)))
    return rows, False if auto else None


def time_job(trainee: Any, spec: Mapping[str, Any], gate: Gate) -> dict[str, Any]:
    """Medians over the measured steps of one arm (of memory the largest), every step's time, losses of all, and bare copies afterwards."""
    device, moves = spec["device"], "offload:" in spec["arm"]
    with in_force(trainee.model, spec["arm"], spec["kernels"], spec["options"]) as applied:
        around = around_of(applied)
        warm, done = warm_up(trainee, applied, spec)
        gate("WARM")
        with frozen_garbage():
            warm.append(timed_step(trainee, len(warm), applied if moves else None, device, around))  # a device that has waited is no warm one
            rows = [timed_step(trainee, len(warm) + index, applied if moves else None, device, around) for index in range(spec["steps"])]
        found = medians(rows)
        found |= {name: max(row[name] for row in rows) for name in ("peak_mib", "reserved_mib", "pinned_mib") if name in rows[0]}
        if moves:
            found["ledger"] = ledger_sums(applied)
            found["lead_blocks"] = lead_blocks(trainee, applied, len(warm) + len(rows))
    found |= {"steps_ms": [row["ms"] for row in rows], "losses": [loss for row in (*warm, *rows) for loss in row["losses"]]}
    found |= {"warm": len(warm), "settled": done, "shares": [row.get("fraction") for row in (*warm, *rows)]}
    return {**found, "bare": bare_rates(device)}


def tune_job(trainee: Any, spec: Mapping[str, Any], setting: KernelSetting | None) -> dict[str, Any]:
    """Two steps of the control and one of each arm: every kernel that they use is tuned, and the results are on disk."""
    probe(trainee, setting)
    for arm in (CONTROL, *spec["arms"]):
        with in_force(trainee.model, arm, spec["kernels"], spec["options"]) as applied:
            for index in range(2 if arm == CONTROL else 1):
                optimizer_step(trainee, index, around=around_of(applied))
    synchronize(spec["device"])
    return {}


def run(spec: Mapping[str, Any], gate: Gate = lambda word: None) -> dict[str, Any]:
    """One job. Returns, and writes to `out`, its result with the tuning results before and after it; rows of a trace go to `rows`."""
    start, before, device = time.time(), autotune_hash(), spec["device"]
    deterministic = kernel_setting(deterministic=True, cuda=device == "cuda") if spec["deterministic"] else nullcontext()
    with deterministic as setting:
        trainee = Stack(device=device, **spec["model"]) if spec["stack"] else Qwen(device=device, **spec["model"])
        if spec["job"] == "time":
            found = time_job(trainee, spec, gate)
        elif spec["job"] == "tune":
            found = tune_job(trainee, spec, setting)
        else:
            probe(trainee, setting)
            with Path(spec["rows"]).open("w", encoding="utf-8") as lines:
                found = Trace(trainee, spec).run(lines)
        if setting is not None:
            found["kernel_setting"] = setting.as_dict()
    found |= {"autotune_before": before, "autotune_after": autotune_hash(), "configs": chosen_configs(), "seconds": time.time() - start}
    found |= {"environment": collect("gpu" if device == "cuda" else "cpu")} if spec["job"] == "tune" else {}
    found = {"status": "ok", **found}
    write_json(Path(spec["out"]), found)
    return found


def main() -> None:
    """Wait if asked to, then run."""
    spec = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    if spec.get("wait"):
        import transformers  # noqa: F401  imported while another process measures

        assert not torch.cuda.is_initialized(), "a process that waits for its turn has touched the GPU"
        told = os.fdopen(os.dup(sys.stdout.fileno()), "w")
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print goes to the log

        def gate(word: str) -> None:
            print(word, file=told, flush=True)
            if not sys.stdin.readline():
                sys.exit("the parent has gone")

        gate("READY")
        run(spec, gate)
    else:
        run(spec)


if __name__ == "__main__":
    main()
