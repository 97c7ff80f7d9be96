"""Runs cases on two gloo processes: `python -m tests.distributed.worker MODULE FOLDER`.

Lightning starts the second process with the first Trainer; later Trainers of the script join the same process group. Each rank writes
`cases_rank{r}.json`: what every case of `CASES` in MODULE returned, or its traceback.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch

torch.set_num_threads(1)


def main() -> None:
    module, folder = importlib.import_module(sys.argv[1]), Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {}
    for name, case in module.CASES.items():
        try:
            results[name] = {"value": case(folder)}
        except BaseException:  # noqa: BLE001  a failed case is a result
            results[name] = {"failed": traceback.format_exc()}
        rank = int(os.environ.get("LOCAL_RANK", 0))
        (folder / f"cases_rank{rank}.json").write_text(json.dumps(results), encoding="utf-8")


if __name__ == "__main__":
    main()
