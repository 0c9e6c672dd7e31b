"""Conversations: the ids that transformers' apply_chat_template gives, supervised where the assistant writes."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from unmask.data import dataset_from, encoding, end_policy, load_tokenizer, open_dataset, prepare, train_tokenizer
from unmask.errors import UserError
from unmask.rows import Document

PLAIN = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.tool_calls %}{% for call in message.tool_calls %}<call>{{ call | tojson }}</call>{% endfor %}"
    "{% else %}{{ message.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
#: The same text, with marks around what the assistant writes, its end token included.
MARKED = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ message.content }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
#: Thoughts of earlier turns are forgotten, as in Qwen3.
FORGETFUL = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' and loop.last %}<think>{{ message.thought }}</think>{% endif %}"
    "{{ message.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOLED = "{% if tools %}<tools>{{ tools | tojson }}</tools>\n{% endif %}" + PLAIN

CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 1 + 1?"},
    {"role": "assistant", "content": "2, naïvely 🙂"},
    {"role": "user", "content": "  And 2 + 2?\n"},
    {"role": "assistant", "content": "4\n\ndef f(): return 4"},
]


@pytest.fixture(scope="session")
def speaker(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> Any:
    """A byte-level tokeniser with the special tokens of ChatML."""
    tokenizer = train_tokenizer(texts, 1000, tmp_path_factory.mktemp("speaker"))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    return tokenizer


def with_template(tokenizer: Any, template: Any, path: Path) -> Any:
    """A tokeniser of its own that has the template, as it comes back from the disk."""
    tokenizer.save_pretrained(path)
    copy = load_tokenizer(path)
    copy.chat_template = template
    return copy


def coded(messages: list[dict[str, Any]], tokenizer: Any, **options: Any) -> tuple[list[int], list[bool]]:
    token, flags = dataset_from([{"messages": messages}], tokenizer, **options).document(0)
    return token.tolist(), flags.tolist()


def said(tokenizer: Any, token: list[int], flags: list[bool]) -> list[str]:
    """The texts of the supervised stretches."""
    edges = np.flatnonzero(np.diff(np.r_[0, flags, 0]))
    return [tokenizer.decode(token[start:stop]) for start, stop in edges.reshape(-1, 2)]


@pytest.mark.parametrize("template", [PLAIN, MARKED, FORGETFUL])
def test_ids_are_those_of_transformers(tmp_path: Path, speaker: Any, template: str) -> None:
    tokenizer = with_template(speaker, template, tmp_path)
    token, _ = coded(CONVERSATION, tokenizer, supervise="last")
    assert token == tokenizer.apply_chat_template(CONVERSATION, return_dict=False)


@pytest.mark.parametrize("supervise, turns", [("all", 2), ("last", 1)])
def test_turns_by_prefixes(tmp_path: Path, speaker: Any, supervise: str, turns: int) -> None:
    """What a turn adds to the prompt that asks for it: found with the ids alone, turn by turn."""
    tokenizer = with_template(speaker, PLAIN, tmp_path)
    token, flags = coded(CONVERSATION, tokenizer, supervise=supervise)
    expected = np.zeros(len(token), bool)
    for turn in (2, 4)[-turns:]:
        before = tokenizer.apply_chat_template(CONVERSATION[:turn], add_generation_prompt=True, return_dict=False)
        after = tokenizer.apply_chat_template(CONVERSATION[: turn + 1], return_dict=False)
        assert token[: len(after)] == after and after[: len(before)] == before
        expected[len(before) : len(after)] = True
    assert flags == expected.tolist()
    assert said(tokenizer, token, flags) == ["2, naïvely 🙂<|im_end|>\n", "4\n\ndef f(): return 4<|im_end|>\n"][-turns:]


def test_marked_turns(tmp_path: Path, speaker: Any) -> None:
    tokenizer = with_template(speaker, MARKED, tmp_path)
    token, flags = coded(CONVERSATION, tokenizer)
    reference = tokenizer.apply_chat_template(CONVERSATION, return_dict=True, return_assistant_tokens_mask=True)
    assert token == reference["input_ids"]
    assert flags == [bool(mask) for mask in reference["assistant_masks"]]
    assert said(tokenizer, token, flags) == ["2, naïvely 🙂<|im_end|>", "4\n\ndef f(): return 4<|im_end|>"]
    token, flags = coded(CONVERSATION, tokenizer, supervise="last")
    assert said(tokenizer, token, flags) == ["4\n\ndef f(): return 4<|im_end|>"]
    # What comes after the last turn changes nothing about it.
    token, flags = coded([*CONVERSATION, {"role": "user", "content": "bye"}], tokenizer, supervise="last")
    assert said(tokenizer, token, flags) == ["4\n\ndef f(): return 4<|im_end|>"]


def test_a_template_that_rewrites_earlier_turns_is_refused_by_name(tmp_path: Path, speaker: Any) -> None:
    tokenizer = with_template(speaker, FORGETFUL, tmp_path)
    messages = [{**message, "thought": "hm"} for message in CONVERSATION]
    with pytest.raises(UserError, match="record 0: the chat template writes message 2 in one way while it is the last"):
        coded(messages, tokenizer)
    token, flags = coded(messages, tokenizer, supervise="last")
    assert said(tokenizer, token, flags) == ["<think>hm</think>4\n\ndef f(): return 4<|im_end|>\n"]
    token, flags = coded(messages[:3], tokenizer)
    assert said(tokenizer, token, flags) == ["<think>hm</think>2, naïvely 🙂<|im_end|>\n"]


#: As Llama 3's first one: the answer's header follows every conversation, whatever is asked for.
HEADED = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}<|im_mid|>\n\n{{ m.content }}<|im_end|>{% endfor %}"
    "{{ '<|im_start|>assistant<|im_mid|>\n\n' }}"
)


def test_a_template_that_always_asks_for_an_answer(tmp_path: Path, speaker: Any) -> None:
    """Its header is no part of the answer before it, of several turns as of one; the end token is the turn's."""
    speaker.save_pretrained(tmp_path / "headed")
    tokenizer = load_tokenizer(tmp_path / "headed")
    tokenizer.add_special_tokens({"bos_token": "<s>", "additional_special_tokens": ["<|im_mid|>"]})
    tokenizer.chat_template = HEADED
    for messages, turns in ((CONVERSATION, [2, 4]), (CONVERSATION[1:3], [1])):
        token, flags = coded(messages, tokenizer)
        assert said(tokenizer, token, flags) == [f"{messages[turn]['content']}<|im_end|>" for turn in turns]
        reference = tokenizer.apply_chat_template(messages, return_dict=False)
        header = tokenizer.encode("<|im_start|>assistant<|im_mid|>\n\n", add_special_tokens=False)
        assert token == reference[: -len(header)] and reference[-len(header) :] == header
        document = Document(np.array(token), np.array(flags))
        assert end_policy([document], tokenizer) == "each answer (<|im_end|>)"
    # One that cannot write an empty conversation does not tell what its header is.
    tokenizer.chat_template = "{% if messages[0].role %}{% endif %}" + HEADED
    for messages in (CONVERSATION, CONVERSATION[1:3]):
        with pytest.raises(UserError, match="record 0: the chat template asks for an answer at the end of every conv"):
            coded(messages, tokenizer)
    # One without a generation prompt, in which an answer follows its question, asks for nothing.
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content }}<|im_end|>{% else %}"
        "<|im_start|>{{ m.content }}<|im_mid|>{% endif %}{% endfor %}"
    )
    assert said(tokenizer, *coded(CONVERSATION, tokenizer))[1] == "4\n\ndef f(): return 4<|im_end|>"


