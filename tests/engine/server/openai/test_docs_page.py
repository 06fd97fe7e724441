"""`/docs` explains the endpoint in a browser that has no Internet."""

import re
from html.parser import HTMLParser

import httpx
from gateways import RunningServer

from engine.server.gateway.docs_page import docs_page
from engine.server.openai.request.schema import ChatRequest


class Page(HTMLParser):
    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("href", "src", "srcset", "action", "style")]

    def handle_data(self, data: str) -> None:
        self.text += data


def test_it_loads_nothing_from_elsewhere_and_runs_no_script(tiny_server: RunningServer) -> None:
    reply = httpx.get(f"{tiny_server.url}/docs")
    assert (reply.status_code, reply.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert reply.headers["content-security-policy"].startswith("default-src 'none'")
    page = Page(reply.text)
    assert page.links == ["openapi.json"]
    assert not {"script", "link", "img", "iframe", "form"} & set(page.tags)
    assert not re.search(r"https?://|url\(|@import", reply.text)


def test_it_describes_every_route_and_field(tiny_server: RunningServer) -> None:
    document = httpx.get(f"{tiny_server.url}/openapi.json").json()
    page = Page(httpx.get(f"{tiny_server.url}/docs").text)
    for path, operations in document["paths"].items():
        assert path in page.text
        assert all(operation["summary"] in page.text for operation in operations.values())
    assert all(name in page.text for name in ChatRequest.__struct_fields__)
    assert page.tags.count("details") == sum(map(len, document["paths"].values()))


def test_what_the_document_holds_is_text(tiny_server: RunningServer) -> None:
    document = httpx.get(f"{tiny_server.url}/openapi.json").json()
    document["info"]["description"] = document["paths"]["/livez"]["get"]["summary"] = "<script>alert(1)</script>"
    page = Page(docs_page(document))
    assert "script" not in page.tags
    assert page.text.count("<script>alert(1)</script>") == 2


def test_the_tokenizer_describes_itself(tiny_server: RunningServer) -> None:
    info = httpx.get(f"{tiny_server.url}/tokenizer_info").json()
    assert info["eos_token"] == "<|im_end|>"  # lm-eval's remote tokenizer asks for it
    assert info["tokenizer_class"]  # what vLLM always names
    assert (info["vocab_size"], info["model_max_length"]) == (320, 512)
    assert "<|im_start|>" in info["chat_template"]
    assert httpx.get(f"{tiny_server.url}/tokenizer_info", params={"model": "none"}).status_code == 404
