"""Conversations to tokens and masks, compared with ``apply_chat_template`` of transformers."""

from __future__ import annotations

import json
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from lightning_streaming.errors import ConfigError, EncodingError, StateMismatchError
from lightning_streaming.tokenizing.documents import DocumentTokenizer
from lightning_streaming.tokenizing.messages import read_messages, read_tools
from lightning_streaming.tokenizing.template import ChatTemplate
from tests.tiers import examples

TEMPLATES = {path.stem: path.read_text() for path in sorted(Path(__file__).parent.glob("templates/*.jinja"))}
"""Of the shapes of widely used models, written for these tests."""
SPECIAL = {"chatml": ("<|endoftext|>", "<|im_end|>"), "headers": ("<s>", "<|eot_id|>"), "inst": ("<s>", "</s>")}
"""The tokens that begin a text and end a turn, for each template."""
_MARKS = ("<|im_start|>", "<|start_header_id|>", "<|end_header_id|>", "[INST]", "[/INST]", "[TOOL_CALLS]")
TOOLS = [
    {"type": "function", "function": {"name": "add", "description": 'a < b, "é"', "parameters": {"type": "object"}}}
]
_EACH = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}"
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": [2, "é"]}}}
CONVERSATION = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "How much is 1 + 2?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "3"},
    {"role": "assistant", "content": "It is 3 — ☃ of course."},
    {"role": "user", "content": "Thanks  \n"},
    {"role": "assistant", "content": " You are\nwelcome!"},
]


def model_folder(folder: Path, template: str, source: str | None = None) -> PreTrainedTokenizerFast:
    """Save the tokenizer of a chat model as transformers does, and return it."""
    bos, eos = SPECIAL[template]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[misc, assignment, unused-ignore]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[bos, eos, *_MARKS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([json.dumps(CONVERSATION), *TEMPLATES.values()], trainer)
    fast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, bos_token=bos, eos_token=eos, chat_template=source or TEMPLATES[template]
    )
    fast.save_pretrained(folder)
    return fast


def without_blocks(source: str) -> str:
    """The template without its generation blocks, which writes the same."""
    return re.sub(r"\{%(-?) (?:end)?generation (-?)%\}", r"{%\1 if true \2%}{% endif %}", source)


def expected(fast: Any, messages: Any, tools: Any = None) -> tuple[list[int], list[int]]:
    """Tokens and mask by transformers."""
    document = fast.apply_chat_template(
        messages, tools=tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    return document["input_ids"], document["assistant_masks"]


def as_lists(document: Any) -> tuple[list[int], list[int]]:
    return document.tokens.tolist(), document.loss_mask.tolist()


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("has_tools", [False, True])
def test_tokens_and_masks_are_those_of_transformers(tmp_path: Path, template: str, has_tools: bool) -> None:
    fast = model_folder(tmp_path, template)
    tokenizer = DocumentTokenizer(tokenizer=str(tmp_path), chat="messages", tools="tools")
    row = {"messages": CONVERSATION, "tools": TOOLS if has_tools else None}
    document = as_lists(tokenizer.encode(row))
    assert document == expected(fast, CONVERSATION, row["tools"])
    assert 0 < sum(document[1]) < len(document[1])
    assert tokenizer.lengths({"messages": [json.dumps(CONVERSATION)], "tools": [json.dumps(row["tools"])]}) == [
        len(document[0])
    ]


@pytest.mark.parametrize("template", TEMPLATES)
def test_masks_of_templates_without_blocks_are_the_same(tmp_path: Path, template: str) -> None:
    fast = model_folder(tmp_path / "with", template)
    model_folder(tmp_path / "without", template, without_blocks(TEMPLATES[template]))
    tokenizer = DocumentTokenizer(tokenizer=str(tmp_path / "without"), chat="messages", tools="tools")
    document = as_lists(tokenizer.encode({"messages": CONVERSATION, "tools": TOOLS}))
    assert document == expected(fast, CONVERSATION, TOOLS)


_TEXTS = st.text(st.sampled_from("ab \n\t<|é☃😀>[]'\"{}"), max_size=12)


@given(turns=st.lists(st.tuples(_TEXTS, _TEXTS), min_size=1, max_size=4), template=st.sampled_from(sorted(TEMPLATES)))
@settings(max_examples=examples(100), deadline=None)
def test_any_text_has_the_tokens_and_masks_of_transformers(
    tmp_path_factory: pytest.TempPathFactory, turns: list[tuple[str, str]], template: str
) -> None:
    folder = tmp_path_factory.getbasetemp() / f"any-{template}"
    fast = _FAST.get(str(folder)) or _FAST.setdefault(str(folder), model_folder(folder, template))
    roles = ("user", "assistant")
    messages = [{"role": role, "content": text} for turn in turns for role, text in zip(roles, turn, strict=True)]
    document = DocumentTokenizer(tokenizer=str(folder), chat="messages").encode({"messages": messages})
    tokens, mask = expected(fast, messages)
    assert document.tokens.tolist() == tokens
    assert document.loss_mask is not None
    # transformers leaves out the last tokens of a turn that ends within a character of several tokens.
    assert (document.loss_mask >= np.array(mask)).all()
    assert fast.decode(document.tokens[document.loss_mask == 1]).count(SPECIAL[template][1]) >= len(turns)


_FAST: dict[str, Any] = {}


def test_the_turn_ends_with_its_last_token() -> None:
    template = ChatTemplate("{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>\n{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}", {"eos_token": "<end>"})  # fmt: skip
    messages = read_messages([{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}])
    text, spans = template.trained(messages)
    assert text == "<user>a<end>\n<assistant>b<end>\n"
    assert [text[begin:stop] for begin, stop in spans] == ["b<end>"]


def test_messages_of_weight_zero_are_not_trained_on() -> None:
    template = ChatTemplate(
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %};{% endfor %}", {}
    )
    messages = [{"role": "assistant", "content": text, "weight": weight} for text, weight in (("a", 0), ("b", 1))]
    assert template.trained(messages) == ("a;b;", [(2, 3)])
    with pytest.raises(EncodingError, match="3 generation blocks for 2 messages"):
        template.trained([*messages, {"role": "user", "content": "c"}])


