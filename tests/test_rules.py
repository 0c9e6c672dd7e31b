"""The table of rules: every one of them can be broken, and is told in its sentence, without a model or processes."""

from __future__ import annotations

import pytest

from unmask.config import Config, ParallelConfig, apply_override, keys, rules
from unmask.config.rules import RULES, Known
from unmask.errors import UserError

#: (overrides, what else is known, part of the sentence)
EXAMPLES = [
    ("parallel.data_parallel_size=3 parallel.expert_parallel_size=2", {}, "=2 does not divide the 3 ranks of data_"),
    ("parallel.data_parallel_size=2 parallel.expert_parallel_size=2 parallel.model_parallel_size=2", {},
     "parallel.expert_parallel_size=2 does not go with parallel.model_parallel_size=2: set one of them to 1"),
    ("parallel.data_parallel_size=2 parallel.expert_parallel_size=2 parallel.pipeline_stages=2", {},
     "does not go with parallel.pipeline_stages=2: set one of them to 1"),
    ("parallel.schedule=zbv", {}, "parallel.schedule=zbv has no effect with pipeline_stages=1: leave it out, or give"),
    ("parallel.virtual_stages=3", {}, "parallel.virtual_stages=3 has no effect with pipeline_stages=1"),
    ("parallel.stage_layers=[2]", {}, "parallel.stage_layers=[2] has no effect with pipeline_stages=1"),
    ("parallel.bubble=0.5", {}, "parallel.bubble=0.5 has no effect with pipeline_stages=1"),
    ("parallel.pipeline_stages=2 parallel.virtual_stages=2", {}, "virtual_stages=2 has no effect with schedule=1f1b"),
    ("parallel.pipeline_stages=2 parallel.zero=3", {}, "parallel.zero=3 does not go with pipeline_stages=2: the"),
    ("parallel.pipeline_stages=2 parallel.prefetch=1", {}, "parallel.prefetch=1 has no effect with pipeline_stages=2,"),
    ("parallel.pipeline_stages=2 parallel.stage_layers=[1,1,1]", {}, "lists 3 stages, and there are 2 ("),
    ("parallel.data_parallel_size=2 parallel.zero=2", {}, "parallel.zero=2 has no effect: no ranks divide a copy"),
    ("parallel.prefetch=1", {}, "parallel.prefetch=1 has no effect: no ranks divide a copy"),
    ("parallel.offload=true", {}, "parallel.offload=True has no effect: no ranks divide a copy"),
    ("parallel.placement=csbp", {}, "parallel.placement=csbp has no effect with block_parallel_size=1: leave it out,"),
    ("parallel.exchange=ring", {}, "parallel.exchange=ring has no effect with block_parallel_size=1"),
    ("parallel.node_size=2", {}, "parallel.node_size=2 has no effect with block_parallel_size=1"),
    ("parallel.speeds=measured", {}, "parallel.speeds=measured has no effect with block_parallel_size=1"),
    ("parallel.block_parallel_size=4 parallel.exchange=ulysses+ring parallel.node_size=3", {},
     "parallel.exchange=ulysses+ring needs parallel.node_size, a divisor of block_parallel_size=4 strictly between"),
    ("parallel.block_parallel_size=4 parallel.node_size=2", {}, "parallel.node_size=2 has no effect with exchange="),
    ("parallel.block_parallel_size=2 parallel.speeds=[1]", {}, "parallel.speeds lists 1 ranks, and block_parallel_s"),
]  # fmt: skip


def asked(overrides: str, known: dict) -> Known:
    tree: dict = {}
    for override in overrides.split():
        apply_override(tree, override)
    return Known(Config.parse(tree), **known)


@pytest.mark.parametrize("overrides, known, sentence", EXAMPLES)
def test_a_broken_rule_is_told_in_its_sentence(overrides, known, sentence):
    with pytest.raises(UserError) as error:
        rules.check(asked(overrides, known))
    assert sentence in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.keys)
def test_a_rule_is_of_keys_that_exist_and_some_example_breaks_it(rule):
    assert set(rule.keys.split()) <= set(keys())
    assert any(rule.broken(asked(overrides, known).facts()) for overrides, known, _ in EXAMPLES)


def test_the_defaults_break_no_rule():
    assert not list(rules.broken(Known(Config())))


def test_the_table_answers_for_a_mesh_alone():
    mesh = ParallelConfig(data_parallel_size=2, block_parallel_size=2, placement="csbp", exchange="ring")
    assert not list(rules.broken(Known(parallel=mesh)))
    wrong = mesh.model_copy(update={"speeds": [1.0], "expert_parallel_size": 3})
    assert [sentence.split()[0] for sentence in rules.broken(Known(parallel=wrong))] == [
        "parallel.expert_parallel_size=3",
        "parallel.speeds",
    ]
