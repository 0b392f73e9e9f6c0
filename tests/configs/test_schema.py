"""Configurations load, round-trip and refuse mistakes on one line: key path, rule, remedy."""

import re
from pathlib import Path

import pytest
from conftest import ROOT
from pydantic import BaseModel

from configs.reading import _OTHER_NAMES, ConfigError, config_keys, section_of
from configs.schema import Config, dump_config, fill_mesh, load_config
from parallel.sharding.mesh import MeshConfig

TP8 = ROOT / "configs" / "tp8.yaml"
FIXED = "mesh.tp=8"
"""Without it, the size of tp depends on the machine."""

LONGROPE = (
    "{type: longrope, factor: 2, original_max_position_embeddings: 64, short_factor: [1], "
    "long_factor: [2]}"
)
# Override of configs/tp8.yaml (8 heads, 8 kv heads, tp 8) -> what the refusal says.
REFUSALS = {
    # Unknown keys name the nearest one.
    "mesh.tpp=8": "mesh.tpp: unknown key; did you mean mesh.tp?",
    "model.hiden_size=64": "model.hiden_size: unknown key; did you mean model.hidden_size?",
    "modle.hidden_size=64": "modle.hidden_size: unknown key; did you mean model.hidden_size?",
    "trainig.steps=5": "trainig.steps: unknown key; did you mean training.steps?",
    "trainig.stpes=5": "trainig.stpes: unknown key; did you mean training.steps?",
    "training.early_stpo.patience=5": "unknown key; did you mean training.early_stop.patience?",
    "modle={}": "modle: unknown key; did you mean model?",
    # Names that other trainers use.
    "optimizer.lr=1": "optimizer.lr: unknown key; did you mean optimizer.learning_rate?",
    "optimizer.groups.embedding.lr=1": "did you mean optimizer.groups.embedding.learning_rate?",
    "dpo.label_smoothing=0.1": "did you mean training.dpo.label_smoothing?",
    "batch_size=8": "batch_size: unknown key; did you mean data.global_batch_size?",
    "model.kv_lora_rank=8": "kv_lora_rank: unknown key; did you mean model.mla.kv_lora_rank?",
    "learning_rate=1": "learning_rate: unknown key; did you mean optimizer.learning_rate?",
    "model.sequence_length=8": "model.sequence_length: unknown key; did you mean data.sequence_le",
    "training.warmup_steps=8": "training.warmup_steps: unknown key; did you mean optimizer.warmup",
    "model.tp=8": "model.tp: unknown key; did you mean mesh.tp?",
    "optimizer.steps=8": "optimizer.steps: unknown key; did you mean training.steps?",
    "qqqqqq=8": "qqqqqq: unknown key; sections: run, model, lora",
    # Types are not converted.
    "training.steps=ten": "training.steps='ten': input should be a valid integer",
    "training.steps=1.5": "training.steps=1.5: input should be a valid integer",
    "training.steps='100'": "training.steps='100': input should be a valid integer",
    "training.steps=true": "training.steps=true: input should be a valid integer",
    "model.rope_theta=0.5": "model.rope_theta=0.5: input should be greater than 1",
    "model.rope_theta=true": "model.rope_theta=true: input should be a valid number",
    "model.tie_word_embeddings=1": "model.tie_word_embeddings=1: input should be a valid boolean",
    "run.dir=null": "run.dir=null: input should be a valid string",
    "run.dir=7": "run.dir=7: input should be a valid string",
    "mesh.tp=[8]": "mesh.tp=[8]: input should be a valid integer",
    # Huge values are refused at once.
    "training.steps=10000000000000000000": "training.steps=10000000000000000000: input should be l",
    "training.steps=2147483648": "training.steps=2147483648: input should be less than 2147483648",
    "model.hidden_size=9999999967": "is not divisible by",
    "mesh.tp=10000000000": "is not divisible by mesh.tp=10000000000; use mesh.tp=",
    # Keys without effect.
    "model.sliding_window=8": "model.sliding_window=8 applies to sliding_attention layers only",
    "model.attention_chunk_size=8": "model.attention_chunk_size=8 applies to chunked_",
    "model.layer_types=[full_attention,full_attention,full_attention]": (
        "model.layer_types has 3 entries, but model.num_hidden_layers=2; remove"
    ),
    "model.layer_types=full_attention": "model.layer_types='full_attention': expected a list",
    "model.swiglu_limit=7.0": "model.swiglu_limit=7.0 has no effect with model.hidden_act=silu",
    "optimizer.groups.experts.learning_rate=0.1": "optimizer.groups.experts has no effect: the",
    "optimizer.groups.mlp.learning_rate=0.1 model.moe.num_experts=4": "all layers have experts; re",
    "optimizer.groups.head.learning_rate=0.1 model.tie_word_embeddings=true": "head is the embed",
    "optimizer.groups.norms.learning_rate=0.1 lora.rank=4": "LoRA does not train it; remove it",
    "optimizer.groups.attention.weight_decay=0 lora.rank=4 lora.targets=[mlp]": "none of its",
    "optimizer.groups.mlp.learning_rate=2 lora.rank=4 lora.targets=[qkv]": "none of its linears",
    "training.noise_scale=true": "set training.gradient_accumulation to 2 or more",
    "model.matmul_dtype=int8 lora.rank=4": "model.matmul_dtype=int8 is not supported with lora",
    "model.matmul_dtype=int4": "='int4': input should be 'int8' or 'fp8_e4m3', or null (the def",
    "training.steps=-5": "training.steps=-5: input should be greater than 0 (default 1000)",
    "model.tie_word_embeddings=no": "input should be a valid boolean (default false)",
    "model.matmul_products=[wgrad]": "has no effect without model.matmul_dtype; set it, or remove",
    "model.matmul_scales=tensor": "model.matmul_scales has no effect without model.matmul_dtype; s",
    "optimizer.groups.norms.weight_decay=0.1": "optimizer.groups.norms.weight_decay: norms do",
    "optimizer.groups.heads.learning_rate=0.1": "optimizer.groups.heads: input should be 'embed",
    "model.hidden_act=clamped_swiglu": "model.hidden_act=clamped_swiglu needs model.swiglu_limit",
    "model.hidden_act=relu": "model.hidden_act: unknown activation 'relu'; use one of silu, g",
    "model.biases=[qkv,qkv]": "model.biases lists qkv twice; remove one",
    "model.biases=[experts]": "model.biases lists experts, but no layer of this model has su",
    "model.biases=qkv": "model.biases='qkv': expected a list",
    "model.qk_norm_across_heads=true": "has no effect with model.qk_norm=false; set qk_norm, or",
    "model.partial_rotary_factor=0.1": "rotates 3 of 32 dimensions of a head, but rope rotates pa",
    "model.rope_layers=[true,true,false]": "model.rope_layers has 3 entries, but model.num_hidden",
    "model.rope_layers=[false] model.rope_theta=5000.0": (
        "model.rope_theta=5000.0 has no effect, because model.rope_layers leaves no layer with rope"
    ),
    "model.rope_local_theta=100.0": (
        "model.rope_local_theta=100.0 applies to sliding_attention and chunked_attention layers on"
    ),
    "model.rope_local_theta=9.0 model.rope_layers=[true,false] model.sliding_window=8 "
    "model.layer_types=[full_attention,sliding_attention]": (
        "model.rope_local_theta=9.0 applies to sliding_attention and chunked_attention layers only"
    ),
    f"model.rope_scaling={LONGROPE}": "model.rope_scaling: short_factor has 1 numbers for 16 freq",
    f"model.partial_rotary_factor=0.0625 model.rope_scaling={LONGROPE}": (
        "is longer than model.rope_scaling.original_max_position_embeddings=64, but row_length=None"
    ),
    # Latent attention.
    "model.mla.kv_lora_rnak=8": "unknown key; did you mean model.mla.kv_lora_rank?",
    "model.mla.kv_lora_rank=0": "model.mla.kv_lora_rank=0: input should be greater than 0",
    "model.mla=8": "model.mla=8 is not a section; write model.mla: with q_lora_rank, ",
    "model.mla={} model.num_attention_heads=16": "model.num_key_value_heads=8: with model.mla ev",
    "model.mla={} model.num_key_value_heads=3": "model.num_key_value_heads=3: with model.mla eve",
    "model.mla={} model.head_dim=32": "model.head_dim=32 is not supported with model.mla; remove",
    "model.mla={} model.qk_norm=true": "model.qk_norm=True is not supported with model.mla; rem",
    "model.mla={} model.biases=[qkv]": "model.biases lists qkv, which is not supported with mod",
    "model.mla.qk_rope_head_dim=7": "model.mla.qk_rope_head_dim=7: rope rotates pairs; use an e",
    "model.mla.q_lora_rank=10 mesh.tp=4 mesh.fsdp=2 mesh.sp=2": (
        "model.mla.q_lora_rank=10 is not divisible by mesh.fsdp * mesh.sp=4"
    ),
    "model.mla={} model.num_attention_heads=6 model.num_key_value_heads=6": (
        "model.num_attention_heads=6 is not divisible by mesh.tp=8"
    ),
    # Ranges.
    "mesh.tp=0": "mesh.tp=0: input should be greater than 0",
    "training.seed=-1": "training.seed=-1: input should be greater than or equal to 0",
    "data.eval_fraction=1": "data.eval_fraction=1: input should be less than 1",
    "optimizer.learning_rate=.nan": "optimizer.learning_rate=nan: input should be",
    "optimizer.learning_rate=.inf": "optimizer.learning_rate=inf: input should be",
    "optimizer.schedule=cosin": "optimizer.schedule: unknown schedule 'cosin'; use one of ",
    "optimizer.name=adamww": (
        "optimizer.name: unknown optimizer 'adamww'; use one of adafactor, adamw, lion, muon, "
        "schedule_free_adamw, sgd, soap; did you mean adamw?"
    ),
    "checkpoint.resume=yes": "checkpoint.resume='yes': input should be 'auto', 'never' or 'must'",
    # The user names sources; values may change at given steps.
    "data.sources.code.wieght=2": (
        "data.sources.code.wieght: unknown key; did you mean data.sources.code.weight?"
    ),
    "data.sources.code=texts/*.py": (
        "data.sources.code='texts/*.py' is not a section; write data.sources.code: with files, "
    ),
    "data.sources=texts": (
        "data.sources='texts' is not a section; map names to sections below data.sources:"
    ),
    "data.sources.code.weight=-1": "data.sources.code.weight=-1: input should be greater than",
    "data.sources.my-code.weight=-1": "data.sources.my-code.weight=-1: input",
    "data.sources.int.weight=-1 data.sources.str.weight=x": (
        "data.sources.int.weight=-1: input should be greater than or equal to 0 (default 1.0); data"
    ),
    "data.sources.code.weight=0": "data.sources: every weight is 0 from step 0 on; give at least",
    "data.files=a data.sources.code.files=b": (
        "data.files and data.sources are both given; leave one out"
    ),
    "data.files=[]": "data.files=[]: an empty list names no file; give a glob such as 'texts/*.txt",
    "data.sources.code.files=[]": "data.sources.code.files=[]: an empty list names no file; give ",
    "data.sources.code.files=7": "data.sources.code.files=7: input should be a valid string",
    "data.sequence_length=long": "data.sequence_length='long': input should be a valid integer",
    "data.sequence_length={5: 128}": (
        "data.sequence_length={5: 128}: write steps in ascending order, the first one 0: {0: 1, "
    ),
    "data.sequence_length={0: 128, 5: 100}": (
        "data.sequence_length=100 is not divisible by mesh.sp * mesh.tp=8"
    ),
    "data.sequence_length={0: 96, 5: 128}": (
        "data.sequence_length=96 does not divide 128, the length of the rows from which it is cut: "
        "the largest data.sequence_length of these steps; use a divisor"
    ),
    "data.global_batch_size={0: 16, 5: 9} training.gradient_accumulation=2": (
        "data.global_batch_size=9 is not divisible by training.gradient_accumulation=2"
    ),
    # Overrides and sections.
    "mesh.tp": "override 'mesh.tp': write mesh.tp=VALUE",
    "=8": "override '=8': write section.key=value",
    "mesh.tp.size=8": "override 'mesh.tp.size=8': mesh.tp is a value",
    "mesh.tp=[": "override 'mesh.tp=[' is not YAML: ",
    "mesh=8": "mesh=8 is not a section; write mesh: with dp, fsdp, tp, sp, ep",
    "model=8": "write model: with vocab_size, pad_vocab_to_multiple_of, hidden_size, ",
    "training.writers=jsonl": "be a valid list (default [jsonl, tensorboard, console])",
    "mesh=null": "mesh=null is not a section; write mesh: with dp",
    # Rules between sections.
    "mesh.tp=3": "model.num_attention_heads=8 is not divisible by mesh.tp=3; use mesh.tp=2 or 4",
    "model.num_attention_heads=3": "model.hidden_size=256 is not divisible by model.num_attention",
    "model.num_key_value_heads=3": "num_attention_heads=8 is not divisible by model.num_key_value",
    "model.num_key_value_heads=4": (
        "model.num_key_value_heads=4 is not divisible by mesh.tp=8; "
        "use mesh.tp=4, or parallel.replicate_kv=true"
    ),
    "model.head_dim=5": "model.head_dim=5: rope rotates pairs; use an even head_dim",
    "model.intermediate_size=100": "model.intermediate_size=100 is not divisible by mesh.tp=8",
    "model.vocab_size=265": "model.vocab_size=265 is not divisible by mesh.tp=8; use mesh.tp=",
    "model.vocab_size=256": "is smaller than the tokenizer's 257 ids; set it to 264 (a multi",
    "model.hidden_size=250": "use model.num_attention_heads=5 or 25, or another model.hidden_size",
    "mesh.fsdp=3": "model.hidden_size=256 is not divisible by mesh.fsdp * mesh.sp=3",
    "data.sequence_length=100": (
        "data.sequence_length=100 is not divisible by mesh.sp * mesh.tp=8; use "
        "data.sequence_length=96 or 104, or another mesh"
    ),
    "data.global_batch_size=12 training.gradient_accumulation=4 mesh.tp=1 mesh.fsdp=8": (
        "data.global_batch_size=12 is not divisible by training.gradient_accumulation * mesh.dp * "
        "mesh.fsdp * mesh.ep=32; use data.global_batch_size=32, or another mesh"
    ),
    "training.gradient_accumulation=3": (
        "data.global_batch_size=16 is not divisible by training.gradient_accumulation=3; "
        "use training.gradient_accumulation=2 or 4, or data.global_batch_size=15 or 18"
    ),
    "mesh.dp=3": (
        "data.global_batch_size=16 is not divisible by mesh.dp * mesh.fsdp * mesh.ep=3; "
        "use data.global_batch_size=15 or 18, or another mesh"
    ),
    "parallel.overlap_experts=ring": "parallel.overlap_experts=ring applies to experts only",
    "model.moe.num_experts_per_tok=4": (
        "model.moe.num_experts_per_tok=4 applies to experts only, and model.moe.num_exp"
    ),
    "model.attention=flashh": "model.attention: unknown attention operation 'flashh'; use one of",
}


