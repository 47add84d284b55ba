from __future__ import annotations

import pytest

from mlx_lm_kvpersist.host.scheduling.pace import Pace


def test_pace_limits_estimates_for_unmeasured_lengths_and_positions() -> None:
    pace = Pace()
    assert pace.tokens(0, 1.0) == 0
    pace.learn(0, 500, 0.5)
    assert pace.tokens(0, 1.0) == pytest.approx(1000, abs=1)
    assert pace.tokens(0, 9.0) == pytest.approx(2000, abs=1)  # four times the measured length
    for seconds, n_tokens in ((1.0, 500), (2.0, 1000)):  # without a measurement: twice as slow
        assert pace.tokens(5000, seconds) == pytest.approx(n_tokens, abs=1)
    for n in (300, 500):
        pace.learn(5000, n, n * 4e-3)
    assert pace.tokens(5000, 1.0) == pytest.approx(250, abs=1)
    assert pace.tokens(0, 1.0) == pytest.approx(1000, abs=1)


def test_position_before_all_measurements_has_the_first_measured_pace() -> None:
    pace = Pace()
    for position, seconds in ((5000, 1.0), (50_000, 5.0)):
        pace.learn(position, 500, seconds)
    assert pace.tokens(0, 1.0) == pytest.approx(500, abs=1)


def test_single_measured_chunk_gives_the_time_per_token() -> None:
    """One chunk cannot separate overhead from the time per token."""
    short, long = Pace(), Pace()
    short.learn(0, 32, 0.01)
    assert short.tokens(0, 1.0) == 128
    long.learn(0, 512, 1.0)
    assert long.tokens(0, 0.5) == 256


@pytest.mark.parametrize(
    ("overhead_s", "n_fast", "n_slow"), [(0.025, 150, 37), (0.045, 256, 150), (0.2, 256, 256)]
)
def test_pace_separates_overhead_from_the_time_per_token(
    overhead_s: float, n_fast: int, n_slow: int
) -> None:
    """If the overhead of small chunks counted as the tokens' cost, chunks would stay small."""
    pace, n_tokens = Pace(), 32
    for _ in range(20):
        pace.learn(5000, n_tokens, overhead_s + n_tokens * 1e-4)
        n_tokens = max(32, pace.tokens(5000, 0.04))
    assert n_tokens == pytest.approx(n_fast, abs=2)
    for _ in range(40):  # the device slows down
        pace.learn(5000, n_tokens, overhead_s + n_tokens * 4e-4)
        n_tokens = max(32, pace.tokens(5000, 0.04))
    assert 32 <= n_tokens <= n_slow + 2


def test_slow_first_chunk_of_a_size_is_not_learned() -> None:
    pace = Pace()
    for n_tokens in (256, 512, 256, 512):
        pace.learn(5000, n_tokens, 0.02 + n_tokens * 1e-4)
    before = pace.tokens(5000, 0.1)
    pace.learn(5000, 384, 3.0)
    assert pace.tokens(5000, 0.1) == before
    pace.learn(5000, 1024, 1.5 * (0.02 + 1024e-4))  # 1.5 times as slow: the device is slower
    assert before / 2 < pace.tokens(5000, 0.1) < before
    before = pace.tokens(5000, 0.1)
    pace.learn(5000, 384, 3.0)
    assert pace.tokens(5000, 0.1) < before / 2


def test_much_slower_first_chunk_is_forgotten() -> None:
    pace = Pace()
    pace.learn(0, 512, 60.0)
    pace.learn(0, 512, 0.1)
    assert pace.tokens(0, 0.3) == pytest.approx(1536, abs=1)
    for seconds in (3.0, 0.1, 3.0, 0.1):  # later slow chunks count: the device may be busy
        pace.learn(0, 512, seconds)
    assert pace.tokens(0, 0.3) < 200


def test_prompt_time_is_the_sum_over_its_ranges_of_positions() -> None:
    pace = Pace()
    assert pace.seconds(0, 1000) is None
    for position, token_s in ((0, 1e-3), (4096, 2e-3), (8192, 4e-3)):
        for n_tokens in (256, 512, 256, 512):
            pace.learn(position, n_tokens, n_tokens * token_s)
    for position, n_tokens, seconds in (
        (0, 4096, 4.096),
        (4096, 1000, 2.0),
        (4000, 1096, 0.096 + 2.0),
        (0, 16_384, 4.096 + 8.192 + 32.768),
        (1 << 20, 10, 0.04),
        (5000, 0, 0.0),
    ):
        assert pace.seconds(position, n_tokens) == pytest.approx(seconds)


def test_prompt_time_does_not_depend_on_the_measured_chunk_sizes() -> None:
    """Short chunks are measured during replies; the result counts the overhead of usual chunks."""
    times_s = []
    for sizes in ((512, 2048), (32, 64, 96)):
        pace = Pace()
        for n_tokens in sizes * 4:
            pace.learn(0, n_tokens, 0.05 + n_tokens * 1e-3)
        times_s.append(pace.seconds(0, 4096))
    assert times_s[0] == pytest.approx(4096 * 1e-3 + 8 * 0.05)
    assert times_s[1] == pytest.approx(times_s[0])


def test_short_chunks_alone_give_no_prompt_time() -> None:
    pace = Pace()
    for _ in range(3):
        pace.learn(0, 20, 0.5)
    assert pace.seconds(0, 4096) is None


def test_describe_returns_tokens_per_second_by_position() -> None:
    pace = Pace()
    assert pace.describe() == {}
    pace.learn(0, 512, 1.0)
    pace.learn(5000, 512, 2.0)
    assert pace.describe() == {"0": 512.0, "4096": 256.0}
