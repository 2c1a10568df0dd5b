"""run.sh from outside: what it would start, what it installs, and what it says when it cannot."""

import os
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# All that run.sh may call besides python, pip and SLURM: a PATH of these alone is a machine without SLURM and GPU.
TOOLS = "bash cat dirname env flock grep mkdir readlink realpath rm sed sha256sum sleep tr cp".split()

# Stands for a bare machine's python3. Making a venv and installing into it leave a line in $NOTES; the rest is real.
PYTHON3 = f"""#!/usr/bin/env bash
case "$*" in
  *"import venv, ensurepip") [[ -z ${{NO_ENSUREPIP:-}} ]] ;;
  "-m venv --clear .venv" | "-m venv --clear .venv-cpu")
    echo "venv${{4#.venv}}" >>"$NOTES"
    [[ -z ${{VENV_FAILS:-}} ]] || exit 1
    rm -rf "$4"; mkdir -p "$4/bin"; cp "$0" "$4/bin/python" ;;
  "-m pip --version") ;;
  "-m pip "*)
    echo "${{*:2}}" >>"$NOTES"
    sleep "${{PIP_SECONDS:-0}}"
    if [[ $* == *"${{PIP_FAILS_ON:-no such words}}"* ]]; then echo "${{PIP_SAYS:-no space left}}" >&2; exit 1; fi ;;
  *libnuma.so.1*) [[ -z ${{NO_LIBNUMA:-}} ]] ;;
  *"import torchvision") [[ -z ${{TORCHVISION_IS_BROKEN:-}} ]] ;;
  *) exec {sys.executable} "$@" ;;
esac
"""


class Machine:
    """A folder of programs as the whole PATH, a copy of the project's set-up files, and a way to start run.sh there."""

    def __init__(self, folder: Path):
        self.bin, self.project, self.notes = folder / "bin", folder / "project", folder / "notes"
        self.bin.mkdir()
        self.project.mkdir()
        self.notes.touch()
        for tool in TOOLS:
            found = shutil.which(tool)
            assert found, f"this machine has no {tool}"
            (self.bin / tool).symlink_to(found)
        for file in [ROOT / "run.sh", *ROOT.glob("requirements-*.txt")]:
            shutil.copy(file, self.project)
        (self.project / "train_grpo.py").touch()
        self.program("python3", PYTHON3)

    def program(self, name: str, text: str) -> None:
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)

    def run(self, *arguments: str, script: Path | None = None, cwd: Path | None = None, **env: str):
        environment = {"PATH": str(self.bin), "NOTES": str(self.notes)} | env
        command = [str(self.bin / "bash"), str(script or self.project / "run.sh"), *arguments]
        return subprocess.run(
            command, env=environment, cwd=cwd or self.project, text=True, capture_output=True, stdin=subprocess.DEVNULL
        )

    def plan(self, *arguments: str, **options) -> list[list[str]]:
        """The commands that run.sh would start, each as its words."""
        done = self.run(*arguments, DRY_RUN="1", **options)
        assert done.returncode == 0, done.stderr
        return [shlex.split(line) for line in done.stdout.splitlines()]

    def noted(self) -> list[str]:
        """What was installed since the last call."""
        lines = self.notes.read_text().splitlines()
        self.notes.write_text("")
        return lines


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


# ---- SLURM's host lists

HOST_LISTS = {
    "gpu[008-010,2]": ["gpu008", "gpu009", "gpu010", "gpu2"],
    "alpha,beta": ["alpha", "beta"],
    "n1": ["n1"],
    "rack[1-2]-ib": ["rack1-ib", "rack2-ib"],
    "c[1,3],login2": ["c1", "c3", "login2"],
    "r[1-2]n[09-10]": ["r1n09", "r1n10", "r2n09", "r2n10"],
    "node-[1-2],a-b": ["node-1", "node-2", "a-b"],
}


