"""The size of a chunk follows the clock."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest

from quire.scheduler.prefill_budget import PrefillBudget
from quire.scheduler.prefill_split import PrefillSplit


def taught(chunk_s: float, token_s: float, decode_s: float, step_s: float = 0.04) -> PrefillBudget:
    """A pace that has seen steps of a machine with these costs."""
    pace = PrefillBudget(step_s, 2.0, 2048)
    for number in range(60):
        pace.observe(4, 0, 0, decode_s)
        chunks, tokens = 1 + number % 3, 10 + 17 * (number % 5)
        pace.observe(4, chunks, tokens, decode_s + chunks * chunk_s + tokens * token_s)
    return pace


def grown(pace: PrefillBudget, rows: int) -> int:
    """The budget that chunks grow to, from one to the next."""
    for _ in range(8):
        budget = pace.prompt_budget(rows)
        pace.observe(4, 1, budget, 0.01 + (pace.prompt_seconds(budget) or 0))
    return pace.prompt_budget(rows)


@pytest.mark.parametrize("token_s", [1e-5, 1e-4, 2e-3])
@pytest.mark.parametrize("chunk_s", [0.0, 1e-4, 2e-3])
def test_learns_what_prompts_cost(chunk_s: float, token_s: float) -> None:
    pace = taught(chunk_s, token_s, decode_s=0.01)
    assert pace.prompt_seconds(100) == pytest.approx(chunk_s + 100 * token_s, rel=0.15)


@pytest.mark.parametrize("token_s", [1e-5, 1e-4, 1e-3])
def test_a_step_that_generates_takes_at_most_twice_as_long(token_s: float) -> None:
    chunk_s, decode_s = 1e-3, 0.01
    budget = grown(taught(chunk_s, token_s, decode_s), 4)
    assert decode_s + chunk_s + budget * token_s <= 2.1 * decode_s
    assert budget >= min(0.8 * (decode_s - chunk_s) / token_s, 2000)


def test_prompts_that_wait_weigh_as_much_as_one_that_is_read() -> None:
    pace = taught(1e-4, 1e-4, decode_s=0.01, step_s=0.05)
    for _ in range(8):  # chunks grow from one to the next
        pace.observe(4, 1, 2048, 0.01 + 1e-4 + 2048e-4)
    sizes = [pace.prompt_budget(4, prompts) for prompts in (0, 1, 2, 3, 4, 30)]
    assert sizes[0] == sizes[1] == pytest.approx(sizes[2], rel=0.05)
    assert sizes[3] == pytest.approx(2 * sizes[1], rel=0.1)
    assert sizes[4] == pytest.approx(3 * sizes[1], rel=0.1)
    assert sizes[5] == pytest.approx(pace.prompt_budget(0), rel=0.05)


def test_a_step_that_only_reads_aims_at_the_step_time() -> None:
    budget = grown(taught(1e-3, 1e-4, 0.01, step_s=0.05), 0)
    assert 1e-3 + budget * 1e-4 == pytest.approx(0.05, rel=0.15)


def test_where_nobody_generates_a_chunk_s_own_cost_is_a_fifth_of_a_step() -> None:
    pace = taught(chunk_s=0.03, token_s=3e-3, decode_s=0.03, step_s=0.06)
    assert grown(pace, 0) == pytest.approx(40, rel=0.3)
    assert grown(pace, 4) < 20
    assert pace.prompt_budget(0, sits_out=True) < 20


def test_where_nobody_generates_small_steps_do_not_teach_small_steps() -> None:
    # Few rows are multiplied otherwise than many: what they cost says nothing of these.
    pace = PrefillBudget(0.06, 2.0, 2048)
    for _ in range(20):
        tokens = pace.prompt_budget(1)
        pace.observe(1, 0, 0, 0.25)
        pace.observe(1, 1, tokens, 0.25 * (1 + tokens))
    assert pace.prompt_budget(1) <= 8
    assert pace.prompt_budget(0) > 8


def test_one_hiccup_changes_little() -> None:
    pace = taught(1e-3, 1e-4, 0.01)
    before = pace.prompt_budget(4)
    pace.observe(4, 1, 50, 30.0)
    assert pace.prompt_budget(4) > before / 3


def test_a_chunk_is_at_most_twice_the_one_before() -> None:
    pace = PrefillBudget(1.0, 2.0, 2048)
    sizes = [pace.prompt_budget(0)]
    for _ in range(12):
        pace.observe(0, 1, sizes[-1], 1e-6)
        sizes.append(pace.prompt_budget(0))
    assert all(after <= 2 * before for before, after in itertools.pairwise(sizes))
    assert max(sizes) == 2048


def test_a_few_short_prompts_do_not_make_the_next_chunks_small() -> None:
    # A burst of requests: the first one is read alone, before the others have come.
    pace = on_a_gpu()
    many = pace.prompt_budget(0, 32)
    assert many > 900
    for _ in range(4):
        pace.observe(0, 1, 128, 0.035 + 128 * 40e-6)
    assert pace.prompt_budget(0, 32) > 0.8 * many


def test_a_chunk_is_worth_its_own_cost_within_the_step_s_aim() -> None:
    for own_s, tokens_s in ((5e-3, 20e-3), (10e-3, 30e-3), (25e-3, 25e-3), (50e-3, 50e-3)):
        pace = taught(own_s, token_s=1e-4, decode_s=1e-3, step_s=0.04)
        for _ in range(8):
            pace.observe(4, 1, 500, 1e-3 + own_s + 500e-4)
        assert pace.prompt_budget(4) * 1e-4 == pytest.approx(tokens_s, rel=0.2)


@pytest.mark.parametrize("waiting", [1, 2, 3, 5])
@pytest.mark.parametrize("own_s", [0.0, 2e-3, 36e-3])
def test_streams_keep_their_share_of_the_time(own_s: float, waiting: int) -> None:
    # 36 ms: a GPU's host launches a step that reads layer by layer, others are recorded.
    decode_s, token_s, aim_s = 3e-3, 4e-5, 60e-3
    pace, split = PrefillBudget(aim_s, 2.0, 2048), PrefillSplit()
    pace.observe(4, 0, 0, decode_s)
    spent, steps, longest, read = 0.0, 0, 0.0, 0
    for number in range(1000):
        shares = split.split(pace.prompt_budget(4, waiting), [10**6] * waiting, pace.room(4))
        chunks, tokens = sum(map(bool, shares)), sum(shares)
        pace.begin(4, waiting, chunks, tokens)
        seconds = decode_s + (own_s + tokens * token_s if tokens else 0.0)
        pace.observe(4, chunks, tokens, seconds)
        if number >= 500:  # costs are learned
            steps, spent, read = steps + 1, spent + seconds, read + tokens
            longest = max(longest, seconds)
    of_prompts = spent / steps - decode_s
    share = max(1, waiting - 1) * decode_s  # each waiting prompt but one counts as the streams do
    assert 0.7 * share <= of_prompts <= 1.1 * share
    assert longest <= 1.1 * max(decode_s + aim_s, decode_s + 2 * own_s)
    assert read * token_s >= 0.4 * of_prompts * steps, "most of the time goes to launching"


def of_streams(
    pace: PrefillBudget, prompt_s: Callable[[int], float], steps: int, clock: float = 1.0
) -> tuple[float, int]:
    """Beside four streams, whose step takes 3 ms alone, one prompt without end is read.

    Args:
        prompt_s: what reading so many tokens adds to a step.
        clock: what the clock shows of a second.

    Returns:
        The time of prompts by that of streams in the last half of the steps; the steps that read.
    """
    decode_s, of_prompts, reads = 3e-3, 0.0, 0
    for number in range(steps):
        tokens = pace.prompt_budget(4)
        pace.begin(4, 1, bool(tokens), tokens)
        more_s = prompt_s(tokens) if tokens else 0.0
        pace.observe(4, bool(tokens), tokens, clock * (decode_s + more_s))
        reads += tokens > 0
        if number >= steps // 2:
            of_prompts += more_s
    return of_prompts / decode_s / (steps - steps // 2), reads


@pytest.mark.parametrize("own_s", [1e-3, 36e-3])
@pytest.mark.parametrize(("times", "often"), [(2, 0.5), (3, 0.5), (3, 0.2), (1.5, 0.7)])
def test_streams_keep_their_share_on_a_machine_that_is_now_and_then_slow(
    own_s: float, times: float, often: float
) -> None:
    noise, pace = random.Random(0), PrefillBudget(0.06, 2.0, 2048)
    share, _ = of_streams(
        pace,
        lambda tokens: (own_s + tokens * 5e-5) * (times if noise.random() < often else 1),
        steps=4000,
    )
    assert 0.85 <= share <= 1.15


@pytest.mark.parametrize("first_s", [None, 5.0, 1e-6])
def test_what_generating_costs_is_seen_beside_prompts_without_end(first_s: float | None) -> None:
    pace = PrefillBudget(0.06, 2.0, 2048)
    if first_s is not None:  # the first step loads kernels, or says nothing
        pace.observe(4, 0, 0, first_s)
    share, reads = of_streams(pace, lambda tokens: 1e-3 + tokens * 1e-4, steps=400)
    assert 0.85 <= share <= 1.15
    assert reads > 100


@pytest.mark.parametrize("times", [10, 0.1])
def test_streams_keep_their_share_when_all_costs_change(times: float) -> None:
    pace = PrefillBudget(0.06, 2.0, 2048)
    of_streams(pace, lambda tokens: 1e-3 + tokens * 1e-4, steps=500)
    share, reads = of_streams(pace, lambda tokens: times * (1e-3 + tokens * 1e-4), steps=400)
    assert 0.7 <= share <= 1.15
    assert reads > 20
    assert pace.prompt_seconds(50) == pytest.approx(times * 6e-3, rel=0.3)


def test_a_slow_first_step_keeps_no_prompt_waiting_for_long() -> None:
    # What the next one was expected to take by it is put right when that is done.
    first = itertools.chain([5.0], itertools.repeat(0.0))
    pace = PrefillBudget(0.06, 2.0, 2048)
    _, reads = of_streams(pace, lambda tokens: next(first) + 36e-3 + tokens * 4e-5, steps=400)
    assert reads >= 8


def test_a_clock_that_stood_still_starves_nobody() -> None:
    pace = PrefillBudget(0.06, 2.0, 2048)
    pace.observe(4, 0, 0, 0.0)
    of_streams(pace, lambda tokens: tokens * 1e-4, steps=50, clock=0.0)
    share, reads = of_streams(pace, lambda tokens: tokens * 1e-4, steps=1000)
    assert 0.8 <= share <= 1.2
    assert reads > 100


def test_a_stream_that_sits_out_every_other_step_keeps_its_share() -> None:
    decode_s, own_s, token_s = 3e-3, 36e-3, 4e-5
    pace = PrefillBudget(60e-3, 2.0, 2048)
    pace.observe(1, 0, 0, decode_s)
    of_prompts = 0.0
    for number in range(2000):
        sits_out = number % 2 == 1
        rows = 0 if sits_out else 1
        tokens = pace.prompt_budget(rows, sits_out=sits_out)
        pace.begin(rows, 1, bool(tokens), tokens, sits_out=sits_out)
        seconds = own_s + tokens * token_s if tokens else 0.0
        if rows or tokens:
            pace.observe(rows, bool(tokens), tokens, rows * decode_s + seconds)
        if number >= 1000:  # costs are learned
            of_prompts += seconds
    assert 0.7 * decode_s <= of_prompts / 500 <= 1.1 * decode_s, "of each token's time"


def test_encoders_leave_prompts_half_of_a_step() -> None:
    pace = taught(0.0, 1e-4, decode_s=0.01)
    assert pace.beside_encoders(100, 0.0) == 100
    assert pace.beside_encoders(100, 2e-3) == pytest.approx(80, abs=5)
    assert pace.beside_encoders(100, 1.0) == 50
    assert pace.beside_encoders(1, 1.0) == 1


def test_a_short_prompt_beside_streams_is_read_at_once() -> None:
    pace = taught(36e-3, 4e-5, decode_s=3e-3, step_s=60e-3)
    pace.begin(4, 0, 0, 0)
    assert pace.prompt_budget(4) > 128
    pace.begin(4, 1, 1, 128)
    assert pace.prompt_budget(4) == 0
    assert pace.prompt_budget(0) > 0, "nobody else is there"


def test_learns_a_chunk_s_cost_from_the_steps_it_asks_for() -> None:
    pace = PrefillBudget(0.06, 2.0, 2048)
    sizes = []
    for _ in range(100):
        pace.observe(1, 0, 0, 5e-3)
        sizes.append(pace.prompt_budget(1))
        pace.observe(1, 1, sizes[-1], 5e-3 + 6e-3 + sizes[-1] * 1e-3)
    assert pace.prompt_seconds(1) == pytest.approx(7e-3, rel=0.2)
    assert max(sizes[-2:]) >= 5, "a few tokens at a time, each time at the cost of a chunk"


@pytest.mark.parametrize("prompts", [1, 2, 4])
def test_where_few_tokens_cost_nothing_beside_the_step_many_are_read(prompts: int) -> None:
    # A GPU's host takes so long to launch a step that its tokens hardly count up to hundreds.
    pace, split = PrefillBudget(0.06, 2.0, 2048), PrefillSplit()
    noise = random.Random(0)
    remaining = [20_000] * prompts
    pace.observe(4, 0, 0, 3e-3)
    steps = 0
    while remaining:
        shares = split.split(pace.prompt_budget(4, len(remaining)), remaining, pace.room(4))
        seconds = 2e-3 + max(46e-3, 12e-3 + sum(shares) * 5e-5)
        pace.observe(4, sum(map(bool, shares)), sum(shares), seconds * noise.uniform(0.93, 1.1))
        remaining = [n - share for n, share in zip(remaining, shares, strict=True) if n > share]
        steps += 1
        assert steps < 60 * prompts


def test_where_there_is_room_for_one_row_one_is_read() -> None:
    pace = PrefillBudget(0.06, 2.0, 5)
    pace.observe(4, 1, 1, 0.01)  # from here on the smaller share is due
    assert pace.prompt_budget(4) == 1
    assert pace.prompt_budget(5) == 0


def on_a_gpu() -> PrefillBudget:
    """A step that is launched layer by layer costs 35 ms; a recorded one of 64 rows 8."""
    pace = PrefillBudget(0.06, 2.0, 2048)
    for number in range(60):
        pace.observe(8, 0, 0, 0.0027)
        pace.observe(8, 1, 56, 0.008, recorded=True)
        tokens = 300 + 170 * (number % 5)
        pace.observe(8, 1, tokens, 0.0027 + 0.035 + tokens * 40e-6)
    return pace


def test_short_prompts_are_read_in_recorded_steps() -> None:
    pace = on_a_gpu()
    large = pace.prompt_budget(8)
    assert large > 500
    assert [pace.recorded(large, 8, waiting, 64) for waiting in (20, 128, 224)] == [20, 56, 56]
    assert pace.recorded(large, 8, 225, 64) == large
    assert pace.recorded(30, 8, 20_000, 64) >= 224  # as much as recorded steps read in that time
    assert pace.recorded(large, 8, 128, 0) == large
    assert pace.recorded(large, 60, 128, 64) == large  # hardly a row is left
    assert pace.recorded(0, 8, 128, 64) == 0  # those who generate are owed time


def test_recorded_steps_that_read_keep_to_the_share_of_prompts() -> None:
    pace = on_a_gpu()
    reads = 0
    for _ in range(100):
        rows = pace.recorded(pace.prompt_budget(8), 8, 100, 64)
        reads += rows > 0
        pace.begin(8, 1, int(rows > 0), rows, recorded=True)
    assert 45 <= reads <= 55


@pytest.mark.parametrize("slow_s", [0.0, 0.06, 0.4])
@pytest.mark.parametrize("rows", [1, 8])
def test_kernels_that_are_loaded_do_not_keep_chunks_small(slow_s: float, rows: int) -> None:
    pace = PrefillBudget(0.06, 2.0, 2048)
    for number in (1, 8, 32):
        pace.observe(number, 0, 0, 0.0022 + number * 80e-6)
    known: set[int] = set()
    sizes: list[int] = []
    while len(sizes) < 16:  # twenty prompts wait, and more and more of them generate
        tokens = pace.recorded(pace.prompt_budget(rows, 20), rows, 20_000, 64)
        pace.begin(rows, 20, 2 * bool(tokens), tokens)
        if tokens:
            first = tokens.bit_length() not in known  # each size needs others
            known.add(tokens.bit_length())
            pace.observe(rows, 2, tokens, 0.033 + tokens * 2.5e-6 + slow_s * first)
            sizes.append(tokens)
            rows += 2
    assert max(sizes) > 1900
    assert sum(sizes) > 14_000


def test_a_step_that_is_not_recorded_has_no_more_rows_than_any() -> None:
    pace = PrefillBudget(0.06, 2.0, 100)
    assert pace.recorded(pace.prompt_budget(20), 20, 20_000, 64) == 80
