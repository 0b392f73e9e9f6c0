"""The choice of an operation keeps its rules, and the registry is open to new operations."""

from functools import partial

import jax.numpy as jnp
import pytest
from conftest import MESHES, ONE_DEVICE, tensor_parallel

from configs.reading import ConfigError
from configs.schema import make_config
from model.attention import registry
from model.attention.api import OperationRegistry
from model.attention.metadata import OperationMetadata
from model.attention.registry import (
    ALL,
    AUTO,
    Capabilities,
    Request,
    backends_of,
    blockwise_names,
    choose_for_layer,
    choose_operation,
    operation_for_generation,
    operation_names,
    register,
)
from model.attention.ring import row_order
from model.config import ModelConfig
from model.mla_config import MLAConfig
from parallel.sharding.axes import MODE_DECODE


def request(*features: str, **changes) -> Request:
    base = {"platform": "cpu", "dtype": "float32", "length": 4096, "head_dim": 128, "heads": 8}
    return Request(features=frozenset(features), **{**base, **changes})


CUDNN = {"platform": "gpu", "dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("asked", "chosen", "not_chosen"),
    [
        (request("segment_ids"), "flash_attn2 native", "ring native, ulysses native (sp is one"),
        (
            request("segment_ids", length=64),
            "vanilla native",
            "blocksparse native (faster only for rows of at least 512 tokens, here 64)",
        ),
        (request("segment_ids", platform="tpu"), "flash_attn2 tpu", "sp is one device"),
        # The kernel does not support a bias, but the native backend does.
        (
            request("bias", platform="tpu"),
            "flash_attn2 native",
            "flash_attn2 tpu (has no bias)",
        ),
        (
            request(platform="tpu", head_dim=80),
            "flash_attn2 native",
            "flash_attn2 tpu (needs heads of a multiple of 128, not 80)",
        ),
        (request("prefix", "segment_ids"), "blocksparse native", "has no prefix"),
        (request("sequence_parallel", sp=4), "ring native", None),
        (request("gqa", "window", **CUDNN), "cudnn gpu", "sp is one device"),
        (
            request("gqa", head_dim=192, **CUDNN, compute_capability=(8, 9)),
            "flash_attn2 native",
            "cudnn gpu, flash_attn2 gpu (takes heads of at most 128 on this device, not 192)",
        ),
        (
            request("gqa", head_dim=192, **CUDNN, compute_capability=(10, 0)),
            "cudnn gpu",
            "sp is one device",
        ),
        # cuDNN supports either feature, but not both at once.
        (
            request("bidirectional", "window", **CUDNN),
            "flash_attn2 native",
            "cudnn gpu, flash_attn2 gpu (has no bidirectional with window)",
        ),
    ],
)
def test_auto_takes_the_most_preferred_and_says_why_not_the_others(
    asked, chosen, not_chosen, monkeypatch
) -> None:
    monkeypatch.setattr(registry, "find_spec", lambda name: None)  # no optional package
    choice = choose_operation(asked)
    assert f"{choice.name} {choice.backend.name}" == chosen
    if not_chosen is None:
        assert choice.reason == f"{choice.backend.name} backend"
    else:
        assert choice.reason.startswith(f"{choice.backend.name} backend; not chosen: ")
        assert not_chosen in choice.reason


def test_a_named_operation_falls_back_to_its_native_backend() -> None:
    both = request("block_mask", "segment_ids", platform="tpu")
    assert choose_operation(both, "blocksparse").backend.name == "native"


@pytest.mark.parametrize(
    ("asked", "name", "message"),
    [
        (request("soft_cap"), "sdpa", r"operation sdpa cannot .*\(native: has no soft_cap\)"),
        (
            request("sequence_parallel", sp=8, heads=4),
            "ulysses",
            r"ulysses cannot .* divisible by sp=8, not 4",
        ),
        (request(dtype="float64"), "auto", r"no attention operation .* vanilla native.* \(takes"),
        (request(), "vanila", r"unknown attention operation 'vanila'; use one of ring, .*vanilla"),
    ],
)
def test_what_cannot_serve_is_refused_with_what_every_backend_lacks(asked, name, message) -> None:
    with pytest.raises(ValueError, match=message):
        choose_operation(asked, name)


def test_operations_that_work_in_blocks_are_listed_by_preference() -> None:
    assert blockwise_names()[:4] == ("ring", "ulysses", "flash_attn2", "blocksparse")


def test_a_decorated_function_is_an_operation(monkeypatch) -> None:
    """`auto` prefers it, metadata and configuration take its block sizes, a call runs it."""
    everything = {name: dict(backends) for name, backends in registry._OPERATIONS.items()}
    monkeypatch.setattr(registry, "_OPERATIONS", everything)

    @register("toy", capabilities=Capabilities(features=ALL, preference=1000, blockwise=True))
    def toy(q_BLHh, k_BTKh, v_BTKh, inputs, spec):
        return v_BTKh * spec.block_q

    assert operation_names()[0] == "toy" and blockwise_names()[0] == "toy"
    assert choose_operation(request()).backend.function is toy
    manager = tensor_parallel(ONE_DEVICE).manager
    metadata = OperationMetadata(
        jnp.float32, partition_manager=manager, operation_configs={"toy": {"block_q": 3}}
    )
    ones = jnp.ones((1, 4, 2, 8))
    assert (OperationRegistry.create("toy", metadata)(ones, ones, ones) == 3).all()
    assert backends_of("toy")[0].name == "native"


