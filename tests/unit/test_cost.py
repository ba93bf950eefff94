"""Lines, their fit, and the encodings that they make worth while."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from asymcheck.errors import OptionError
from asymcheck.planning import cost
from asymcheck.planning.cost import (
    RAW,
    Choice,
    Kind,
    Linear,
    LinearFit,
    Option,
    choose,
    paper_compresses,
    paper_threshold_bytes,
)
from asymcheck.planning.layout import MiB

# Measured operating points of lossless codecs on training state, one thread (docs/cost-model.md).
ZSTD = Option("zstd1+shuffle", 0.84, 0.9e9)
LZ4 = Option("lz4+bitshuffle", 0.87, 2.0e9)
STATE = (
    Kind("parameters", 500_000_000, (ZSTD, LZ4)),
    Kind("exp_avg", 500_000_000, (Option("zstd1+shuffle", 0.85, 0.95e9), LZ4)),
    Kind("exp_avg_sq", 500_000_000, (Option("zstd1+shuffle", 0.81, 0.91e9), LZ4)),
)


def store(bytes_per_s: float, latency_s: float = 0.005) -> Linear:
    return Linear(latency_s, 1.0 / bytes_per_s)


# --- lines ------------------------------------------------------------------


def test_a_line_is_a_latency_and_a_rate() -> None:
    assert store(100e6)(200_000_000) == pytest.approx(2.005)
    for wrong in (-1.0, math.nan, math.inf):
        with pytest.raises(OptionError, match="alpha_s"):
            Linear(wrong, 0.0)
        with pytest.raises(OptionError, match="beta_s_per_byte"):
            Linear(0.0, wrong)


def test_a_fit_finds_the_line_that_the_samples_lie_on() -> None:
    fit = LinearFit()
    truth = store(200e6, 0.014)
    for nbytes in (1 * MiB, 64 * MiB, 8 * MiB, 64 * MiB, 3 * MiB):
        fit = fit.add(nbytes, truth(nbytes))
    line = fit.line()
    assert line is not None
    assert line.alpha_s == pytest.approx(0.014)
    assert line.beta_s_per_byte == pytest.approx(5e-9)


def test_before_two_sizes_were_seen_all_time_is_put_down_to_the_bytes() -> None:
    assert LinearFit().line() is None
    once = LinearFit().add(100, 2.0)
    assert once.line() == Linear(0.0, 0.02)
    thrice = once.add(100, 4.0).add(100, 3.0).line()
    assert thrice is not None
    assert thrice.alpha_s == 0.0
    assert thrice.beta_s_per_byte == pytest.approx(0.03, rel=0.05)
    assert LinearFit().add(0, 2.0).line() == Linear(2.0, 0.0)


def test_a_store_that_changes_is_followed() -> None:
    fit = LinearFit(keep=0.9)
    for before in (True, False):
        truth = store(1e9 if before else 50e6)
        for nbytes in [MiB, 16 * MiB] * 60:
            fit = fit.add(nbytes, truth(nbytes))
    line = fit.line()
    assert line is not None
    assert line.beta_s_per_byte == pytest.approx(1 / 50e6, rel=0.01)


def test_samples_that_are_no_measurements_are_left_out() -> None:
    fit = LinearFit().add(10, 1.0)
    for nbytes, seconds in [(math.nan, 1.0), (-1, 1.0), (1, math.inf), (1, -0.1), (1e30, 1.0)]:
        assert fit.add(nbytes, seconds) == fit


SAMPLES = st.lists(st.tuples(st.integers(0, 1000), st.floats(0, 100)), min_size=1, max_size=20)


@given(SAMPLES, st.floats(0.5, 1.0))
@example([(0, 1.0), (10, 0.0)], 1.0)
@example([(10, 0.0), (20, 5.0)], 1.0)
def test_no_line_without_negative_parts_fits_better(
    samples: list[tuple[int, float]], keep: float
) -> None:
    fit = LinearFit(keep)
    for nbytes, seconds in samples:
        fit = fit.add(nbytes, seconds)
    line = fit.line()
    assert line is not None
    weights = [keep ** (len(samples) - 1 - i) for i in range(len(samples))]

    def error(alpha: float, beta: float) -> float:
        return math.fsum(
            w * (s - alpha - beta * n) ** 2 for w, (n, s) in zip(weights, samples, strict=True)
        )

    best = error(line.alpha_s, line.beta_s_per_byte)
    for alpha in (0.0, line.alpha_s * 0.9, line.alpha_s * 1.1 + 0.01):
        for beta in (0.0, line.beta_s_per_byte * 0.9, line.beta_s_per_byte * 1.1 + 1e-4):
            assert best <= error(alpha, beta) * (1 + 1e-6) + 1e-6


# --- choosing ---------------------------------------------------------------


def modelled(
    kinds: tuple[Kind, ...], options: tuple[Option, ...], line: Linear, workers: int, copy_s: float
) -> tuple[float, float, int]:
    """The model of the docs, written down a second time."""
    stored = sum(math.ceil(k.nbytes * o.ratio) for k, o in zip(kinds, options, strict=True))
    cpu_s = sum(k.nbytes / o.encode_bytes_per_s for k, o in zip(kinds, options, strict=True))
    write_s = line.alpha_s * math.ceil(stored / (64 * MiB)) + line.beta_s_per_byte * stored
    return max(copy_s, cpu_s / workers, write_s), cpu_s, stored


RAW_OPTION = Option(RAW, 1.0, math.inf)


@pytest.mark.parametrize(
    ("bytes_per_s", "expected"),
    [(50e6, "zstd1+shuffle"), (1500e6, "lz4+bitshuffle"), (20e9, RAW)],
)
def test_the_slower_the_store_the_more_is_spent_on_encoding(
    bytes_per_s: float, expected: str
) -> None:
    line = store(bytes_per_s, 0.0)
    choice = choose(STATE, line, encode_workers=1)
    assert expected in choice.labels
    assert choice.exhaustive
    times = [
        modelled(STATE, options, line, 1, 0.0)[0]
        for options in itertools.product(*[(RAW_OPTION, *k.options) for k in STATE])
    ]
    assert choice.durable_s == pytest.approx(min(times))


def test_a_choice_says_what_it_costs_and_what_bounds_it() -> None:
    one = (Kind("all", 1_000_000_000, (Option("half", 0.5, 1e9),)),)
    slow = choose(one, store(100e6), encode_workers=2, copy_s=0.5, hash_bytes_per_s=10e9)
    assert slow == Choice(
        labels=("half",),
        durable_s=pytest.approx(5.04),  # type: ignore[arg-type]
        cpu_s=pytest.approx(1.05),  # type: ignore[arg-type]
        write_s=pytest.approx(5.04),  # type: ignore[arg-type]
        stored_bytes=500_000_000,
        bound_by="store",
        exhaustive=True,
    )
    copying = choose(one, store(100e6), encode_workers=2, copy_s=60.0)
    # The copy takes longer than anything else: a tie, so no CPU is spent.
    assert (copying.labels, copying.bound_by, copying.durable_s) == ((RAW,), "copy", 60.0)


@pytest.mark.parametrize("budget_s", [0.0, -1.0, math.nan])
def test_without_cpu_everything_is_raw(budget_s: float) -> None:
    choice = choose(STATE, store(1e6), encode_workers=4, cpu_budget_s=budget_s)
    assert set(choice.labels) == {RAW}
    assert choice.stored_bytes == 1_500_000_000
    assert set(choose(STATE, store(1e6), encode_workers=0).labels) == {RAW}


def test_a_budget_goes_where_it_saves_most() -> None:
    kinds = (
        Kind("parameters", 1000, (Option("fast", 0.5, 1000.0),)),
        Kind("noise", 1000, (Option("fast", 0.99, 1000.0),)),
    )
    choice = choose(kinds, Linear(0.0, 1.0), encode_workers=1, cpu_budget_s=1.0)
    assert choice.labels == ("fast", RAW)
    assert choice.cpu_s == 1.0


def test_measurements_that_failed_are_never_chosen() -> None:
    broken = (
        Option("nan", math.nan, 1e9),
        Option("nan speed", 0.1, math.nan),
        Option("no speed", 0.1, 0.0),
        Option("endless", math.inf, 1e9),
    )
    choice = choose((Kind("all", 1000, broken),), Linear(0.0, 1.0), encode_workers=1)
    assert choice.labels == (RAW,)


def test_on_a_tie_lossless_wins() -> None:
    options = (Option("lossy", 0.5, 1e3, lossless=False), Option("lossless", 0.5, 1e3))
    choice = choose((Kind("all", 1000, options),), Linear(0.0, 1.0), encode_workers=1)
    assert choice.labels == ("lossless",)


def test_nothing_to_store_is_no_trouble() -> None:
    assert choose((), store(1e6), encode_workers=1).labels == ()
    empty = choose((Kind("all", 0, (ZSTD,)),), store(1e6), encode_workers=1)
    assert (empty.stored_bytes, empty.durable_s) == (0, 0.0)


@pytest.mark.parametrize(
    "wrong", [{"copy_s": math.nan}, {"copy_s": -1.0}, {"hash_bytes_per_s": 0.0}, {"batch_bytes": 0}]
)
def test_numbers_about_the_machine_that_cannot_be_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(OptionError, match="choose: expected"):
        choose(STATE, store(1e6), encode_workers=1, **wrong)  # type: ignore[arg-type]


def test_very_many_combinations_are_thinned_and_the_choice_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cost, "MOST_COMBINATIONS", 200)
    chance = random.Random(3)
    kinds = tuple(
        Kind(
            f"kind {i}",
            chance.randrange(10**6, 10**8),
            tuple(Option(f"o{j}", 0.9 - 0.1 * j, 1e9 / (j + 1)) for j in range(6)),
        )
        for i in range(12)
    )
    line = store(300e6)
    choice = choose(kinds, line, encode_workers=2)
    assert not choice.exhaustive
    raw_s, _, _ = modelled(kinds, (RAW_OPTION,) * 12, line, 2, 0.0)
    assert choice.durable_s < raw_s
    by_label = [{o.label: o for o in (RAW_OPTION, *k.options)} for k in kinds]
    options = tuple(table[label] for table, label in zip(by_label, choice.labels, strict=True))
    time_s, cpu_s, stored = modelled(kinds, options, line, 2, 0.0)
    assert (choice.durable_s, choice.cpu_s) == pytest.approx((time_s, cpu_s))
    assert choice.stored_bytes == stored


OPTIONS = st.builds(
    Option, st.sampled_from(["a", "b", "c"]), st.floats(0.01, 1.2), st.floats(1.0, 1e4)
)
KINDS = st.lists(
    st.builds(Kind, st.just("k"), st.integers(0, 10_000), st.lists(OPTIONS, max_size=3).map(tuple)),
    max_size=4,
).map(tuple)


@given(
    KINDS,
    st.builds(Linear, st.floats(0, 10), st.floats(0, 10)),
    st.integers(1, 4),
    st.floats(0, 100),
)
def test_no_combination_is_durable_sooner_or_as_soon_with_less_cpu(
    kinds: tuple[Kind, ...], line: Linear, workers: int, copy_s: float
) -> None:
    choice = choose(kinds, line, encode_workers=workers, copy_s=copy_s)
    every = [
        modelled(kinds, options, line, workers, copy_s)
        for options in itertools.product(*[(RAW_OPTION, *k.options) for k in kinds])
    ]
    assert (choice.durable_s, choice.cpu_s, choice.stored_bytes) == min(every)


# --- the paper's rule -------------------------------------------------------


def test_the_rule_of_the_paper_never_compresses_on_one_core_with_a_fast_disk() -> None:
    # Top-k at 0.17 GB/s against 1.1 GB/s with fsync.
    comp, write = Linear(1e-4, 1 / 0.17e9), Linear(5e-3, 1 / 1.1e9)
    assert paper_threshold_bytes(0.01, comp, write) is None
    assert not any(paper_compresses(10**n, 0.01, comp, write) for n in range(4, 13))


def test_the_rule_of_the_paper_has_a_threshold_on_a_slow_store() -> None:
    comp, write = Linear(0.01, 1 / 0.17e9), Linear(5e-3, 1 / 100e6)
    threshold = paper_threshold_bytes(0.01, comp, write)
    assert threshold == pytest.approx(0.01 / (0.98 / 100e6 - 1 / 0.17e9))
    assert not paper_compresses(threshold * 0.999, 0.01, comp, write)
    assert paper_compresses(threshold * 1.001, 0.01, comp, write)


def test_a_density_of_a_half_or_more_is_never_worth_it() -> None:
    for density in (0.5, 0.9):
        assert paper_threshold_bytes(density, Linear(0, 0), Linear(0, 1.0)) is None
        assert not paper_compresses(1e9, density, Linear(0, 0), Linear(0, 1.0))
