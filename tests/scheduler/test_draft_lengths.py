"""A step takes the drafts that raise the expected tokens per second, often none."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from quire.scheduler.draft_lengths import Candidate, WorthwhileDrafts
from quire.scheduler.prefill_budget import PrefillBudget


def measured(seconds: Callable[[int], float]) -> WorthwhileDrafts:
    """Return it with step times by rows."""
    return WorthwhileDrafts(lambda first, last: [seconds(n) for n in range(first, last + 1)])


def lengths(base_s: float, row_s: float, wait_s: float = 0.0) -> WorthwhileDrafts:
    chosen = measured(lambda rows: base_s + row_s * rows)
    if wait_s:
        chosen.observe_wait(wait_s, 1)
    return chosen


def test_rows_that_cost_nothing_are_all_taken_and_dear_ones_not() -> None:
    (cheap,) = lengths(1.0, 0.0).choose([Candidate(0.9, 10)], 1)
    (some,) = lengths(1.0, 0.3).choose([Candidate(0.8, 10)], 1)
    (none,) = lengths(0.0, 1.0).choose([Candidate(0.9, 10)], 1)
    assert cheap == 10 > some > none == 0


def test_more_is_drafted_where_more_comes_true() -> None:
    found = lengths(1.0, 0.1).choose([Candidate(rate, 16) for rate in (0.9, 0.6, 0.05)], 3)
    assert found[0] > found[1] > found[2] == 0


@pytest.mark.parametrize("streams", [1, 8, 64])
def test_beside_many_streams_it_goes_to_none_by_itself(streams: int) -> None:
    """Few rows share the time in which weights are read; many rows compute."""
    chosen = measured(lambda rows: max(1.0, rows / 16))
    found = chosen.choose([Candidate(0.7, 8)] * streams, streams)
    assert (sum(found) > 0) is (streams < 64)


def test_a_wait_of_the_device_counts() -> None:
    candidate = Candidate(0.5, 4)
    assert lengths(1.0, 0.01).choose([candidate], 1) != [0]
    assert lengths(1.0, 0.01, wait_s=2.0).choose([candidate], 1) == [0]


def test_nothing_is_drafted_before_steps_were_measured() -> None:
    assert WorthwhileDrafts(lambda first, last: None).choose([Candidate(1.0, 4)], 1) == [0]


def test_a_step_samples_at_most_twice_as_many_rows_as_one_before() -> None:
    """Steps of more rows that read prompts as graphs are known to be fast."""
    budget = PrefillBudget(step_s=1.0, stall_factor=2.0, max_rows=2048)
    budget.observe(0, 8, 1024, 1.0, graphed=True)
    chosen = WorthwhileDrafts(budget.times.sampling)
    candidates = [Candidate(0.9, 16)] * 8
    found = list[int]()
    for rows in (1, 8, 16, 32, 64):
        budget.observe(rows, 0, 0, 1.0)
        found.append(8 + sum(chosen.choose(candidates, 8)))
    assert found == [8, 16, 32, 64, 128]


@pytest.mark.parametrize("rate", [0.0, 0.015])
def test_no_draft_is_likely_enough_though_rows_are_free(rate: float) -> None:
    """CUDA graphs of one and of two rows take the same time."""
    budget = PrefillBudget(step_s=1.0, stall_factor=2.0, max_rows=2048)
    budget.observe(1, 0, 0, 1.0)
    budget.observe(2, 0, 0, 1.0)
    assert WorthwhileDrafts(budget.times.sampling).choose([Candidate(rate, 4)], 1) == [0]


def test_drafts_that_have_to_be_computed_are_fewer() -> None:
    """All sequences are drafted together, so the longest draft is what costs."""
    chosen = lengths(1.0, 0.01)
    (free,) = chosen.choose([Candidate(0.8, 10)], 1)
    (some,) = chosen.choose([Candidate(0.8, 10, token_s=0.2)], 1)
    (none,) = chosen.choose([Candidate(0.8, 10, token_s=2.0)], 1)
    assert free > some > none == 0
    candidate = Candidate(0.8, 10, token_s=0.4)
    assert min(chosen.choose([candidate] * 4, 4)) > chosen.choose([candidate], 4)[0] == 0


def test_prompts_that_drafters_read_first_count_for_each_sequence() -> None:
    chosen = lengths(1.0, 0.05)
    read, unread = Candidate(0.8, 4, token_s=0.05), Candidate(0.8, 4, token_s=0.05, reading_s=0.6)
    assert min(chosen.choose([read] * 4, 4)) > 0
    assert chosen.choose([unread], 1)[0] > 0
    assert chosen.choose([unread] * 4, 4) == [0] * 4


def test_a_prompt_is_read_once_for_all_drafts_of_a_sequence() -> None:
    unread = Candidate(0.9, 4, token_s=1e-6, reading_s=1.0)
    assert lengths(1.0, 0.0).choose([unread], 1) == [4]


def test_waits_in_which_graphs_were_recorded_do_not_count() -> None:
    chosen = lengths(1.0, 0.01)
    for wait_s in (0.1, 900.0, 700.0, 800.0, 0.1):
        chosen.observe_wait(wait_s, 1)
    assert chosen.choose([Candidate(0.7, 4)], 1) != [0]


def test_a_first_wait_that_recorded_a_graph_is_soon_forgotten() -> None:
    chosen = lengths(1.0, 0.01)
    chosen.observe_wait(900.0, 1)
    likely = [Candidate(0.9, 8)]
    assert chosen.choose(likely, 1) != [0]
    unlikely = [Candidate(0.6, 8)]
    tried = next(n for n in range(1000) if any(chosen.choose(unlikely, 1, beginning=True)))
    assert 0 < tried < 500


def test_waits_are_those_of_as_many_sequences() -> None:
    chosen = lengths(1.0, 0.001)
    chosen.observe_wait(0.1, 1)
    chosen.observe_wait(1.9, 32)
    candidates = [Candidate(0.5, 4)] * 32
    assert any(chosen.choose(candidates[:1], 1))
    assert any(chosen.choose(candidates[:2], 2))
    assert not any(chosen.choose(candidates, 32))


def test_beginning_takes_a_larger_gain_than_going_on() -> None:
    chosen = lengths(1.0, 0.0, wait_s=0.4)
    candidates = [Candidate(0.5, 1)]
    assert chosen.choose(candidates, 1) == [1]
    assert chosen.choose(candidates, 1, beginning=True) == [0]


def test_promises_that_are_not_kept_end_drafts_until_they_are_forgotten() -> None:
    chosen = lengths(1.0, 0.3)
    candidates = [Candidate(0.8, 8)]
    assert any(chosen.choose(candidates, 1, beginning=True))
    for _ in range(60):
        chosen.settle(2.0, 0)
    assert not any(chosen.choose(candidates, 1))
    tried = [any(chosen.choose(candidates, 1, beginning=True)) for _ in range(2000)]
    assert 50 < tried.index(True) < 1500


def test_drafts_are_tried_again_after_a_slow_time() -> None:
    """Only steps with drafts say what they take, and the last ones were slow."""
    chosen, candidates = measured(lambda rows: 0.6 * rows), [Candidate(0.8, 3)]
    tried = [any(chosen.choose(candidates, 1, beginning=True)) for _ in range(300)]
    assert 20 < tried.index(True) < 200
    again = [any(chosen.choose(candidates, 1)) for _ in range(9)]
    assert True in again  # so often that steps with drafts are measured
    assert not again[-1]


def test_drafts_that_are_much_too_dear_are_never_tried() -> None:
    chosen = measured(float)
    assert not any(any(chosen.choose([Candidate(0.4, 8)], 1, beginning=True)) for _ in range(2000))


def test_candidates_without_drafts_get_none() -> None:
    chosen = lengths(1.0, 0.01)
    assert chosen.choose([], 1) == []
    assert chosen.choose([Candidate(0.9, 0)], 1) == [0]
    assert chosen.choose([Candidate(0.9, 0), Candidate(1.0, 40)], 2) == [0, 16]


def test_a_draft_must_be_as_likely_as_its_row_is_dear() -> None:
    """A row is worth its time if it yields as many tokens a second as the step does."""

    def least(row_s: float) -> float:
        lengths = WorthwhileDrafts(
            lambda first, last: [1 + row_s * n for n in range(first, last + 1)]
        )
        return lengths.least_chance([Candidate(0.5, 3)], [2], 1)

    assert least(0.0) == 0.0
    assert least(0.1) == pytest.approx(0.1 * 1.75 / 1.3)
    assert least(0.2) > least(0.1)