@pytest.mark.parametrize("compressed", HOST_LISTS)
def test_a_host_list_is_expanded_without_scontrol(machine, compressed):
    assert machine.run("hosts", compressed).stdout.split() == HOST_LISTS[compressed]


@pytest.mark.parametrize("compressed", HOST_LISTS)
def test_a_host_list_is_expanded_where_scontrol_cannot_read_its_configuration(machine, compressed):
    machine.program("scontrol", "#!/usr/bin/env bash\necho 'fatal: no slurm.conf' >&2; exit 1\n")
    assert machine.run("hosts", compressed).stdout.split() == HOST_LISTS[compressed]


def test_scontrol_is_asked_first(machine):
    machine.program("scontrol", '#!/usr/bin/env bash\nprintf "%s\\n" "$*" first second\n')
    assert machine.run("hosts", "x[1-2]").stdout.split("\n")[:3] == ["show hostnames x[1-2]", "first", "second"]


def test_a_broken_host_list_is_refused(machine):
    done = machine.run("hosts", "gpu[1-2")
    assert done.returncode != 0 and done.stderr == "run.sh: cannot read the host list 'gpu[1-2'\n"


# ---- what is started

TWO_NODES = {
    "SLURM_JOB_ID": "1234567",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_JOB_NODELIST": "gpu[008,010]",
    "SLURM_GPUS_ON_NODE": "8",
}
NVIDIA_SMI = "#!/usr/bin/env bash\necho 'GPU 0: A'; echo '  MIG 1g.10gb'; echo 'GPU 1: A'; echo 'GPU 2: A'\n"


def test_a_laptop_runs_two_single_threaded_ranks(machine):
    (command,) = machine.plan("train_grpo.py", "configs/x.yaml", "model=a b")
    assert command == [
        *["env", "OMP_NUM_THREADS=1", f"{machine.project}/.venv/bin/python", "-m", "torch.distributed.run"],
        *["--standalone", "--nproc-per-node=2", "train_grpo.py", "configs/x.yaml", "model=a b"],
    ]


def test_the_users_number_of_threads_is_kept(machine):
    assert "OMP_NUM_THREADS=3" in machine.plan("train_grpo.py", OMP_NUM_THREADS="3")[0]


def test_a_machine_with_gpus_runs_one_rank_on_each_and_its_threads_are_left_alone(machine):
    machine.program("nvidia-smi", NVIDIA_SMI)
    (command,) = machine.plan("train_grpo.py")
    assert "--nproc-per-node=3" in command and not any("OMP" in word for word in command)
    assert "--nproc-per-node=2" in machine.plan("train_grpo.py", CUDA_VISIBLE_DEVICES="5,7")[0]
    assert "OMP_NUM_THREADS=1" in machine.plan("train_grpo.py", CUDA_VISIBLE_DEVICES="")[0]


def test_an_nvidia_smi_without_a_driver_is_no_gpu(machine):
    machine.program("nvidia-smi", "#!/usr/bin/env bash\necho 'NVIDIA-SMI has failed'; exit 9\n")
    assert "--nproc-per-node=2" in machine.plan("train_grpo.py")[0]


@pytest.mark.parametrize("line", ["--nproc 5 X a=1", "--nproc=5 X a=1", "X --nproc 5 a=1", "X a=1 --nproc 5"])
def test_nproc_is_taken_wherever_it_stands_and_not_passed_on(machine, line):
    (command,) = machine.plan(*line.replace("X", "train_grpo.py").split())
    assert command[-3:] == ["--nproc-per-node=5", "train_grpo.py", "a=1"]


@pytest.mark.parametrize("question", ["--help", "-h", "--plan", "--plan=8", "--plan=8x80GiB", "--show-batch", "--show-batch=2"])
@pytest.mark.parametrize("env", [{}, TWO_NODES], ids=["laptop", "slurm"])
def test_a_question_starts_one_process(machine, question, env):
    expected = [f"{machine.project}/.venv/bin/python", "train_grpo.py", "configs/x.yaml", question]
    assert machine.plan("train_grpo.py", "configs/x.yaml", question, **env) == [expected]


