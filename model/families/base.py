"""Hugging Face model families: their registry, and config.json to `ModelConfig` and back.

A family is one file with two tables: rules for the keys of config.json, and entries for tensors.
Nothing in this package reads or writes a file.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from model.config import ModelConfig, MoEConfig
from model.families.tensors import Entry
from model.router import ROUTERS
from registry import Registry

Keys = Mapping[str, Any]
"""The content of config.json, or a part of it."""
Fields = dict[str, Any]
"""Values of `ModelConfig` by dotted path, such as `moe.num_experts`."""

IGNORED = frozenset(
    """
    architectures model_type transformers_version torch_dtype dtype quantization_config
    _name_or_path name_or_path auto_map tokenizer_class prefix problem_type id2label label2id
    bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id
    use_cache cache_implementation attn_implementation _attn_implementation torchscript
    output_router_logits output_attentions output_hidden_states return_dict
    max_position_embeddings max_length initializer_range pretraining_tp gradient_checkpointing
    resid_pdrop embd_pdrop router_jitter_noise router_aux_loss_coef aux_loss_alpha seq_aux ep_size
    is_encoder_decoder tie_encoder_decoder chunk_size_feed_forward
    is_llama_config rope_interleaved num_nextn_predict_layers num_mtp_layers
    unsloth_version unsloth_fixed transformers.js_config
    """.split()
)
"""Keys of config.json that do not change what the model computes for given tokens: names, token
ids, caches, outputs, initial values, and losses and dropout of training."""

NOT_MATHEMATICS = frozenset(
    """
    pad_vocab_to_multiple_of attention_dropout initializer_range mup_base_width dtype param_dtype
    matmul_dtype matmul_products matmul_scales attention
    operation_configs scan_ring_attention zigzag mtp_loss_weights remat loss_chunk
    moe.router_aux_loss_coef moe.router_z_loss_coef moe.bias_update_speed moe.exchange
    moe.capacity_factor moe.exchange_chunks moe.dispatch_dtype moe.grouped_matmul moe.expert_rule
    """.split()
)
"""Fields of `ModelConfig` that config.json does not hold: how a model is computed and trained."""


class FamilyError(ValueError):
    """Error for a model that cannot be read from or written to Hugging Face's format; one line."""


class Rule(Protocol):
    """Keys of config.json that together give some fields of `ModelConfig`."""

    @property
    def names(self) -> tuple[str, ...]:
        """The keys that this rule reads."""

    def read(self, keys: Keys, fields: Fields) -> None:
        """Add the fields that the keys give. Raises: FamilyError for an unsupported value."""

    def write(self, model: ModelConfig, keys: dict[str, Any]) -> None:
        """Add the keys that give the fields of this model."""