# Overrides of the same file with eight experts.
EXPERT_REFUSALS = {
    "model.moe.shared_expert_gate=true": "has no effect with model.moe.num_shared_experts=0; set",
    "model.biases=[mlp]": "model.biases lists mlp, but no layer of this model has such a linear",
    "mesh.ep=3": "model.moe.num_experts=8 is not divisible by mesh.ep=3; use mesh.ep=2 or 4",
    "model.moe.moe_intermediate_size=100": (
        "model.moe.moe_intermediate_size=100 is not divisible by mesh.tp=8"
    ),
    "model.moe.num_experts_per_tok=9": "router=softmax: num_experts_per_tok=9: there are 8",
    "model.moe.router=switch": "router=switch: num_experts_per_tok=2: the switch router",
    "model.moe.router=topk_softmax model.moe.n_group=2": (
        "router=topk_softmax: n_group=2, topk_group=1: the topk_softmax router"
    ),
    "model.moe.router=best": "model.moe.router=best: unknown router 'best'; use one of ",
    "model.moe.grouped_matmul=fast": "unknown grouped matmul 'fast'; use one of reference",
    "model.moe.first_k_dense_replace=2": "leave no mixture-of-experts layer among 2; lower them",
    "model.moe.capacity_factor=0": "model.moe.capacity_factor=0: input should be greater than 0",
    "parallel.overlap_experts=split": "pieces of a block would not hold whole groups of rows",
    "model.moe.bias_update_speed=0.1 model.moe.router=expert_choice": (
        "model.moe.bias_update_speed=0.1 has no effect with model.moe.router=expert_choice"
    ),
    "model.moe.router_bias=true model.moe.router=expert_choice": (
        "model.moe.router_bias=True has no effect with model.moe.router=expert_choice"
    ),
    "model.moe.norm_topk_prob=false model.moe.router=topk_softmax": (
        "model.moe.norm_topk_prob=False has no effect with model.moe.router=topk_softmax"
    ),
    "model.moe.exchange_chunks=2 model.moe.exchange=ragged": (
        "model.moe.exchange_chunks=2 has no effect with model.moe.exchange=ragged; remove one"
    ),
    "model.moe.capacity_factor=2 model.moe.exchange=dense": (
        "model.moe.capacity_factor=2.0 has no effect with model.moe.exchange=dense"
    ),
    "model.moe.router=expert_choice": "cannot generate text; set training.sample_tokens=0, or use",
}


