"""Mixtures that count tokens: a stream's passes in tokens, steps of the right tokens, and even shares within a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, reject, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from lightning_streaming.errors import ConfigError
from lightning_streaming.sequence.partition import BatchGeometry
from lightning_streaming.sequence.phased import Mixture
from lightning_streaming.sequence.phases import ResolvedPhase, WeightChange
from lightning_streaming.sequence.settings import SHUFFLE_ALGOS
from lightning_streaming.sequence.stream_slices import StreamPasses, StreamSlice, TruncatedEpochs, slice_units
from lightning_streaming.sequence.tokens import TokenPasses, even_shares
from tests.helpers import assert_error
from tests.sequence.builders import make_settings, phase
from tests.tiers import examples

SINGLE = BatchGeometry(num_nodes=1, ranks_per_node=1, batch_size=1)


class Lengths:
    """Tokens of samples, by id."""

    def __init__(self, values: NDArray[np.int64]) -> None:
        self.values, self.digest = values, str(hash(values.tobytes()))

    def __call__(self, sample_ids: NDArray[np.int64]) -> NDArray[np.int64]:
        return self.values[sample_ids]


def lengths_of(shards: Mapping[str, Sequence[int]], means: Mapping[str, float], seed: int = 1) -> Lengths:
    """Lengths around a mean, of some streams."""
    generator = np.random.default_rng(seed)
    of_all = [generator.gamma(2, means[name] / 2, sum(sizes)).astype(np.int64) + 1 for name, sizes in shards.items()]
    return Lengths(np.concatenate(of_all))


def mixture_of(
    phases: Sequence[ResolvedPhase],
    shards: Mapping[str, Sequence[int]],
    lengths: Lengths | None,
    nodes: int = 2,
    **more: Any,
) -> Mixture:
    """Streams of these shard sizes, mixed by tokens, or by samples without lengths."""
    first_ids = dict(zip(shards, accumulate((sum(sizes) for sizes in shards.values()), initial=0), strict=False))
    sizes = {name: np.asarray(of, np.int64) for name, of in shards.items()}
    if not more.pop("in_tokens", True):
        more["tokens"] = None
    options = {name: more.pop(name) for name in ("shuffle", "shuffle_algo", "shuffle_block_size") if name in more}
    more.setdefault("tokens", lengths)
    return Mixture(make_settings(num_canonical_nodes=nodes, **options), phases, sizes, first_ids, **more)


def tokens_by_stream(mixture: Mixture, lengths: Lengths, ids: NDArray[np.int64]) -> dict[str, int]:
    """The tokens that some samples have of each stream."""
    of = {name: mixture._draws.ids_of(name) for name in mixture.plan.streams}
    return {name: int(lengths(ids[(ids >= here.start) & (ids < here.stop)]).sum()) for name, here in of.items()}


def epoch_ids(mixture: Mixture, epoch: int = 0) -> NDArray[np.int64]:
    """All samples of an epoch in order."""
    sequence = mixture.batched(SINGLE, epoch)
    return sequence.ids(np.arange(len(sequence)))


@given(
    sizes=st.lists(st.integers(0, 6), min_size=1, max_size=5).filter(lambda sizes: sizes[0] > 0),
    grown=st.booleans(),
    is_shuffled=st.booleans(),
    data=st.data(),
)
@settings(deadline=None)
def test_tokens_of_passes_are_those_of_the_samples_that_slices_take(
    sizes: list[int], grown: bool, is_shuffled: bool, data: st.DataObject
) -> None:
    first = np.asarray(sizes, np.int64)
    shorter = (TruncatedEpochs(shards=1, stop=2 * sizes[0]),) if grown else ()
    lengths = Lengths(
        np.asarray([0] * 3 + data.draw(st.lists(st.integers(0, 9), min_size=sum(sizes), max_size=sum(sizes))))
    )
    if not lengths(np.arange(3, 3 + (sizes[0] if grown else sum(sizes)))).sum():
        return
    passes = StreamPasses(first, shorter)
    tokens = TokenPasses("a", 3, passes, lengths, 7, is_shuffled=is_shuffled)
    count = data.draw(st.integers(1, 4 * sum(sizes)))
    # Sample by sample, so that each is a part of a shard in the order of its pass.
    ids, read = np.empty(count, np.int64), 0
    while read < count:
        taken = StreamSlice(stream="a", first_id=3, start=read, shorter=shorter)
        slice_units([first], [1], [taken], 7, is_shuffled=is_shuffled).write_ids(ids[read : read + 1])
        read += 1
    sums = np.concatenate([[0], np.cumsum(lengths(ids))])
    whole = {
        place for place in range(count + 1) if passes.position(int(passes.numbers(np.asarray([place]))[0]))[0] == place
    }
    for place in range(count + 1):
        assert tokens.before(place) == sums[place]
        assert tokens.before(tokens.sample_at(tokens.repeats(place))) == sums[place]
        if place in whole:
            assert tokens.repeats(place) == passes.count(place)
    for wanted in range(int(sums[-1]) + 1):
        position = tokens.position(wanted)
        assert abs(tokens.before(position) - wanted) == abs(sums - wanted).min()


SHARDS = {"books": [4] * 10, "code": [50] * 12, "web": [100] * 20}
MEANS = {"books": 900.0, "code": 40.0, "web": 20.0}
LENGTHS = lengths_of(SHARDS, MEANS)
MIX = {"books": 0.25, "code": 0.25, "web": 0.5}


@pytest.mark.parametrize("algo", sorted(SHUFFLE_ALGOS))
def test_shares_are_those_of_tokens_at_each_border_and_anywhere_in_between(algo: str) -> None:
    block = 4000 if algo != "naive" else None
    phases = [phase("main", 60_000, MIX), phase("ramp", 90_000, {"books": (0.25, 0.75), "web": (0.75, 0.25)}, steps=4)]
    mixture = mixture_of(phases, SHARDS, LENGTHS, shuffle_algo=algo, shuffle_block_size=block)
    ids, plan = epoch_ids(mixture), mixture.plan
    main, ramp = (
        ids[first:stop] for first, stop in zip([0, *plan.phase_stops.tolist()], plan.phase_stops, strict=False)
    )
    of_main = tokens_by_stream(mixture, LENGTHS, main)
    assert sum(of_main.values()) == pytest.approx(60_000, abs=1500)
    for name, share in MIX.items():
        assert of_main[name] == pytest.approx(share * 60_000, abs=1000)
    both = tokens_by_stream(mixture, LENGTHS, ids)
    assert {name: both[name] / 90_000 for name in both} == pytest.approx(
        {"books": 1 / 3, "code": 1 / 6, "web": 1 / 2}, abs=0.02
    )
    # Anywhere within a step, shares differ by a few samples only.
    for stop in range(len(main) // 4, len(main), len(main) // 8):
        of_part = tokens_by_stream(mixture, LENGTHS, main[:stop])
        total = sum(of_part.values())
        for name, share in MIX.items():
            assert of_part[name] == pytest.approx(share * total, abs=4000), (stop, name)
    assert len(ramp) > 0


@given(
    nodes=st.sampled_from([1, 2, 8]),
    stops=st.lists(st.integers(2_000, 60_000), min_size=1, max_size=4),
    seed=st.integers(0, 3),
    data=st.data(),
)
@settings(deadline=None)
def test_errors_do_not_add_up_and_the_past_depends_on_the_past_only(
    nodes: int, stops: list[int], seed: int, data: st.DataObject
) -> None:
    lengths, stop, phases = lengths_of(SHARDS, MEANS, seed), 0, list[ResolvedPhase]()
    for number, size in enumerate(stops):
        stop += size
        mix = {name: data.draw(st.floats(0.1, 1)) for name in SHARDS}
        phases.append(phase(f"p{number}", stop, mix, steps=data.draw(st.integers(1, 5))))
    mixture = mixture_of(phases, SHARDS, lengths, nodes, longest_step=500)
    plan, wanted = mixture.plan, dict.fromkeys(SHARDS, 0.0)
    assert plan.planned_stops == tuple(accumulate(stops))
    assert not (plan.stops % nodes).any()
    longest = int(lengths.values.max())
    for number, size in enumerate(stops):
        mix = dict(phases[number].begin)
        for name in wanted:
            wanted[name] += size * mix[name] / sum(mix.values())
            drawn = int(plan.drawn[plan.last_steps[number] + 1, plan.streams.index(name)])
            passes = mixture.tokens_of(name)
            assert passes is not None
            # Whole canonical nodes are filled up, once.
            assert abs(passes.before(drawn) - wanted[name]) <= longest * (1 + nodes)
    kept = data.draw(st.integers(1, len(phases)))
    other = mixture_of(
        [*phases[:kept], phase("new", phases[kept - 1].planned_stop + 20_000, {"books": 1.0})],
        SHARDS,
        lengths,
        nodes,
        longest_step=500,
    ).plan
    steps = int(plan.last_steps[kept - 1]) + 1
    assert other.stops[:steps].tolist() == plan.stops[:steps].tolist()
    assert other.drawn[: steps + 1].tolist() == plan.drawn[: steps + 1].tolist()


def test_epochs_continue_where_the_one_before_ended_with_what_it_owes() -> None:
    mixture = mixture_of([phase("all", 20_000, MIX)], SHARDS, LENGTHS)
    seen = np.concatenate([epoch_ids(mixture, epoch) for epoch in range(5)])
    again = np.concatenate([epoch_ids(mixture, epoch) for epoch in (4, 1)])  # in any order
    assert epoch_ids(mixture, 4).tolist() == again[: len(epoch_ids(mixture, 4))].tolist()
    for name, share in MIX.items():
        assert tokens_by_stream(mixture, LENGTHS, seen)[name] == pytest.approx(share * 100_000, abs=2000)
    web = seen[np.isin(seen, mixture._draws.ids_of("web"))]
    assert len(np.unique(web[:2000])) == min(len(web), 2000)  # none is repeated before all were read


def test_streams_that_were_read_as_often_as_they_may_be_are_replaced_by_the_others() -> None:
    total = {name: int(LENGTHS(np.asarray(mixture_ids)).sum()) for name, mixture_ids in _ids().items()}
    limits = {"books": 3.0, "code": 1.0}
    phases = [phase("all", 90_000, {"books": 0.5, "code": 0.4, "web": 0.1})]
    mixture = mixture_of(phases, SHARDS, LENGTHS, longest_step=300, limits=limits)
    ids = epoch_ids(mixture)
    of = tokens_by_stream(mixture, LENGTHS, ids)
    assert of["code"] == total["code"]
    assert np.bincount(ids[np.isin(ids, _ids()["code"])]).max() == 1
    beyond = 0.4 * 90_000 - total["code"]
    assert of["books"] == pytest.approx(45_000 + beyond * 5 / 6, abs=4_000)
    assert of["web"] == pytest.approx(9_000 + beyond / 6, abs=1_000)
    further = tokens_by_stream(mixture, LENGTHS, epoch_ids(mixture, 1))  # limits count over all epochs
    assert further["code"] == 0
    assert of["books"] + further["books"] == 3 * total["books"]
    assert sum(further.values()) == pytest.approx(90_000, abs=4_000)
    with assert_error(ConfigError, option="mixing.max_repeats", stream="code", hint="redistribute") as caught:
        mixture_of(phases, SHARDS, LENGTHS, limits=limits, redistributes=False)
    assert str(caught.value).startswith(
        f"phase 'all' would read stream 'code' up to 36,000 tokens, and mixing.max_repeats allows {total['code']:,} in "
        f"the whole run (1 times its {total['code']:,})"
    )
    with assert_error(ConfigError, option="mixing.max_repeats") as caught:
        mixture_of([phase("all", 400_000, {"books": 0.5, "code": 0.5})], SHARDS, LENGTHS, limits=limits)
    assert str(caught.value).startswith(
        f"phase 'all' needs 400,000 tokens, and mixing.max_repeats leaves {3 * total['books']:,} of 'books', "
        f"{total['code']:,} of 'code'"
    )
    mix = {"books": 0.5, "code": 0.4, "web": 0.1}
    with assert_error(ConfigError, option="mixing.max_repeats", stream="code") as caught:
        mixture_of([phase("all", 4000, mix)], SHARDS, None, limits={"code": 2.0}, redistributes=False)
    once = sum(SHARDS["code"])
    assert (
        f"up to 1,600 samples, and mixing.max_repeats allows {2 * once:,} in the whole run (2 times its {once:,})"
        in (str(caught.value))
    )


def _ids() -> dict[str, range]:
    starts = list(accumulate((sum(sizes) for sizes in SHARDS.values()), initial=0))
    return {name: range(*pair) for name, pair in zip(SHARDS, pairwise(starts), strict=True)}


def test_even_shares_keep_the_order_within_a_stream() -> None:
    generator = np.random.default_rng(0)
    streams, tokens = np.sort(generator.integers(0, 3, 240)), generator.integers(0, 50, 240)
    for nodes in (1, 4):
        order = even_shares(streams, np.zeros_like(streams), tokens, nodes)
        assert sorted(order.tolist()) == list(range(240))
        for of_node in np.split(order, nodes):
            shares = np.bincount(streams[of_node], tokens[of_node], 3) / tokens[of_node].sum()
            assert shares == pytest.approx(np.bincount(streams, tokens, 3) / tokens.sum(), abs=0.05)
            for stream in range(3):
                here = of_node[streams[of_node] == stream]
                assert (np.diff(here) > 0).all()


@pytest.mark.parametrize("nodes", [1, 16])
@pytest.mark.parametrize("algo", ["py1e", "blockwise"])
def test_shares_stay_even_where_streams_are_repeated_within_a_step(nodes: int, algo: str) -> None:
    shards = {"books": [20] * 40, "code": [200] * 60, "few": [3], "web": [1000] * 80}
    means = {"books": 5_000.0, "code": 300.0, "few": 3_000.0, "web": 100.0}
    lengths = lengths_of(shards, means)
    mix = {"books": 0.3, "code": 0.3, "few": 0.05, "web": 0.35}
    mixture = mixture_of([phase("all", 20_000_000, mix)], shards, lengths, nodes, shuffle_algo=algo)
    assert len(mixture.plan) == 1
    ids = epoch_ids(mixture)
    assert mixture.repeats("books", int((ids < 800).sum())) > 1.4
    size = len(ids) // 10
    for start in range(0, len(ids) - size, size // 3):
        of = tokens_by_stream(mixture, lengths, ids[start : start + size])
        for name, share in mix.items():
            assert of[name] / sum(of.values()) == pytest.approx(share, abs=0.01), (start, name)
    for name in shards:  # and no sample is repeated before its pass ends
        here = mixture._draws.ids_of(name)
        of_stream = ids[(ids >= here.start) & (ids < here.stop)]
        for start in range(0, len(of_stream), len(here)):
            whole = of_stream[start : start + len(here)]
            assert len(np.unique(whole)) == len(whole)


@given(seed=st.integers(0, 1 << 32), nodes=st.sampled_from([1, 2, 8, 64]), algo=st.sampled_from(sorted(SHUFFLE_ALGOS)))
@example(seed=5028, nodes=64, algo="py1e")
@example(seed=5072, nodes=1, algo="naive")
@settings(deadline=None, max_examples=examples(20))
def test_no_part_of_a_run_is_further_from_its_shares_than_a_longest_document_for_each_node(
    seed: int, nodes: int, algo: str
) -> None:
    generator = np.random.default_rng(seed)
    names = [f"s{number}" for number in range(int(generator.integers(2, 7)))]
    shards, values = dict[str, list[int]](), dict[str, NDArray[np.int64]]()
    for name in names:
        shards[name] = generator.integers(1, int(generator.choice([2, 8, 50])), int(generator.integers(2, 60))).tolist()
        count, mean = sum(shards[name]), float(generator.choice([10, 300, 20_000]))
        of_kind = {
            "equal": np.full(count, mean),
            "exponential": generator.exponential(mean, count),
            "heavy": np.minimum((generator.pareto(1.1, count) + 1) * mean / 8, 300 * mean),
            "some empty": np.where(generator.random(count) < 0.3, 0, mean),
        }
        values[name] = of_kind[str(generator.choice(list(of_kind)))].astype(np.int64)
        values[name][0] += 1
    lengths = Lengths(np.concatenate(list(values.values())))
    shares = dict(zip(names, generator.dirichlet(np.ones(len(names))) * 0.9 + 0.1 / len(names), strict=True))
    # The epoch that repeats a stream so often.
    size = int(generator.uniform(0.2, 8) * min(values[name].sum() / shares[name] for name in names))
    longest = int(generator.choice([500, 1 << 22]))
    block = None if algo == "naive" else 4000
    try:
        mixture = mixture_of(
            [phase("all", size, shares)], shards, lengths, nodes, shuffle_algo=algo, shuffle_block_size=block,
            longest_step=longest,
        )  # fmt: skip
    except ConfigError:  # fewer documents than canonical nodes
        reject()
    ids = np.concatenate([epoch_ids(mixture, epoch) for epoch in range(3)])
    of_all = np.concatenate([[0], np.cumsum(lengths(ids))])
    most = {name: int(values[name].max()) for name in names}
    for name in names:
        here = mixture._draws.ids_of(name)
        of_stream = np.concatenate([[0], np.cumsum(lengths(ids) * ((ids >= here.start) & (ids < here.stop)))])
        beyond = of_stream - shares[name] * of_all
        # A window differs by no more than the highest and the lowest of its borders.
        others = sum(most.values()) - most[name]
        assert np.ptp(beyond) <= (nodes + 1) * (most[name] * (1 - shares[name]) + others * shares[name])


@given(
    nodes=st.sampled_from([1, 2, 8]),
    size=st.sampled_from([3_000, 100_000, 400_000]),
    seed=st.integers(0, 3),
    ramp=st.booleans(),
    steps=st.sampled_from([80, 1000, 1 << 22]),
    limits=st.dictionaries(st.sampled_from(list(SHARDS)), st.floats(0.5, 8), max_size=3),
    changed=st.dictionaries(st.integers(0, 12), st.sampled_from([{"web": 1.0}, MIX, {"code": 1.0, "books": 2.0}])),
    in_tokens=st.booleans(),
)
@settings(deadline=None, max_examples=examples(50))
def test_a_late_epoch_is_the_same_whether_those_before_it_were_planned_or_skipped(
    nodes: int,
    size: int,
    seed: int,
    ramp: bool,
    steps: int,
    limits: dict[str, float],
    changed: dict[int, dict[str, float]],
    in_tokens: bool,
) -> None:
    mix: dict[str, Any] = {"books": 0.25, "code": (0.25, 0.5), "web": (0.5, 0.25)} if ramp else MIX
    phases = [phase("all", size if in_tokens else size // 40, mix, steps=4 if ramp else 1)]
    changes = [
        WeightChange(epoch=epoch, step=0, mix=tuple(sorted(changed[epoch].items()))) for epoch in sorted(changed)
    ]

    lengths = lengths_of(SHARDS, MEANS, seed)

    def mixture() -> Mixture:
        how: dict[str, Any] = {"longest_step": steps, "limits": limits, "changes": changes, "in_tokens": in_tokens}
        return mixture_of(phases, SHARDS, lengths, nodes, **how)

    try:
        one_by_one = mixture()
    except ConfigError:  # the first epoch exceeds the limits
        reject()
    for epoch in (2, 5, 14):
        can_be_read = all(one_by_one.has_epoch(before) for before in range(epoch + 1))
        at_once = mixture()
        assert at_once.has_epoch(epoch) is can_be_read
        if not can_be_read:
            break
        plan, expected = at_once.plan_of(epoch), one_by_one.plan_of(epoch)
        assert plan.drawn.tolist() == expected.drawn.tolist()
        if expected.earlier is not None:
            assert [part.tolist() for part in plan.end] == [part.tolist() for part in expected.end]


def test_epochs_before_a_late_one_are_not_planned() -> None:
    for changes in ([], [WeightChange(epoch=9, step=0, mix=(("books", 1.0), ("web", 1.0)))]):
        mixture, numbers = mixture_of([phase("all", 100_000, MIX)], SHARDS, LENGTHS, changes=changes), list[int]()
        plan_one = mixture._planned

        def planned(epoch: int, **how: Any) -> Any:
            numbers.append(epoch)  # noqa: B023
            return plan_one(epoch=epoch, **how)  # noqa: B023

        mixture._planned = planned  # type: ignore[assignment]
        mixture.plan_of(60_000)
        assert numbers == ([9, 10, 60_000] if changes else [60_000])


def test_an_epoch_too_late_to_plan_is_refused() -> None:
    mixture = mixture_of([phase("all", 20_000, MIX)], SHARDS, LENGTHS)
    assert not mixture.has_epoch(10**9)
    with assert_error(ConfigError, option="epoch"):
        mixture.check_epoch(10**9)


def test_a_phase_has_enough_tokens_for_all_canonical_nodes() -> None:
    shards = {"books": [4] * 10}
    lengths = lengths_of(shards, {"books": 90_000.0})
    with assert_error(ConfigError, option="schedule.short.end"):
        mixture_of([phase("short", 300_000, {"books": 1.0})], shards, lengths, 16)
    mixture = mixture_of([phase("long", 1_600_000, {"books": 1.0})], shards, lengths, 16)
    assert mixture.plan.epoch_size in (16, 32)
    # Steps of a ramp are as many as have these samples.
    ramp = phase("ramp", 3_200_000, {"books": (1.0, 2.0)}, steps=9)
    assert len(mixture_of([ramp], shards, lengths, 16).plan) == 2


def test_whole_canonical_nodes_are_not_filled_beyond_the_limits_of_all_streams() -> None:
    shards = {"books": [10], "code": [27]}
    lengths = Lengths(np.full(37, 10))
    mix, limits = {"books": 0.5, "code": 0.5}, {"books": 1.0, "code": 1.0}
    mixture = mixture_of([phase("all", 300, mix)], shards, lengths, 8, limits=limits)
    assert np.bincount(epoch_ids(mixture), minlength=37).max() == 1
    assert mixture.plan.epoch_size == 32
    with assert_error(ConfigError, option="mixing.max_repeats"):
        mixture_of([phase("all", 370, mix)], shards, lengths, 8, limits=limits)


def test_a_stream_without_tokens_has_no_weight_in_them() -> None:
    lengths = Lengths(np.zeros(2640, np.int64))
    with assert_error(ConfigError, option="mixing.weights_in", stream="books"):
        mixture_of([phase("all", 100, MIX)], SHARDS, lengths)