def test_parts_are_not_written_as_python_writes_them(tmp_path: Path, speaker: Any) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}]}, {"role": "assistant", "content": "b"}]
    with pytest.raises(UserError, match='record 0: the chat template takes "content" for a text, and message 0 has'):
        coded(parts, with_template(speaker, PLAIN, tmp_path / "plain"))
    reads = PLAIN.replace("{{ message.content }}", "{{ message.content if message.content is string else 'a' }}")
    coded(parts, with_template(speaker, reads, tmp_path / "reads"))


def test_what_to_do_about_conversations_that_templates_refuse(tmp_path: Path, speaker: Any) -> None:
    strict = "{% if messages[0].role != 'x' %}{% endif %}{% for m in messages %}{{ 'a' + m.content }}{% endfor %}"
    tokenizer = with_template(speaker, strict, tmp_path)
    user, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    for messages, advice in [
        ([user, {"role": "assistant", "tool_calls": [{}]}], 'put "content": "" beside "tool_calls"'),
        (
            [{"role": "user", "content": [{"type": "text", "text": "a"}]}, answer],
            "given as parts: write it as one",
        ),
        ([answer, user], "it begins with the assistant, and many templates have no words for that: begin with the u"),
    ]:
        with pytest.raises(UserError, match=f"record 0: the chat template refuses it: .*{advice}"):
            coded(messages, tokenizer)
    tokenizer.chat_template = FORGETFUL
    messages = [*({**message, "thought": "hm"} for message in CONVERSATION), {"role": "user", "content": "bye"}]
    with pytest.raises(UserError, match="or leave out what follows message 4, the last of the assistant"):
        coded(messages, tokenizer, supervise="last")


