"""`/v1/models`, `/tokenize` and `/detokenize`: which models are served, and how they tokenise."""

from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response

from engine.errors import InvalidRequestError
from engine.server.http.documented import READ, documented
from engine.server.openai.chat.endpoint import chat_prompt, check_chat_size, check_content
from engine.server.openai.endpoint import admission, gateway_of, json_reply
from engine.server.openai.reply import replies as r
from engine.server.openai.request.body import read_request
from engine.server.openai.request.sampling import check_length_before_encoding
from engine.server.openai.request.schema import DetokenizeRequest, TokenizeRequest
from engine.server.openai.serving import ServedModel

_ERRORS = (404, *READ, 429, 503)

models_router = APIRouter(tags=["Models"])
text_router = APIRouter(tags=["Text and tokens"], dependencies=[Depends(admission)])


@models_router.get("/v1/models", **documented("List the served models", reply=r.ModelList))
async def list_models(request: Request) -> Response:
    models = gateway_of(request).models
    return json_reply(r.ModelList("list", [_card(name, model) for name, model in models.items()]))


@models_router.get("/v1/models/{id:path}", **documented("One served model", reply=r.ModelCard, errors=(404,)))
async def get_model(request: Request, id: str) -> Response:  # ids may contain slashes
    return json_reply(_card(id, gateway_of(request).model(id or "?")))


@models_router.get("/tokenizer_info", **documented(
    "Special tokens and chat template of a model", reply=r.TokenizerInfo, errors=(400, 404)))
async def tokenizer_info(request: Request, model: str | None = None) -> Response:
    served = gateway_of(request).model(model)
    tokens, template = served.tokenizer.named_tokens, served.tokenizer.template
    return json_reply(r.TokenizerInfo(
        served.name, served.tokenizer.class_name, served.tokenizer.vocab_size, served.max_model_len,
        tokens.get("bos_token"), tokens.get("eos_token"), tokens.get("pad_token"), tokens.get("unk_token"),
        template.source if template is not None else None))


@text_router.post("/tokenize", **documented(
    "Token ids of a text or a conversation", body=TokenizeRequest, reply=r.TokenizeReply, errors=_ERRORS))
async def tokenize(request: Request) -> Response:
    gateway = gateway_of(request)
    body = await read_request(request, TokenizeRequest, gateway.limits)
    model = gateway.model(body.model)
    info = model.ready(gateway.limits)
    check_chat_size(body, gateway.limits)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequestError("Send either prompt or messages.", "prompt")
    _check_form(body)
    if body.prompt is not None:
        check_length_before_encoding(len(body.prompt), model.tokenizer.longest_token, info.max_model_len, "prompt")
        special = body.add_special_tokens if body.add_special_tokens is not None else True
        tokens = await gateway.off_loop(model.tokenizer.encode_text, body.prompt, special)
    else:
        if not body.messages:
            raise InvalidRequestError("messages must not be empty.", "messages")
        check_content(body.messages)
        tokens = await chat_prompt(gateway, model, info, body)
    texts = [model.tokenizer.token_text(i) for i in tokens] if body.return_token_strs else None
    return json_reply(r.TokenizeReply(len(tokens), info.max_model_len, tokens, texts))


def _check_form(body: TokenizeRequest) -> None:
    """Refuse fields that do not apply: a prompt has no template, and a template adds its own special tokens.

    Raises InvalidRequestError.
    """
    if body.messages is not None and body.add_special_tokens:
        raise InvalidRequestError("add_special_tokens: the chat template adds them; leave it out.",
                                  "add_special_tokens")
    for name in ("tools", "reasoning_effort", "chat_template_kwargs", "add_generation_prompt",
                 "continue_final_message"):
        if body.prompt is not None and getattr(body, name):
            raise InvalidRequestError(f"{name} belongs to messages, not to a prompt.", name)


@text_router.post("/detokenize", **documented(
    "Text of token ids", body=DetokenizeRequest, reply=r.DetokenizeReply, errors=_ERRORS))
async def detokenize(request: Request) -> Response:
    gateway = gateway_of(request)
    body = await read_request(request, DetokenizeRequest, gateway.limits)
    model = gateway.model(body.model)
    if any(i >= model.tokenizer.vocab_size for i in body.tokens):
        raise InvalidRequestError(f"tokens must be below {model.tokenizer.vocab_size}.", "tokens")
    text = await gateway.off_loop(model.tokenizer.decode, body.tokens, skip_special_tokens=False)
    return json_reply(r.DetokenizeReply(text))


def _card(name: str, model: ServedModel) -> r.ModelCard:
    length = model.max_model_len
    return r.ModelCard(name, "model", model.created, "atoll", model.name, None, length, length)
