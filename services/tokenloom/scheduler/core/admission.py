"""Which requests are taken: what can never run is refused, and so is what finds the queue full.

A full queue is shared like everything else: a request of a tenant that holds less than its share of the queue takes the
place of one that never ran and is no more urgent, of the tenant furthest over its share. So a flood cannot lock others
out. Nor do a tenant's own less urgent requests: the last of them gives way to a more urgent one.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenloom.scheduler.core.request import Request, RequestRefused
from tokenloom.scheduler.core.tenants import Tenant, Tenants
from tokenloom.scheduler.core.waiting_queue import WaitingQueue


def refuse_what_cannot_run(request: Request, max_request_tokens: int) -> None:
    """Check a request against what context and KV memory hold.

    Args:
        max_request_tokens: longest request, prompt and output.

    Raises: RequestRefused naming the field.
    """
    room, num_output = max_request_tokens - request.num_prompt_tokens, len(request.output_token_ids)
    if request.num_prompt_tokens == 0:
        raise RequestRefused("the prompt is empty; it needs at least one token", field="prompt")
    if room < 1:
        raise RequestRefused(
            f"the prompt has {request.num_prompt_tokens} tokens and leaves no room for output: prompt and output "
            f"together can have {max_request_tokens}",
            field="prompt",
        )
    if request.max_output_tokens < 1:
        raise RequestRefused(
            f"max_tokens is {request.max_output_tokens}; at least 1 token is generated", field="max_tokens"
        )
    if num_output >= min(room, request.max_output_tokens):
        raise RequestRefused(
            f"the resumed output has {num_output} tokens and may have {min(room, request.max_output_tokens)}: "
            "nothing is left to generate",
            field="resume_token_ids",
        )
    if num_output >= max(1, request.min_output_tokens) and request.output_token_ids[-1] in request.stop_token_ids:
        raise RequestRefused("the resumed output ends with a stop token already", field="resume_token_ids")


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """Bounds of the queue.

    Args:
        max_num_waiting: requests.
        max_num_waiting_tokens: tokens of all of them; one request alone may have more.
    """

    max_num_waiting: int
    max_num_waiting_tokens: int


def find_place(
    request: Request, waiting: WaitingQueue, tenants: Tenants, limits: QueueLimits, num_free_rows: int, now_s: float
) -> Request | None:
    """See whether the queue, and the limits of the request's tenant, have room for a request.

    Args:
        num_free_rows: rows for the tenant's waiting requests; those that they are enough for do not count as waiting.

    Returns: None if there is room; otherwise the waiting request whose place it takes.

    Raises: RequestRefused if it gets no place; nothing has changed.
    """
    own = waiting.last_of(request.account)
    if own is not None and own.current_class <= request.current_class:
        own = None
    is_tenant_full = _is_tenant_full(request.account, num_free_rows)
    if is_tenant_full and own is None:
        raise RequestRefused(
            f"{request.account.num_waiting} requests of this tenant wait already; the most is "
            f"{request.account.policy.max_num_waiting}",
            is_overload=True,
            reason="TENANT_QUEUE_FULL",
        )
    _check_token_rate(request, tenants, now_s)
    if not is_tenant_full and _has_room(request, waiting, limits, leaving=None):
        return None
    if own is not None and _has_room(request, waiting, limits, leaving=own):
        return own
    gives_way = None if is_tenant_full else _gives_way_to(request, waiting, tenants, limits)
    if gives_way is not None and _has_room(request, waiting, limits, leaving=gives_way):
        return gives_way
    if len(waiting) >= limits.max_num_waiting:
        what = f"{len(waiting)} requests wait already; the most is {limits.max_num_waiting}"
    else:
        what = f"{waiting.num_tokens} tokens wait already; the most is {limits.max_num_waiting_tokens}"
    raise RequestRefused(what, is_overload=True, reason="QUEUE_FULL")


def _is_tenant_full(tenant: Tenant, num_free_rows: int) -> bool:
    limit, max_num_running = tenant.policy.max_num_waiting, tenant.policy.max_num_running
    if max_num_running is not None:
        num_free_rows = min(num_free_rows, max_num_running - tenant.num_running)
    return limit is not None and tenant.num_waiting - max(0, num_free_rows) >= limit


def _check_token_rate(request: Request, tenants: Tenants, now_s: float) -> None:
    bucket = tenants.bucket_of(request.account, now_s)
    wait_s = bucket.wait_s(request.num_prompt_tokens, now_s) if bucket is not None else 0.0
    if bucket is not None and wait_s > 0:
        raise RequestRefused(
            f"the tenant's limit of {bucket.per_minute} tokens per minute is used up; there is room for "
            f"{request.num_prompt_tokens} more in {wait_s:.1f} s",
            is_overload=True,
            reason="TOKEN_RATE",
            retry_after_s=wait_s,
        )


def _has_room(request: Request, waiting: WaitingQueue, limits: QueueLimits, leaving: Request | None) -> bool:
    num_waiting, num_tokens = len(waiting), waiting.num_tokens
    if leaving is not None:
        num_waiting, num_tokens = num_waiting - 1, num_tokens - leaving.num_tokens
    if num_waiting == 0:
        return True
    return num_waiting < limits.max_num_waiting and num_tokens + request.num_tokens <= limits.max_num_waiting_tokens


def _gives_way_to(request: Request, waiting: WaitingQueue, tenants: Tenants, limits: QueueLimits) -> Request | None:
    """A request of another tenant, over its share of the queue."""
    newcomer = request.account

    def shares_held(tenant: Tenant, more_requests: int = 0, more_tokens: int = 0) -> float:
        """How many times its share of the queue the tenant has, or would have with more."""
        num_requests = tenants.share(tenant, limits.max_num_waiting, newcomer)
        num_tokens = tenants.share(tenant, limits.max_num_waiting_tokens, newcomer)
        return max(
            (tenant.num_waiting + more_requests) / num_requests, (tenant.num_waiting_tokens + more_tokens) / num_tokens
        )

    if shares_held(newcomer, 1, request.num_tokens) > 1:
        return None
    others = [tenant for tenant in tenants.alive if tenant is not newcomer]
    worst = max(others, key=shares_held, default=None)
    if worst is None or shares_held(worst) <= 1:
        return None
    last = waiting.last_of(worst)
    return last if last is not None and last.current_class >= request.current_class else None