def test_a_token_across_the_edge_is_refused(tmp_path: Path, speaker: Any) -> None:
    """Between words there is a space that the tokeniser gives to the answer's first word."""
    template = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    template += "{% if add_generation_prompt %}assistant: {% endif %}"
    tokenizer = with_template(speaker, template, tmp_path)
    with pytest.raises(UserError, match="record 0: the tokeniser joins the end of a prompt and the beginning"):
        coded([{"role": "user", "content": "a"}, {"role": "assistant", "content": "return self"}], tokenizer)
    # With marks such a token is the assistant's, as it is for transformers.
    marked = template.replace("{{ message.content }}\n", "{% generation %}{{ message.content }}{% endgeneration %}\n")
    tokenizer.chat_template = marked
    messages = [{"role": "assistant", "content": "return self"}]
    token, flags = coded(messages, tokenizer)
    reference = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    assert flags == [bool(mask) for mask in reference["assistant_masks"]]
    assert said(tokenizer, token, flags) == [" return self"]


def test_a_tokeniser_that_trims_offsets_changes_nothing(tmp_path: Path, speaker: Any) -> None:
    """GPT-2's and Llama 3's post-processors move the places of tokens off the spaces beside them."""
    from tokenizers.processors import ByteLevel

    messages = [*CONVERSATION[:-1], {"role": "assistant", "content": "  spaced  "}]
    plain = with_template(speaker, PLAIN, tmp_path / "plain")
    trimming = with_template(speaker, PLAIN, tmp_path / "trimming")
    trimming.backend_tokenizer.post_processor = ByteLevel(trim_offsets=True)
    assert coded(messages, trimming) == coded(messages, plain)
    assert trimming.backend_tokenizer.post_processor is not None  # the tokeniser that was given stays as it is
    token, flags = coded(messages, trimming)
    assert said(trimming, token, flags)[-1] == "  spaced  <|im_end|>\n"


def test_a_long_conversation_is_encoded_in_pieces(tmp_path: Path, speaker: Any, monkeypatch: Any) -> None:
    """With the ids and the places that the whole has; what is encoded at once is bounded."""
    messages = [
        {**message, "content": message["content"] + " return self.x\n    def f" * 40} for message in CONVERSATION
    ]
    tokenizer = with_template(speaker, PLAIN, tmp_path)
    whole = coded(messages, tokenizer)
    monkeypatch.setattr("unmask.data.records.PIECE", 100)
    monkeypatch.setattr("unmask.data.encoding.CHARACTERS", 300)
    sizes = []
    groups = encoding._groups
    monkeypatch.setattr(encoding, "_groups", lambda given: sizes.extend(groups(given)) or groups(given))
    assert coded(messages, tokenizer) == whole
    assert len(sizes) > 10


def test_tools_and_their_calls(tmp_path: Path, speaker: Any) -> None:
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": None}}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "It is 2."},
    ]
    tokenizer = with_template(speaker, TOOLED, tmp_path)
    record = {"messages": messages, "tools": tools}
    for given in (record, {**record, "tools": json.dumps(tools)}):
        token, flags = dataset_from([given], tokenizer).document(0)
        assert token.tolist() == tokenizer.apply_chat_template(messages, tools=tools, return_dict=False)
        first, last = said(tokenizer, token.tolist(), flags.tolist())
        assert first.startswith("<call>") and '"b": null' in first and last == "It is 2.<|im_end|>\n"
    assert "<tools>" not in tokenizer.decode(coded(messages, tokenizer)[0])
    # Templates by name: the one for tools is taken where there are some.
    tokenizer.chat_template = {"default": PLAIN, "tool_use": TOOLED}
    assert dataset_from([record], tokenizer).document(0)[0].tolist() == token.tolist()
    tokenizer.chat_template = {"tool_use": TOOLED}
    with pytest.raises(UserError, match="the tokeniser's chat templates: .*no default"):
        dataset_from([record], tokenizer)


BAD = [
    ([], '"messages" is not a list of messages'),
    ("hello", '"messages" is not a list of messages'),
    (["hello"], 'message 0 is not an object with "role" and "content"'),
    ([{"content": "a"}], 'message 0 is not an object with "role" and "content"'),
    ([{"role": "user", "content": 3}], r'message 0 \(user\) has no "content"'),
    ([{"role": "user", "content": "a"}], 'has no message of the role "assistant", so nothing to learn'),
    ([{"role": "user", "content": "<|mask|>"}, {"role": "assistant", "content": "a"}], "contains the mask token"),
    ([{"role": "user", "content": "\ud800"}, {"role": "assistant", "content": "a"}], "half of a surrogate pair"),
]


