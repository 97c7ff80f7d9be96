"""The recipe schema: one frozen dataclass per YAML section, with the unit and the price of each field.

Values that name something are closed lists (`CHOICES`), not import paths: a recipe cannot run code.
"""

from __future__ import annotations

import dataclasses
import os
import typing
from dataclasses import dataclass, field
from typing import Any

__all__ = [
    "AT_MOST",
    "CHOICES",
    "FAMILY_FIELDS",
    "POSITIVE",
    "SAVED_FIELDS",
    "CompareConfig",
    "DataConfig",
    "ModelConfig",
    "MonitorConfig",
    "OffloadSection",
    "PlanConfig",
    "Recipe",
    "TrainerConfig",
    "WandbConfig",
]


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The model: random weights in the shape of a family, or a local folder of weights."""

    family: str = "qwen3_5"
    """What is built when `path` is not given: `qwen3_5` (dense hybrid), `qwen3_next` (hybrid with mixture of experts), or `gdn_stack`
    (Gated DeltaNet layers only, no MLP, no attention). A field that the family does not have (`FAMILY_FIELDS`) is an error. Given beside `path`
    it must be that of the saved model."""
    path: str | None = None
    """Local folder written by `save_pretrained`, whose sizes are its own. Nothing is downloaded. A size beside it (all but `SAVED_FIELDS`) is an
    error; the sizes of a file of random weights do not count where the command line says `model.path=FOLDER`."""
    hidden_size: int = 1024
    """H, width of the residual stream. Weights grow with H squared, retained bytes with H."""
    intermediate_size: int = 3584
    """Width of the dense MLP. Per token and block about three tensors of this width are retained."""
    num_experts: int = 512
    """`qwen3_next`: experts per block. Weights are proportional to it, computation is not."""
    num_experts_per_tok: int = 10
    """`qwen3_next`: experts that each token is sent to. Computation and retained bytes of the experts are proportional to it."""
    moe_intermediate_size: int = 512
    """`qwen3_next`: width of one expert."""
    shared_expert_intermediate_size: int = 512
    """`qwen3_next`: width of the expert that every token passes."""
    mlp_only_layers: list[int] = field(default_factory=list)
    """`qwen3_next`: blocks (from 0) with a dense MLP in place of experts."""
    num_hidden_layers: int = 24
    """Number of blocks. Time, weights and retained bytes are proportional to it."""
    full_attention_interval: int = 4
    """Every n-th block has softmax attention, the others Gated DeltaNet (4: L, L, L, F)."""
    num_attention_heads: int = 8
    """Query heads of attention blocks."""
    num_key_value_heads: int = 2
    """Key and value heads of attention blocks; must divide `num_attention_heads`."""
    head_dim: int = 256
    """Width of one attention head."""
    linear_num_key_heads: int = 16
    """Key heads of Gated DeltaNet blocks."""
    linear_num_value_heads: int = 16
    """Value heads of Gated DeltaNet blocks; a multiple of `linear_num_key_heads`."""
    linear_key_head_dim: int = 128
    """K, key width of one Gated DeltaNet head."""
    linear_value_head_dim: int = 128
    """V, value width of one Gated DeltaNet head."""
    linear_conv_kernel_dim: int = 4
    """Taps of the causal convolution."""
    vocab_size: int = 248320
    """Rows of the embedding, at least 256 (bytes). The logits are batch x tokens x vocab_size: often the largest single tensor."""
    tie_word_embeddings: bool = True
    """Share the embedding with the output projection: vocab_size x H fewer parameters."""
    dtype: str = "auto"
    """Type of the parameters: `auto` follows `trainer.precision` (bf16-true: bfloat16, else float32)."""
    keep_fp32: bool = True
    """Keep `A_log`, `dt_bias` and rotary frequencies in float32 when the rest is bfloat16, as released checkpoints do."""
    attn_implementation: str = "sdpa"
    """Attention kernel of transformers. `eager` retains batch x heads x tokens squared."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Real text as bytes: token ids 0 to 255, no tokenizer, no download. Every arm sees the same batches in the same order."""

    path: str | None = None
    """A text file, a folder of text files or a glob; by default the sources of Python's own standard library."""
    seq_len: int = 4096
    """T, tokens (bytes) per sequence. Retained bytes are proportional to it, attention time to its square."""
    batch_size: int = 1
    """Sequences per micro-batch. Retained bytes and step time are proportional to it."""
    seed: int = 0
    """Order of the sequences."""
    max_mib: int = 64
    """Read at most this much text, in MiB of host memory."""


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """What is handed to Lightning's Trainer, and the optimizer (AdamW, fused on a GPU)."""

    devices: int = 1
    """Devices, on a CPU processes. Several are DDP: each has its own `batch_size` sequences, and its own part in the record."""
    accelerator: str = "auto"
    """`cpu`, `gpu`, or `auto`: the GPU if there is one."""
    precision: str = "32-true"
    """Lightning's precision. `bf16-mixed` keeps float32 weights and casts per block; `bf16-true` halves weights and activations."""
    max_steps: int = 20
    """Optimizer steps, warm-up included."""
    accumulate_grad_batches: int = 1
    """Micro-batches per optimizer step. Time is proportional to it, memory is not."""
    val_every: int = 0
    """Validate every this many optimizer steps; 0 never. Measured steps leave validation out."""
    val_batches: int = 2
    """Micro-batches per validation; they are held out of the training text when `val_every` is set."""
    lr: float = 1e-3
    """Learning rate, constant."""
    weight_decay: float = 0.1
    """Decoupled weight decay."""
    grad_clip: float | None = None
    """Clip the gradient norm to this value; costs one pass over all gradients."""
    seed: int = 0
    """Seed of the random weights."""
    loss: str = "cross_entropy"
    """`cross_entropy` is the model's own: logits of the whole vocabulary and their float32 copy are held. `fused_linear_cross_entropy` is
    flash-linear-attention's, on a GPU: output projection and loss chunk by chunk, gradients made in the forward, no logits retained."""
    num_threads: int | None = None
    """CPU threads of each arm. Fix it on CPU: sums are bit-equal only with an equal number of threads."""


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """What `lightning-gdn run` trains with; `compare` overrides `arm`."""

    arm: str = "none"
    """Arm grammar: `none`, labels joined by `+`, `full`, `full:block:6`, `offload:gdn_core_attn@0.5`, or a rival (docs/rivals.md).
    `lightning-gdn labels` lists them with their price."""
    kernels: str = "stock"
    """`stock` calls what the model itself would call; `fused` flash-linear-attention's convolution and gated norm on a GPU (less memory,
    faster, not bit-equal to `stock`; on a CPU both are the same torch functions). One setting for all arms, the control included."""


