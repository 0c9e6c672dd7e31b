"""Which settings go together: one table, asked before a run starts, by its launcher, and for a mesh alone.

A rule is broken where all of its keys are given, that is, differ from their defaults, and its condition holds. What a
condition asks of are its parameters: sections of the config, and what `Known` has besides; while one of these is not
known yet the rule is not asked. Options of objectives and of samplers have tables of their own.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from string import Formatter
from typing import Any, NamedTuple

from unmask.config import Config, ParallelConfig, Section
from unmask.errors import UserError


@dataclass(frozen=True)
class Known:
    """What is known of a run; None: not yet.

    parallel: the config's, where nothing else is known of it; objective: the built one, which is bound to no model yet;
    device: its type; validation: whether there are held-out data; steps: of the whole run; processes: that were
    started; restarts: that a launcher may make.
    """

    config: Config | None = None
    parallel: ParallelConfig | None = None
    objective: Any = None
    device: str | None = None
    validation: bool | None = None
    steps: int | None = None
    processes: int | None = None
    restarts: int | None = None

    def facts(self) -> dict[str, Any]:
        """What the parameters of conditions stand for, by name."""
        sections = {} if self.config is None else {name: getattr(self.config, name) for name in Config.model_fields}
        sections.pop("objective", None)
        return sections | {name: value for name, value in vars(self).items() if value is not None}


class Rule(NamedTuple):
    """keys: with a space between; condition: true, or values for the sentence besides settings, where the rule is
    broken. In the sentence {section.key} is a value, {section.key=} the key with it."""

    keys: str
    condition: Callable[..., Any]
    sentence: str

    def broken(self, facts: Mapping[str, Any]) -> str | None:
        """The sentence where the rule is broken; None where it is kept, or cannot be asked."""
        keys = [key for key in self.keys.split() if not key.startswith("objective.")]
        names = list(inspect.signature(self.condition).parameters)
        if not all(name in facts for name in (*names, *(key.partition(".")[0] for key in keys))):
            return None
        if not all(_given(facts, key) for key in keys):
            return None
        found = self.condition(*(facts[name] for name in names))
        if not found:
            return None
        values = found if isinstance(found, Mapping) else {}
        return _Sentence().format(re.sub(r"\{([\w.]+)=", r"\1={\1", self.sentence), **facts, **values)


class _Sentence(Formatter):
    """Values as a user writes them."""

    def format_field(self, value: Any, spec: str) -> str:
        if isinstance(value, bool):
            return str(value).lower()
        return format(value, spec or "g") if isinstance(value, float) else format(value, spec)


def broken(known: Known) -> Iterator[str]:
    """The sentences of all rules that are broken, in the order of the table."""
    facts = known.facts()
    return filter(None, (rule.broken(facts) for rule in RULES))


def check(known: Known) -> None:
    """UserError with the sentence of the first rule that is broken."""
    sentence = next(broken(known), None)
    if sentence is not None:
        raise UserError(sentence)


def _given(facts: Mapping[str, Any], key: str) -> bool:
    """Whether a setting differs from its default."""
    first, *path, last = key.split(".")
    section: Section = facts[first]
    for name in path:
        section = getattr(section, name)
    return last in section.given()


def _always() -> bool:
    return True


def _no_effect(section: str, keys: str, condition: Callable[..., Any], why: str) -> list[Rule]:
    """Keys of a section that nothing reads under the condition."""
    paths = [f"{section}.{key}" for key in keys.split()]
    return [Rule(path, condition, f"{path}={{{path}!s}} has no effect{why}") for path in paths]


def _apart(ones: str, others: str, why: str, other: str = "") -> list[Rule]:
    """Each of `ones` beside each of `others` (the sentence says `other`) is refused."""
    return [
        Rule(f"{one} {key}", _always, f"{{{one}=}} does not go with {other or f'{{{key}=}}'}{why.replace('ONE', one)}")
        for one, key in product(ones.split(), others.split())
    ]


# fmt: off
#: The mesh alone.
MESH = [
    Rule("parallel.expert_parallel_size", lambda parallel: parallel.data_ranks % parallel.expert_parallel_size,
         "{parallel.expert_parallel_size=} does not divide the {parallel.data_ranks} ranks of data_parallel_size x "
         "shard_size x block_parallel_size, among which experts are divided"),
    *_apart("parallel.expert_parallel_size", "parallel.model_parallel_size parallel.pipeline_stages",
            ": set one of them to 1"),
    *_no_effect("parallel", "schedule virtual_stages stage_layers bubble",
                lambda parallel: parallel.pipeline_stages == 1,
                " with pipeline_stages=1: leave it out, or give the layers several ranks"),
    Rule("parallel.pipeline_stages parallel.virtual_stages", lambda parallel: parallel.schedule != "interleaved",
         "{parallel.virtual_stages=} has no effect with schedule={parallel.schedule}: leave it out, or use "
         "interleaved"),
    Rule("parallel.pipeline_stages parallel.zero", lambda parallel: parallel.zero > 1,
         "{parallel.zero=} does not go with pipeline_stages={parallel.pipeline_stages}: the ranks of a pipeline sum "
         "gradients once a step, over all of its micro-batches; use zero=1"),
    Rule("parallel.pipeline_stages parallel.prefetch", _always,
         "{parallel.prefetch=} has no effect with pipeline_stages={parallel.pipeline_stages}, where a rank's layers "
         "stay gathered for a step: set it to 0"),
    Rule("parallel.pipeline_stages parallel.stage_layers",
         lambda parallel: len(parallel.stage_layers) != parallel.stages and {"count": len(parallel.stage_layers)},
         "parallel.stage_layers lists {count} stages, and there are {parallel.stages} (pipeline_stages x stages of a "
         "rank): give one number each"),
    *_no_effect("parallel", "zero prefetch offload", lambda parallel: not parallel.level,
                ": no ranks divide a copy of the model; give parallel.shard_size=2 or more"),
    *_no_effect("parallel", "placement exchange node_size speeds", lambda parallel: parallel.block_parallel_size == 1,
                " with block_parallel_size=1: leave it out, or give a pack several ranks"),
    Rule("parallel.exchange",
         lambda parallel: "+" in parallel.exchange and not _divides_nodes(parallel),
         "{parallel.exchange=} needs parallel.node_size, a divisor of block_parallel_size="
         "{parallel.block_parallel_size} strictly between 1 and it"),
    Rule("parallel.node_size", lambda parallel: "+" not in parallel.exchange,
         "{parallel.node_size=} has no effect with exchange={parallel.exchange}: leave it out, or choose an exchange "
         "of two levels such as ulysses+ring"),
    Rule("parallel.speeds",
         lambda parallel: isinstance(parallel.speeds, list) and len(parallel.speeds) != parallel.block_parallel_size
         and {"count": len(parallel.speeds)},
         "parallel.speeds lists {count} ranks, and block_parallel_size is {parallel.block_parallel_size}: give one "
         "each"),
]
# fmt: on


def _divides_nodes(parallel: ParallelConfig) -> bool:
    node, blocks = parallel.node_size, parallel.block_parallel_size
    return node is not None and 1 < node < blocks and blocks % node == 0


RULES: Sequence[Rule] = (*MESH,)
