"""Which tokenizer gets a request: the one with the fewest choices in flight, those of other gateways included."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from tokenloom.api.v1 import inference_pb2
from tokenloom.common.errors import Cancelled
from tokenloom.gateway.generation import Generation
from tokenloom.gateway.tokenizer_client import TokenizerClient
from tokenloom.gateway.tokenizer_pool import TokenizerPool

GONE = Cancelled("the client went away")
Story = Callable[[TokenizerPool, "list[TokenizerClient]"], Coroutine[Any, Any, None]]


def with_two(story: Story) -> None:
    """Run a story with a pool over two healthy tokenizers that nobody connects to."""

    async def run() -> None:
        pool = TokenizerPool(["unix:/nowhere/a", "unix:/nowhere/b"], "", "", 100)
        for client in pool._clients:
            client.is_up = client.is_serving = client.has_served = True
        await story(pool, pool._clients)
        await pool.stop()

    asyncio.run(run())


def submit(pool: TokenizerPool, num_choices: int = 1, num_prompts: int = 1) -> Generation:
    generation = Generation("r", 1000)
    options = inference_pb2.GenerationOptions(num_choices=num_choices)
    prompts = [inference_pb2.Prompt(text="x")] * num_prompts
    start = inference_pb2.SessionStart(complete=inference_pb2.CompleteRequest(prompts=prompts, options=options))
    pool.submit(generation, start, 60.0)
    return generation


async def tell_load(client: TokenizerClient, num_choices: int) -> None:
    await client._take(inference_pb2.SessionResponse(load=inference_pb2.SessionLoad(num_choices=num_choices)))


def in_flight(clients: list[TokenizerClient]) -> list[int]:
    return [client.num_choices for client in clients]


def test_what_another_gateway_has_there_counts() -> None:
    async def story(pool: TokenizerPool, clients: list[TokenizerClient]) -> None:
        await tell_load(clients[0], 4)
        for _ in range(6):
            submit(pool)
        assert in_flight(clients) == [1, 5], "equal loads go where less is our own"

    with_two(story)


def test_choices_count_and_not_requests() -> None:
    async def story(pool: TokenizerPool, clients: list[TokenizerClient]) -> None:
        submit(pool, num_choices=2, num_prompts=3)
        for _ in range(5):
            submit(pool)
        assert in_flight(clients) == [6, 5]

    with_two(story)


def test_a_report_holds_our_own_too_which_are_known_better_here() -> None:
    async def story(pool: TokenizerPool, clients: list[TokenizerClient]) -> None:
        generations = [submit(pool) for _ in range(8)]
        assert in_flight(clients) == [4, 4]
        await tell_load(clients[0], 4 + 3)
        for generation in generations:
            generation.abandon(GONE)
        assert [client.load for client in clients] == [3, 0]
        submit(pool)
        await tell_load(clients[1], 0)  # made before our latest came
        assert [client.load for client in clients] == [3, 1]

    with_two(story)


def test_one_that_drains_or_is_not_healthy_gets_nothing_however_idle() -> None:
    async def story(pool: TokenizerPool, clients: list[TokenizerClient]) -> None:
        await tell_load(clients[1], 50)
        clients[0].is_draining = True
        submit(pool)
        clients[0].is_draining, clients[0].is_serving = False, False
        submit(pool)
        assert in_flight(clients) == [0, 2]

    with_two(story)


def test_all_that_ended_counts_no_more_however_it_ended() -> None:
    async def story(pool: TokenizerPool, clients: list[TokenizerClient]) -> None:
        clients[1].is_up = False
        first, *_ = [submit(pool, num_choices=2) for _ in range(4)]
        assert in_flight(clients) == [8, 0]
        first.abandon(GONE)
        await clients[0]._take(inference_pb2.SessionResponse(completed=[inference_pb2.SessionCompleted(handle=2)]))
        assert in_flight(clients) == [4, 0]
        clients[0]._lose_session(False)
        assert in_flight(clients) == [0, 0]
        assert clients[0].load == 0

    with_two(story)
