"""Draw the README's moving picture: an SVG of a real run, masks turning into words, without any dependency.

    python docs/make_demo_picture.py pretrained/mdlm_stories_cpu --steps 128 --seed 3 --out docs/demo.svg
    python docs/make_demo_picture.py --recording run.json --out docs/demo.svg

Each token stands where it ends up, so a mask is as wide as its word; the order is the sampler's.
"""

import argparse
import html
import json
from pathlib import Path
from typing import Any, NamedTuple

COLUMNS = 84
CHARACTER, LINE, MARGIN = 8.43, 21, 18
FONT = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
BACKGROUND, TEXT, GIVEN, NEW, MASK, NOTE = "#0d1117", "#e6edf3", "#79c0ff", "#7ee787", "#30363d", "#8b949e"
START, FRESH = 0.8, 0.6
"""Seconds before the first step, and for which a new word is bright."""


class Fragment(NamedTuple):
    """A token's characters on one line: where they stand, and the step that reveals them."""

    line: int
    column: int
    text: str
    step: int


def main() -> None:
    """Record a run or read one, and write its picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="a model folder, a run folder or a name on the hub")
    parser.add_argument("--recording", type=Path, help="a run that --save wrote, in place of a model")
    parser.add_argument("--save", type=Path, help="where to keep the run, as JSON")
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--prompt")
    parser.add_argument("--seconds", type=float, default=6.0, help="how long the text takes to form in the picture")
    parser.add_argument("--hold", type=float, default=5.0, help="how long the text stands before it starts anew")
    parser.add_argument("--out", type=Path, default=Path("docs/demo.svg"))
    asked = parser.parse_args()
    if (asked.model is None) == (asked.recording is None):
        parser.error("give a model or --recording")
    if asked.recording is not None:
        recording = json.loads(asked.recording.read_text("utf-8"))
    else:
        recording = run(asked.model, asked.steps, asked.seed, asked.prompt)
    if asked.save is not None:
        asked.save.write_text(json.dumps(recording) + "\n", "utf-8")
    asked.out.write_text(picture(recording, asked.seconds, asked.hold), "utf-8")


def run(model: str, steps: int, seed: int, prompt: str | None) -> dict[str, Any]:
    """Sample one text and record how it forms."""
    from diladiff import MaskedLM
    from diladiff.pipelines.frames import record

    lm = MaskedLM.from_pretrained(model)
    return record(lm.tokenizer, lm.stream(steps=steps, seed=seed, prompt=prompt))


def picture(recording: dict[str, Any], seconds: float, hold: float) -> str:
    """The SVG of a recording's first sample."""
    fragments = lay_out(recording["rows"][0])
    total = START + seconds + hold
    height = MARGIN * 2 + LINE * (max((fragment.line for fragment in fragments), default=0) + 3)
    width = MARGIN * 2 + CHARACTER * COLUMNS
    steps = sorted({fragment.step for fragment in fragments} - {0})
    rules = [rule(step, 100 * (START + seconds * step / recording["steps"]) / total, total) for step in steps]
    note = f"{len(recording['rows'][0])} tokens, {recording['steps']} steps, {recording['seconds']:.2f} s"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" width="{width:.0f}" '
            f'height="{height}" role="img" aria-label="A text forming out of masks">',
            "<style>",
            f"text{{font:14px {FONT};fill:{TEXT};white-space:pre}}.given{{fill:{GIVEN}}}.note{{fill:{NOTE}}}",
            f".m{{fill:{MASK};opacity:0}}",
            *rules,
            "</style>",
            f'<rect width="100%" height="100%" rx="8" fill="{BACKGROUND}"/>',
            *(draw(fragment) for fragment in fragments),
            f'<text class="note" x="{MARGIN}" y="{height - MARGIN}">{html.escape(note)}</text>',
            "</svg>\n",
        ]
    )


def lay_out(row: list[tuple[str, int]]) -> list[Fragment]:
    """Break a text into lines at its spaces and say where the characters of each token stand."""
    owned = ((character, number) for number, (text, _) in enumerate(row) for character in text)
    characters = [(character, number) for character, number in owned if character.isprintable() or character == "\n"]
    placed: list[tuple[int, int, str, int]] = []
    line = column = 0
    word: list[tuple[str, int]] = []
    for character, number in [*characters, (" ", -1)]:
        if not character.isspace():
            word.append((character, number))
            continue
        if column + len(word) > COLUMNS and column > 0:
            line, column = line + 1, 0
        placed += [(line, column + place, letter, owner) for place, (letter, owner) in enumerate(word)]
        column, word = column + len(word) + 1, []
        if character == "\n":
            line, column = line + 1, 0
    fragments: list[Fragment] = []
    owners: list[int] = []
    for line, column, letter, owner in placed:
        last = fragments[-1] if fragments else None
        if last and owners[-1] == owner and last.line == line and last.column + len(last.text) == column:
            fragments[-1] = last._replace(text=last.text + letter)
        else:
            fragments.append(Fragment(line, column, letter, row[owner][1]))
            owners.append(owner)
    return fragments


def rule(step: int, percent: float, total: float) -> str:
    """The animation of all that a step reveals: its masks go, its words come bright and settle."""
    settled = percent + 100 * FRESH / total
    words = f"0%{{opacity:0}}{percent:.2f}%{{opacity:1;fill:{NEW}}}{settled:.2f}%,100%{{opacity:1;fill:{TEXT}}}"
    masks = f"0%{{opacity:1}}{percent:.2f}%,100%{{opacity:0}}"
    return (
        f"@keyframes w{step}{{{words}}}@keyframes m{step}{{{masks}}}"
        f".w{step}{{animation:w{step} {total:g}s step-end infinite}}"
        f".m{step}{{animation:m{step} {total:g}s step-end infinite}}"
    )


def draw(fragment: Fragment) -> str:
    """A fragment as a word and, where it was not given, the mask before it."""
    x, y = MARGIN + CHARACTER * fragment.column, MARGIN + LINE * (fragment.line + 1)
    width = CHARACTER * len(fragment.text)
    kind = f"w{fragment.step}" if fragment.step else "given"
    word = (
        f'<text class="{kind}" x="{x:.1f}" y="{y}" textLength="{width:.1f}" lengthAdjust="spacingAndGlyphs">'
        f"{html.escape(fragment.text)}</text>"
    )
    if not fragment.step:
        return word
    mask = f'<rect class="m m{fragment.step}" x="{x + 1:.1f}" y="{y - 12}" width="{width - 2:.1f}" height="15" rx="3"/>'
    return mask + word


if __name__ == "__main__":
    main()
