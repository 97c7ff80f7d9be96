"""The model of a recipe and the LightningModule that trains it. The only place of `bench` that knows transformers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from torch import Tensor, nn

from .errors import UserError
from .schema import ModelConfig, Recipe
from .stack import StackLM, next_ids

__all__ = ["BenchModule", "block_kinds", "build_model", "fused_loss", "fused_loss_problem", "make_module", "meta_model", "parameter_dtype"]

FP32_NAMES = ("A_log", "dt_bias")
"""Parameters of a Gated DeltaNet layer that are exponentiated or added before a softplus: bfloat16 would change the recurrence."""


def parameter_dtype(recipe: Recipe) -> torch.dtype:
    """Type of the parameters, `A_log` and `dt_bias` aside."""
    name = recipe.model.dtype
    if name == "auto":
        name = "bfloat16" if recipe.trainer.precision == "bf16-true" else "float32"
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def layer_kinds(model: ModelConfig) -> list[str]:
    """transformers' name of each block's kind, in order."""
    if model.family == "gdn_stack":
        return ["linear_attention"] * model.num_hidden_layers
    return ["linear_attention" if (i + 1) % model.full_attention_interval else "full_attention" for i in range(model.num_hidden_layers)]


def saved_layer_kinds(recipe: Recipe) -> list[str]:
    """transformers' name of each block's kind of the model in `model.path`.

    Raises:
        UserError: transformers cannot read its configuration.
    """
    from transformers import AutoConfig

    assert recipe.model.path is not None
    try:
        config = AutoConfig.from_pretrained(str(Path(recipe.model.path).expanduser()), local_files_only=True).get_text_config()
        return list(config.layer_types)
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise UserError(f"model.path: {recipe.model.path} is no model that transformers can read: {str(error).splitlines()[0]}") from error


def block_kinds(recipe: Recipe) -> list[str]:
    """transformers' name of each block's kind, of the model that the recipe trains."""
    return layer_kinds(recipe.model) if recipe.model.path is None else saved_layer_kinds(recipe)


def build_model(recipe: Recipe, kinds: list[str] | None = None, *, dense: Collection[int] | None = None) -> nn.Module:
    """Build the causal language model on the current default device, weights set by `trainer.seed`, `use_cache=False`.

    Args:
        kinds: build these blocks instead of the recipe's (with the recipe's dimensions and random weights, also for `model.path`).
        dense: which of `kinds`, counted from 0, have a dense MLP where the others have experts; the recipe's own if None.

    Raises:
        UserError: `model.path` cannot be loaded, or transformers refuses the dimensions.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(recipe.trainer.seed)
    if recipe.model.path is None and recipe.model.family == "gdn_stack":
        with _float32():
            model: nn.Module = StackLM(recipe.model, len(kinds or layer_kinds(recipe.model)))
    elif recipe.model.path is None:
        config = _text_config(recipe.model, kinds or layer_kinds(recipe.model))
        _set_dense(config, dense)
        model = _from_config(config)
    else:
        folder = str(Path(recipe.model.path).expanduser())
        try:
            if kinds is None:
                model = AutoModelForCausalLM.from_pretrained(
                    folder, dtype=torch.float32, attn_implementation=recipe.model.attn_implementation, local_files_only=True
                )
            else:
                config = AutoConfig.from_pretrained(folder, local_files_only=True).get_text_config()
                config.layer_types, config.num_hidden_layers = list(kinds), len(kinds)
                _set_dense(config, dense)
                config._attn_implementation = recipe.model.attn_implementation
                model = _from_config(config)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # transformers and safetensors raise many classes for a folder that is no model
            raise UserError(f"model.path: {recipe.model.path} cannot be loaded: {str(error).splitlines()[0]}") from error
    if not isinstance(model, StackLM):
        configuration: Any = model.config
        configuration.use_cache = False
    dtype = parameter_dtype(recipe)
    if dtype != torch.float32:
        with _kept_fp32(model, enabled=recipe.model.keep_fp32):
            model.to(dtype)
    return model


def meta_model(recipe: Recipe) -> nn.Module:
    """The recipe's model without memory: enough for layouts, parameter counts and label checks. Leaves the random stream alone."""
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        return build_model(recipe, block_kinds(recipe))


_SAME_FIELDS = (
    "hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim linear_num_key_heads linear_num_value_heads "
    "linear_key_head_dim linear_value_head_dim linear_conv_kernel_dim vocab_size tie_word_embeddings"
).split()
"""Fields that a recipe and transformers' configurations call the same."""
_MOE_FIELDS = "num_experts num_experts_per_tok moe_intermediate_size shared_expert_intermediate_size mlp_only_layers".split()


def _text_config(model: ModelConfig, kinds: list[str]) -> Any:
    from transformers import Qwen3_5TextConfig, Qwen3NextConfig

    cls, names = (Qwen3NextConfig, [*_SAME_FIELDS, *_MOE_FIELDS]) if model.family == "qwen3_next" else (Qwen3_5TextConfig, _SAME_FIELDS)
    try:
        config = cls(num_hidden_layers=len(kinds), layer_types=list(kinds), use_cache=False, **{name: getattr(model, name) for name in names})
    except (ValueError, TypeError) as error:
        raise UserError(f"model: transformers refuses these dimensions: {str(error).splitlines()[0]}") from error
    config._attn_implementation = model.attn_implementation
    return config


def _set_dense(config: Any, dense: Collection[int] | None) -> None:
    if dense is not None and hasattr(config, "mlp_only_layers"):
        config.mlp_only_layers, config.decoder_sparse_step = sorted(dense), 1


