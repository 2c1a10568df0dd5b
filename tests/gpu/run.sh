#!/usr/bin/env bash
# All tests that need a GPU; ends with a table of verdicts and figures.
#
#   [PYTHON=python3] [SMOLLM2=folder] [GSM8K=train.jsonl] [OUT=folder] tests/gpu/run.sh [attention precision checkpoint sync ...]
#
# Without names: all. With the same OUT several calls add up to one table. Tests that measure time or all of a GPU's memory run alone
# on theirs: on one GPU after the others, on two beside them.
set -uo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
export OUT=${OUT:-$(mktemp -d)} SMOLLM2=${SMOLLM2:-HuggingFaceTB/SmolLM2-135M-Instruct} PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
export VERDICTS=$OUT/verdicts.jsonl SHAPES=${SHAPES:-/tmp/shapes-$$} TOKENIZERS_PARALLELISM=false
gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())')
last=$((gpus > 1))
mkdir -p "$OUT"; touch "$VERDICTS"
"$python" -c 'import torch, transformers, vllm; print("torch", torch.__version__, "vllm", vllm.__version__, "transformers",
  transformers.__version__, torch.cuda.get_device_name())' 2>/dev/null | tee "$OUT/versions"
[[ -d $SHAPES ]] || "$python" tests/gpu/shapes.py "$SHAPES" "$SMOLLM2" >"$OUT/shapes.log" 2>&1 || { cat "$OUT/shapes.log"; exit 1; }

lane() { # GPU TEST...: those asked for, one after the other, a log each
  local gpu=$1 test
  for test in "${@:2}"; do
    [[ -z $asked || " $asked " == *" $test "* ]] || continue
    CUDA_VISIBLE_DEVICES=$gpu "$python" -m pytest -q -p no:cacheprovider "tests/gpu/test_$test.py" >"$OUT/$test.log" 2>&1
  done
}
asked="$*"
beside() { for test in attention precision checkpoint sync; do lane "$last" "$test" & done; wait; }
if ((gpus > 1)); then
  lane 0 runs small_runs & alone=$!
  (beside)
  lane 1 engine memory
  wait "$alone"
  lane 0,1 two_gpus
else
  beside
  lane 0 engine small_runs memory runs
fi
cat "$OUT/versions"
"$python" tests/gpu/table.py "$VERDICTS"
! grep -q '"outcome": "failed"' "$VERDICTS"