@pytest.mark.parametrize("messages, sentence", BAD)
def test_sentences_about_conversations(tmp_path: Path, speaker: Any, messages: Any, sentence: str) -> None:
    tokenizer = with_template(speaker, PLAIN, tmp_path / "t")
    good = json.dumps({"messages": CONVERSATION})
    (tmp_path / "a.jsonl").write_text(f"{good}\n{json.dumps({'messages': messages})}\n{good}\n")
    with pytest.raises(UserError, match=f"a.jsonl:2: .*{sentence}.*; fix it or use --skip-bad"):
        prepare(tmp_path / "a.jsonl", tmp_path / "out", tokenizer)
    manifest = prepare(tmp_path / "a.jsonl", tmp_path / "out", tokenizer, skip_bad=True)
    assert (manifest.documents, manifest.conversations, manifest.skipped) == (2, 2, 1)


def test_the_first_bad_line_is_told_whatever_a_later_one_lacks(tmp_path: Path, speaker: Any) -> None:
    tokenizer = with_template(speaker, PLAIN, tmp_path / "t")
    tokenizer.chat_template = None
    file, good = tmp_path / "a.jsonl", json.dumps({"messages": CONVERSATION})
    file.write_text('{"text": "one"}\n{"text": 3}\n{"messages": []}\n{"messages": [{"role": "user"}]}\n')
    manifest = prepare(file, tmp_path / "out", tokenizer, skip_bad=True)
    assert (manifest.documents, manifest.skipped) == (1, 3)
    for faulty, needs in ((tokenizer, good), (None, '{"text": "two"}'), (None, good)):
        file.write_text(f'{{"input_ids": [3]}}\n{{"text": 3}}\n{{"messages": []}}\n{needs}\n')
        with pytest.raises(UserError, match='a.jsonl:2: "text" is a number, not a string; fix it or use --skip-bad'):
            prepare(file, tmp_path / "out2", faulty)
        with pytest.raises(UserError, match="a.jsonl:4: (messages need a chat template|text needs a tokeniser)"):
            prepare(file, tmp_path / "out2", faulty, skip_bad=True)
    assert not (tmp_path / "out2").exists()


def test_a_message_of_an_unknown_role_that_the_template_leaves_out_is_refused(tmp_path: Path, speaker: Any) -> None:
    """A template that writes the roles it knows, and drops the others in silence."""
    chooses = PLAIN.replace(
        "<|im_start|>{{ message.role }}", "{% if message.role in ['user', 'assistant'] %}<|im_start|>{{ message.role }}"
    ).replace("<|im_end|>\n{% endfor %}", "<|im_end|>\n{% endif %}{% endfor %}")
    assert chooses.count("{% if") == 3 and chooses != PLAIN
    tokenizer = with_template(speaker, chooses, tmp_path)
    turns = CONVERSATION[1:3]
    odd = [{"role": "sytem", "content": "Be brief."}, *turns]
    with pytest.raises(UserError, match="record 0: the chat template leaves out message 0, of the role 'sytem'; usual"):
        coded(odd, tokenizer)
    wanted = coded(turns, tokenizer)
    assert (
        coded([{"role": "system", "content": "Be brief."}, *turns], tokenizer) == wanted
    )  # a choice of the template's
    tokenizer.chat_template = PLAIN
    assert "sytem" in tokenizer.decode(coded(odd, tokenizer)[0])


def test_what_a_template_itself_refuses(tmp_path: Path, speaker: Any) -> None:
    tokenizer = with_template(speaker, "{{ raise_exception('no systems here') }}", tmp_path)
    with pytest.raises(UserError, match="record 0: the chat template refuses it: no systems here"):
        coded(CONVERSATION, tokenizer)
    tokenizer.chat_template = "{{ messages[0].nothing.at_all }}"
    with pytest.raises(UserError, match="record 0: the chat template refuses it: "):
        coded(CONVERSATION, tokenizer)
    tokenizer.chat_template = "{% generation %}{% endgeneration %}nothing"
    with pytest.raises(UserError, match="record 0: the chat template leaves nothing of the assistant's turns"):
        coded(CONVERSATION, tokenizer)
    tokenizer.chat_template = None
    with pytest.raises(
        UserError, match="record 0: messages need a chat template.*give one with `unmask prepare --chat-template FILE`"
    ):
        coded(CONVERSATION, tokenizer)
    with pytest.raises(UserError, match='record 0: "tools" is a string, and not one of JSON'):
        tokenizer.chat_template = PLAIN
        dataset_from([{"messages": CONVERSATION, "tools": "{"}], tokenizer)


