"""How many files and connections this process may have open at once."""

from __future__ import annotations

import resource

_MOST = 1 << 20


def raise_open_file_limit() -> int:
    """Raise the soft limit of open files to the hard one, as every connection is one; returns what holds now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return open_file_limit()


def open_file_limit() -> int:
    """Most files that may be open at once."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST if soft == resource.RLIM_INFINITY else soft