def refusal(path, *overrides: str) -> str:
    fixed = [FIXED] if path == TP8 else []
    with pytest.raises(ConfigError) as error:
        load_config(path, [*fixed, *overrides])
    return str(error.value)


def written(folder: Path, text: str) -> Path:
    (folder / "config.yaml").write_text(text)
    return folder / "config.yaml"


def sections(model: type[BaseModel] = Config) -> list[type[BaseModel]]:
    below = [section_of(info.annotation)[0] for info in model.model_fields.values()]
    return [model, *(s for kind in below if kind is not None for s in sections(kind))]


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda p: p.stem)
def test_every_shipped_configuration_loads_and_round_trips(path, tmp_path):
    config = load_config(path)
    assert load_config(written(tmp_path, dump_config(config))) == config


def test_a_file_without_values_gives_the_defaults(tmp_path):
    assert load_config(written(tmp_path, "# nothing\n")) == Config()


def test_the_dump_round_trips_values_that_are_not_defaults(tmp_path):
    overrides = [
        "run.compilation_cache=null",
        "run.dir='runs/a: b #c'",
        "model.head_dim=16",
        "optimizer.learning_rate=1.2345678901234567e-5",
        "optimizer.clip_norm=null",
        "model.tie_word_embeddings=true",
        "training.sample_prompt='ünïcode \"quoted\": {x} # y'",
        "data.sources={code: {weight: {0: 1, 100: 0.5}, files: a}, chat: {field: messages}}",
        "data.global_batch_size={0: 16, 50: 32}",
    ]
    config = load_config(TP8, overrides)
    assert load_config(written(tmp_path, dump_config(config))) == config
    config = load_config(TP8, ["data.files=['~/texts/**/*.txt', b.jsonl]"])
    assert load_config(written(tmp_path, dump_config(config))) == config