def test_a_template_that_changes_earlier_turns_is_refused() -> None:
    template = ChatTemplate("{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}", {})
    with pytest.raises(EncodingError, match="writes messages up to 1 in another way") as caught:
        template.trained(read_messages([{"role": role, "content": role} for role in ("user", "assistant", "user")]))
    assert "{% generation %}" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ messages.__class__.__mro__ }}", "SecurityError"),
        ("{{ ''.__class__ }}{{ cycler.__init__.__globals__ }}", "SecurityError"),
        ("{% include '/etc/passwd' %}", "cannot render"),
        ("{% set _ = messages.append(1) %}", "SecurityError"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "OverflowError"),
        ("{{ raise_exception('no such\nrole') }}", "no such role|no such.nrole"),
        ("{{ strftime_now('%Y') }}", "UndefinedError"),
        ("{{ raise_exception | tojson(default='{0.__globals__}'.format) }}", "unexpected keyword argument 'default'"),
        ("{{ messages | tojson(cls=namespace) }}", "unexpected keyword argument 'cls'"),
        ("{{ messages | tojson(indent=10 ** 9) }}", "indent must be a number up to 64, but is 1000000000"),
        ("{{ messages | tojson(separators=[',', messages]) }}", "separators must be two texts"),
        ("{{ messages | random }}", "No filter named 'random'"),
        ("{{ lipsum() }}", "'lipsum' is undefined"),
        ("{% for i in range(9999) %}{{ 'a' * 9999 }}{% endfor %}", "writes more than 67,108,864 characters"),
        ("{% generation %}{% generation %}{% endgeneration %}{% endgeneration %}", "block within another"),
    ],
)
def test_a_template_reaches_nothing_but_the_messages(source: str, words: str) -> None:
    with pytest.raises((EncodingError, ConfigError), match=words):
        ChatTemplate(source, {}).trained(read_messages([{"role": "user", "content": "a"}]))


def test_json_of_a_template_is_that_of_transformers() -> None:
    source = "{{ messages | tojson(indent=2, separators=(',', ':'), sort_keys=true, ensure_ascii=true) }}"
    messages = [{"role": "user", "content": "é"}]
    text = ChatTemplate(source, {}).text(messages)
    assert text == json.dumps(messages, indent=2, separators=(",", ":"), sort_keys=True)


@pytest.mark.parametrize(
    "source", ["{% if 1 %}" * 300 + "{% endif %}" * 300, "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}"]
)
def test_a_template_that_cannot_be_compiled_is_an_error_of_the_template(source: str) -> None:
    with pytest.raises(
        ConfigError, match=r"the chat template has an error: (Recursion|Syntax|Memory)Error|nested blocks"
    ):
        ChatTemplate(source, {})


@pytest.mark.parametrize("name", ["tools", "documents"])
def test_arguments_that_are_not_given_are_none_as_in_transformers(name: str) -> None:
    source = f"{{{{ {name} is defined }}}}{{{{ {name} is none }}}}"
    assert ChatTemplate(source, {}).text([{"role": "user", "content": ""}]) == "TrueTrue"


def test_marks_in_data_are_data() -> None:
    template = ChatTemplate(f"{_EACH}{{% endfor %}}", {})
    text = "\ufdd0\ufdd1{% generation %}\ufdd2"
    assert template.trained([{"role": "assistant", "content": text}]) == (text, [(0, len(text))])


