#!/usr/bin/env bash
# The one entry: sets up what is missing, then runs the demo, the tests, or a script on every rank.
#
#   ./run.sh                                  set up if needed, then the demo
#   ./run.sh setup [cpu|cuda]                 only set up; the stack is this machine's unless named
#   ./run.sh test [--all] [pytest arguments]  the tests, on the CPU; --all adds the slow ones (tests/gpu/run.sh: those for a GPU)
#   ./run.sh lint                             ruff and mypy
#   ./run.sh SCRIPT.py [CONFIG] [key=value]   a script under torchrun, e.g. train_grpo.py configs/demo_grpo.yaml seed=1
#   ./run.sh hosts LIST                       the names in a SLURM host list, one a line
#
#   --nproc N            ranks on this machine, or on each node; by default one per GPU, or 2 on a CPU
#   PYTHON=/path/python  use this interpreter; nothing is set up
#   DRY_RUN=1            print what would be started, start nothing
#
# In a SLURM job the SCRIPT line starts a torchrun on each node: sbatch --nodes=2 --gpus-per-node=8 run.sh SCRIPT.py ...
# Paths are relative to this file's folder.
set -euo pipefail

say() { echo "run.sh: $*" >&2; }
die() { say "$*"; exit 1; }

count_gpus() {
  case ${CUDA_VISIBLE_DEVICES-all} in
    '' | -1 | NoDevFiles) echo 0 ;;
    # nvidia-smi may be there and fail, in a container without a driver; MIG slices are indented.
    all) echo "${SLURM_GPUS_ON_NODE:-$({ nvidia-smi -L 2>/dev/null || true; } | grep -c '^GPU ')}" ;;
    *) tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -c . ;;
  esac
}