def test_a_glob_may_begin_with_a_star():
    assert load_config(TP8, ["data.files=**/*.txt"]).data.files == "**/*.txt"


@pytest.mark.parametrize("override", EXPERT_REFUSALS)
def test_invalid_expert_settings_are_refused(override):
    batch = "data.global_batch_size=24"
    message = refusal(TP8, "model.moe.num_experts=8", batch, *override.split())
    assert EXPERT_REFUSALS[override] in message


def test_overrides_are_yaml_values_and_the_last_one_wins():
    config = load_config(
        TP8,
        [
            "optimizer.learning_rate=1e-3",
            "optimizer.clip_norm=null",
            "optimizer.weight_decay=0",
            "run.compilation_cache=null",
            "parallel.replicate_kv=true",
            "data.files=a=b/*.txt",
            "training.steps=5",
            "training.steps=7",
        ],
    )
    assert config.optimizer.learning_rate == 1e-3
    assert isinstance(config.optimizer.learning_rate, float)
    assert config.optimizer.clip_norm is None and config.run.compilation_cache is None
    assert config.optimizer.weight_decay == 0
    assert config.parallel.replicate_kv is True
    assert config.data.files == "a=b/*.txt"
    assert config.training.steps == 7


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("runs/a #1", "runs/a #1"),
        ("#1", "#1"),
        ("def ", "def "),
        ("*.txt", "*.txt"),
        ("'2024'", "2024"),
        ('"a #1" # a comment', "a #1"),
    ],
)
def test_an_unquoted_string_in_an_override_is_kept_whole(text, value):
    config = load_config(TP8, [f"run.dir={text}"])
    assert config.run.dir == value


