#!/usr/bin/env bash
# All that is to be known of a machine with 2, 4 or 8 GPUs, in one call; verdicts, tables and JSON lines are in the folder OUT.
#
#   [OUT=folder] [GSM8K=train.jsonl] [PYTHON=python3] tests/gpu/node.sh [placements sub_world matrix sync scaling failures]
#   ROUNDS=2 OUT=folder tests/gpu/node.sh scaling     after one with the same OUT: the second round of its runs
#   REHEARSE=4 tests/gpu/node.sh ...        the same on a CPU: 4 ranks, gloo, tiny models; its figures mean nothing
#
# Without names: all. With the same OUT several calls add up, and a bench goes on after the last whole run of a call that was ended.
#
#   placements  configs/qwen.yaml, a 1.7B shape: colocated, separate, an engine of TP 2, rollouts fresh and a version old
#   sub_world   engines of two ranks, each a world of its own
#   matrix      the layouts of docs/parallelism.md against one GPU
#   sync        weights to separate engines, 1.7B and 8B shapes, against a broadcast a tensor
#   scaling     steps on 1, 2, 4, 8 GPUs, strong and weak; rollouts sampled beside training
#   failures    a killed and a stopped rank; the run goes on from its checkpoint
set -uo pipefail
cd "$(dirname "$0")/../.."
parts=("${@:-placements sub_world matrix sync scaling failures}")
read -ra parts <<<"${parts[*]}"
python=${PYTHON:-python3}
export OUT=${OUT:-$(mktemp -d)} PYTHON=$python PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} SHAPES=${SHAPES:-/tmp/shapes-$$}
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1 VLLM_ALLREDUCE_USE_SYMM_MEM=0
export VLLM_USE_FLASHINFER_SAMPLER=${VLLM_USE_FLASHINFER_SAMPLER:-0}
[[ -z ${REHEARSE:-} ]] || export CUDA_VISIBLE_DEVICES=""
mkdir -p "$OUT"
gpus=${REHEARSE:-$("$python" -c 'import torch; print(torch.cuda.device_count())')} || exit 1
ranks=(1)
for count in 2 4 8; do ((count <= gpus)) && ranks+=("$count"); done
((${#ranks[@]} > 1)) || { echo "$gpus GPUs: two are needed, or REHEARSE=4" >&2; exit 2; }
data=()
if [[ -f ${GSM8K:-} && -z ${REHEARSE:-} ]]; then data=(--data "$GSM8K"); fi
if [[ -n ${REHEARSE:-} ]]; then
  sync=(--device cpu --shapes tiny small --rounds 1)
  rounds=1
  scale=(--device cpu --shape tiny --prompts 2 --samples 2 --new 4 --steps 3)
else
  sync=(--device cuda --shapes 1.7b 8b --rounds 5)
  scale=(--device cuda --shape 1.7b --prompts 16 --samples 8 --new 256 --steps 5)
  rounds=${ROUNDS:-1}
fi
case ${ranks[-1]} in
  8) sync+=(--layouts "1 -> 1" "FSDP 4 -> 4 engines" "FSDP 4 -> 2 engines of TP 2") ;;
  4) sync+=(--layouts "1 -> 1" "FSDP 2 -> 2 engines" "FSDP 2 -> TP 2") ;;
  2) sync+=(--layouts "1 -> 1") ;;
esac
failed=0
bench() { # NAME ARGUMENT...: its JSON lines to $OUT/NAME.jsonl, what it tells to $OUT/NAME.err
  "$python" -m "bench.$1" "${@:2}" >"$OUT/bench_$1.out" 2> >(tee "$OUT/bench_$1.err" >&2) && cat "$OUT/bench_$1.out" || failed=1
}
tests() { # K FILE
  K=$1 OUT=$OUT/$2${1:+-${1// /_}} tests/gpu/run.sh "$2" || failed=1
}
for part in "${parts[@]}"; do
  echo "== $part"
  case $part in
    placements) tests placement many_gpus ;;
    sub_world) tests engines many_gpus ;;
    matrix) tests "" many_layouts ;;
    sync) bench sync "${sync[@]}" ;;
    scaling) bench scale "${scale[@]}" "${data[@]}" --rounds "$rounds" --ranks "${ranks[@]}" --folder "$OUT/scale" ;;
    failures) tests "" many_failures ;;
    *) echo "there is no part '$part'" >&2; exit 2 ;;
  esac
done
exit "$failed"
