"""The executor stage: weights, KV memory, attention, sampling. It runs plans and decides nothing."""
