"""Attention over Rows: a Plan says who sees whom, `attend` computes it, transformers' models call it by name.

plan = Plan.from_rows(rows)
model = AutoModelForCausalLM.from_config(config, attn_implementation="unmask")
hidden = model.model(input_ids=..., position_ids=..., plan=plan, use_cache=False)
"""

from unmask.attention.attend import attend
from unmask.attention.interface import NAME, register
from unmask.attention.plan import Pattern, Plan

__all__ = ["NAME", "Pattern", "Plan", "attend", "register"]
