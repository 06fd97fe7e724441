"""A client of the appliance, as somebody on its LAN writes one: the official `openai` package, over TLS.

Runs on the host, in the machine's network namespace. One JSON object on standard input says what to do, so that the
key is in no argument list; one on standard output says what came of it.
"""

import json
import ssl
import sys
import time
from typing import Any

import httpx
import openai


def main(asked: dict[str, Any]) -> dict[str, Any]:
    trust = ssl.create_default_context(cadata=asked["ca"]) if asked.get("ca") else ssl.create_default_context()
    client = openai.OpenAI(
        base_url=asked["url"], api_key=asked["key"], max_retries=0, timeout=asked.get("timeout", 60),
        http_client=httpx.Client(verify=trust, trust_env=False),
    )  # fmt: skip
    began = time.monotonic()
    try:
        if asked.get("list"):
            return {"models": [model.id for model in client.models.list()]}
        common: dict[str, Any] = {
            "model": asked["model"], "messages": [{"role": "user", "content": asked["prompt"]}],
            "max_tokens": asked.get("max_tokens", 16), "temperature": 0, "extra_body": asked.get("extra", {}),
        }  # fmt: skip
        if not asked.get("stream"):
            answer = client.chat.completions.create(**common)
            return {"text": answer.choices[0].message.content, "finish": answer.choices[0].finish_reason,
                    "tokens": answer.usage.completion_tokens if answer.usage else 0}  # fmt: skip
        pieces, finish, first = [], None, None
        for chunk in client.chat.completions.create(stream=True, **common):
            if first is None:
                first = time.monotonic() - began
                print("first piece", file=sys.stderr, flush=True)
            for choice in chunk.choices:
                pieces.append(choice.delta.content or "")
                finish = choice.finish_reason or finish
        return {"text": "".join(pieces), "finish": finish, "pieces": len(pieces), "ttft_s": first}
    except openai.APIStatusError as error:
        return {"status": error.status_code, "error": str(error)}
    except openai.APIConnectionError as error:
        return {"status": 0, "error": f"{error} {error.__cause__!r}"}


if __name__ == "__main__":
    json.dump(main(json.load(sys.stdin)), sys.stdout)
