"""Blocks of `lightning_gdn.models.GDNStack`: the model's own step functions, run through the tape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels.gated_norm import gated_rms_norm, gated_rms_norm_again
from ..models import gdn_stack as model
from ..regions import GDN, BlockLayout
from ..tape import RegionFn, Tape
from .base import Adapter

__all__ = ["ADAPTER"]


def _norm_out(mixer: model.GDNMixer, o: Tensor, z: Tensor) -> Tensor:
    """`model.norm_out`, on CUDA by a launch of its kernel."""
    if o.device.type != "cuda":
        return model.norm_out(mixer, o, z)
    width = mixer.head_v_dim
    return gated_rms_norm(o.reshape(-1, width), z.reshape(-1, width), mixer.norm_weight, mixer.eps).reshape(z.shape)


def _norm_out_again(mixer: model.GDNMixer, o: Tensor, z: Tensor) -> tuple[Tensor, list[Tensor]] | None:
    """See `RegionFn.again`."""
    if o.device.type != "cuda":
        return None
    width = mixer.head_v_dim
    found = gated_rms_norm_again(o.reshape(-1, width), z.reshape(-1, width), mixer.norm_weight, mixer.eps)
    return None if found is None else (found[0].reshape(z.shape), found[1])


_INPUT_NORM = RegionFn(name="input_norm", call=model.input_norm, params=("norm_weight",))
_IN_PROJ = RegionFn(name="in_proj", call=model.in_proj, modules=("in_proj",))
_CONV = RegionFn(name="conv", call=model.conv, params=("conv_weight",))
_PREP = RegionFn(name="prep", call=model.prep)
_GATES = RegionFn(name="gates", call=model.gates, params=("A_log", "dt_bias"))
_DELTA_RULE = RegionFn(name="delta_rule", call=model.delta_rule)
_NORM_OUT = RegionFn(name="norm_out", call=_norm_out, params=("norm_weight",), again=_norm_out_again)
_OUT_PROJ = RegionFn(name="out_proj", call=model.out_proj, modules=("out_proj",))
_RESIDUAL = RegionFn(name="mixer_residual", call=model.residual)
REGIONS = (_INPUT_NORM, _IN_PROJ, _CONV, _PREP, _GATES, _DELTA_RULE, _NORM_OUT, _OUT_PROJ, _RESIDUAL)


def _mixer_forward(mixer: model.GDNMixer, tape: Tape, x: Tensor) -> Tensor:
    mixed, z, b, a = tape.run(_IN_PROJ, mixer, x)
    mixed = tape.run(_CONV, mixer, mixed)
    q, k, v = tape.run(_PREP, mixer, mixed)
    g, beta = tape.run(_GATES, mixer, b, a)
    o = tape.run(_DELTA_RULE, mixer, q, k, v, g, beta)
    del mixed, b, a, q, k, v, g, beta  # a local would hold what the tape lets go
    x = tape.run(_NORM_OUT, mixer, o, z)
    del o, z
    return tape.run(_OUT_PROJ, mixer, x)


class GDNStackAdapter(Adapter):
    """See `Adapter`."""

    name = "gdn_stack"
    block_class = "GDNBlock"

    def matches(self, module: nn.Module) -> bool:
        """A block and mixer with the forward of their classes."""
        if not isinstance(module, model.GDNBlock) or type(module).forward is not model.GDNBlock.forward:
            return False
        return type(module.mixer).forward is model.GDNMixer.forward

    def layout(self, name: str, block: nn.Module) -> BlockLayout:
        """See `Adapter.layout`."""
        return BlockLayout(name=name, kind=GDN, regions=tuple(fn.name for fn in REGIONS))

    def block_forward(self, block: Any, tape: Tape, *args: Any, **kwargs: Any) -> Tensor:
        """See `Adapter.block_forward`."""
        return _block_forward(block, tape, *args, **kwargs)

    def parts(self, block: Any) -> list[tuple[nn.Module, Callable[..., Any]]]:
        """See `Adapter.parts`."""
        return [(block.mixer, _mixer_forward)]

    def kernels(self, block: nn.Module, device: torch.device, kernels: str) -> dict[str, str]:
        """See `Adapter.kernels`. The stack has one set of kernels per device, whatever the option says."""
        if model.operations(device).__name__.endswith("torch_ops"):
            return {"conv": "torch.conv1d", "delta_rule": "torch.chunk_gated_delta_rule", "norm_out": "torch.gated_rms_norm"}
        return {"conv": "fla.causal_conv1d", "delta_rule": "fla.chunk_gated_delta_rule", "norm_out": "fla.rms_norm_gated"}


def _block_forward(block: model.GDNBlock, tape: Tape, hidden_states: Tensor) -> Tensor:
    x = tape.run(_INPUT_NORM, block, hidden_states)
    x = block.mixer(x)
    return tape.run(_RESIDUAL, block, hidden_states, x)


ADAPTER = GDNStackAdapter()
