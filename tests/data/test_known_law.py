"""Stories of the known law on their way into a data set: seeds, progress, what is drawn again and what is not."""

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from diladiff.data import known_law
from diladiff.data.known_law import LAST_SEED, PER_SEED, TRAIN_SEED, VALID_SEED, plan
from diladiff.data.prepare import prepare
from diladiff.data.presets import PRESETS
from diladiff.data.settings import PrepareConfig, Progress
from tests.examples.test_stories_law import tiny_checkpoint


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> PrepareConfig:
    """The preset with a tiny law, at a tiny size."""
    folder = tmp_path_factory.mktemp("law")
    return replace(
        PRESETS["stories"](),
        out=folder / "a set",
        stories=12,
        stories_valid=5,
        stories_weights=tiny_checkpoint(folder / "tiny.data"),
        train_tokenizer=270,
        workers=1,
    )


def test_no_seed_serves_both_splits() -> None:
    files = plan(2 * PER_SEED + 3, PER_SEED + 1)
    train = [(count, seed) for name, count, seed in files if name.startswith("train-")]
    valid = [(count, seed) for name, count, seed in files if name.startswith("valid-")]
    assert train == [(PER_SEED, TRAIN_SEED), (PER_SEED, TRAIN_SEED + 1), (3, TRAIN_SEED + 2)]
    assert valid == [(PER_SEED, VALID_SEED), (1, VALID_SEED + 1)]
    most = (VALID_SEED - TRAIN_SEED) * PER_SEED
    assert max(seed for _, _, seed in plan(most, 0)) == VALID_SEED - 1
    for train_stories, valid_stories in ((most + 1, 0), (1, (LAST_SEED + 1 - VALID_SEED) * PER_SEED + 1)):
        with pytest.raises(ValueError, match=f"at most {most} have own seeds"):
            plan(train_stories, valid_stories)


def test_the_preset_from_weights_to_shards(config: PrepareConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every story arrives; a second run draws none; other settings leave nothing of the first behind."""
    seen: list[Progress] = []
    summary = prepare(config, seen.append)
    drawn = [now.documents for now in seen if now.stage == "stories"]
    assert drawn == sorted(drawn)
    assert drawn[-1] == 17
    assert sum(split.documents for split in summary.splits.values()) + summary.left_out["empty"] == 17
    assert summary.splits["train"].documents > 6
    assert summary.splits["valid"].documents > 0
    assert sorted(path.name for path in (config.out / "stories").iterdir()) == [
        "train-00100-cpu-12.jsonl",
        "valid-00800-cpu-5.jsonl",
    ]
    with pytest.raises(ValueError, match="stories_device: cpu -> cuda"):
        prepare(replace(config, stories_device="cuda"))
    monkeypatch.setattr(known_law, "_run", lambda command, look: pytest.fail("drawn again"))
    assert prepare(config).already_there


def test_what_was_drawn_is_kept_and_what_other_settings_drew_is_not(
    config: PrepareConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(command: list[str], look: Callable[[], None]) -> None:
        options = dict(zip(command[4::2], command[5::2], strict=True))
        Path(options["--out"]).write_text("a story\n" * int(options["--stories"]))
        look()

    def draw(train: int) -> dict[str, list[str]]:
        seen.clear()
        return known_law.draw(tmp_path, train, 2, weights=config.stories_weights, device="cpu", progress=seen.append)

    seen: list[int] = []
    monkeypatch.setattr(known_law, "_run", write)
    (first,), (valid,) = draw(3).values()
    assert seen == [3, 3, 5, 5]
    Path(valid).write_text("left alone\n")
    (second,), (again,) = draw(4).values()
    assert (again, Path(again).read_text()) == (valid, "left alone\n")
    assert len(Path(second).read_text().splitlines()) == 4
    assert not Path(first).exists()


def test_a_run_is_looked_at_while_it_goes_on_and_does_not_outlive_a_stop(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(known_law, "LOOK_SECONDS", 0.02)
    pid = tmp_path / "pid"
    script = f"import os, time; open({str(pid)!r}, 'w').write(f'{{os.getpid()}}\\n'); time.sleep(60)"

    def stop() -> None:
        if pid.is_file() and pid.read_text().endswith("\n"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        known_law._run([sys.executable, "-c", script], stop)
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


def test_what_goes_wrong_while_drawing_is_one_line(config: PrepareConfig, tmp_path: Path) -> None:
    (tmp_path / "none.data").write_bytes(b"no weights")
    with pytest.raises(ValueError, match=r"stories: stories_law\.py failed \(.+\)"):
        prepare(replace(config, out=tmp_path / "set", stories_weights=tmp_path / "none.data"))
