#!/usr/bin/env bash
# Pre-train on wikitext-2/valid.txt (evaluated on test.txt), then LoRA-tune on gsm8k/train.jsonl (evaluated on test.jsonl).
# Needs: gangline on PATH, and a folder with both data sets, $GANGLINE_DATA or ../shared/data beside the repository.
set -eu
cd "$(dirname "$0")"
data=$(realpath "${GANGLINE_DATA:-../../../shared/data}")
python=${PYTHON:-python3}
mkdir -p out

if [ ! -d out/model ]; then
    "$python" -m gangline.worker scratch "$data/wikitext-2/valid.txt" "$data/gsm8k/train.jsonl" --to out/model --vocabulary 4096
fi
first=$(gangline train pretrain.yaml --cluster cluster.yaml "data.train=$data/wikitext-2/valid.txt" "data.eval=$data/wikitext-2/test.txt")
rm -rf out/pretrained
gangline export "$first" --to out/pretrained
second=$(gangline train tune.yaml --cluster cluster.yaml "data.train=$data/gsm8k/train.jsonl" "data.eval=$data/gsm8k/test.jsonl")
gangline chat "$second" --prompt "A baker has 12 rolls and sells 5. How many are left?" --max-tokens 60 --temperature 0
