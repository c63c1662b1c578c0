"""The known law: what was drawn, what the scorer says and what the exported model says are one number."""

import json
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from examples import stories_law
from examples.stories_law import BEGIN, END, Law

TOLERANCE = 1e-3
WORDS = [b" ", b"a", b"b", b"c", b"d", b"ab", b" a", b" ab", b"cd", b" cd", b" abcd"]


def tiny_checkpoint(path: Path, *, length: int = 24) -> Path:
    """A random llama2.c file of 2 layers with a vocabulary of 270; the end comes soon, and only as <s>."""
    width, hidden, layers, heads, vocab = 16, 24, 2, 2, 259 + len(WORDS)
    source = np.random.default_rng(0)

    def random(*shape: int, scale: float = 0.3) -> np.ndarray:
        return (source.standard_normal(shape) * scale).astype(np.float32)

    def into_stream(inner: int) -> np.ndarray:
        weights = random(layers, width, inner)
        weights[:, 0] = 0.0  # the residual stream's first channel keeps what the embedding put there
        return weights

    embedding = random(vocab, width, scale=0.25)
    embedding[:, 0] = 1.0
    embedding[[0, END], 0] = -20.0  # so these are never drawn
    embedding[3:259, 0] = -20.0
    embedding[BEGIN, 0] = 2.0
    angles = np.outer(np.arange(length), 10000.0 ** -(np.arange(0, width // heads, 2) / (width // heads)))
    gains = np.ones((layers, width), np.float32)
    parts = [embedding, gains, *(random(layers, width, width) for _ in range(3)), into_stream(width)]
    parts += [gains, random(layers, hidden, width), into_stream(hidden)]
    parts += [random(layers, hidden, width), np.ones(width, np.float32), np.cos(angles), np.sin(angles)]
    names = [b"<unk>", b"<s>", b"</s>", *(b"<0x%02X>" % byte for byte in range(256)), *WORDS]
    with open(path, "wb") as file:
        file.write(struct.pack("7i", width, hidden, layers, heads, heads, vocab, length))
        for part in parts:
            file.write(part.astype(np.float32).tobytes())
        file.write(struct.pack("i", max(map(len, names))))
        for index, name in enumerate(names):
            file.write(struct.pack("fi", -float(index), len(name)) + name)
    return path


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Law:
    return stories_law.load(tiny_checkpoint(tmp_path_factory.mktemp("law") / "tiny.data"))


def transformers_nats(folder: Path, stories: list[list[int]]) -> list[float]:
    """Nats of each story, one at a time, under the exported model."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = []
    for ids in stories:
        tokens = torch.tensor([[BEGIN, *ids, END]])
        with torch.no_grad():
            logprobs = model(tokens[:, :-1]).logits[0].double().log_softmax(-1)
        found.append(-logprobs.gather(1, tokens[0, 1:, None]).sum().item())
    return found


def check_law(law: Law, count: int, folder: Path) -> list[list[int]]:
    """Drawn nats, scored nats and transformers' nats agree; gives the stories back."""
    drawn = stories_law.sample_wave(law, count, torch.Generator().manual_seed(5))
    ended = drawn.ended.nonzero()[:, 0].tolist()
    assert len(ended) > count // 4
    stories = [[index for index in drawn.ids[i].tolist() if index >= 0] for i in ended]
    assert sum(map(len, stories)) > 3 * len(stories)  # empty stories would agree on anything
    nats = [drawn.nats[i].item() for i in ended]
    assert stories_law.score(law, stories) == pytest.approx(nats, abs=TOLERANCE)
    stories_law.export(law, folder)
    assert transformers_nats(folder, stories) == pytest.approx(nats, abs=TOLERANCE)
    return stories


def test_three_ways_to_the_same_nats(tiny: Law, tmp_path: Path) -> None:
    check_law(tiny, 200, tmp_path)


def test_the_law_sums_to_one_and_is_what_is_drawn(tiny: Law) -> None:
    """The first token's frequencies against its exact law by chi-square, five standard deviations wide."""
    keys = [torch.empty(1, tiny.heads, tiny.length, tiny.head_width) for _ in range(tiny.layers)]
    logits = stories_law._step(tiny, torch.tensor([BEGIN]), 0, keys, [key.clone() for key in keys])
    law = logits[0].double().softmax(-1)
    uniform = torch.rand(20_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    ids, nats = stories_law.draw(logits.expand(20_000, -1), uniform)
    torch.testing.assert_close(nats, -law[ids].log(), rtol=0, atol=1e-5)
    counts, expected = torch.bincount(ids, minlength=len(law)).double(), law * 20_000
    likely = expected > 5
    chi2 = ((counts - expected).square() / expected)[likely].sum().item()
    assert likely.sum() >= 8
    assert chi2 < likely.sum().item() + 5 * (2 * likely.sum().item()) ** 0.5


def exact_tail(size: int, tail: float) -> Tensor:
    """Logits of a law with one head and a flat tail of some mass."""
    return torch.cat([torch.tensor([1 - tail]), torch.full((size - 1,), tail / (size - 1))]).log()[None]


def test_the_tail_is_drawn(tiny: Law) -> None:
    """Of mass 1e-10, the tail is hit by uniforms beyond 1 - 1e-10, which float32 cannot even hold."""
    logits = exact_tail(500, 1e-10)
    uniform = torch.tensor([0.5, 1 - 0.9e-10, 1 - 1e-12], dtype=torch.float64)
    ids, nats = stories_law.draw(logits.expand(3, -1), uniform)
    assert ids[0] == 0
    assert 0 < ids[1] < ids[2] < 500
    assert nats[2].item() == pytest.approx(-np.log(1e-10 / 499), rel=1e-3)


def test_waves_repeat_by_seed_and_compact_without_a_trace(tiny: Law, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = list(stories_law.sample(tiny, 40, seed=3, wave=64))
    assert rows == list(stories_law.sample(tiny, 40, seed=3, wave=64))
    assert rows != list(stories_law.sample(tiny, 40, seed=4, wave=64))
    monkeypatch.setattr(stories_law, "COMPACT_EVERY", 3)
    wave = stories_law.sample_wave(tiny, 64, torch.Generator().manual_seed(3))
    stories = [[index for index in row.tolist() if index >= 0] for row in wave.ids[wave.ended]]
    assert stories_law.score(tiny, stories) == pytest.approx(wave.nats[wave.ended].tolist(), abs=TOLERANCE)


def test_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = str(tiny_checkpoint(tmp_path / "tiny.data"))
    drawn, scored = tmp_path / "drawn.jsonl", tmp_path / "scored.jsonl"
    stories_law.main(["sample", weights, "--stories", "30", "--seed", "1", "--wave", "32", "--out", str(drawn)])
    stories_law.main(["score", weights, str(drawn), "--out", str(scored)])
    stories_law.main(["export", weights, "--out", str(tmp_path / "judge")])
    rows = [json.loads(line) for line in drawn.read_text().splitlines()]
    again = [json.loads(line) for line in scored.read_text().splitlines()]
    assert len(rows) == len(again) == 30
    assert all(set(row) == {"text", "nll", "tokens"} for row in rows)
    assert "30 stories" in capsys.readouterr().out
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {p.name for p in (tmp_path / "judge").iterdir()}


@pytest.mark.parts
def test_the_real_law(parts: Callable[[str], Path], tmp_path: Path) -> None:
    """As above with the real weights; here the text alone leads back to the ids, also in transformers."""
    law = stories_law.load(parts("stories-llama") / "llama2.data")
    stories = check_law(law, 4, tmp_path)
    texts = [law.text(ids) for ids in stories]
    assert stories_law.encode(law, texts) == stories
    from transformers import AutoTokenizer

    judge = AutoTokenizer.from_pretrained(tmp_path)
    assert judge(texts[0]).input_ids == [BEGIN, *stories[0], END]