def test_an_override_keeps_the_other_keys_of_its_section():
    plain, changed = load_config(TP8, [FIXED]), load_config(TP8, [FIXED, "mesh.dp=2"])
    assert changed.mesh == plain.mesh.model_copy(update={"dp": 2})
    assert changed == plain.model_copy(update={"mesh": changed.mesh})


def test_config_keys_lists_every_key_once():
    keys = list(config_keys(Config))
    assert 40 < len(keys) == len(set(keys)) <= 192
    assert {"mesh.tp", "run.dir", "optimizer.clip_norm"} <= set(keys)


@pytest.mark.parametrize("section", sections(), ids=lambda s: s.__name__)
def test_every_field_has_a_docstring(section):
    silent = [name for name, info in section.model_fields.items() if not info.description]
    assert silent == [] and section.__doc__


@pytest.mark.parametrize("section", sections(), ids=lambda s: s.__name__)
def test_sections_are_frozen_and_refuse_unknown_keys(section):
    assert section.model_config["frozen"] and section.model_config["extra"] == "forbid"


@pytest.mark.parametrize("override", REFUSALS)
def test_mistakes_are_refused_with_path_rule_and_remedy(override):
    message = refusal(TP8, *re.split(r" (?=\w+\.)", override))
    assert REFUSALS[override] in message
    assert "\n" not in message


