"""Block tables: found and added blocks, naming, announcements."""

from tokenloom.scheduler.core.kv_cache import KVCache
from tokenloom.scheduler.core.request import Request
from tokenloom.scheduler.core.scheduler import Scheduler, SchedulerConfig


def test_first_plan_names_each_block_once() -> None:
    scheduler = Scheduler(SchedulerConfig(block_size=2), num_blocks=16)
    request = Request("a", [1, 2, 3, 4, 5], max_output_tokens=4)
    scheduler.add_request(request)
    plan = scheduler.schedule()
    assert plan is not None
    assert plan.rows[0].new_block_ids == request.block_ids == [1, 2, 3]


def test_opening_a_table_leaves_the_list_of_found_blocks_alone() -> None:
    kv = KVCache(num_blocks=8, block_size=2)
    found: list[int] = []
    request = Request("a", [1, 2, 3], max_output_tokens=1)
    kv.open_table(request, found)
    assert kv.allocate_slots(request, 3) == [1, 2]
    assert found == []
    assert request.block_ids == [1, 2]
