"""The most bytes that torch's CPU allocator had handed out at once, from its own reports to the profiler."""

from __future__ import annotations

from collections.abc import Callable

from torch.autograd.profiler import profile


def peak_of(run: Callable[[], object]) -> int:
    """Of what was allocated during `run` and not freed before the peak."""
    with profile(profile_memory=True) as profiled:
        run()
    results = profiled.kineto_results
    assert results is not None
    reports = sorted((e.start_ns(), e.nbytes()) for e in results.events() if e.name() == "[memory]")
    live = peak = 0
    for _, change in reports:
        live += change
        peak = max(peak, live)
    return peak
