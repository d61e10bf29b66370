"""The engine core's benchmarks: `python -m loadtest.scheduler [PART ...] [--quick]`, or `make bench-scheduler`.

Parts: `cost` (the pure core), `overlap` (plans in flight), `split` (what the hops cost), `admission` (overload, long
prompts). Each prints a table; all write build/bench-scheduler.json:

    machine             cpu, num_cores, python, commit, load_average_1m (at the start)
    is_quick            the figures come from a few seconds and are worth little
    duration_s          of all parts together
    schedule_update_ms  p50 of one schedule() and update(), by number of running requests: {"16": ..., "64": ..., ...}
    executor_idle_pct   the executor's idle time between steps at 64 running requests, 2 ms steps, two plans in flight
    cost                {"steps": [name, num_running, num_waiting, num_blocks, p50_ms, p99_ms, num_preemptions],
                        "long_prompt": [name, p50_ms, max_ms]}
    overlap             by plans_in_flight: executor_idle_pct, num_steps, rows_per_step_mean, step_ms_p50,
                        gap_us_p50/p99/max (between steps), gap_us_max_beside_long_prompts (32,768 tokens each),
                        wasted_rows_stop_token_max and _bound, wasted_rows_finish_mean, _max and _over_bound (how many
                        wasted more than depth - 1 and the steps of their own round trip),
                        session_round_trip_steps_mean, session_round_trip_ms_p50/p99 (an answer to a request that is
                        refused), tokens_after_end
    split               by arrangement, num_rows, plans_in_flight: us_per_step, us_per_token, scheduler_cpu_us_per_step
    admission           {"overload": capacity_per_s, offered_per_s, served_per_s, num_refused, refusal_ms_p50/p99,
                        ttft_ms_p50; "long_prompt": chunk_ms, ttft_alone_ms_p50, ttft_behind_ms_p50/max,
                        extra_chunks_p50/p95/max}; with --url also "http": served_per_s, offered_per_s,
                        num_refused, refusal_ms_p50/p99, other_errors

Lists hold an object per row of the table. What was not measured is null.
"""
