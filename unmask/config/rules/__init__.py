"""Which settings go together: one table, asked before a run starts, by its launcher, and for a mesh alone.

A rule is broken where its settings are given, or have the values that it names, and its condition holds. It asks of
sections of the config and of what `Known` has besides; while one of these is not known yet the rule is not asked, so
that a config, or a mesh, can be judged without a model and without processes. Options of objectives and of samplers
have tables of their own.
"""

from __future__ import annotations

from collections.abc import Iterator

from unmask.config.rules.rule import Known, Rule
from unmask.config.rules.table import RULES, heads_fit, unmeasured
from unmask.errors import UserError

__all__ = ["RULES", "Known", "Rule", "broken", "check", "heads_fit", "unmeasured"]


def broken(known: Known) -> Iterator[str]:
    """The sentences of all rules that are broken, in the order of the table."""
    facts = known.facts()
    return filter(None, (rule.broken(facts) for rule in RULES))


def check(known: Known) -> None:
    """UserError with the sentence of the first rule that is broken."""
    sentence = next(broken(known), None)
    if sentence is not None:
        raise UserError(sentence)
