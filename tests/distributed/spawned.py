"""A fit whose processes are spawned, so that strategy and callbacks are pickled: `python -m tests.distributed.spawned FOLDER`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from lightning_gdn import GDNRecomputeStrategy
from lightning_gdn.callbacks import MemoryMonitor
from tests.distributed.fits import DdpModule, fit, weights_hash

torch.set_num_threads(1)
torch.multiprocessing.set_sharing_strategy("file_system")  # containers exist in which passing file descriptors fails, under any strategy

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    monitor = MemoryMonitor(warmup_steps=1, dir=folder, table=False, progress_bar=False)
    module, _ = fit(GDNRecomputeStrategy("gdn_conv+gdn_norm_out+layernorm", start_method="spawn"), DdpModule(), callbacks=[monitor])
    found = {"weights": weights_hash(module), "group_here": torch.distributed.is_initialized()}
    (folder / "spawned.json").write_text(json.dumps(found))
