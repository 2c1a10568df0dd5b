#!/usr/bin/env bash
# All tests that need a GPU; ends with a table of verdicts and figures, and with 0 if every file was run to its end and nothing failed.
#
#   [PYTHON=python3] [SMOLLM2=folder] [GSM8K=train.jsonl] [OUT=folder] tests/gpu/run.sh [attention precision checkpoint sync ...]
#
# Without names: all. With the same OUT several calls add up to one table, in which a file that is run again replaces its rows. Uses the
# first two GPUs of CUDA_VISIBLE_DEVICES. Tests that measure time or all of a GPU's memory run alone on theirs: on one GPU after the
# others, on two beside them. Those of many GPUs (test_many_*.py) come last, alone, and have all of them, of which they use 8, 4 or 2:
#
#   [K="colocated or engines"] tests/gpu/run.sh many_gpus many_layouts many_failures      K: those that pytest's -k takes
#   REHEARSE=4 tests/gpu/run.sh many_gpus ...                                             the same on a CPU with 4 ranks, tiny models, gloo
#
# NVLink multicast is off for all: where a host's GPUs are shared by several machines, one that uses it can take them from the others.
set -uo pipefail
cd "$(dirname "$0")/../.."
known=(tests/gpu/test_*.py)
known=("${known[@]#tests/gpu/test_}")
known=("${known[@]%.py}")
asked=("${@:-"${known[@]}"}")
for test in "${asked[@]}"; do
  [[ -f tests/gpu/test_$test.py ]] || { echo "there is no GPU test '$test', only: ${known[*]}" >&2; exit 2; }
done
python=${PYTHON:-python3}
export OUT=${OUT:-$(mktemp -d)} SMOLLM2=${SMOLLM2:-HuggingFaceTB/SmolLM2-135M-Instruct} PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
export SHAPES=${SHAPES:-/tmp/shapes-$$} TOKENIZERS_PARALLELISM=false
export VLLM_USE_FLASHINFER_SAMPLER=${VLLM_USE_FLASHINFER_SAMPLER:-0} # 1: its default, which fails without FlashInfer
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1 VLLM_ALLREDUCE_USE_SYMM_MEM=0
export LAYOUTS_DEVICE=cuda
[[ -z ${REHEARSE:-} ]] || export CUDA_VISIBLE_DEVICES="" LAYOUTS_DEVICE=follow
gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())') || exit 1
IFS=, read -ra visible <<<"${CUDA_VISIBLE_DEVICES-0,1}" # numbers or UUIDs; torch counts those that it can use, from the first on
first=${visible[0]:-} last=${visible[gpus > 1 ? 1 : 0]:-}
every=${CUDA_VISIBLE_DEVICES-$(seq -s, 0 $((gpus - 1)))}
mkdir -p "$OUT"
"$python" -c 'import torch, transformers, vllm; print("torch", torch.__version__, "vllm", vllm.__version__, "transformers",
  transformers.__version__, *([torch.cuda.get_device_name()] if torch.cuda.is_available() else ["no GPU"]), torch.cuda.device_count(), "GPUs")' 2>/dev/null | tee "$OUT/versions"
if ((gpus > 0)) && [[ ! -d $SHAPES ]]; then
  "$python" tests/gpu/shapes.py "$SHAPES" "$SMOLLM2" >"$OUT/shapes.log" 2>&1 || { cat "$OUT/shapes.log"; exit 1; }
fi
for test in "${asked[@]}"; do
  rm -f "$OUT/$test".{jsonl,log}
  echo unfinished >"$OUT/$test.status"
done

lane() { # GPU TEST...: those asked for, one after the other; a log, verdicts and pytest's exit status each
  local gpu=$1 test
  for test in "${@:2}"; do
    [[ " ${asked[*]} " == *" $test "* ]] || continue
    CUDA_VISIBLE_DEVICES=$gpu VERDICTS=$OUT/$test.jsonl "$python" -m pytest -q -p no:cacheprovider ${K:+-k "$K"} "tests/gpu/test_$test.py" \
      >"$OUT/$test.log" 2>&1
    echo $? >"$OUT/$test.status"
  done
}
beside() { for test in attention precision checkpoint sync switches; do lane "$last" "$test" & done; wait; }
if ((gpus > 1)); then
  lane "$first" runs small_runs & alone=$!
  (beside)
  lane "$last" engine memory mismatch
  wait "$alone"
  lane "$first,$last" two_gpus
else
  beside
  lane "$first" engine small_runs memory mismatch runs two_gpus
fi
lane "$every" many_gpus many_layouts many_failures
cat "$OUT/versions"
"$python" tests/gpu/table.py "$OUT"
