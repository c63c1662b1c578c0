"""How far a generator of stories is from their law: nats a token, entropy, distinct n-grams, share that end.

python examples/stories_report.py llama2.data MODEL --reference valid.jsonl --steps 8 32 128 256 --num 512 --out DIR
Samples are scored by the law itself (examples/stories_law.py), so the nats are a true cross-entropy to the source, not
an opinion: below the source's own value is not better, it is narrower. Writes report.jsonl, report.md and the samples.
"""

import argparse
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import stories_law

from diladiff import MaskedLM, __version__, files
from diladiff.metrics.entropy import Estimate, distinct_ngrams, mean, ratio, unigram_entropy
from diladiff.pipelines.samples import Samples, write_samples

NGRAM = 4
COLUMNS = ("nats a token", "nats a story", "tokens", "unigram entropy", f"distinct {NGRAM}-grams", "ended")


def measure(law: stories_law.Law, texts: list[str], ended: list[bool]) -> dict[str, Estimate]:
    """Every column over a set of texts; entropy and n-grams are of the law's tokens, one value a text."""
    stories = stories_law.encode(law, texts)
    nats = stories_law.score(law, stories)
    tokens = [float(min(len(ids) + 1, law.length)) for ids in stories]
    values = (
        ratio(nats, tokens),
        mean(nats),
        mean(tokens),
        mean([unigram_entropy(ids) for ids in stories]),
        mean([distinct_ngrams(ids, NGRAM) for ids in stories]),
        mean([float(end) for end in ended]),
    )
    return dict(zip(COLUMNS, values, strict=True))


def generate(lm: MaskedLM, steps: int, chosen: argparse.Namespace) -> tuple[Samples, list[bool]]:
    """Samples at a number of steps, and whether each holds its end token."""
    samples = lm.generate(
        num=chosen.num, steps=steps, seed=chosen.seed, top_p=chosen.top_p, batch_size=chosen.batch_size
    )
    return samples, [lm.tokenizer.end_id in ids for ids in samples.ids.tolist()]


def table(rows: list[dict[str, Any]]) -> str:
    """The results as a Markdown table, errors in brackets."""
    lines = [("", *COLUMNS), ("---",) * (len(COLUMNS) + 1)]
    for row in rows:
        cells = (f"{row[name]['value']:.3f} ({row[name]['error']:.3f})" for name in COLUMNS)
        lines.append((row["what"], *cells))
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("law", type=Path, help="the law's llama2.c checkpoint: llama2.data")
    parser.add_argument("model", help="a model or run folder")
    parser.add_argument("--reference", type=Path, required=True, help="held-out stories: JSON lines with a field text")
    parser.add_argument("--steps", type=int, nargs="+", default=[8, 32, 128, 256])
    parser.add_argument("--num", type=int, default=512, help="samples, and held-out stories, a row")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--top-p", type=float, default=None)
    parser.add_argument("--batch-size", type=int, default=None)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, required=True)
    chosen = parser.parse_args(arguments)

    law = stories_law.load(chosen.law, device=chosen.device)
    lm = MaskedLM.from_pretrained(chosen.model, device=chosen.device)
    settings = {
        "n": chosen.num,
        "seed": chosen.seed,
        "top_p": chosen.top_p,
        "model": lm.identity,
        "version": __version__,
    }

    lines = chosen.reference.read_text(encoding="utf-8").splitlines()[: chosen.num]
    texts = [json.loads(line)["text"] for line in lines]
    rows = [row("held-out stories", measure(law, texts, [True] * len(texts)), settings | {"steps": None})]
    for steps in chosen.steps:
        samples, ended = generate(lm, steps, chosen)
        write_samples(chosen.out / f"samples_{steps}.jsonl", samples, model=lm.identity)
        rows.append(row(f"{steps} steps", measure(law, samples.texts, ended), settings | {"steps": steps}))
        print(f"{steps} steps: {samples.seconds:.1f} s", flush=True)
    files.write_atomic(chosen.out / "report.jsonl", "".join(json.dumps(one) + "\n" for one in rows))
    files.write_atomic(chosen.out / "report.md", table(rows))
    print(table(rows))
    for before, after in pairwise(rows[1:]):
        change = after[COLUMNS[0]]["value"] - before[COLUMNS[0]]["value"]
        print(f"{before['what']} -> {after['what']}: {change:+.3f} nats a token")


def row(what: str, measured: dict[str, Estimate], settings: dict[str, Any]) -> dict[str, Any]:
    """A line of the result file."""
    return {"what": what, **{name: one._asdict() for name, one in measured.items()}, "settings": settings}


if __name__ == "__main__":
    main()