def _from_config(config: Any) -> nn.Module:
    from transformers import AutoModelForCausalLM

    with _float32():
        config.dtype = torch.float32
        return AutoModelForCausalLM.from_config(config, attn_implementation=config._attn_implementation)


@contextmanager
def _float32() -> Iterator[None]:
    """float32 whatever Lightning set: weights are drawn once at full precision and rounded by `build_model`, A_log never."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class _GuardedCast:
    """Wraps the function that `nn.Module._apply` maps over tensors: marked tensors may move, but keep their type."""

    def __init__(self, fn: Callable[[Tensor], Tensor], kept: set[int]) -> None:
        self.fn, self.kept = fn, kept

    def __call__(self, tensor: Tensor) -> Tensor:
        moved = self.fn(tensor)
        if id(tensor) not in self.kept or moved.dtype == tensor.dtype:
            return moved
        return tensor.to(moved.device)


def _fp32_tensors(module: nn.Module) -> set[int]:
    """Decay parameters and buffers (rotary frequencies) that are float32 now: transformers keeps both so in a bfloat16 checkpoint."""
    parameters = [p for name, p in module.named_parameters() if name.rpartition(".")[2] in FP32_NAMES]
    return {id(tensor) for tensor in (*parameters, *module.buffers()) if tensor.dtype == torch.float32}


@contextmanager
def _kept_fp32(model: nn.Module, *, enabled: bool) -> Iterator[None]:
    """Casts inside the block leave `A_log`, `dt_bias` and buffers alone."""
    if not enabled:
        yield
        return
    kept, plain = _fp32_tensors(model), type(model)._apply
    model._apply = lambda fn, recurse=True: plain(model, _GuardedCast(fn, kept), recurse)  # type: ignore[method-assign]
    try:
        yield
    finally:
        del model._apply


class BenchModule(L.LightningModule):
    """Next-byte prediction, AdamW, and a record of every loss.

    The model is built in `configure_model`, on the device that Lightning chose, from the recipe's seed. A model loaded from a folder
    stays in eval mode, as transformers leaves it; gradients do not depend on that.
    """

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.recipe = recipe
        self.model: nn.Module | None = None
        self.losses: list[Tensor] = []
        """Loss of every training micro-batch, detached, on the device: reading them would wait for it."""
        self.val_losses: list[Tensor] = []

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        # Lightning's bf16-true casts the whole module in its setup; released checkpoints keep A_log and dt_bias in float32
        kept = _fp32_tensors(self) if self.recipe.model.keep_fp32 else set()
        return super()._apply(_GuardedCast(fn, kept), recurse)

    def configure_model(self) -> None:
        if self.model is None:
            self.model = build_model(self.recipe)

    def forward(self, ids: Tensor) -> Tensor:
        """Cross entropy of the next byte; `ids` [B, T], returns a scalar in nats per byte."""
        assert self.model is not None, "configure_model runs first"
        if self.recipe.trainer.loss == "fused_linear_cross_entropy":
            return fused_loss(self.model, ids)
        loss: Tensor = self.model(input_ids=ids, labels=ids).loss
        return loss

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self(batch)
        self.losses.append(loss.detach())
        self.log("train/loss", loss.detach(), prog_bar=True, batch_size=batch.shape[0])
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        config = self.recipe.trainer
        on_gpu = next(self.parameters()).device.type == "cuda"
        return torch.optim.AdamW(self.parameters(), lr=config.lr, weight_decay=config.weight_decay, fused=on_gpu or None)


class ValidatedModule(BenchModule):
    """With validation; a class of its own, because Lightning warns of a `validation_step` without validation data."""

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        loss = self(batch)
        self.val_losses.append(loss.detach())
        self.log("val/loss", loss, prog_bar=True, batch_size=batch.shape[0], sync_dist=True)


def fused_loss_problem(device: str) -> str | None:
    """Why flash-linear-attention's loss cannot run on this kind of device, or None."""
    remedy = "write trainer.loss=cross_entropy"
    if device != "cuda":
        return f"trainer.loss: fused_linear_cross_entropy runs on a GPU only, this is {device}; {remedy}"
    try:
        import fla.modules.fused_linear_cross_entropy  # noqa: F401
    except ImportError as error:
        return f"trainer.loss: fused_linear_cross_entropy needs flash-linear-attention ({error}); pip install 'lightning-gdn[cuda]', or {remedy}"
    return None


def fused_loss(model: Any, ids: Tensor) -> Tensor:
    """flash-linear-attention's cross entropy of the next byte, from hidden states and the weight of the output projection.

    Raises:
        UserError: not on a GPU, or flash-linear-attention is missing.
    """
    problem = fused_loss_problem(ids.device.type)
    if problem:
        raise UserError(problem)
    from fla.modules.fused_linear_cross_entropy import FusedLinearCrossEntropyLoss

    hidden, weight = model.base_model(input_ids=ids).last_hidden_state, model.lm_head.weight
    loss = FusedLinearCrossEntropyLoss()
    if not torch.is_autocast_enabled("cuda"):
        return loss(hidden, next_ids(ids), weight)
    dtype = torch.get_autocast_dtype("cuda")
    with torch.autocast("cuda", enabled=False):  # these kernels do not know autocast; a Linear would cast both
        return loss(hidden.to(dtype), next_ids(ids), weight.to(dtype))


def make_module(recipe: Recipe) -> BenchModule:
    """The LightningModule of a recipe."""
    return ValidatedModule(recipe) if recipe.trainer.val_every else BenchModule(recipe)
