"""What a step's record says, and what it refuses."""

import math

import pytest
import torch

from diladiff.engine.records import Ledger, NonFiniteError, Record, pack
from diladiff.objectives.base import LossTerms


def terms(*totals):
    count = torch.tensor(2.0)
    return [LossTerms(torch.tensor(t), count, {"b": (torch.tensor(1.0), count), "a": (count, count)}) for t in totals]


def record(step, totals, norm=1.0, *, stop=False, tokens=10):
    names, values = pack(terms(*totals), stop=stop)
    norm = torch.tensor([norm], dtype=torch.float64)
    return Record.queue(step, names, torch.cat([values, norm]), {"all": 0.5}, tokens)


def ledger(rows, **changes):
    settings = {"global_batch": 8, "steps": 10, "log_every_steps": 2, "flops_per_token": 3.0, "peak_flops": None}
    return Ledger(**{**settings, **changes}, emit=rows.append)


def test_pack_adds_micro_batches():
    names, values = pack(terms(1.0, 3.0), stop=True)
    assert names == ["a", "b"]
    assert values.tolist() == [1.0, 4.0, 4.0, 4.0, 4.0, 2.0, 4.0, 0.0, 0.0]


def test_a_row_holds_means_since_the_last_one():
    rows = []
    book = ledger(rows)
    for step, totals in enumerate([(1.0, 3.0), (5.0, 7.0), (1.0, 1.0)]):
        book.add(record(step, totals, norm=float(step)))
    assert not book.settle()
    (row,) = rows
    assert (row["step"], row["loss"], row["a"], row["b"], row["grad_norm"], row["lr"]) == (2, 2.0, 1.0, 0.5, 0.5, 0.5)
    assert row["tokens_per_s"] > 0
    assert row["mfu"] is None


def test_a_row_also_ends_the_run_and_survives_a_resume():
    rows = []
    first, second = ledger(rows, steps=3, log_every_steps=100), ledger(rows, steps=3, log_every_steps=100)
    first.add(record(0, (1.0, 3.0)))
    first.settle()
    second.load(first.state())
    for step in (1, 2):
        second.add(record(step, (5.0, 7.0)))
    second.settle()
    assert [(row["step"], row["loss"]) for row in rows] == [(3, pytest.approx(28 / 12))]


def test_the_host_may_read_late():
    book = ledger([])
    book.add(record(0, (1.0,), stop=True))
    assert not book.settle(keep=1)
    assert book.settle()


def test_utilisation_is_flops_over_the_peak():
    rows = []
    book = ledger(rows, peak_flops=300.0, log_every_steps=1)
    book.add(record(0, (1.0,)))
    book.settle()
    assert rows[0]["mfu"] == pytest.approx(rows[0]["tokens_per_s"] / 100)


def test_a_loss_that_is_not_finite_names_its_samples():
    book = ledger([])
    book.add(record(3, (1.0, math.nan)))
    with pytest.raises(NonFiniteError, match="step 3: the loss is nan over samples 28 to 31 of the run"):
        book.settle()


def test_a_gradient_that_is_not_finite_names_the_batch():
    book = ledger([])
    book.add(record(3, (1.0, 1.0), norm=math.inf))
    with pytest.raises(NonFiniteError, match=r"gradient is not finite \(norm inf\) over samples 24 to 27, 28 to 31"):
        book.settle()
