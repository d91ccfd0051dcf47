"""Every wait and every record of the code that orders streams is needed, and the checker misses none of them.

A site is left out, and some scenario then has two accesses to the same bytes that nothing orders. Events do nothing on
a CPU, so a run without the site would be told the same, but for the site itself: it is left out of the recorded run.
"""

# ruff: noqa: F401, F811 - tests take the imported fixture `ranks` as an argument

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest

from offload.stream.staging import Span, StagingRing
from tests.order import COMPUTE, HOST, Site, Trace, Work, conflicts, written_sites
from tests.ranks import RankPool, ranks
from tests.test_order import SCENARIOS, Scenario, found, record, record_on_all

SITES = written_sites()
NOTICING_FIRST = sorted(SCENARIOS, key=lambda scenario: not (scenario.alone or scenario.options))
"""All scenarios; the first ones notice nearly everything."""
FEW = [scenario for scenario in SCENARIOS if scenario.alone or "uneven_repeated" in scenario.models]


_traces: dict[str, list[Trace]] = {}


def traces_of(ranks: RankPool, scenario: Scenario) -> list[Trace]:
    """What the device of every rank was told; each scenario runs once."""
    if str(scenario) not in _traces:
        _traces[str(scenario)] = record_on_all(ranks, scenario)
    return _traces[str(scenario)]


@pytest.mark.parametrize("site", SITES, ids=str)
def test_leaving_it_out_is_noticed(ranks: RankPool, site: Site) -> None:
    for scenario in NOTICING_FIRST:
        traces = [trace for trace in traces_of(ranks, scenario) if site in trace.sites()]
        if found(traces, without=site):
            return
    pytest.fail(f"{site} orders nothing that any scenario needs")


def working_streams(trace: Trace) -> list[int]:
    """The streams beside the compute stream that work is issued on."""
    return sorted({entry.stream for entry in trace.entries if isinstance(entry, Work)} - {HOST, COMPUTE})


@pytest.mark.parametrize("scenario", FEW, ids=str)
def test_fewer_streams_are_slower_and_no_less_right(ranks: RankPool, scenario: Scenario) -> None:
    for trace in traces_of(ranks, scenario):
        streams = working_streams(trace)
        for stream in streams:
            assert not conflicts(trace, streams={stream: COMPUTE})
        for one, other in combinations(streams, 2):
            assert not conflicts(trace, streams={one: other})
        assert not conflicts(trace, streams=dict.fromkeys(streams, COMPUTE))


@pytest.mark.parametrize("scenario", FEW, ids=str)
def test_work_on_a_stream_that_nobody_waits_for_is_noticed(ranks: RankPool, scenario: Scenario) -> None:
    for trace in traces_of(ranks, scenario):
        for stream in working_streams(trace):
            assert conflicts(with_stray_work(trace, stream)), f"the work of {trace.streams[stream]} may run at any time"


def with_stray_work(trace: Trace, stream: int) -> Trace:
    """A trace in which the work of `stream` goes to another one, while its events stay."""
    stray = len(trace.streams)
    entries = [
        replace(entry, stream=stray) if isinstance(entry, Work) and entry.stream == stream else entry
        for entry in trace.entries
    ]
    return Trace(entries, [*trace.streams, "a stray stream"], trace.buffers)


def record_with_hasty_copies(scenario: Scenario) -> Trace:
    """Records a run in which, once, a shard is copied over another that still waits for its all-gather."""
    reserve = StagingRing.reserve
    hasty: list[Span] = []

    def reserve_hastily(ring: StagingRing, num_bytes: int, copy_stream: object) -> Span | None:
        span = reserve(ring, num_bytes, copy_stream)
        if span is None and not hasty:
            ring.forget_waiting()
            span = reserve(ring, num_bytes, copy_stream)
            hasty.extend([span] if span else [])
        return span

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StagingRing, "reserve", reserve_hastily)
        trace = record(scenario)
    assert hasty
    return trace


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_copy_before_its_staging_is_free_is_noticed(ranks: RankPool, num_ranks: int) -> None:
    scenario = Scenario("dlo", num_ranks, ("stack5",))
    for trace in ranks(num_ranks).run(record_with_hasty_copies, scenario):
        assert "StagingRing" in found([trace])