@dataclass(frozen=True)
class Family:
    """A model family: the correspondence of its config.json and its tensors to ours.

    architecture: class name in `architectures`. model_type: its `model_type`.
    rules: readers and writers of the keys of config.json. tensors: the tensor table.
    fields: values of `ModelConfig` that all its models share and that have no key.
    """

    architecture: str
    model_type: str
    rules: Sequence[Rule]
    tensors: Sequence[Entry]
    fields: Mapping[str, Any]

    @property
    def is_sparse(self) -> bool:
        """Whether its models are mixtures of experts."""
        return "moe.router" in self.fields

    def read(self, keys: Keys) -> Fields:
        """Return the fields of `ModelConfig` that config.json gives.

        Raises:
            FamilyError: a key is missing, or not supported.
        """
        known = IGNORED.union(*(rule.names for rule in self.rules))
        unknown = [name for name, value in keys.items() if name not in known and value is not None]
        if unknown:
            listed = ", ".join(f"{name}={keys[name]!r}" for name in unknown)
            raise FamilyError(
                f"config.json: {listed} is not supported for {self.architecture} and may change "
                "what the model computes; if it does not, remove it from config.json"
            )
        fields: Fields = dict(self.fields)
        for rule in self.rules:
            rule.read(keys, fields)
        if self.is_sparse:
            fields["moe.router_aux_loss_coef"] = _balance_coefficient(keys, fields)
        return fields

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Return config.json without the keys that do not affect the mathematics.

        Raises:
            FamilyError: this family cannot express the model.
        """
        keys, missed = self._express(model)
        if missed:
            raise FamilyError(f"{self.architecture} cannot express {', '.join(missed)}")
        return keys

    def _express(self, model: ModelConfig) -> tuple[dict[str, Any], list[str]]:
        """Return (config.json, the fields of the model that it does not give)."""
        keys: dict[str, Any] = {
            "architectures": [self.architecture],
            "model_type": self.model_type,
        }
        for rule in self.rules:
            rule.write(model, keys)
        wanted, got = mathematics(model), mathematics(model_config(self.read(keys)))
        names = sorted(wanted.keys() | got.keys())
        missed = [name for name in names if wanted.get(name) != got.get(name)]
        return keys, [f"model.{name}={wanted.get(name)}" for name in missed]


FAMILIES: Registry[Family] = Registry("architecture")


def register(family: Family) -> Family:
    """Register a family under its architecture, and return it."""
    FAMILIES[family.architecture] = family
    return family


def family_of(keys: Keys) -> Family:
    """Return the family of a config.json. Raises: FamilyError."""
    named = keys.get("architectures") or [
        family.architecture
        for family in FAMILIES.values()
        if family.model_type == keys.get("model_type")
    ]
    names = list(map(str, named)) if isinstance(named, list) else [repr(named)]
    if len(names) != 1 or names[0] not in FAMILIES:
        found = ", ".join(names) or f"model_type {keys.get('model_type')!r}"
        raise FamilyError(
            f"config.json: architecture {found} is not supported; supported: {', '.join(FAMILIES)}"
        )
    return FAMILIES[names[0]]


def find_family(model: ModelConfig) -> Family:
    """Return the first family that can express a model. Raises: FamilyError."""
    failures: list[tuple[float, str]] = []
    for name, family in FAMILIES.items():
        if family.is_sparse != bool(model.moe.num_experts):
            continue
        try:
            missed = family._express(model)[1]
        except ValueError as error:
            reason = str(error).partition("\n")[0]
            failures.append((math.inf, f"{name}, which does not fit: {reason}"))
            continue
        if not missed:
            return family
        failures.append((len(missed), f"{name}, which lacks {', '.join(missed)}"))
    _, nearest = min(failures, key=lambda failure: failure[0])
    raise FamilyError(
        f"no Hugging Face architecture can express this model; the nearest is {nearest}"
    )


def nested(fields: Fields) -> dict[str, Any]:
    """Return fields by dotted path as the nested mapping of a configuration file."""
    tree: dict[str, Any] = {}
    for path, value in fields.items():
        *sections, name = path.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[name] = value
    return tree


def model_config(fields: Fields) -> ModelConfig:
    """Return the model configuration of fields by dotted path."""
    return ModelConfig.model_validate(nested(fields))


def _balance_coefficient(keys: Keys, fields: Fields) -> float:
    """Return the coefficient of the balance loss per layer with which transformers would train.

    It has one loss over all layers, and none unless `output_router_logits` is true.
    """
    model = model_config(fields)
    if not keys.get("output_router_logits") or not model.moe.num_experts:
        return 0.0
    coefficient = float(keys.get("router_aux_loss_coef") or 0.0)
    return coefficient * model.moe.num_experts_per_tok / sum(model.sparse_layers)


def get_field(model: ModelConfig, path: str) -> Any:
    """Return the value of a dotted path. Raises: FamilyError for a section that is null."""
    value: Any = model
    for name in path.split("."):
        if value is None:
            raise FamilyError(f"the model has no {path}")
        value = getattr(value, name)
    return value


def _canonical_router(moe: MoEConfig) -> dict[str, Any]:
    """Return the fields that decide the weights of experts, without those that have no effect.

    A softmax over the top k gives the probabilities of the top k divided by their sum.
    """
    name, normalises, all_groups = moe.router, moe.norm_topk_prob, moe.topk_group == moe.n_group
    if name == "topk_softmax" and not moe.has_router_bias:
        name, normalises = "softmax", True
    return {
        "moe.router": name,
        "moe.norm_topk_prob": normalises if ROUTERS[name].uses_normalise else None,
        "moe.n_group": 1 if all_groups else moe.n_group,
        "moe.topk_group": 1 if all_groups else moe.topk_group,
    }


def mathematics(model: ModelConfig) -> dict[str, Any]:
    """Return the fields that decide what a model computes, in a canonical form.

    Defaults that follow from other fields are filled in, and repeating lists are written in full.
    Models with equal results of this function compute the same.
    """
    values = model.model_dump()
    moe = values.pop("moe")
    if model.moe.num_experts:
        values |= {f"moe.{name}": value for name, value in moe.items()}
        values |= _canonical_router(model.moe)
        values["moe.moe_intermediate_size"] = model.expert_size
        values["moe.router_bias"] = model.moe.has_router_bias
        values["moe.first_k_dense_replace"] = values["moe.decoder_sparse_step"] = None
    values["sparse_layers"] = model.sparse_layers
    values["layer_types"] = model.layer_kinds
    values["rope_layers"] = model.rope_pattern
    values["biases"] = sorted(model.biases)
    values["head_dim"] = model.head_size
    values["query_pre_attn_scalar"] = model.query_pre_attn_scalar or model.head_size
    values["rope_scaling"]["row_length"] = None  # chosen by a run
    if False not in model.sparse_layers:
        values["intermediate_size"] = None
    return {name: value for name, value in values.items() if name not in NOT_MATHEMATICS}
