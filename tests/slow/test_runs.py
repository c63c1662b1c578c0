"""The numbered scripts of runs/ at debug size: from the law to a trained model and its report."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OVERRIDES = "--objective.model.length 256 --objective.model.vocab-size 1000"


@pytest.mark.slow
@pytest.mark.parts
def test_the_stories_script_goes_from_the_law_to_a_report(tmp_path, parts):
    settings = {
        "DEVICE": "cpu",
        "STORIES": "40",
        "VALID": "12",
        "WAVE": "16",
        "NUM": "6",
        "VOCAB": "1000",
        "STEPS": "2 4",
    }
    environment = (
        os.environ
        | settings
        | {
            "LAW": str(parts("stories-llama") / "llama2.data"),
            "RECIPE": "mdlm_stories_debug",
            "OVERRIDES": OVERRIDES,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }
    )
    run = subprocess.run(
        ["bash", "runs/01_mdlm_stories.sh", str(tmp_path / "a b")],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    for folder, top_p in (("report", None), ("report_nucleus", 0.9)):
        rows = [json.loads(line) for line in (tmp_path / "a b" / folder / "report.jsonl").read_text().splitlines()]
        assert [row["what"] for row in rows] == ["held-out stories", "2 steps", "4 steps"]
        assert all(row["settings"]["top_p"] == top_p and row["nats a token"]["n"] == 6 for row in rows)
        source, *models = (row["nats a token"]["value"] for row in rows)
        # The law's own stories cost it about .64 nats a token; a model after four steps writes noise.
        assert 0.4 < source < 1.0 < min(models)
