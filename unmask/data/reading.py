"""How a source is read: what its records are called, which part of it is meant, what in it is learnt from."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from unmask.config import Section
from unmask.registry import nearest

#: The fields of each kind of record; a record of several kinds is read as the first of them.
KINDS: dict[str, tuple[str, ...]] = {
    "input_ids": ("input_ids", "loss_mask"),
    "messages": ("messages", "tools"),
    "prompt": ("prompt", "response"),
    "text": ("text",),
}
FIELDS = tuple(field for fields in KINDS.values() for field in fields)


class Reading(Section):
    #: Begin text documents with the tokeniser's beginning token; `auto`: if the tokeniser adds it.
    bos: bool | Literal["auto"] = "auto"
    #: End text documents with the tokeniser's end token (not those that a chat template renders).
    eos: bool = True
    #: Leave malformed records out and count them.
    skip_bad: bool = False
    #: Field names of the source: {"text": "content"}. Records are then of the kind that has these fields.
    fields: dict[str, str] = {}
    #: Which split of a Hugging Face dataset.
    split: str | None = None
    #: The type of the ids in a raw .bin file.
    dtype: Literal["uint8", "uint16", "uint32", "uint64", "int16", "int32", "int64"] | None = None
    #: The id that ends a document in an array of ids; empty: an array (or a row of it) is one document.
    end_id: int | None = Field(default=None, ge=0)
    #: Which assistant messages are supervised.
    supervise: Literal["all", "last"] = "all"
    #: A file with a chat template to use instead of the tokeniser's.
    chat_template: str | None = None
    #: Processes that tokenise; 0: this one, with the tokeniser's threads.
    workers: int = Field(default=0, ge=0, le=1024)

    @field_validator("fields")
    @classmethod
    def _known(cls, fields: dict[str, str]) -> dict[str, str]:
        for name in fields:
            if name not in FIELDS:
                raise ValueError(f"{name!r} is no field of a record{nearest(name, list(FIELDS))}: {', '.join(FIELDS)}")
        kinds = {kind for kind, own in KINDS.items() if set(own) & set(fields)}
        if len(kinds) > 1:
            raise ValueError(f"{', '.join(fields)} are fields of different kinds of records: name those of one kind")
        return fields

    @property
    def kinds(self) -> list[str]:
        """The kinds of records to look for, in order."""
        return [kind for kind, own in KINDS.items() if not self.fields or set(own) & set(self.fields)]

    def name(self, field: str) -> str:
        """What the source calls one of our fields."""
        return self.fields.get(field, field)
