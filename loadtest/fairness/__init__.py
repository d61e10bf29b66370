"""Fair queueing between tenants: `python -m loadtest.fairness [PART ...] [--quick]`, or `make bench-fairness`.

A flood from one tenant beside a light one that sends a request now and then. Parts: `simulation` (the pure core on a
simulated clock: the same figures everywhere) and `real` (the scheduler stage over gRPC, around an executor whose steps
take a modelled time). With --url a running stack is measured over HTTP, with two keys of its keys file. All write
build/bench-fairness.json:

    machine      cpu, num_cores, python, commit, load_average_1m (at the start)
    is_quick     the figures come from a few seconds and are worth little
    duration_s   of all parts together
    simulation, real
        solo, fair, fcfs  the light tenant alone; both tenants under each policy: light_ttft_ms_p50/p95, num_light,
                          num_light_unserved (had no token at the end; counted with the time they had waited),
                          step_ms_p50/p95, tokens_per_s (prompt and output), num_preemptions
        bound_ms          what is promised for the light tenant's p95: solo p95 and three times the p95 step of `fair`
        is_within_bound   the promise is kept
        throughput_ratio  tokens_per_s of `fair` over `fcfs`; promised: at least 0.95
    http         light_ttft_alone_ms_p50/p95, light_ttft_beside_ms_p50/p95, flood_gap_ms_p95, bound_ms,
                 num_light_failed, num_flood_requests

What was not measured is null.
"""