def test_a_job_starts_one_torchrun_on_each_node_with_the_first_host_as_meeting_point(machine):
    srun, on_node = machine.plan("train_grpo.py", "configs/x.yaml", **TWO_NODES)
    assert srun[0] == "srun" and {"--nodes=2", "--ntasks=2", "--ntasks-per-node=1"} <= set(srun)
    assert srun[-4:] == ["bash", f"{machine.project}/run.sh", "train_grpo.py", "configs/x.yaml"]
    assert {"--nnodes=2", "--node-rank=$SLURM_NODEID", "--nproc-per-node=8", "--master-addr=gpu008"} <= set(on_node)


def test_inside_srun_every_node_gets_its_own_number_and_the_same_address(machine):
    step = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "2"} | TWO_NODES
    commands = [machine.plan("train_grpo.py", "--nproc", "4", SLURM_NODEID=str(node), **step)[0] for node in (0, 1)]
    assert [word for word in commands[0] if word not in commands[1]] == ["--node-rank=0"]
    assert [word for word in commands[1] if word not in commands[0]] == ["--node-rank=1"]
    assert {"--master-addr=gpu008", "--nproc-per-node=4", "--rdzv-backend=static"} <= set(commands[0])


def test_two_jobs_on_a_node_meet_at_different_ports_outside_the_ephemeral_range(machine):
    def port(job: int) -> int:
        words = machine.plan("train_grpo.py", **(TWO_NODES | {"SLURM_JOB_ID": str(job)}))[1]
        return int(next(word for word in words if word.startswith("--master-port")).split("=")[1])

    ports = [port(job) for job in (1, 2, 3, 1234567)]
    assert len(set(ports)) == 4 and all(10000 <= one < 30000 for one in ports)


def test_a_job_of_one_node_needs_no_host_name(machine):
    _, on_node = machine.plan("train_grpo.py", **(TWO_NODES | {"SLURM_JOB_NUM_NODES": "1"}))
    assert "--standalone" in on_node and not any("master-addr" in word for word in on_node)


def test_several_tasks_on_a_node_are_refused(machine):
    step = {"SLURM_STEP_ID": "3", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "4", "SLURM_NODEID": "0"}
    done = machine.run("train_grpo.py", DRY_RUN="1", **step, **TWO_NODES)
    assert done.returncode != 0 and "4 tasks on 2 nodes" in done.stderr and "--ntasks-per-node=1" in done.stderr


def test_a_copy_in_sbatchs_spool_folder_works_on_the_folder_where_the_job_was_submitted(machine, tmp_path):
    spooled = tmp_path / "job00001" / "slurm_script"
    spooled.parent.mkdir()
    shutil.copy(ROOT / "run.sh", spooled)
    options = {"script": spooled, "cwd": tmp_path, **TWO_NODES}
    srun, on_node = machine.plan("train_grpo.py", SLURM_SUBMIT_DIR=str(machine.project), **options)
    assert f"{machine.project}/run.sh" in srun and f"{machine.project}/.venv/bin/python" in on_node
    done = machine.run("train_grpo.py", SLURM_SUBMIT_DIR=str(tmp_path), **options)
    assert done.returncode != 0 and f"the project is not in {tmp_path}; call sbatch" in done.stderr