@dataclass(frozen=True, kw_only=True)
class OffloadSection:
    """How arms with `offload:` labels move activations to the host; which labels and which share of the bytes the arm says."""

    min_bytes: int = 1048576
    """Storages below this size stay on the device: a copy costs tens of microseconds of host time whatever its size."""
    max_pinned_gib: float | None = None
    """Most pinned host memory per process, GiB; what does not fit stays on the device and is counted. null: twice what was ever in use."""
    resident_last_blocks: int = 1
    """The last blocks keep what they save: their backward comes at once, and the copies could not hide."""
    prefetch_blocks: int = 1
    """Blocks by which a reload is enqueued before its use. Each costs the moved bytes of one block on the device during backward."""
    release_blocks: int = 1
    """Further blocks that may run before a block's sources must be free. Each costs the moved bytes of one block during forward."""


@dataclass(frozen=True, kw_only=True)
class CompareConfig:
    """What `lightning-gdn compare` runs: arms x rounds fresh processes, one after the other."""

    arms: list[str] = field(default_factory=lambda: ["none", "gdn_in_proj_conv", "gdn_conv+gdn_norm_out+layernorm", "full"])
    """Arms; the control `none` is added if it is missing. `checkpoint:sweep` adds whole-block checkpointing of k of the N blocks."""
    rounds: int = 2
    """How often every arm runs. Two is the least that shows a spread; wall time is proportional to it."""


@dataclass(frozen=True, kw_only=True)
class MonitorConfig:
    """MemoryMonitor's window."""

    warmup_steps: int = 3
    """Optimizer steps left out of step time and peaks: optimizer state appears and kernels are tuned in the first ones."""


