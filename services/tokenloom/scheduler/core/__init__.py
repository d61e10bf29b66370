"""The engine core, pure: requests, block pool, prefix cache, batching plan.

Standard library only; no clock, no I/O, no randomness. Built and stepped in three lines:

    scheduler = Scheduler(SchedulerConfig(), num_blocks=64)
    scheduler.add_request(Request("r", prompt_token_ids=[1, 2, 3], max_output_tokens=8))
    plan = scheduler.schedule()
"""
