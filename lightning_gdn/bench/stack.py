"""`GDNStack` as a language model: an embedding in front, a norm and an output projection behind."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..models import GDNStack
from .schema import ModelConfig

__all__ = ["StackLM", "StackOutput"]

EPS = 1e-6


@dataclass(frozen=True, kw_only=True)
class StackOutput:
    """What a forward gives, by the names that transformers uses."""

    last_hidden_state: Tensor
    """[B, T, H], after the last norm."""
    logits: Tensor | None = None
    """[B, T, vocabulary]."""
    loss: Tensor | None = None
    """Mean cross entropy of the next token, in nats."""


class StackTrunk(nn.Module):
    """Embedding, stack and norm: ids [B, T] -> hidden states [B, T, H]."""

    def __init__(self, model: ModelConfig, layers: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(model.vocab_size, model.hidden_size)
        self.stack = GDNStack(
            num_layers=layers,
            hidden_size=model.hidden_size,
            num_k_heads=model.linear_num_key_heads,
            num_v_heads=model.linear_num_value_heads,
            head_k_dim=model.linear_key_head_dim,
            head_v_dim=model.linear_value_head_dim,
            conv_kernel=model.linear_conv_kernel_dim,
            eps=EPS,
        )
        self.norm = nn.RMSNorm(model.hidden_size, eps=EPS)
        nn.init.normal_(self.embed_tokens.weight, std=0.02)

    def forward(self, input_ids: Tensor) -> StackOutput:
        return StackOutput(last_hidden_state=self.norm(self.stack(self.embed_tokens(input_ids))))


class StackLM(nn.Module):
    """A causal language model of `layers` Gated DeltaNet layers, called as one of transformers is."""

    def __init__(self, model: ModelConfig, layers: int) -> None:
        super().__init__()
        self.model = StackTrunk(model, layers)
        self.lm_head = nn.Linear(model.hidden_size, model.vocab_size, bias=False)
        nn.init.normal_(self.lm_head.weight, std=0.02)
        if model.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    @property
    def base_model(self) -> StackTrunk:
        """The part without the output projection."""
        return self.model

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> StackOutput:
        """ids [B, T] -> logits; with `labels` (the ids again, not shifted) also the loss, in float32."""
        hidden = self.model(input_ids).last_hidden_state
        logits = self.lm_head(hidden)
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits.flatten(0, 1).float(), next_ids(labels).flatten())
        return StackOutput(last_hidden_state=hidden, logits=logits, loss=loss)


def next_ids(ids: Tensor) -> Tensor:
    """[B, T] -> the id that follows each, -100 (left out of the loss) after the last: logits need no slice, which would be a copy."""
    return torch.cat((ids[:, 1:], ids.new_full((ids.shape[0], 1), -100)), dim=1)