@dataclass(frozen=True, kw_only=True)
class WandbConfig:
    """Weights & Biases, used when `logger: wandb`."""

    project: str = "lightning-gdn"
    """Project of the runs."""
    entity: str | None = None
    """Team or user; the account's default if not given."""
    mode: str = "auto"
    """`online`, `offline`, or `auto`: what WANDB_MODE says, else online after `wandb login` and offline without."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One recipe. Every section may be left out; a missing field has the default given here."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    offload: OffloadSection = field(default_factory=OffloadSection)
    compare: CompareConfig = field(default_factory=CompareConfig)
    monitor: MonitorConfig = field(default_factory=MonitorConfig)
    wandb: WandbConfig = field(default_factory=WandbConfig)
    logger: str = "none"
    """Where metrics go besides the run folder: `none`, `csv` or `wandb`."""
    out_dir: str = "runs"
    """Folder in which each run and each comparison makes its own folder."""


CHOICES: dict[str, tuple[str, ...]] = {
    "model.family": ("qwen3_5", "qwen3_next", "gdn_stack"),
    "model.dtype": ("auto", "float32", "bfloat16"),
    "model.attn_implementation": ("sdpa", "eager"),
    "trainer.accelerator": ("auto", "cpu", "gpu"),
    "trainer.precision": ("32-true", "bf16-mixed", "bf16-true"),
    "trainer.loss": ("cross_entropy", "fused_linear_cross_entropy"),
    "plan.kernels": ("stock", "fused"),
    "wandb.mode": ("auto", "online", "offline"),
    "logger": ("none", "csv", "wandb"),
}
"""Closed lists of names, by dotted key."""

_EVERY_FAMILY = (
    "family hidden_size num_hidden_layers linear_num_key_heads linear_num_value_heads linear_key_head_dim linear_value_head_dim "
    "linear_conv_kernel_dim vocab_size tie_word_embeddings dtype keep_fp32"
).split()
_HYBRIDS = "path intermediate_size full_attention_interval num_attention_heads num_key_value_heads head_dim attn_implementation".split()
_EXPERTS = "num_experts num_experts_per_tok moe_intermediate_size shared_expert_intermediate_size mlp_only_layers".split()
FAMILY_FIELDS: dict[str, frozenset[str]] = {
    "qwen3_5": frozenset((*_EVERY_FAMILY, *_HYBRIDS)),
    "qwen3_next": frozenset((*_EVERY_FAMILY, *_HYBRIDS, *_EXPERTS)),
    "gdn_stack": frozenset(_EVERY_FAMILY),
}
"""By family the fields of `ModelConfig` that have a meaning for it."""

SAVED_FIELDS = frozenset("family path dtype keep_fp32 attn_implementation".split())
"""The fields of `ModelConfig` that may stand beside `path`: what a saved model leaves open, and the family (`gdn_stack` is never a saved one)."""

POSITIVE: dict[str, float] = {
    **dict.fromkeys(
        (
            "model.hidden_size model.intermediate_size model.num_hidden_layers model.full_attention_interval model.num_attention_heads "
            "model.num_key_value_heads model.head_dim model.linear_num_key_heads model.linear_num_value_heads model.linear_key_head_dim "
            "model.linear_value_head_dim model.linear_conv_kernel_dim model.vocab_size model.num_experts model.num_experts_per_tok "
            "model.moe_intermediate_size model.shared_expert_intermediate_size data.batch_size data.max_mib trainer.devices "
            "trainer.max_steps trainer.accumulate_grad_batches trainer.val_batches trainer.num_threads compare.rounds"
        ).split(),
        1,
    ),
    "data.seq_len": 2,
    "trainer.val_every": 0,
    "trainer.seed": 0,
    "data.seed": 0,
    "trainer.lr": 0.0,
    "trainer.weight_decay": 0.0,
    "trainer.grad_clip": 0.0,
    "monitor.warmup_steps": 0,
}
"""Smallest value allowed, by dotted key (of `offload` see `offload_config.field_problem`). Two tokens are the least that has a next token to
predict."""


AT_MOST: dict[str, int] = {
    **{key: 2**31 - 1 for key, least in POSITIVE.items() if type(least) is int},
    "trainer.seed": 2**63 - 1,
    "data.seed": 2**63 - 1,
    "trainer.num_threads": max(256, 4 * (os.cpu_count() or 1)),
}
"""Largest value allowed, by dotted key: what a 32-bit size or torch's generators take. More threads than that end OpenMP with a crash; a
recipe from a machine with more cores stays valid."""


def _schema() -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """The sections with the type of each key, and the top-level keys with theirs."""
    sections: dict[str, dict[str, Any]] = {}
    top: dict[str, Any] = {}
    for name, kind in typing.get_type_hints(Recipe).items():
        if dataclasses.is_dataclass(kind):
            sections[name] = typing.get_type_hints(kind)
        else:
            top[name] = kind
    return sections, top


SECTIONS, TOP = _schema()