# ---- set-up: $venv/stack says cpu or cuda, $venv/stamp-* what was installed to its end
venv=.venv
make_venv() {
  local base version on_debian="on Debian or Ubuntu: apt-get install"
  for base in python3 python3.{14,13,12,11} none; do
    "$base" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' 2>/dev/null && break
  done
  [[ $base != none ]] || die "no Python 3.11 to 3.14 on the PATH; $on_debian python3 python3-venv"
  version=$("$base" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
  # Debian's python3 comes without ensurepip; asking first spares the half-made folder that venv leaves behind.
  "$base" -c 'import venv, ensurepip' 2>/dev/null ||
    die "$base lacks the modules venv and ensurepip; $on_debian python$version-venv"
  "$base" -m venv --clear "$venv" >&2 || die "'$base -m venv $venv' failed; $on_debian python$version-venv"
}
# vLLM's CPU build loads libnuma, which a small container lacks; without it vLLM fails later, with an unrelated message.
need_libnuma() {
  "$venv"/bin/python -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null && return
  ((EUID == 0)) || die "vLLM needs libnuma.so.1; on Debian or Ubuntu: apt-get install libnuma1"
  say "vLLM needs libnuma.so.1: installing the package libnuma1"
  { apt-get update -qq && apt-get install -y -qq libnuma1; } >&2 || die "apt-get cannot install libnuma1"
}
pip_install() {
  local quiet=-qq
  if [[ -t 1 && -t 2 ]]; then quiet=""; fi # a person sees progress, a log what went wrong
  "$venv"/bin/python -m pip install ${quiet:+"$quiet"} --disable-pip-version-check "$@" >&2
}
# torch's CPU build is not on PyPI. It alone comes from PyTorch's index: a second index for all costs seconds a package.
install_cpu_torch() {
  local torch output
  torch=$(grep '^torch==' requirements-cpu.txt)
  output=$(pip_install --no-deps "$torch" 2>&1) && return
  [[ $output == *"No matching distribution found"* ]] || die "pip could not install $torch:"$'\n'"$output"
  pip_install --no-deps --index-url https://download.pytorch.org/whl/cpu "$torch" || die "pip could not install $torch"
}
# A finished install leaves a stamp; an interrupted one leaves none, and pip takes it up again.
stamp_of() { { cat "$1"; "$venv"/bin/python --version; } 2>&1 | sha256sum; }
is_installed() { [[ -f $venv/stamp-$1 && $(<"$venv/stamp-$1") == "$(stamp_of "requirements-$1.txt")" ]]; }
install_requirements() {
  is_installed "$1" && return
  say "installing requirements-$1.txt into $venv"
  if [[ $1 == cpu ]]; then need_libnuma; install_cpu_torch; fi
  pip_install -r "requirements-$1.txt" || die "pip could not install requirements-$1.txt; start again to go on"
  # A torchvision built for another torch breaks whoever imports it, transformers first. Text needs none of the three.
  [[ $1 == dev ]] || "$venv"/bin/python -c 'import torchvision' 2>/dev/null ||
    "$venv"/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec >&2 || die "pip cannot remove torchvision"
  stamp_of "requirements-$1.txt" >"$venv/stamp-$1"
}

# set_up [dev]: then $python runs the project. The stack is what was asked for, else what is there, else the machine's.
set_up() {
  if [[ -n ${PYTHON:-} || -n ${DRY_RUN:-} ]]; then return; fi
  local there="" stack
  if [[ -f $venv/stack ]]; then there=$(<"$venv/stack"); fi
  stack=${asked_stack:-${there:-$( ((gpus > 0)) && echo cuda || echo cpu)}}
  [[ $stack == cpu || $stack == cuda ]] || die "setup takes cpu or cuda, not '$stack'"
  if [[ $stack == cpu && -z $asked_stack ]] && ((gpus > 0)); then
    die "there is a GPU here and $venv is for a CPU: replace it by './run.sh setup cuda' or set CUDA_VISIBLE_DEVICES="
  fi
  if [[ $there == "$stack" ]] && is_installed "$stack" && { [[ -z ${1:-} ]] || is_installed dev; }; then return; fi
  # This file is the lock: a second run.sh, also on another node of a shared folder, waits and then installs nothing.
  (
    flock -n 9 || { say "another run.sh is setting up; waiting for it"; flock 9; }
    there=$(cat "$venv/stack" 2>/dev/null || echo "$stack") # a .venv that a user made is added to
    if [[ $there != "$stack" ]] || ! "$venv"/bin/python -m pip --version >/dev/null 2>&1; then make_venv; fi
    echo "$stack" >"$venv/stack"
    install_requirements "$stack"
    if [[ -n ${1:-} ]]; then install_requirements dev; fi
  ) 9<>run.sh
}

# ---- SLURM's host lists: gpu[008-010,2],login is gpu008 gpu009 gpu010 gpu2 login
expand_hosts() {
  local rest=$1
  while [[ -n $rest ]]; do
    [[ $rest =~ ^(([^][,]|\[[0-9,-]+\])+)(,(.+))?$ ]] || die "cannot read the host list '$1'"
    rest=${BASH_REMATCH[4]}
    expand_item "${BASH_REMATCH[1]}"
  done
}
expand_item() {
  if ! [[ $1 =~ ^([^[]*)\[([^]]+)\](.*)$ ]]; then echo "$1"; return; fi
  local before=${BASH_REMATCH[1]} after=${BASH_REMATCH[3]} range first number
  for range in ${BASH_REMATCH[2]//,/ }; do
    first=${range%-*}
    for ((number = 10#$first; number <= 10#${range#*-}; number++)); do
      expand_item "$before$(printf "%0${#first}d" "$number")$after"
    done
  done
}
# SLURM's own answer where it can be had; a container inside a job has no scontrol, or one without its slurm.conf.
hosts() { scontrol show hostnames "$1" 2>/dev/null || expand_hosts "$1"; }

# ---- running
export TORCH_CPP_LOG_LEVEL=${TORCH_CPP_LOG_LEVEL:-ERROR} # a rank's warnings about NUMA and the like would bury the progress lines
start() { if [[ -n ${DRY_RUN:-} ]]; then printf '%q ' "$@"; echo; else exec "$@"; fi; }
torchrun() {
  local threads=() ranks=${nproc:-$((gpus > 0 ? gpus : 2))}
  # One thread a rank: ranks do not fight for a CPU's cores, and sums do not depend on how many there are.
  if ((gpus == 0)); then threads=(env "OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}"); fi
  start "${threads[@]}" "$python" -m torch.distributed.run "$@" --nproc-per-node="$ranks" "${script[@]}"
}
# Node numbers and address are SLURM's, not an election's: ranks follow the host list, whatever names resolve to.
torchrun_on_node() {
  local nodes=$1 node=$2 step=$3 first
  if ((nodes == 1)); then torchrun --standalone; return; fi
  first=$(hosts "${SLURM_STEP_NODELIST:-$SLURM_JOB_NODELIST}")
  torchrun --nnodes="$nodes" --node-rank="$node" --rdzv-backend=static --rdzv-id="$SLURM_JOB_ID.$step" \
    --master-addr="${first%%$'\n'*}" --master-port=$((10000 + (SLURM_JOB_ID * 8 + step) % 20000))
}

launch() {
  local nodes=${SLURM_JOB_NUM_NODES:-1} tasks=${SLURM_STEP_NUM_TASKS:-1}
  if [[ -z ${SLURM_JOB_ID:-} ]]; then torchrun --standalone
  # srun counts its steps from 0; the step numbers near 2^32 are those of batch scripts and interactive shells.
  elif ((${SLURM_STEP_ID:-4294967291} < 4294967280)); then
    nodes=${SLURM_STEP_NUM_NODES:-1}
    ((nodes == tasks)) || die "srun started $tasks tasks on $nodes nodes; one a node is needed: --ntasks-per-node=1"
    torchrun_on_node "$nodes" "$SLURM_NODEID" "$SLURM_STEP_ID"
  else
    [[ -n ${DRY_RUN:-} ]] || command -v srun >/dev/null || die "in a SLURM job (SLURM_JOB_ID is set) but without srun"
    # One task a node, with all that the job has there: what sbatch was told per task was meant for ranks.
    unset SLURM_CPUS_PER_TASK SRUN_CPUS_PER_TASK SLURM_TRES_PER_TASK SLURM_NTASKS_PER_NODE
    start srun --nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit=1 \
      bash "$root/run.sh" ${nproc:+"--nproc=$nproc"} "${script[@]}"
    torchrun_on_node "$nodes" "\$SLURM_NODEID" 0 # reached in a dry run only: what srun's run.sh starts on each node
  fi
}

run_script() {
  while (($#)); do # --nproc is ours wherever it stands; everything else belongs to the script
    case $1 in
      --nproc) nproc=${2:-nothing}; shift $(($# > 1)) ;;
      --nproc=*) nproc=${1#*=} ;;
      *) script+=("$1") ;;
    esac
    shift
  done
  [[ $nproc =~ ^([1-9][0-9]*)?$ ]] || die "--nproc takes a number of ranks, not '$nproc'"
  case ${script[0]:-} in
    *.py) [[ -f ${script[0]} ]] || die "there is no ${script[0]} in $root"; set_up ;;
    *.yaml) die "name the script first: ./run.sh train_grpo.py ${script[0]}" ;;
    *) die "there is no command '${script[0]:-}'; ./run.sh --help lists them" ;;
  esac
  # These answer from the configuration alone, or with a few rows of the data.
  local alone=" (-h|--help|--plan(=[0-9x.GiB]*)?|--show-batch(=[0-9]*)?) "
  if [[ " ${script[*]} " =~ $alone ]]; then start "$python" "${script[@]}"; else launch; fi
}

root=$(dirname "$(readlink -f "$0")")
# sbatch runs a copy of this file from its spool folder: then the project is where the job was submitted.
if ! [[ -f $root/requirements-cpu.txt ]]; then root=${SLURM_SUBMIT_DIR:-$root}; fi
[[ -f $root/requirements-cpu.txt ]] || die "the project is not in $root; call sbatch in the project's folder"
python=""
if [[ -n ${PYTHON:-} ]]; then python=$(type -P "$PYTHON") || die "PYTHON=$PYTHON is not a program"; python=$(realpath -s "$python"); fi
cd "$root"
gpus=$(count_gpus) nproc="" asked_stack="" script=()
# The tests are the CPU's everywhere: their worlds have more ranks than most machines have GPUs. vLLM is built for one of the two, so beside
# an environment for CUDA they have their own.
if [[ ${1:-} == test ]]; then
  case $(cat .venv/stack 2>/dev/null || { ((gpus == 0)) || echo cuda; }) in cuda) venv=.venv-cpu ;; esac
  export CUDA_VISIBLE_DEVICES=""
  gpus=0
fi
python=${python:-$root/$venv/bin/python}
# On a CPU torch.compile needs a C++ compiler. Without one it stays off, in vLLM too, which compiles small functions.
((gpus > 0)) || command -v "${CXX:-g++}" >/dev/null || export TORCH_COMPILE_DISABLE="${TORCH_COMPILE_DISABLE:-1}"

case ${1:-demo} in
  -h | --help) sed -n '2,/^set /s/^# \{0,1\}//p' "$root/run.sh" ;;
  setup) asked_stack=${2:-}; set_up ;;
  demo) set_up; start "$python" demo.py "${@:2}" ;;
  test) set_up dev
    if [[ ${2:-} == --all ]]; then selected="not gpu"; shift; else selected="not slow and not gpu"; fi
    start "$python" -m pytest -m "$selected" "${@:2}" ;;
  lint) set_up dev; "$python" -m ruff check .; start "$python" -m mypy . ;;
  hosts) hosts "${2:-}" ;;
  *) run_script "$@" ;;
esac
