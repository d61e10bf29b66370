"""The pool over tokenizers that only note what they are sent."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

import pytest

from tokenloom.api.v1 import inference_pb2
from tokenloom.common.errors import Cancelled, TokenloomError, Unavailable
from tokenloom.gateway import tokenizer_pool
from tokenloom.gateway.generation import Generation
from tokenloom.gateway.tokenizer_client import Call
from tokenloom.gateway.tokenizer_pool import TokenizerPool


class NotingClient:
    """Takes calls while it is up and gives them back when told to."""

    def __init__(
        self,
        address: str,
        token: str,
        client_id: str,
        on_lost: Callable[[list[Call], bool], None],
        on_up: Any,
        stall_timeout_s: float,
    ) -> None:
        self.is_up, self.is_serving, self.has_served, self.is_draining = True, True, True, False
        self.load, self.num_choices, self.left_at_s = 0, 0, -math.inf
        self.waits_for_executor = False
        self.calls: list[Call] = []
        self.cancelled: list[str] = []
        self.on_lost, self.on_up = on_lost, on_up

    def submit(self, call: Call) -> None:
        call.is_sent = True
        call.num_attempts += 1
        call.generation.on_abandoned = lambda: self.cancelled.append(call.generation.request_id)
        self.calls.append(call)

    def start(self) -> None:
        """It is what the test says."""

    async def stop(self) -> None:
        self.lose(comes_back=False)

    def lose(self, *, is_overfull: bool = False, comes_back: bool = True) -> None:
        """End the session, and open the next one unless told otherwise."""
        lost, self.calls = self.calls, []
        self.is_up = self.has_served = False
        self.on_lost(lost, is_overfull)
        if comes_back:
            self.is_up = True
            self.on_up()


@pytest.fixture
def clients(monkeypatch: pytest.MonkeyPatch) -> list[NotingClient]:
    made: list[NotingClient] = []

    def make(*args: Any) -> NotingClient:
        made.append(NotingClient(*args))
        return made[-1]

    monkeypatch.setattr(tokenizer_pool, "TokenizerClient", make)
    return made


def submit(pool: TokenizerPool, request_id: str, num_bytes: int = 1, timeout_s: float = 60.0) -> Generation:
    generation = Generation(request_id, 1000)
    prompt = inference_pb2.Prompt(text="x" * num_bytes)
    start = inference_pb2.SessionStart(complete=inference_pb2.CompleteRequest(prompts=[prompt]))
    pool.submit(generation, start, timeout_s)
    return generation


async def error_of(generation: Generation) -> TokenloomError:
    error = (await generation.next_update()).error
    assert error is not None
    return error


def test_what_was_too_large_for_a_session_is_not_sent_again_and_its_neighbours_once(
    clients: list[NotingClient],
) -> None:
    async def story() -> None:
        pool = TokenizerPool(["a"], "", "", 10)
        large, small = submit(pool, "large", 2 << 20), submit(pool, "small")
        clients[0].lose(is_overfull=True)
        assert [call.generation for call in clients[0].calls] == [small]
        assert (await error_of(large)).reason == "REQUEST_TOO_LARGE"
        clients[0].lose(is_overfull=True)
        assert clients[0].calls == []
        assert small.is_over

    asyncio.run(story())


def test_a_session_lost_for_another_reason_costs_a_large_request_nothing(clients: list[NotingClient]) -> None:
    async def story() -> None:
        pool = TokenizerPool(["a"], "", "", 10)
        large = submit(pool, "large", 2 << 20)
        clients[0].lose()
        assert [call.generation for call in clients[0].calls] == [large]

    asyncio.run(story())


def test_a_second_loss_has_a_wait_of_its_own(clients: list[NotingClient]) -> None:
    async def story() -> None:
        pool = TokenizerPool(["a"], "", "", 10, takeover_limit_s=0.05)
        generation = submit(pool, "r")
        [call] = clients[0].calls
        clients[0].lose(comes_back=False)
        first = call.give_up
        assert first is not None
        clients[0].is_up = True
        clients[0].on_up()
        assert first.cancelled()
        clients[0].lose(comes_back=False)
        assert not generation.is_over
        await asyncio.sleep(0.1)
        assert (await error_of(generation)).reason == "SESSION_LOST"

    asyncio.run(story())


def test_a_request_given_up_while_it_waits_is_sent_again_only_to_be_cancelled(clients: list[NotingClient]) -> None:
    async def story() -> None:
        pool = TokenizerPool(["a"], "", "", 10)
        generation = submit(pool, "r")
        [call] = clients[0].calls
        clients[0].lose(comes_back=False)
        new = submit(pool, "new")
        for left in (generation, new):
            left.abandon(Cancelled("gone"))
        assert call.give_up is None
        clients[0].is_up = True
        clients[0].on_up()
        assert clients[0].calls == [call]
        await asyncio.sleep(2 * tokenizer_pool._CANCEL_AFTER_S)
        assert clients[0].cancelled == ["r"]

    asyncio.run(story())


def test_what_the_engine_has_given_up_itself_is_not_sent_to_be_cancelled(
    clients: list[NotingClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        monkeypatch.setattr(tokenizer_pool, "_ENGINE_KEEPS_S", 0.0)
        pool = TokenizerPool(["a"], "", "", 10)
        generation = submit(pool, "r")
        clients[0].lose(comes_back=False)
        generation.abandon(Cancelled("gone"))
        clients[0].is_up = True
        clients[0].on_up()
        assert clients[0].calls == []

    asyncio.run(story())


def test_a_request_that_goes_on_has_all_its_attempts_again_and_one_that_does_not_ends(
    clients: list[NotingClient],
) -> None:
    async def story() -> None:
        pool = TokenizerPool(["a"], "", "", 10)
        stuck, moving = submit(pool, "stuck"), submit(pool, "moving")
        for number in range(tokenizer_pool.MAX_ATTEMPTS):
            assert not stuck.is_over
            moving.add_text(0, "x", number, 1, [7])
            clients[0].lose()
        assert (await error_of(stuck)).reason == "SESSION_LOST"
        assert [call.generation for call in clients[0].calls] == [moving]

    asyncio.run(story())


def test_new_requests_wait_while_the_last_tokenizer_may_come_back_and_are_refused_afterwards(
    clients: list[NotingClient],
) -> None:
    async def story() -> None:
        pool = TokenizerPool(["a"], "", "", 10, takeover_limit_s=0.2)
        clients[0].lose(comes_back=False)
        early = submit(pool, "early")
        clients[0].is_up, clients[0].is_serving = True, False  # its session is open, its engine not there yet
        clients[0].on_up()
        assert clients[0].calls == []
        clients[0].is_serving = True
        clients[0].on_up()
        assert [call.generation for call in clients[0].calls] == [early]
        clients[0].lose(comes_back=False)
        late = submit(pool, "late")
        await asyncio.sleep(0.3)
        assert (await error_of(late)).reason == "NO_TOKENIZER"
        with pytest.raises(Unavailable):
            submit(pool, "later")

    asyncio.run(story())


def test_a_pool_that_stops_sends_nothing_again(clients: list[NotingClient]) -> None:
    async def story() -> None:
        pool = TokenizerPool(["a"], "", "", 10)
        generation = submit(pool, "r")
        pool.close()
        clients[0].lose()
        assert len(clients[0].calls) == 1, "a drain lets what runs go on"
        await pool.stop()
        assert generation.is_over
        assert clients[0].calls == []

    asyncio.run(story())


def test_many_requests_are_sent_again_over_several_turns_of_the_loop(clients: list[NotingClient]) -> None:
    async def story() -> None:
        pool = TokenizerPool(["a"], "", "", 100)
        generations = [submit(pool, str(number)) for number in range(50)]
        clients[0].lose()
        assert 0 < len(clients[0].calls) < 50
        for _ in range(10):
            await asyncio.sleep(0)
        assert [call.generation for call in clients[0].calls] == generations

    asyncio.run(story())


def test_a_tokenizer_whose_engine_is_away_keeps_new_requests_unless_another_one_is_healthy(
    clients: list[NotingClient],
) -> None:
    async def story() -> None:
        pool = TokenizerPool(["a", "b"], "", "", 10)
        clients[0].lose(comes_back=False)
        clients[1].is_serving = False
        new = submit(pool, "new")
        assert [call.generation for call in clients[1].calls] == [new]
        clients[0].is_up = clients[0].is_serving = True
        clients[0].on_up()
        submit(pool, "newer")
        assert len(clients[0].calls) == len(clients[1].calls) == 1

    asyncio.run(story())


def test_the_time_of_a_drain_does_not_count_for_those_who_wait_for_its_end(clients: list[NotingClient]) -> None:
    async def story() -> None:
        pool = TokenizerPool(["a"], "", "", 10, takeover_limit_s=0.1)
        clients[0].is_draining = True
        patient, hurried = submit(pool, "patient"), submit(pool, "hurried", timeout_s=0.15)
        await asyncio.sleep(0.3)
        assert (await error_of(hurried)).reason == "DEADLINE_EXCEEDED"
        clients[0].is_draining, clients[0].left_at_s = False, asyncio.get_running_loop().time()
        clients[0].lose(comes_back=False)
        await asyncio.sleep(0.05)
        assert not patient.is_over
        await asyncio.sleep(0.15)
        assert (await error_of(patient)).reason == "NO_TOKENIZER"

    asyncio.run(story())


def test_a_gateway_that_has_just_started_lets_requests_wait_for_its_first_session(
    clients: list[NotingClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        monkeypatch.setattr(tokenizer_pool, "_FIRST_CONNECT_S", 0.1)
        pool = TokenizerPool(["a"], "", "", 10)
        clients[0].is_up = clients[0].is_serving = clients[0].has_served = False
        await pool.start()
        early, too_early = submit(pool, "early"), submit(pool, "too early", timeout_s=0.01)
        await asyncio.sleep(0.05)
        assert too_early.is_over
        clients[0].is_up = clients[0].is_serving = True
        clients[0].on_up()
        assert [call.generation for call in clients[0].calls] == [early]
        clients[0].is_up = False
        await asyncio.sleep(0.1)
        with pytest.raises(Unavailable):
            submit(pool, "late")

    asyncio.run(story())


def test_while_too_much_waits_for_all_clients_those_for_whom_most_waits_lose_their_requests(
    clients: list[NotingClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_pool, "SWEEP_S", 0.01)

    async def story() -> None:
        pool = TokenizerPool(["a"], "", "", 10, max_total_buffered_bytes=5000)
        sizes = {"much": 2900, "more": 4000, "little": 100, "half": 2000}
        open_ones = {name: submit(pool, name) for name in sizes}
        for name, generation in open_ones.items():
            generation.add_text(0, "x" * sizes[name], 0, 1, [7])
        await asyncio.sleep(0.1)
        assert clients[0].cancelled == ["more"]  # 5,000 bytes are left
        assert [name for name, generation in open_ones.items() if generation.is_over] == ["more"]

    asyncio.run(story())


def test_what_a_tokenizer_gave_back_waits_at_another_one_whose_engine_is_away(clients: list[NotingClient]) -> None:
    async def story() -> None:
        pool = TokenizerPool(["a", "b"], "", "", 10)
        for client in clients:
            client.is_serving = False
        clients[1].num_choices = 1
        generation = submit(pool, "r")
        assert [call.generation for call in clients[0].calls] == [generation]
        clients[0].is_draining = True
        given_back, clients[0].calls = clients[0].calls, []
        clients[0].on_lost(given_back, False)
        assert clients[1].calls == given_back, "its engine may still run it, and has the time of its own drain"

    asyncio.run(story())
