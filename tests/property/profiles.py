"""Hypothesis settings: the same examples on every run of `make test`, new and more ones in the slow tests."""

from hypothesis import HealthCheck, settings

SHORT = settings(
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=600,
    stateful_step_count=60,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
LONG = settings(SHORT, derandomize=False, max_examples=2000, stateful_step_count=100)
