"""The HTTP interface: routes, error handlers and what surrounds them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException
from starlette.responses import Response

from tokenloom import __version__
from tokenloom.common.auth import ApiKeys, bearer_of
from tokenloom.common.errors import NotFound, TokenloomError, Unavailable
from tokenloom.common.metrics import REGISTRY, fetch_metrics
from tokenloom.common.telemetry import context_of, inject
from tokenloom.gateway import metrics
from tokenloom.gateway.answers import AnswerHead, StreamAnswer, WholeAnswer
from tokenloom.gateway.config import GatewayConfig
from tokenloom.gateway.convert import CallContext, Start, chat_start, completion_start, options_of
from tokenloom.gateway.deadlines import HEADER_DOCUMENT, time_limit_s
from tokenloom.gateway.delivery import Job, StreamDelivery, WholeDelivery, end_of_stream
from tokenloom.gateway.event_ids import HEADER_DOCUMENT as LAST_EVENT_ID_DOCUMENT
from tokenloom.gateway.event_ids import LAST_EVENT_ID, EventIds, Told, told_before
from tokenloom.gateway.formats import ChatFormat, CompletionFormat, Format
from tokenloom.gateway.generation import Generation
from tokenloom.gateway.http_errors import HttpError, to_http
from tokenloom.gateway.json_response import JsonResponse, error_response
from tokenloom.gateway.json_route import JsonRoute
from tokenloom.gateway.middleware import OPEN_PATHS, BodyLimit, DrainGate, KeyGate, Telemetry
from tokenloom.gateway.openai_types import ChatBody, CompletionBody, GenerationBody
from tokenloom.gateway.request_info import RequestInfo, created_s_of, info_of, seed_of
from tokenloom.gateway.sized_work import MAX_LOOP_BYTES, run_sized
from tokenloom.gateway.tokenizer_client import MAX_START_BYTES
from tokenloom.gateway.tokenizer_pool import TokenizerPool

CHAT_PATH = "/v1/chat/completions"
COMPLETIONS_PATH = "/v1/completions"
MODELS_PATH = "/v1/models"
_WITH_HEADERS = {"parameters": [HEADER_DOCUMENT, LAST_EVENT_ID_DOCUMENT]}
ROUTES = OPEN_PATHS | {CHAT_PATH, COMPLETIONS_PATH, MODELS_PATH}


@dataclass(frozen=True)
class Gateway:
    """What the routes work with."""

    config: GatewayConfig
    keys: ApiKeys
    pool: TokenizerPool
    is_draining: Callable[[], bool]


def create_app(gateway: Gateway) -> FastAPI:
    """The ASGI application."""
    app = FastAPI(
        title="Tokenloom",
        version=__version__,
        description="LLM inference in OpenAI's format.",
        redoc_url=None,
        redirect_slashes=False,
    )
    app.include_router(_generation_routes(gateway))
    app.include_router(_model_routes(gateway))
    app.include_router(_operations_routes(gateway))
    _add_error_handlers(app)
    config = gateway.config
    app.add_middleware(
        BodyLimit,
        max_bytes=config.max_body_bytes,
        max_total_bytes=config.max_total_body_bytes,
        timeout_s=config.body_timeout_s,
    )
    app.add_middleware(KeyGate, keys=gateway.keys)
    app.add_middleware(DrainGate, is_draining=gateway.is_draining)
    app.add_middleware(Telemetry, routes=ROUTES)
    return app


def _generation_routes(gateway: Gateway) -> APIRouter:
    router = APIRouter(route_class=JsonRoute, tags=["generation"])

    @router.post(CHAT_PATH, response_model=None, openapi_extra=_WITH_HEADERS)
    async def create_chat_completion(body: ChatBody, request: Request) -> Response:
        """Continue a conversation."""
        info = info_of(request.scope)
        form = ChatFormat(has_logprobs=bool(body.logprobs), has_token_ids=bool(body.return_token_ids))
        told = _told_before(body, request, form, body.num_choices)
        context = _call_context(info, form, told)
        start = await run_sized(await _is_large(request), lambda: chat_start(body, context))
        return _delivery(gateway, body, request, form, start, body.num_choices, told)

    @router.post(COMPLETIONS_PATH, response_model=None, openapi_extra=_WITH_HEADERS)
    async def create_completion(body: CompletionBody, request: Request) -> Response:
        """Continue prompts."""
        info = info_of(request.scope)
        form = CompletionFormat(
            has_logprobs=body.logprobs is not None,
            has_token_ids=bool(body.return_token_ids),
            echo=bool(body.echo),
            has_prompt_logprobs=body.prompt_logprobs is not None,
            num_choices=body.num_choices,
        )
        num_choices = len(body.prompt) * body.num_choices
        told = _told_before(body, request, form, num_choices)
        context = _call_context(info, form, told)
        start = await run_sized(await _is_large(request), lambda: completion_start(body, context))
        return _delivery(gateway, body, request, form, start, num_choices, told)

    return router


async def _is_large(request: Request) -> bool:
    return len(await request.body()) > MAX_LOOP_BYTES


def _told_before(body: GenerationBody, request: Request, form: Format, num_choices: int) -> Told | None:
    """What a client that is back has already; its request has the id of the first one then. Raises: HttpError."""
    told = told_before(request.headers, form.id_prefix, num_choices)
    if told is not None:
        if not body.resumable:
            message = f"resumable: must be true with the header {LAST_EVENT_ID}, as in the first request"
            raise HttpError(400, message, param="resumable", code="invalid_value")
        info_of(request.scope).hex_id = told.hex_id
        metrics.RETURNS.inc()
    return told


def _call_context(info: RequestInfo, form: Format, told: Told | None) -> CallContext:
    """Fix what a retry needs before the first send."""
    request_id = form.id_prefix + info.hex_id
    trace = inject(context_of(info.span))
    return CallContext(request_id, seed_of(request_id), info.key_digest, trace, told)


def _delivery(
    gateway: Gateway,
    body: GenerationBody,
    request: Request,
    form: Format,
    start: Start,
    num_choices: int,
    told: Told | None,
) -> Response:
    """What will submit the request and carry its answer."""
    if start.ByteSize() > MAX_START_BYTES:
        raise HttpError(413, f"the request takes more than {MAX_START_BYTES} bytes", code="body_too_large")
    config, info = gateway.config, info_of(request.scope)
    timeout_s = time_limit_s(request.headers, body.timeout, config.request_timeout_s)
    head = AnswerHead(form.id_prefix + info.hex_id, created_s_of(info.hex_id))
    wants_prompts, may_return = options_of(start).return_token_ids, bool(body.resumable)
    generation = Generation(
        head.request_id, config.max_buffered_bytes, wants_prompts=wants_prompts, may_return=may_return
    )
    _describe(info, body, form, head)
    job = Job(generation, start, timeout_s, gateway.pool)
    if body.stream:
        ids = EventIds(head.request_id, told, generation.progress, body.num_choices) if may_return else None
        if told is not None and ids is not None:
            if told.has_usage:
                return end_of_stream(ids, told)
            told.note_in(generation.progress)
        return StreamDelivery(job, StreamAnswer(head, form, body.includes_usage, ids))
    return WholeDelivery(job, WholeAnswer(head, form, num_choices))


def _describe(info: RequestInfo, body: GenerationBody, form: Format, head: AnswerHead) -> None:
    """Attributes of the span by OpenTelemetry's GenAI conventions; no prompt and no text."""
    attributes: dict[str, Any] = {
        "gen_ai.operation.name": "chat" if isinstance(body, ChatBody) else "text_completion",
        "gen_ai.provider.name": "tokenloom",
        "gen_ai.request.model": body.model,
        "gen_ai.request.choice.count": body.num_choices,
        "gen_ai.request.temperature": body.temperature,
        "gen_ai.request.top_p": body.top_p,
        "gen_ai.request.top_k": body.top_k,
        "gen_ai.request.presence_penalty": body.presence_penalty,
        "gen_ai.request.frequency_penalty": body.frequency_penalty,
        "gen_ai.request.seed": body.seed,
        "gen_ai.response.id": head.request_id,
    }
    if isinstance(body, ChatBody | CompletionBody):
        attributes["gen_ai.request.max_tokens"] = body.max_generated_tokens
    info.span.set_attributes({name: value for name, value in attributes.items() if value is not None})


