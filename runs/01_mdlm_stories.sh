#!/usr/bin/env bash
# From nothing to a masked diffusion model of the stories and its distance from their law. Sized for half an hour of one H200, and not yet run there:
#   runs/01_mdlm_stories.sh outputs/mdlm_stories
# Every number can be set: STORIES, SEED, DEVICE, STEPS, NUM, RECIPE, FROM (a model folder to go on from), OVERRIDES.
# Run again with the next SEED and FROM=<the last model> to go on over freshly drawn stories.
set -euo pipefail
out=${1:?give the folder to write: runs/01_mdlm_stories.sh outputs/mdlm_stories}
law=${LAW:-${DILADIFF_PARTS:-$HOME/.cache/diladiff/parts}/stories-llama/llama2.data}
device=${DEVICE:-cuda}
[ -f "$law" ] || { echo "$law is missing: run make parts" >&2; exit 2; }
mkdir -p "$out"

# 1. Fresh stories, drawn from the law; the held-out ones have a seed that no training run uses.
python examples/stories_law.py sample "$law" --stories "${STORIES:-450000}" --seed "${SEED:-100}" --device "$device" \
    --wave "${WAVE:-4096}" --out "$out/train.jsonl"
python examples/stories_law.py sample "$law" --stories "${VALID:-2000}" --seed 899 --device "$device" \
    --wave "${WAVE:-4096}" --out "$out/valid.jsonl"

# 2. Tokens: one story a block. A model that goes on keeps its tokenizer.
tokenizer=(--train-tokenizer "${VOCAB:-4096}")
[ -z "${FROM:-}" ] || tokenizer=(--tokenizer "$FROM")
diladiff prepare "$out/train.jsonl" --valid "$out/valid.jsonl" --packing document --length "${LENGTH:-256}" \
    "${tokenizer[@]}" --out "$out/data"

# 3. Training; the same command resumes.
from=()
[ -z "${FROM:-}" ] || from=(--init-from "$FROM")
# shellcheck disable=SC2086
diladiff train "${RECIPE:-mdlm_stories}" --data "$out/data" --out "$out/run" --device "$device" \
    "${from[@]}" ${OVERRIDES:-}

# 4. How far from the law, at few and at many steps, without nucleus and with it.
for top_p in "" 0.9; do
    # shellcheck disable=SC2086
    python examples/stories_report.py "$law" "$out/run" --reference "$out/valid.jsonl" --num "${NUM:-512}" \
        --steps ${STEPS:-8 32 128 256} --device "$device" ${top_p:+--top-p $top_p} --out "$out/report${top_p:+_nucleus}"
done