@pytest.mark.parametrize(("length", "row_length"), [(64, None), (128, 128), (32, None)])
def test_rows_that_fit_the_chosen_factors_of_longrope_are_accepted(length, row_length):
    factors = f"short_factor: [{','.join('1' * 16)}], long_factor: [{','.join('2' * 16)}]"
    scaling = (
        "{type: longrope, factor: 2, original_max_position_embeddings: 64, "
        f"row_length: {row_length or 'null'}, {factors}}}"
    )
    overrides = [f"model.rope_scaling={scaling}", f"data.sequence_length={length}"]
    assert load_config(TP8, overrides).model.rope_scaling.row_length == row_length


def test_the_names_of_other_trainers_stand_for_keys_of_this_one():
    leaves = {key.rpartition(".")[2] for key in config_keys(Config)}
    assert {*_OTHER_NAMES.values()} <= leaves and not {*_OTHER_NAMES} & leaves


def test_a_missing_file_suggests_the_shipped_files(monkeypatch):
    monkeypatch.chdir(ROOT)
    message = refusal("configs/tp9.yaml")
    assert message.startswith("--config configs/tp9.yaml: No such file or directory; give a YAML")
    assert "configs/tp8.yaml" in message


def test_a_folder_is_refused(tmp_path):
    assert refusal(tmp_path).startswith(f"--config {tmp_path}: Is a directory; give a YAML file")


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("mesh: {tp: 1", "is not YAML: line 1, column 13: expected ',' or '}', but got '<stream "),
        (
            "mesh:\n  tp: '1\nrun:\n  dir: a\n",
            "is not YAML: line 5, .*; check the bracket or quote that opens in line 2$",
        ),
        ("mesh:\n  a b: 1\n  a b: 2\n", 'is not YAML: .*the key "a b" is given twice$'),
        ("[a](b)\nkey: a\n", "is not YAML: line 1, column 4: this text is no mapping; give a"),
        ("mesh:\n\ttp: 1\n", "is not YAML: line 2, column 1: found .*; indent with spaces$"),
        ("mesh:\n  tp: 1\n  tp: 2\n", 'is not YAML: .*the key "tp" is given twice$'),
        ("mesh: {tp: 1}\nmesh: {dp: 1}\n", 'is not YAML: .*the key "mesh" is given twice$'),
        (
            "mesh:\n  tp: 1\n dp: 2\n",
            "is not YAML: line 3, column 2: .*; check the indentation$",
        ),
        ("- mesh\n", "holds no sections but a list; write, for example, 'mesh:"),
        ("just words\n", "holds no sections but a str; write, for example, 'mesh:"),
    ],
)
def test_a_file_that_is_not_a_mapping_of_sections_is_refused(tmp_path, text, rule):
    path = written(tmp_path, text)
    message = refusal(path)
    assert re.match(f"--config {re.escape(str(path))} ({rule})", message)
    assert "\n" not in message


