"""The adapter's own promises: no tensor in a closure, versions told apart rightly, and the forward's arguments as transformers passes them."""

from __future__ import annotations

import inspect
import re

import pytest
import torch
import transformers
import transformers.models.qwen3_5.modeling_qwen3_5 as modeling
from transformers import DynamicCache

from lightning_gdn.adapters import hf_regions, qwen3_5, qwen3_next
from lightning_gdn.adapters.base import imported_adapters
from lightning_gdn.apply import apply_plan
from lightning_gdn.inspection import inspect_model
from lightning_gdn.regions import REGIONS
from lightning_gdn.tape import RegionFn
from tests.models import tiny_batch, tiny_qwen3_5

FAMILY = qwen3_5.FAMILY
REGION_FUNCTIONS = [value for value in vars(FAMILY.regions).values() if isinstance(value, RegionFn)]
NEXT_IN_PROJ = qwen3_next.FAMILY.regions.in_proj


@pytest.mark.parametrize("fn", [*REGION_FUNCTIONS, NEXT_IN_PROJ], ids=lambda fn: f"{fn.call.__module__.rpartition('.')[2]}.{fn.name}")
def test_region_functions_close_over_nothing(fn: RegionFn) -> None:
    """A region function that holds a tensor is a permanent leak when a backward never comes."""
    assert inspect.isfunction(fn.call)
    assert fn.call.__closure__ is None
    home = next(module for module in (hf_regions, qwen3_5, qwen3_next) if module.__name__ == fn.call.__module__)
    assert getattr(home, fn.call.__name__) is fn.call, "a function of the module's top level"
    assert fn.call.__defaults__ is None
    assert fn.call.__kwdefaults__ is None
    assert not any(isinstance(value, torch.Tensor) for value in inspect.getclosurevars(fn.call).globals.values())


def test_regions_name_real_parts_of_the_modules() -> None:
    model = tiny_qwen3_5()
    block, attention = model.model.layers[0], model.model.layers[3]
    owners = [block.linear_attn, attention.self_attn, block.mlp, block]
    for fn in REGION_FUNCTIONS:
        assert fn.name in REGIONS
        assert any(set(fn.modules) <= set(o._modules) and set(fn.params) <= set(o._parameters) for o in owners), fn.name
    # Every parameter of a block belongs to a region, or an edit of it between forward and backward would go unnoticed.
    named = {part for fn in REGION_FUNCTIONS if fn.name != "moe" for part in (*fn.modules, *fn.params)}
    for name, _ in [*block.named_parameters(), *attention.named_parameters()]:
        assert named & set(name.split(".")), name


def test_layouts_list_what_the_forward_runs() -> None:
    model = tiny_qwen3_5()
    with apply_plan(model, "full") as applied:
        model(**tiny_batch(2, 9)).loss.backward()
    for layout in inspect_model(model).layouts:
        assert tuple(row.region for row in applied.ledger.rows() if row.block == layout.name) == layout.regions


def test_what_differs_between_versions_is_read_off_rightly() -> None:
    """transformers renamed the cache argument in 5.24 and dropped the head repeat from the layer in 5.23."""
    version = tuple(int(part) for part in re.findall(r"\d+", transformers.__version__)[:2])
    assert (FAMILY.mixer_cache == "cache") == (version >= (5, 24))
    assert (version < (5, 23)) == FAMILY.repeats_heads
    parameters = inspect.signature(inspect.unwrap(FAMILY.block.forward)).parameters
    assert ("cache" in parameters) == FAMILY.new_cache_name


def test_the_family_is_found_once_its_modeling_module_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    before = [a.name for a in imported_adapters()]  # others are there as well if an earlier test imported them
    assert {"qwen3_5", "qwen3_next"} <= set(before)
    monkeypatch.delitem(sys.modules, modeling.__name__)
    assert [a.name for a in imported_adapters()] == [name for name in before if name != "qwen3_5"]


@pytest.mark.parametrize("name", ["past_key_values", "cache"])
def test_a_cache_of_the_caller_under_either_name(name: str) -> None:
    if name == "cache" and not FAMILY.new_cache_name:
        pytest.skip("this transformers knows past_key_values only")
    model = tiny_qwen3_5()
    batch = tiny_batch(2, 33)

    def run() -> tuple[list[torch.Tensor | None], DynamicCache]:
        model.zero_grad()
        cache = DynamicCache(config=model.config)
        with pytest.warns(FutureWarning, match="cache") if name == "past_key_values" and FAMILY.new_cache_name else _nothing():
            model(**batch, **{name: cache}, use_cache=True).loss.backward()
        return [p.grad for p in model.parameters()], cache

    want, want_cache = run()
    with apply_plan(model, "full"):
        got, cache = run()
    assert all(a is b if a is None or b is None else torch.equal(a, b) for a, b in zip(got, want, strict=True))
    for mine, theirs in zip(cache.layers, want_cache.layers, strict=True):
        states = [n for n in ("keys", "values") if isinstance(getattr(theirs, n, None), torch.Tensor)]
        assert all(torch.equal(getattr(mine, n), getattr(theirs, n)) for n in states)
    assert cache.get_seq_length() == want_cache.get_seq_length() == 33, "written once"


class _nothing:
    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def test_training_on_top_of_a_filled_cache_does_what_the_untouched_model_does() -> None:
    """A prefix without gradients, then a step that continues from its states: transformers edits a saved state in place, PyTorch says so."""
    model = tiny_qwen3_5()
    ids = tiny_batch(2, 40)["input_ids"]

    def run() -> list[torch.Tensor | None]:
        model.zero_grad()
        cache_name = "cache" if FAMILY.new_cache_name else "past_key_values"
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(input_ids=ids[:, :20], use_cache=True, **{cache_name: cache})
        out = model(input_ids=ids[:, 20:], use_cache=True, **{cache_name: cache})
        out.logits.square().mean().backward()
        return [p.grad for p in model.parameters()]

    usual = "modified by an inplace operation"
    with pytest.raises(RuntimeError, match=usual):
        run()
    for label in ("gdn_conv+gdn_norm_out+layernorm", "full", "core_attn"):
        with apply_plan(model, label):
            for _ in range(2):
                with pytest.raises(RuntimeError, match=usual):
                    run()


def test_a_block_called_with_positional_arguments() -> None:
    model = tiny_qwen3_5()
    embeddings = model.get_input_embeddings()(tiny_batch(2, 9)["input_ids"]).detach()
    positions = torch.arange(9).view(1, 1, -1).expand(3, 2, -1)
    rotary = model.model.rotary_emb(embeddings, positions)
    for layer in model.model.layers[2:]:
        want = layer(embeddings, rotary, None, positions[0])
        with apply_plan(model, "full"):
            got = layer(embeddings, rotary, None, positions[0])
            again = layer(hidden_states=embeddings, position_embeddings=rotary, attention_mask=None, position_ids=positions[0])
        assert torch.equal(got, want)
        assert torch.equal(again, want)
