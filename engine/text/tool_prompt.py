"""Tools for models whose chat template does not support them: shown in the system message, in the form of Hermes.

Calls and results in the history become text in the same form, so that the model sees the syntax that it is to use.
"""

import json
from typing import Any

_INTRODUCTION = """\
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


def with_tool_prompt(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """Normalised messages (engine.text.conversation), converted so that any template can render them."""
    shown: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "tool":
            text = f"<tool_response>\n{message['content']}\n</tool_response>"
            if shown and shown[-1].get("_results"):
                shown[-1]["content"] += f"\n{text}"
            else:
                shown.append({"role": "user", "content": text, "_results": True})
        elif calls := message.get("tool_calls"):
            texts = [f"<tool_call>\n{_json(call['function'])}\n</tool_call>" for call in calls]
            content = "\n".join([*([message["content"]] if message["content"] else []), *texts])
            shown.append({**message, "content": content, "tool_calls": None})
        else:
            shown.append(message)
    if tools:
        text = _INTRODUCTION.format(tools="\n".join(map(_json, tools)))
        if shown and shown[0]["role"] == "system":
            shown[0] = {**shown[0], "content": f"{shown[0]['content']}\n\n{text}".strip()}
        else:
            shown.insert(0, {"role": "system", "content": text})
    return [{key: value for key, value in message.items() if key != "_results" and value is not None}
            for message in shown]


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