def test_a_binary_file_is_refused_by_name(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_bytes(b"mesh: {tp: 1}\n# \xff\xfe\n")
    assert f"--config {path}" in refusal(path)


@pytest.mark.parametrize("size", ["auto", "-1"])
def test_an_automatic_axis_takes_the_devices_that_the_others_leave(size):
    config = load_config(TP8, [f"mesh.fsdp={size}", "mesh.dp=2"])
    assert config.mesh == MeshConfig(dp=2, fsdp=size if size == "auto" else -1)
    assert (config.mesh.fsdp, config.mesh.given_devices) == (4, None)
    mesh = fill_mesh(config, 2).mesh
    assert mesh == MeshConfig(dp=2) and mesh.given_devices == 2
    assert fill_mesh(config, 16).mesh == MeshConfig(dp=2, fsdp=8)
    assert fill_mesh(load_config(TP8, [FIXED]), 1).mesh == MeshConfig(tp=8)


def test_an_override_takes_over_from_the_automatic_axis_of_the_file_and_dp_spans_slices():
    assert load_config(TP8).mesh == MeshConfig(tp="auto")
    slices = load_config(TP8, ["mesh.tp=8", "mesh.dp=auto", "mesh.dcn_dp=2"])
    assert fill_mesh(slices, 32).mesh == MeshConfig(tp=8, dp=4, dcn_dp=2)
    assert load_config(TP8, ["mesh.fsdp=auto"]).mesh == MeshConfig(fsdp="auto")
    assert load_config(TP8, ["mesh.dp=4"]).mesh.tp == 2


def test_an_automatic_axis_that_does_not_fit_is_refused_on_one_line(tmp_path):
    message = refusal(written(tmp_path, "mesh: {tp: auto, sp: auto}"))
    assert message.startswith("mesh.sp and mesh.tp are both auto, but only one axis")
    odd = load_config(TP8, ["mesh.tp=4", "mesh.dp=auto"])
    with pytest.raises(ConfigError, match=r"mesh\.tp=4 does not divide 6 devices; make it a div"):
        fill_mesh(odd, 6)
    with pytest.raises(ConfigError) as wide:
        fill_mesh(load_config(TP8), 16)
    assert str(wide.value) == (
        "mesh.tp=auto on 16 devices: model.num_attention_heads=8 is not divisible by mesh.tp=16; "
        "use mesh.tp=8 mesh.fsdp=2"
    )
    with pytest.raises(
        ConfigError, match=r"=auto on 512 devices: .*; use mesh\.fsdp=256 mesh\.dp=2"
    ):
        fill_mesh(load_config(TP8, ["mesh.fsdp=auto", "data.global_batch_size=512"]), 512)
    # A size that this machine would refuse may fit another one.
    load_config(TP8, ["data.global_batch_size=2", "mesh.fsdp=auto"])


def test_all_wrong_values_are_reported_on_one_line():
    message = refusal(TP8, "training.steps=ten", "mesh.dp=-2")
    assert "training.steps='ten'" in message and "mesh.dp=-2" in message
    assert "\n" not in message


def test_replicate_kv_accepts_kv_heads_that_tp_does_not_divide():
    overrides = ["model.num_key_value_heads=4", "parallel.replicate_kv=true"]
    assert load_config(TP8, overrides).model.num_key_value_heads == 4


@pytest.mark.parametrize("residual", ["hidden", "replicated"])
def test_only_the_sequence_layout_splits_a_row_over_tp(residual):
    load_config(TP8, ["data.sequence_length=100", f"parallel.residual={residual}"])
    message = refusal(TP8, "data.sequence_length=101", "mesh.sp=2", "mesh.tp=1")
    assert "data.sequence_length=101 is not divisible by mesh.sp * mesh.tp=2" in message
    message = refusal(TP8, "data.sequence_length=101", "mesh.sp=2", f"parallel.residual={residual}")
    assert "data.sequence_length=101 is not divisible by mesh.sp=2" in message


def test_the_hidden_layout_splits_the_residual_stream_over_tp():
    message = refusal(TP8, "model.hidden_size=252", "model.head_dim=32", "parallel.residual=hidden")
    assert "model.hidden_size=252 is not divisible by mesh.tp=8" in message