def test_tests_are_selected_by_their_marks(machine):
    assert machine.plan("test", "-k", "x")[0][1:] == ["-m", "pytest", "-m", "not slow and not gpu", "-k", "x"]
    assert machine.plan("test", "--all", "-k", "x")[0][1:] == ["-m", "pytest", "-m", "not gpu", "-k", "x"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("trian_grpo.py", "there is no trian_grpo.py in "),
        ("configs/x.yaml seed=1", "name the script first: ./run.sh train_grpo.py configs/x.yaml"),
        ("tests", "there is no command 'tests'; ./run.sh --help lists them"),
        ("train_grpo.py --nproc two", "--nproc takes a number of ranks, not 'two'"),
        ("train_grpo.py --nproc", "--nproc takes a number of ranks, not 'nothing'"),
        ("setup rocm", "setup takes cpu or cuda, not 'rocm'"),
    ],
)
def test_a_mistyped_line_is_answered_in_one_line(machine, line, message):
    done = machine.run(*line.split())
    assert done.returncode != 0 and done.stderr.startswith(f"run.sh: {message}") and done.stderr.count("\n") == 1
    assert machine.noted() == []


# ---- what is installed

PIP = "pip install -qq --disable-pip-version-check"
TORCH = next(line for line in (ROOT / "requirements-cpu.txt").read_text().splitlines() if line.startswith("torch=="))
FIRST_SETUP = ["venv", f"{PIP} --no-deps {TORCH}", f"{PIP} -r requirements-cpu.txt"]


def test_the_first_run_installs_and_the_second_does_not(machine):
    assert machine.run("setup").returncode == 0
    assert machine.noted() == FIRST_SETUP
    done = machine.run("setup")
    assert (done.returncode, done.stdout, done.stderr, machine.noted()) == (0, "", "", [])


def test_a_changed_requirement_is_installed_into_the_same_environment(machine):
    machine.run("setup")
    machine.noted()
    with open(machine.project / "requirements-cpu.txt", "a") as file:
        file.write("# changed\n")
    machine.run("setup")
    assert machine.noted() == FIRST_SETUP[1:]


def test_an_environment_that_the_user_made_is_added_to_and_not_replaced(machine):
    machine.run("setup")
    for file in ("stack", "stamp-cpu"):
        (machine.project / ".venv" / file).unlink()
    machine.run("setup")
    assert machine.noted() == [*FIRST_SETUP, *FIRST_SETUP[1:]]


def test_an_interrupted_install_says_why_and_is_taken_up_again(machine):
    done = machine.run("setup", PIP_FAILS_ON="-r requirements-cpu.txt")
    assert done.returncode != 0 and "no space left" in done.stderr
    assert done.stderr.splitlines()[-1] == "run.sh: pip could not install requirements-cpu.txt; start again to go on"
    machine.noted()
    assert machine.run("setup").returncode == 0
    assert machine.noted() == FIRST_SETUP[1:]


def test_only_torch_and_only_where_it_is_not_found_comes_from_pytorchs_index(machine):
    says = f"ERROR: No matching distribution found for {TORCH}"
    assert machine.run("setup", PIP_FAILS_ON="--no-deps torch", PIP_SAYS=says).returncode == 0
    from_index = f"{PIP} --no-deps --index-url https://download.pytorch.org/whl/cpu {TORCH}"
    assert machine.noted() == [*FIRST_SETUP[:2], from_index, FIRST_SETUP[2]]
    machine.run("setup", "cuda")
    machine.noted()
    done = machine.run("setup", "cpu", PIP_FAILS_ON="--no-deps torch", PIP_SAYS="Connection refused")
    assert done.returncode != 0 and "Connection refused" in done.stderr
    assert machine.noted() == FIRST_SETUP[:2]


def test_a_torchvision_that_cannot_be_imported_is_removed_with_its_companions(machine):
    assert machine.run("setup", TORCHVISION_IS_BROKEN="1").returncode == 0
    assert machine.noted() == [*FIRST_SETUP, "pip uninstall -q -y torchvision torchaudio torchcodec"]


def test_the_test_tools_are_installed_when_they_are_asked_for(machine):
    for _ in range(2):
        machine.run("test", "--version")
    assert machine.noted() == [*FIRST_SETUP, f"{PIP} -r requirements-dev.txt"]


