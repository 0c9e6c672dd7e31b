"""Prompts of the command line and of files: what is read, and what is refused with its line."""

from __future__ import annotations

import pytest

from unmask.errors import UserError
from unmask.sampling import Fill
from unmask.sampling.prompts import Asked, asked, read


def test_the_command_line():
    assert asked() == [Asked("")]
    assert asked(prompt=["a", "b"], suffix="c") == [Asked("a", "c"), Asked("b", "c")]
    assert asked(prompt_ids=["1 2", "3"], suffix_ids="4") == [Asked([1, 2], [4]), Asked([3], [4])]
    assert asked(suffix_ids="4") == [Asked([], [4])]
    assert asked(fill=["a[MASK:2]b[MASK:3]"]) == [Asked(Fill(("a", "b", ""), (2, 3)))]


@pytest.mark.parametrize(
    "given, sentence",
    [
        ({"prompt": ["a"], "fill": ["b[MASK:1]"]}, "--prompt and --fill each say what to sample from"),
        ({"prompt_ids": ["1"], "suffix": "a"}, "give prompt and suffix as text"),
        ({"prompt": ["a"], "suffix_ids": "1"}, "give prompt and suffix as text"),
        ({"fill": ["a[MASK:1]"], "suffix": "b"}, "--fill says itself what comes after its holes"),
        ({"fill": ["a[MASK]"]}, "'a[MASK]' has no hole; write [MASK:20] where 20 tokens are to be filled in"),
        ({"fill": ["a[MASK:0]"]}, "a hole has at least one token"),
        ({"prompt_ids": ["1 x"]}, "--prompt-ids '1 x': write token ids"),
    ],
)
def test_mistakes_on_the_command_line(given, sentence):
    with pytest.raises(UserError) as error:
        asked(**given)
    assert sentence in str(error.value)


def test_a_line_each(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_bytes(b"\xef\xbb\xbfonce\r\n\n  two words \nlast")
    assert read(path, "!") == [Asked("once", "!"), Asked("  two words ", "!"), Asked("last", "!")]


def test_a_record_each(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        '{"prompt": "a", "id": 7}\n{"prompt": "b", "suffix": "c"}\n\n{"prompt_ids": [1, 2], "suffix_ids": [3]}\n'
        '{"fill": "x[MASK:4]"}\n'
    )
    expected = [Asked("a"), Asked("b", "c"), Asked([1, 2], [3]), Asked(Fill(("x", ""), (4,)))]
    assert read(path) == expected
    assert read(path, "z")[:2] == [Asked("a", "z"), Asked("b", "c")]


@pytest.mark.parametrize(
    "line, sentence",
    [
        (b"{", "not valid JSON"),
        (b'"text"', "a record is an object"),
        (b'{"text": "a"}', 'has one of "prompt", "prompt_ids" and "fill"; it has text'),
        (b'{"prompt": "a", "fill": "b[MASK:1]"}', 'has one of "prompt"'),
        (b'{"prompt": 3}', '"prompt" is text, not 3'),
        (b'{"prompt_ids": [true]}', '"prompt_ids" is a list of token ids, not [True]'),
        (b'{"prompt": "a", "suffix_ids": [1]}', "both as text or both as ids"),
        (b'{"fill": "b"}', "'b' has no hole"),
        (b'{"fill": "b[MASK:1]", "suffix": "c"}', "leave the suffix out"),
        (b"\xff", "not UTF-8"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, sentence):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n\n' + line + b"\n")
    with pytest.raises(UserError) as error:
        read(path)
    assert str(error.value).startswith(f"{path}:3: ") and sentence in str(error.value)


def test_a_file_without_prompts_is_refused(tmp_path):
    (tmp_path / "empty.txt").write_text("\n \n")
    with pytest.raises(UserError, match="empty.txt: holds no prompt; write one a line"):
        read(tmp_path / "empty.txt")
    with pytest.raises(UserError, match="missing.txt: cannot be read: No such file"):
        read(tmp_path / "missing.txt")


def test_what_is_printed_around_the_holes():
    assert Asked("a", "b").around(["x"]) == ["a", "x", "b"]
    assert Asked("a").around(["x"]) == ["a", "x"]
    assert Asked(Fill(("a", "b", "c"), (1, 1))).around(["x", "y"]) == ["a", "x", "b", "y", "c"]
    assert Asked(Fill(("", ""), (1,))).around([None]) == ["", None, ""]
    assert Asked([1]).texts is False and Asked("a", "b").texts and not Asked("", [1]).texts