def test_a_model_chooses_per_layer_type_and_mode() -> None:
    config = ModelConfig(
        layer_types=("sliding_attention", "full_attention"), sliding_window=8, dtype="float32"
    )
    manager = tensor_parallel(MESHES["tp4-sp2"]).manager
    long = choose_for_layer(config, "sliding_attention", manager, length=8192)
    short = choose_for_layer(config, "full_attention", manager, length=64)
    assert (long.name, short.name) == ("ring", "vanilla")
    decode = choose_for_layer(config, "full_attention", manager, length=1, mode=MODE_DECODE)
    assert decode.name == "flash_attn2" and decode.backend.capabilities.merges_keys
    # Keys that are split over sp are merged, not gathered, for every type of layer.
    chunks = ModelConfig(
        layer_types=("chunked_attention",), attention_chunk_size=8, dtype="float32"
    )
    decode = choose_for_layer(chunks, "chunked_attention", manager, length=1, mode=MODE_DECODE)
    assert decode.name == "flash_attn2" and decode.backend.capabilities.merges_keys
    for paged_length, name in ((1, "ragged_page_attention_v2"), (4, "ragged_page_attention_v3")):
        paged = choose_for_layer(
            config, "full_attention", manager, length=paged_length, mode=MODE_DECODE, paged=True
        )
        assert paged.name == name


def test_operations_of_ours_replace_each_other_in_generation_and_those_of_users_do_not(
    monkeypatch,
) -> None:
    everything = {name: dict(backends) for name, backends in registry._OPERATIONS.items()}
    monkeypatch.setattr(registry, "_OPERATIONS", everything)
    assert {operation_for_generation(name) for name in (*operation_names(), AUTO)} == {AUTO}
    for name, features in (("own", ALL), ("no_cache", ALL - {"decode"})):
        can = Capabilities(features=features)
        register(name, capabilities=can)(lambda q, k, v, inputs, spec: q)
        assert operation_for_generation(name) == name
    manager = tensor_parallel(ONE_DEVICE).manager
    choose = partial(choose_for_layer, layer_type="full_attention", manager=manager, length=1)
    own, none = (ModelConfig(attention=name) for name in ("own", "no_cache"))
    assert choose(own, mode=MODE_DECODE).name == choose(own).name == choose(own).backend.operation
    with pytest.raises(ValueError, match=r"no_cache cannot serve .*has no decode"):
        choose(none, mode=MODE_DECODE)
    latents = ModelConfig(attention="own", mla=MLAConfig(), num_key_value_heads=8)
    with pytest.raises(ValueError, match=r"own cannot serve .*has no shared_values"):
        choose(latents, mode=MODE_DECODE)
    for model, features in (
        ({"attention": "no_cache"}, "decode"),
        ({"attention": "own", "mla": {}, "num_key_value_heads": 8}, "decode and shared_values"),
    ):
        settings = {"model": model, "mesh": {"tp": 1}}
        with pytest.raises(ConfigError, match=f"cannot generate text without {features} among"):
            make_config(settings)
        make_config({**settings, "training": {"sample_tokens": 0}})


def test_only_rows_of_several_documents_ask_for_segments(monkeypatch) -> None:
    everything = {name: dict(backends) for name, backends in registry._OPERATIONS.items()}
    monkeypatch.setattr(registry, "_OPERATIONS", everything)
    can = Capabilities(features=frozenset({"gqa"}))
    register("one_document", capabilities=can)(lambda q, k, v, inputs, spec: q)
    config, manager = ModelConfig(attention="one_document"), tensor_parallel(ONE_DEVICE).manager
    choose = partial(choose_for_layer, config, "full_attention", manager, length=64)
    assert choose(documents=False).name == "one_document"
    with pytest.raises(ValueError, match="has no segment_ids"):
        choose()


def test_rows_are_in_zigzag_order_if_a_layer_is_a_ring_and_every_choice_allows_it() -> None:
    manager, config = tensor_parallel(MESHES["tp4-sp2"]).manager, ModelConfig(dtype="float32")
    ring = choose_for_layer(config, "full_attention", manager, length=8192)
    flash = choose_operation(request())
    fixed_order = choose_operation(request("window", **CUDNN))
    zigzag, window = [0, 1, 6, 7, 2, 3, 4, 5], {"sliding_window": 4}

    def order(full, sliding, mesh="tp4-sp2", length=8, **changes):
        given = {"full_attention": full, "sliding_attention": sliding}
        choices = {kind: choice for kind, choice in given.items() if choice is not None}
        other = tensor_parallel(MESHES[mesh]).manager
        return row_order(choices, config.model_copy(update=changes), other, length)

    assert order(ring, flash).tolist() == order(ring, ring, **window).tolist() == zigzag
    assert order(None, ring, sliding_window=8).tolist() == zigzag
    assert order(flash, None) is None
    assert order(flash, ring, **window) is None  # no layer sees the whole row around the ring
    assert order(ring, fixed_order) is None
    assert order(ring, None, zigzag=False) is None
    assert order(ring, None, length=6) is None
    assert order(ring, None, mesh="tp8") is None
