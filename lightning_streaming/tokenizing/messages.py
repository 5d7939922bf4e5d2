"""Messages of a conversation in one form, from the forms in which data sets store them.

OpenAI     [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]
ShareGPT   [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Hi"}]
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_streaming.errors import EncodingError
from lightning_streaming.escaping import short_repr

Message = dict[str, Any]
ASSISTANT = "assistant"
_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": ASSISTANT,
    "assistant": ASSISTANT,
    "model": ASSISTANT,
    "chatgpt": ASSISTANT,
    "bot": ASSISTANT,
    "function_call": ASSISTANT,
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}
"""Roles of the ShareGPT form."""


def read_messages(value: Any) -> list[Message]:
    """Return the messages of a conversation with ``role`` and ``content``, as chat templates read them.

    Fields that are None are left out, except ``content``; arguments of tool calls that are JSON in a text become an
    object.

    Args:
        value: A list of messages in one of the forms, or its JSON.

    Raises:
        EncodingError: It is something else.
    """
    items = _from_json(value, "a conversation")
    if not isinstance(items, Sequence) or isinstance(items, str) or not items:
        raise EncodingError(f"a conversation must be a list of messages, but is {short_repr(items)}")
    return [_message(item, number) for number, item in enumerate(items)]


def read_tools(value: Any) -> list[Any] | None:
    """Return the tools of a conversation: a list of JSON schemas, or its JSON; None if there are none.

    Raises:
        EncodingError: It is something else.
    """
    tools = _from_json(value, "tools") if value != "" else None  # an empty cell of a text column
    if tools is not None and not isinstance(tools, list):
        raise EncodingError(f"tools must be a list of JSON schemas, but is {short_repr(tools)}")
    return tools or None


def is_trained_on(message: Message) -> bool:
    """Return whether a message is one of the assistant, without the ``weight`` 0 of OpenAI's fine-tuning files."""
    return message["role"] == ASSISTANT and bool(message.get("weight", 1) != 0)


def _from_json(value: Any, what: str) -> Any:
    if not isinstance(value, str | bytes):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise EncodingError(f"{what} must be a list or JSON, but is {short_repr(value)}: {error}") from error


def _message(item: Any, number: int) -> Message:
    if isinstance(item, Mapping) and isinstance(item.get("role"), str):
        message = {name: value for name, value in item.items() if value is not None or name == "content"}
        calls = message.get("tool_calls")
        if isinstance(calls, list):
            message["tool_calls"] = [_call(call) for call in calls]
        return message
    if isinstance(item, Mapping) and "from" in item and isinstance(item.get("value"), str):
        role = _ROLES.get(str(item["from"]))
        if role is None:
            raise EncodingError(f"message {number} is from {item['from']!r:.60}", hint=f"roles are {', '.join(_ROLES)}")
        if item["from"] != "function_call":
            return {"role": role, "content": item["value"]}
        calls = _from_json(item["value"], "a function call")
        calls = calls if isinstance(calls, list) else [calls]
        calls = [_call({"type": "function", "function": call}) for call in calls]
        return {"role": role, "content": "", "tool_calls": calls}
    raise EncodingError(
        f"message {number} must have role and content, or from and value, but is {short_repr(item)}",
    )


def _call(call: Any) -> Any:
    """Return a call of a tool with its arguments as an object, which templates write as JSON."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except (ValueError, RecursionError):
            parsed = None  # a text that is no JSON stays as it is
        arguments = parsed if isinstance(parsed, dict) else arguments
    return {**call, "function": {**function, "arguments": arguments}}