def test_two_at_once_install_once(machine):
    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(machine.run, "setup", PIP_SECONDS="0.5") for _ in range(2)]
    assert [run.result().returncode for run in runs] == [0, 0]
    assert machine.noted() == FIRST_SETUP
    assert "another run.sh is setting up; waiting for it" in runs[0].result().stderr + runs[1].result().stderr


def test_a_missing_venv_module_is_named_with_its_package(machine):
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    done = machine.run("setup", NO_ENSUREPIP="1")
    assert done.returncode != 0 and machine.noted() == []
    remedy = f"on Debian or Ubuntu: apt-get install python{version}-venv"
    assert done.stderr == f"run.sh: python3 lacks the modules venv and ensurepip; {remedy}\n"
    done = machine.run("setup", VENV_FAILS="1")
    assert done.returncode != 0 and remedy in done.stderr


def test_a_machine_without_a_python_to_use_is_told_what_to_install(machine):
    machine.program("python3", "#!/usr/bin/env bash\nexit 1\n")  # what an older Python answers to run.sh's question
    done = machine.run("setup")
    assert done.returncode != 0 and "no Python 3.11 to 3.14 on the PATH" in done.stderr
    assert "apt-get install python3 python3-venv" in done.stderr


def test_a_missing_libnuma_is_installed_by_root_and_named_to_others(machine):
    machine.program("apt-get", '#!/usr/bin/env bash\necho "apt-get $*" >>"$NOTES"\n')
    done = machine.run("setup", NO_LIBNUMA="1")
    if os.geteuid() == 0:
        assert done.returncode == 0 and "apt-get install -y -qq libnuma1" in machine.noted()
    else:
        assert done.returncode != 0 and "apt-get install libnuma1" in done.stderr


def test_a_gpu_gets_the_cuda_stack_and_a_cpu_environment_is_not_used_for_it(machine):
    machine.run("setup")
    machine.noted()
    machine.program("nvidia-smi", NVIDIA_SMI)
    done = machine.run("train_grpo.py")
    assert done.returncode != 0 and "replace it by './run.sh setup cuda'" in done.stderr and machine.noted() == []
    assert machine.run("setup", "cuda").returncode == 0
    assert machine.noted() == ["venv", f"{PIP} -r requirements-cuda.txt"]
    assert machine.run("setup").returncode == 0 and machine.noted() == []


def test_the_tests_have_an_environment_for_the_cpu_beside_one_for_cuda_and_see_no_gpu(machine):
    machine.program("nvidia-smi", NVIDIA_SMI)
    machine.run("setup")
    assert machine.noted() == ["venv", f"{PIP} -r requirements-cuda.txt"]
    for_tests = ["venv-cpu", *FIRST_SETUP[1:], f"{PIP} -r requirements-dev.txt"]
    for installed in (for_tests, []):
        assert machine.run("test", "--version").returncode == 0
        assert machine.noted() == installed
    machine.program("shown", "#!/usr/bin/env bash\necho \"visible: '$CUDA_VISIBLE_DEVICES'\"\n")
    assert machine.run("test", PYTHON="shown").stdout == "visible: ''\n"
    assert machine.run("setup").returncode == 0 and machine.noted() == []
    assert (machine.project / ".venv/stack").read_text() == "cuda\n"


def test_the_users_own_interpreter_is_used_as_it_is(machine):
    assert machine.plan("train_grpo.py", "--plan", PYTHON=sys.executable)[0][0] == sys.executable
    assert machine.run("train_grpo.py", "--plan", PYTHON=sys.executable).returncode == 0  # train_grpo.py is empty there
    assert not (machine.project / ".venv").exists() and machine.noted() == []
    done = machine.run("train_grpo.py", PYTHON="/nowhere/python")
    assert done.returncode != 0 and done.stderr == "run.sh: PYTHON=/nowhere/python is not a program\n"