def test_both_forms_are_read() -> None:
    openai = [
        {"role": "system", "content": "s", "name": None},
        {"role": "user", "content": "u"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}],
        },
        {"role": "tool", "content": "3"},
    ]
    sharegpt = [
        {"from": "system", "value": "s"},
        {"from": "human", "value": "u"},
        {"from": "function_call", "value": '{"name": "f", "arguments": {"a": 1}}'},
        {"from": "observation", "value": "3"},
    ]
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    messages = read_messages(openai)
    assert messages[2] == {"role": "assistant", "content": None, "tool_calls": [call]}
    assert read_messages(json.dumps(openai)) == messages
    untyped = [
        {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": {}}}]}
    ]
    assert read_messages(untyped) == untyped
    assert read_messages(sharegpt) == [*messages[:2], {**messages[2], "content": ""}, messages[3]]
    assert read_tools("") is read_tools(None) is read_tools("[]") is None


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ([], "must be a list of messages"),
        ("hello", "must be a list or JSON"),
        ("[" * 10_000, "must be a list or JSON"),
        (["hello"], "message 0 must have role"),
        ([{"role": 3, "content": ""}], "message 0 must have role"),
        ([{"from": "alien", "value": ""}], "message 0 is from 'alien'"),
        ([{"from": "function_call", "value": "f("}], "a function call must be"),
    ],
)
def test_what_is_no_conversation_is_refused(value: Any, words: str) -> None:
    with pytest.raises(EncodingError, match=words):
        read_messages(value)


def test_files_are_read_at_first_use_and_are_in_the_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = DocumentTokenizer(tokenizer=str(tmp_path), chat="messages")
    with pytest.raises(ConfigError, match="tokenizer must be"):
        tokenizer.check()
    model_folder(tmp_path, "inst")
    tokenizer.check()
    digests = {tokenizer.digest, DocumentTokenizer(tokenizer=str(tmp_path), chat="chat").digest}
    copy = pickle.loads(pickle.dumps(tokenizer))
    assert copy.digest == tokenizer.digest
    assert as_lists(copy.encode({"messages": CONVERSATION})) == as_lists(tokenizer.encode({"messages": CONVERSATION}))
    path = tmp_path / "chat_template.jinja"
    path.write_text(path.read_text() + " ")
    digests.add(DocumentTokenizer(tokenizer=str(tmp_path), chat="messages").digest)
    digests.add(DocumentTokenizer(tokenizer=str(tmp_path), chat="messages", variables={"a": 1}).digest)
    assert len(digests) == 4
    path.write_text("{% if %}")
    with pytest.raises(ConfigError, match="error in line 1"):
        DocumentTokenizer(tokenizer=str(tmp_path), chat="messages").check()
    for name in ("a\0b", str(tmp_path / "none")):
        with pytest.raises(ConfigError, match=r"the chat template .* cannot be read"):
            DocumentTokenizer(tokenizer=str(tmp_path), chat="messages", template=name).check()
    path.unlink()
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": [{"name": []}]}))
    with pytest.raises(ConfigError, match="has no chat template"):
        DocumentTokenizer(tokenizer=str(tmp_path), chat="messages").check()
    with monkeypatch.context() as here:
        here.chdir(tmp_path)
        with pytest.raises(ConfigError, match=f"^{re.escape(str(tmp_path.resolve()))} has no chat template"):
            DocumentTokenizer(tokenizer=".", chat="messages").check()
    named = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    config.update(chat_template=named, bos_token={"content": "<s>", "lstrip": False})
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    for tools, letter in ((None, "a"), ("tools", "b")):
        both = DocumentTokenizer(tokenizer=str(tmp_path), chat="messages", tools=tools)
        assert both.encode({"messages": CONVERSATION[:2], "tools": None}).tokens.tolist() == [
            both.loaded.encode(letter)[0]
        ]


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_a_replaced_file_is_never_mixed_with_the_first(tmp_path: Path, file: str) -> None:
    model_folder(tmp_path, "chatml")
    row, tokenizer = {"messages": CONVERSATION}, DocumentTokenizer(tokenizer=str(tmp_path), chat="messages")
    expected = as_lists(DocumentTokenizer(tokenizer=str(tmp_path), chat="messages").encode(row))
    unread = pickle.dumps(tokenizer)
    digest = tokenizer.digest
    path = tmp_path / file
    path.write_text(path.read_text().replace("<|im_end|>", "<|im_stop|>"))
    assert as_lists(tokenizer.encode(row)) == expected
    copy = pickle.loads(pickle.dumps(tokenizer))
    assert copy.digest == digest
    with pytest.raises(StateMismatchError, match="was replaced after another process"):
        copy.encode(row)
    assert pickle.loads(unread).digest != digest


def test_bytes_have_masks_too(tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text(
        "{% for m in messages %}é{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    )
    tokenizer = DocumentTokenizer(tokenizer="bytes", chat="messages", template=str(tmp_path / "t.jinja"))
    document = tokenizer.encode({"messages": [{"role": "assistant", "content": "☃a"}]})
    assert (document.tokens.tobytes().decode(), as_lists(document)[1]) == ("é☃a", [0, 0, 1, 1, 1, 1])
    with pytest.raises(ConfigError, match="the tokenizer has no chat template"):
        DocumentTokenizer(tokenizer="bytes", chat="messages").check()