def test_a_template_from_a_file_goes_into_the_dataset(tmp_path: Path, speaker: Any) -> None:
    bare = with_template(speaker, None, tmp_path / "bare")
    (tmp_path / "chat.jinja").write_text(MARKED)
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": CONVERSATION}) + "\n")
    options: dict[str, Any] = {"chat_template": str(tmp_path / "chat.jinja"), "supervise": "last"}
    manifest = prepare(tmp_path / "a.jsonl", tmp_path / "out", bare, **options)
    assert bare.chat_template is None
    dataset = open_dataset(tmp_path / "out", bare, verify=True)
    assert dataset.tokenizer_path is not None
    assert load_tokenizer(dataset.tokenizer_path).chat_template == MARKED
    assert manifest.chat_template_sha256 == hashlib.sha256(f"{MARKED}\0{MARKED}".encode()).hexdigest()
    assert (manifest.conversations, manifest.supervise) == (1, "last")
    token, flags = dataset.document(0)
    assert said(bare, token.tolist(), flags.tolist()) == ["4\n\ndef f(): return 4<|im_end|>"]
    assert manifest.supervised == flags.sum() < manifest.tokens == len(token)
    for text, sentence in [("{% for %}", "chat.jinja:1: not a chat template"), (None, "no chat template can be read")]:
        (tmp_path / "chat.jinja").unlink()
        if text is not None:
            (tmp_path / "chat.jinja").write_text(text)
        else:
            (tmp_path / "chat.jinja").mkdir()
        with pytest.raises(UserError, match=sentence):
            dataset_from(tmp_path / "a.jsonl", bare, **options)


def test_a_tokeniser_is_trained_on_what_is_said(tmp_path: Path, speaker: Any) -> None:
    from unmask.data import source_tokenizer

    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"messages": CONVERSATION}) + "\n" for _ in range(20)))
    trained = source_tokenizer(tmp_path / "a.jsonl", 280)
    contents = "\n".join(str(message["content"]) for message in CONVERSATION)
    expected = train_tokenizer([contents] * 20, 280, tmp_path / "t")
    assert trained.get_vocab() == expected.get_vocab()


def test_a_tokeniser_that_is_trained_keeps_the_templates_tokens_whole(tmp_path: Path) -> None:
    from unmask.data import source_tokenizer

    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"messages": CONVERSATION}) + "\n" for _ in range(20)))
    template = "<|endoftext|>[SAYS]<think></think>" + PLAIN
    (tmp_path / "chat.jinja").write_text(template)
    reports: list[tuple[int, int, int]] = []
    options: dict[str, Any] = {"chat_template": str(tmp_path / "chat.jinja")}
    trained = source_tokenizer(tmp_path / "a.jsonl", 300, report=lambda *told: reports.append(told), **options)
    names = ["[SAYS]", "<think>", "</think>", "<|im_start|>", "<call>", "</call>", "<|im_end|>"]
    assert trained.convert_tokens_to_ids(names) == list(range(3, 10)) and len(trained) == 300
    assert set(range(3, 10)) <= set(trained.all_special_ids)
    size = (tmp_path / "a.jsonl").stat().st_size
    assert [told[0] for told in reports] == sorted(told[0] for told in reports) and reports[-1] == (size, size, 19)
    prepare(tmp_path / "a.jsonl", tmp_path / "out", trained, **options)
    dataset = open_dataset(tmp_path / "out")
    token, flags = dataset.document(0)
    assert (token == 6).sum() == len(CONVERSATION)
    assert end_policy([Document(token, flags)], load_tokenizer(tmp_path / "out")) == "each answer (<|im_end|>)"
    with pytest.raises(UserError, match="vocab_size=260: a byte-level vocabulary has at least 266 tokens, 7 special"):
        source_tokenizer(tmp_path / "a.jsonl", 260, **options)


def test_a_dataset_a_run_and_its_steps_stand_for_their_tokeniser(tmp_path: Path, speaker: Any) -> None:
    for number, place in enumerate(["data/tokenizer", "run/step-00000009/hf", "run/step-00000010/hf"]):
        speaker.chat_template = f"template {number}"
        speaker.save_pretrained(tmp_path / place)
    speaker.chat_template = None
    named = {"data": 0, "run/step-00000009": 1, "run/step-00000009/hf": 1, "run": 2}
    assert {name: load_tokenizer(tmp_path / name).chat_template for name in named} == {
        name: f"template {number}" for name, number in named.items()
    }
