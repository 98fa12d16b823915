"""Private sampling: who is drawn, with which probability, and that nothing else decides it."""

import random
import threading

import numpy as np
import pytest
import torch
from scipy.stats import binomtest, chi2

from tacit.privacy import Budget, Ledger, Neighbours, Unit, events, mechanisms, rehearsal, sampling
from tacit.privacy._noise import NoiseKey
from tacit.privacy._queries import grid_sum
from tacit.privacy._receipts import Receipt, ReceiptError, check_used
from tacit.privacy.events import DpEvent

FALSE_ALARM = 1e-7  # of each statistical test


def charged(event: DpEvent, *, seed: int | None = 1, ledger: Ledger | None = None) -> Receipt:
    ledger = ledger or Ledger("sqlite://")
    ledger.subject("s", Budget(1e4, 1e-5), plan=[event])
    return ledger.charge("s", event, stage="test", seed=seed)


def release(receipt: Receipt) -> None:
    mechanisms.gaussian_query(grid_sum(torch.zeros(1), low=0.0, high=1.0, grid=1.0), receipt)


@pytest.mark.parametrize("rate", [0.003, 0.2, 0.9])
def test_units_are_drawn_with_the_charged_probability(rate: float) -> None:
    """A binomial test on 40 draws of 5,000: in all, of one unit over the draws, and of pairs (independence)."""
    people, draws = 5000, 40
    receipt = charged(events.poisson(rate, events.gaussian(5.0), draws), seed=7)
    drawn = torch.zeros(draws, people, dtype=torch.bool)
    for step in range(draws):
        found = sampling.draw(receipt, people)
        assert torch.equal(found, found.unique())  # ascending, nobody twice
        drawn[step, found] = True
        release(receipt)
    assert binomtest(int(drawn.sum()), people * draws, rate).pvalue > FALSE_ALARM
    neighbours = int((drawn[:, 1:] & drawn[:, :-1])[:, ::2].sum())
    assert binomtest(neighbours, draws * (people // 2), rate**2).pvalue > FALSE_ALARM
    again = int((drawn[1:] & drawn[:-1])[::2].sum())
    assert binomtest(again, people * (draws // 2), rate**2).pvalue > FALSE_ALARM


def test_batch_sizes_vary_as_poisson_sampling_makes_them() -> None:
    """The variance of a batch's size is N q (1 - q), not 0 as for shuffled batches: a chi-square test of 400 draws."""
    people, rate, draws = 300, 0.1, 400
    receipt = charged(events.poisson(rate, events.gaussian(5.0), draws), seed=3)
    sizes = []
    for _ in range(draws):
        sizes.append(len(sampling.draw(receipt, people)))
        release(receipt)
    spread = sum((size - people * rate) ** 2 for size in sizes) / (people * rate * (1 - rate))
    slack = 1.15  # a binomial is not quite a normal
    assert chi2.ppf(FALSE_ALARM, draws) / slack < spread < chi2.ppf(1 - FALSE_ALARM, draws) * slack


def test_somebody_who_comes_changes_nobodys_chances() -> None:
    """The draw of N people is that of N + 1 without the last."""
    receipt = charged(events.poisson(0.3, events.gaussian(5.0), 2))
    everyone = sampling.draw(receipt, 1000)
    for people in (0, 1, 57, 999):
        assert torch.equal(sampling.draw(receipt, people), everyone[everyone < people])


def test_asking_again_gives_the_same_and_a_release_moves_on() -> None:
    receipt = charged(events.poisson(0.5, events.gaussian(5.0), 3), seed=None)
    first, uniforms = sampling.draw(receipt, 200), sampling.uniforms(receipt, 9, 4)
    assert torch.equal(first, sampling.draw(receipt, 200))
    assert torch.equal(uniforms, sampling.uniforms(receipt, 9, 4))
    release(receipt)
    assert not torch.equal(first, sampling.draw(receipt, 200))  # equal with probability 2^-200
    assert not torch.equal(uniforms, sampling.uniforms(receipt, 9, 4))


def test_draws_ahead_are_those_that_come() -> None:
    event = events.compose(events.poisson(rate, events.gaussian(5.0), steps) for rate, steps in ((0.3, 2), (0.7, 3)))
    receipt = charged(event, seed=None)

    def drawn(ahead: int) -> tuple[torch.Tensor, torch.Tensor, str]:
        keys = sampling.reading_key(receipt, 1, ahead=ahead)
        return sampling.draw(receipt, 500, ahead=ahead), sampling.uniforms(receipt, 4, 2, ahead=ahead), keys

    early = [drawn(ahead) for ahead in range(4, 0, -1)][::-1]
    sampling.draw(receipt, 500)
    for step, (units, uniforms, key) in enumerate(early, 1):
        assert binomtest(len(units), 500, 0.3 if step < 2 else 0.7).pvalue > FALSE_ALARM
        release(receipt)
        now = drawn(0)
        assert torch.equal(now[0], units)
        assert torch.equal(now[1], uniforms)
        assert now[2] == key
    assert len({key for _, _, key in early} | {sampling.reading_key(receipt, 0)}) == 5
    with pytest.raises(ReceiptError):
        sampling.draw(receipt, 500, ahead=1)  # there is none after the next


def test_the_rate_is_that_of_the_next_release() -> None:
    """Read off the receipt, leaf by leaf; a full batch draws everybody, and nothing is drawn when all is used."""
    event = events.compose(
        [
            events.poisson(0.01, events.gaussian(4.0), 2),
            events.gaussian(9.0),
            events.poisson(0.6, events.gaussian(3.0)),
        ]
    )
    receipt = charged(event, seed=5)
    for rate in (0.01, 0.01, 1.0, 0.6):
        size = len(sampling.draw(receipt, 20_000))
        assert size == 20_000 if rate == 1 else binomtest(size, 20_000, rate).pvalue > FALSE_ALARM
        release(receipt)
    with pytest.raises(ReceiptError, match="releases nothing here"):
        sampling.draw(receipt, 10)


@pytest.mark.parametrize("first", [events.poisson(0.5, events.laplace(9.0)), events.laplace(9.0)])
def test_units_drawn_for_one_release_are_not_released_as_another(first: DpEvent) -> None:
    """Half of all people, or everybody, at the price of one in a hundred: refused, and nothing is used up by it."""
    receipt = charged(events.compose([first, events.poisson(0.01, events.gaussian(4.0))]), seed=5)
    query = grid_sum(torch.zeros(1), low=0.0, high=1.0, grid=1.0)
    assert len(sampling.draw(receipt, 100_000)) > 40_000
    with pytest.raises(ReceiptError, match="were drawn for a LaplaceDpEvent"):
        mechanisms.gaussian_query(query, receipt)
    assert receipt.used == 0
    mechanisms.laplace(query, receipt)
    assert binomtest(len(sampling.draw(receipt, 100_000)), 100_000, 0.01).pvalue > FALSE_ALARM
    mechanisms.gaussian_query(query, receipt)
    assert receipt.used == 2


def test_a_release_that_was_charged_as_sampled_needs_a_draw() -> None:
    receipt = charged(events.compose([events.poisson(0.01, events.gaussian(4.0), 2), events.laplace(5.0)]))
    with pytest.raises(ReceiptError, match=r"drawn with probability 0\.01: draw them"):
        release(receipt)
    sampling.uniforms(receipt, 3, 2)  # for units that were drawn: not a draw
    with pytest.raises(ReceiptError, match="draw them"):
        release(receipt)
    assert receipt.used == 0
    sampling.draw(receipt, 10)
    release(receipt)
    with pytest.raises(ReceiptError, match="draw them"):  # a draw serves one release
        release(receipt)
    mechanisms.laplace(grid_sum(torch.zeros(1), low=0.0, high=1.0, grid=1.0), receipt)  # of everybody, between draws
    assert receipt.used == 2


def test_a_refused_release_leaves_the_draw_as_it_was() -> None:
    receipt = charged(events.poisson(0.5, events.gaussian(5.0), 2), seed=None)
    first = sampling.draw(receipt, 200)
    with pytest.raises(ReceiptError, match="were drawn for a GaussianDpEvent"):
        mechanisms.laplace(grid_sum(torch.zeros(1), low=0.0, high=1.0, grid=1.0), receipt)
    assert torch.equal(first, sampling.draw(receipt, 200))
    release(receipt)


def test_two_threads_that_draw_the_same_units_release_them_once() -> None:
    """Whoever comes second has no draw of its own, so that its sum cannot leave as that of the next draw."""
    receipt = charged(events.poisson(0.5, events.gaussian(5.0), 2))
    assert torch.equal(sampling.draw(receipt, 100), sampling.draw(receipt, 100))
    release(receipt)
    with pytest.raises(ReceiptError, match="draw them"):
        release(receipt)


def test_a_receipt_knows_whether_anything_was_released_on_it() -> None:
    receipt = charged(events.poisson(0.5, events.gaussian(5.0), 2))
    sampling.draw(receipt, 100)
    with pytest.raises(ReceiptError, match="Nothing was released on receipt"):
        check_used(receipt)
    release(receipt)
    check_used(receipt)
    receipt.close()
    check_used(receipt)


def test_messages_about_a_dry_run_say_so() -> None:
    receipt = rehearsal(events.gaussian(5.0), unit=Unit.SAMPLE, neighbours=Neighbours.ADD_REMOVE)
    assert str(receipt).startswith("receipt 'rehearsal' in the dry run: ")
    with pytest.raises(ReceiptError, match=r"^Nothing was released on receipt 'rehearsal' in the dry run: "):
        check_used(receipt)


def test_a_draw_is_where_the_uniforms_of_its_key_lie_below_the_rate() -> None:
    receipt = charged(events.poisson(0.25, events.gaussian(5.0), 2), seed=11)
    uniforms = NoiseKey((11, "s", 1)).uniforms(0, 100, 1)
    assert sampling.draw(receipt, 100).tolist() == [i for i, u in enumerate(uniforms.tolist()) if u <= 0.25]


def test_draws_chances_and_noise_share_no_bits() -> None:
    key = NoiseKey(4)
    streams = [key.uniforms(r, 50, p) for r in range(3) for p in range(4)]
    values = torch.cat(streams).tolist()
    assert len(set(values)) == len(values)


def test_chances_are_uniform_and_one_line_per_unit() -> None:
    """A chi-square test over 20 cells of 40,000 numbers."""
    receipt = charged(events.poisson(0.25, events.gaussian(5.0)), seed=2)
    found = sampling.uniforms(receipt, 10_000, 4)
    assert found.shape == (10_000, 4)
    assert 0 < float(found.min()) <= float(found.max()) <= 1
    cells = torch.histc(found, 20, 0, 1)
    statistic = float(((cells - 2000) ** 2 / 2000).sum())
    assert chi2.sf(statistic, 19) > FALSE_ALARM
    assert torch.equal(sampling.uniforms(receipt, 3, 4), found[:3])


def test_nothing_is_drawn_without_a_live_receipt_or_by_another_sampling() -> None:
    with pytest.raises(ReceiptError, match="needs the receipt"):
        sampling.draw("receipt", 3)  # type: ignore[arg-type]
    with Ledger("sqlite://") as ledger:
        receipt = charged(events.poisson(0.5, events.gaussian(5.0)), ledger=ledger)
        with pytest.raises(ReceiptError):
            sampling.draw(ledger.receipt(receipt.id), 3)
        ledger.settle(receipt)
        with pytest.raises(ReceiptError):
            sampling.uniforms(receipt, 1, 1)


def test_what_a_model_draws_is_secret_comes_again_and_leaves_the_global_generators_alone() -> None:
    def draws() -> tuple[list[float], float, float]:
        return torch.rand(8).tolist(), float(np.random.rand()), random.random()

    receipt = charged(events.gaussian(1.0, steps=3), seed=None)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    seen = []
    for _ in range(2):
        with sampling.randomness(receipt):
            seen.append(draws())
    torch.manual_seed(0)  # what a script does first changes nothing
    with sampling.randomness(receipt):
        seen.append(draws())
    torch.set_rng_state(before[0])
    assert seen[0] == seen[1] == seen[2]
    assert np.random.get_state()[1].tolist() == before[1]
    assert random.getstate() == before[2]
    release(receipt)
    with sampling.randomness(receipt):
        assert draws() != seen[0]
    with sampling.randomness(charged(events.gaussian(1.0, steps=3), seed=None)):
        assert draws() != seen[0]


def test_threads_take_turns_with_the_global_generators() -> None:
    """Each draws what its key says, and no secret state stays behind where the first to enter is the first to leave."""
    receipts = [charged(events.gaussian(1.0), seed=None) for _ in range(2)]
    draws: list[list[torch.Tensor]] = [[], []]
    alone: list[torch.Tensor] = []
    for receipt in receipts:
        with sampling.randomness(receipt):
            alone.append(torch.rand(4))
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    entered, other_entered, left = (threading.Event() for _ in range(3))

    def first() -> None:
        with sampling.randomness(receipts[0]):
            draws[0].append(torch.rand(2))
            entered.set()
            other_entered.wait(0.3)
            draws[0].append(torch.rand(2))
        left.set()

    def second() -> None:
        entered.wait()
        with sampling.randomness(receipts[1]):
            other_entered.set()
            draws[1].append(torch.rand(2))
            left.wait(0.3)
            draws[1].append(torch.rand(2))

    threads = [threading.Thread(target=target) for target in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for drawn, expected in zip(draws, alone, strict=True):
        assert torch.equal(torch.cat(drawn), expected)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.random.get_state()[1].tolist() == before[1]
    assert random.getstate() == before[2]


def test_torchs_whole_state_is_secret_not_32_bits_of_it() -> None:
    """No seed of 32 bits gives this state: its words are not those of the twister's initialisation from the first."""
    with sampling.randomness(charged(events.gaussian(1.0), seed=None)):
        state = torch.get_rng_state()
        words = state[24 : 24 + 8 * 624].view(torch.int64)
        torch.manual_seed(int(words[0]))
        from_seed = torch.get_rng_state()[24 : 24 + 8 * 624].view(torch.int64)
    assert from_seed[0] == words[0]  # the words are where they are believed to be
    assert (from_seed[1:] != words[1:]).sum() > 600
    assert len(torch.unique(words)) > 600