def _model_routes(gateway: Gateway) -> APIRouter:
    router = APIRouter(tags=["models"])

    @router.get(MODELS_PATH, response_model=None)
    async def list_models(request: Request) -> Response:
        """The models served."""
        models = await gateway.pool.list_models(bearer_of(request.headers.get("authorization")))
        return JsonResponse({"object": "list", "data": [model.body() for model in models]})

    @router.get(MODELS_PATH + "/{model_id:path}", response_model=None)
    async def get_model(model_id: str, request: Request) -> Response:
        """One model."""
        for model in await gateway.pool.list_models(bearer_of(request.headers.get("authorization"))):
            if model.id == model_id:
                return JsonResponse(model.body())
        raise NotFound(f"the model {model_id!r} is not served here", field="model", reason="MODEL_NOT_FOUND")

    return router


def _operations_routes(gateway: Gateway) -> APIRouter:
    router = APIRouter(tags=["operations"])

    @router.get("/health", response_model=None)
    async def health() -> Response:
        """Liveness: this process answers."""
        return JsonResponse({"status": "ok"})

    @router.get("/ready", response_model=None)
    async def ready() -> Response:
        """Readiness: requests can be served now."""
        if gateway.is_draining():
            return JsonResponse({"status": "draining"}, 503)
        if not gateway.pool.is_ready:
            return JsonResponse({"status": f"waiting for the {gateway.pool.waits_for}"}, 503, {"retry-after": "1"})
        return JsonResponse({"status": "ready"})

    @router.get("/metrics", response_model=None)
    async def metrics_page() -> Response:
        """Prometheus metrics of the gateway, and of the stages that `metrics_from` names."""
        pages = await asyncio.gather(*(_page_of(address) for address in gateway.config.metrics_from))
        return Response(b"".join([generate_latest(REGISTRY), *pages]), media_type=CONTENT_TYPE_LATEST)

    return router


async def _page_of(address: str) -> bytes:
    try:
        return await fetch_metrics(address)
    except Unavailable as error:
        return f"# {error.message}\n".encode()


def _add_error_handlers(app: FastAPI) -> None:
    def handler(to_error: Callable[[Any], HttpError]) -> Callable[[Request, Any], Awaitable[Response]]:
        async def handle(request: Request, error: Any) -> Response:
            if isinstance(error, TokenloomError):
                info_of(request.scope).error = error
            return error_response(to_error(error))

        return handle

    app.add_exception_handler(TokenloomError, handler(to_http))
    app.add_exception_handler(HttpError, handler(lambda error: error))
    app.add_exception_handler(HTTPException, handler(_from_framework))


def _from_framework(error: HTTPException) -> HttpError:
    """What the router itself refuses: unknown paths and wrong methods."""
    messages = {404: "no such path", 405: "this path does not take this method"}
    message = messages.get(error.status_code, str(error.detail))
    codes = {404: "not_found", 405: "method_not_allowed"}
    return HttpError(error.status_code, message, code=codes.get(error.status_code), headers=error.headers)
