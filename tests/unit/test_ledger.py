"""The ledger: when it counts, what its figures add up to, and what it says as data."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from torch import nn

from lightning_gdn.apply import apply_plan, instrument
from lightning_gdn.ledger import Ledger, LedgerRow
from tests.models import tiny_batch, tiny_qwen3_5


@pytest.fixture
def model() -> nn.Module:
    return tiny_qwen3_5()


def test_it_fills_in_the_first_forward_with_gradients_and_only_there(model: nn.Module) -> None:
    with apply_plan(model, "gdn_conv+layernorm") as applied:
        ledger = applied.ledger
        assert ledger.retained_bytes is None
        assert not ledger.complete
        with torch.no_grad():
            model(**tiny_batch(2, 65))
        assert ledger.retained_bytes is None
        model(**tiny_batch(2, 65)).loss.backward()
        assert ledger.complete
        first = ledger.as_dict()
        model(**tiny_batch(2, 9)).loss.backward()
        assert ledger.as_dict() == first, "a later step changes nothing"
        ledger.arm()
        assert ledger.retained_bytes is None
        model(**tiny_batch(2, 65)).loss.backward()
        assert ledger.as_dict() == first, "the same step gives the same figures"


def test_the_second_forward_before_a_backward_is_not_counted(model: nn.Module) -> None:
    with apply_plan(model, "gdn_conv") as applied:
        one = model(**tiny_batch(2, 65)).loss
        two = model(**tiny_batch(2, 65)).loss
        (one + two).backward()
    assert {row.calls for row in applied.ledger.rows()} == {1}
    assert {row.replays for row in applied.ledger.rows()} == {0, 1}


def test_a_forward_that_raised_is_counted_anew(model: nn.Module) -> None:
    with apply_plan(model, "gdn_conv") as applied:
        handle = model.model.layers[1].linear_attn.out_proj.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(**tiny_batch(2, 65))
        handle.remove()
        model(**tiny_batch(2, 65)).loss.backward()
    assert applied.ledger.complete
    assert {row.calls for row in applied.ledger.rows() if row.block.endswith("1")} == {1}


def test_sums(model: nn.Module) -> None:
    with apply_plan(model, "gdn_conv+gdn_norm_out+layernorm+mlp") as applied:
        model(**tiny_batch(2, 65)).loss.backward()
    ledger, rows = applied.ledger, applied.ledger.rows()
    assert ledger.kept_bytes == sum(row.kept_bytes for row in rows) > 0
    assert ledger.discarded_bytes == sum(row.discarded_bytes for row in rows) > 0
    assert ledger.replay_input_bytes == sum(row.replay_input_bytes for row in rows) > 0
    assert ledger.retained_bytes == ledger.kept_bytes + ledger.replay_input_bytes
    assert sum(row.freed_bytes for row in rows) == ledger.discarded_bytes, "what is gone, a replay brings back"
    by_region = ledger.by_region()
    assert sum(row.kept_bytes for row in by_region.values()) == ledger.kept_bytes
    assert by_region["conv"].calls == 3
    assert by_region["qkv"].calls == 1
    assert list(by_region)[:5] == ["input_norm", "in_proj", "conv", "prep", "gates"], "the order of the forward"
    assert {row.block for row in rows} == set(ledger.blocks)


def test_as_dict_is_json_with_integers(model: nn.Module) -> None:
    with apply_plan(model, "layernorm") as applied:
        model(**tiny_batch(2, 65)).loss.backward()
    data = json.loads(json.dumps(applied.ledger.as_dict()))
    assert data == applied.ledger.as_dict()
    assert data["blocks"] == 4
    assert all(type(value) is int for row in data["by_region"].values() for value in row.values())
    assert data["by_region"]["input_norm"]["replays"] == 4


def test_an_empty_ledger_says_nothing_rather_than_zero() -> None:
    ledger = Ledger(())
    assert ledger.retained_bytes is None
    assert not ledger.complete
    assert ledger.as_dict()["retained_bytes"] is None
    assert ledger.probe("x", nn.Linear(1, 1)) is None


def test_rows_add_up_by_field() -> None:
    names = [field.name for field in dataclasses.fields(LedgerRow) if field.name not in ("block", "region")]
    row = LedgerRow(block="*", region="conv", **dict.fromkeys(names, 1))
    row.add(LedgerRow(block="a", region="conv", **{name: 10 * place for place, name in enumerate(names)}))
    assert row == LedgerRow(block="*", region="conv", **{name: 10 * place + 1 for place, name in enumerate(names)})


def test_instrument_ends_with_its_block(model: nn.Module) -> None:
    with instrument(model) as ledger:
        model(**tiny_batch(2, 65)).loss.backward()
    assert not any("forward" in module.__dict__ for module in model.modules())
    assert ledger.complete
    assert ledger.discarded_bytes == 0
    assert {row.replays for row in ledger.rows()} == {0}


def test_a_frozen_model_retains_nothing(model: nn.Module) -> None:
    model.requires_grad_(False)
    with instrument(model) as ledger:
        model(**tiny_batch(2, 65))
    assert ledger.complete
    assert ledger.retained_bytes == 0
    with apply_plan(model, "full") as applied:
        model(**tiny_batch(2, 65))
    assert (applied.ledger.retained_bytes, applied.ledger.discarded_bytes) == (0, 0)
