#!/usr/bin/env bash
# Starts a SLURM of two nodes, node1 and node2, on this one machine, as root: a controller and two slurmd.
#   tests/slurm/start_two_nodes.sh FOLDER     FOLDER gets the state, the logs and the process ids
#   kill $(cat FOLDER/*.pid)                  stops it
# Needs Debian's slurm-wlm and munge. Both names resolve to the loopback address, as a node's own name often does.
set -euo pipefail
folder=$(mkdir -p "$1" && cd "$1" && pwd)
conf=/etc/slurm/slurm.conf
mark="# Two test nodes on one machine, written by tests/slurm/start_two_nodes.sh"
die() { echo "start_two_nodes.sh: $*" >&2; exit 1; }

((EUID == 0)) || die "must be root: slurmd and munged start as root"
for program in slurmctld slurmd munged sinfo; do
  command -v "$program" >/dev/null || [[ -x /usr/sbin/$program ]] || die "no $program; apt-get install slurm-wlm munge"
done
if [[ -e $conf ]] && ! grep -qxF "$mark" "$conf"; then die "$conf belongs to another cluster"; fi

for name in node1 node2; do grep -qw "$name" /etc/hosts || echo "127.0.0.1 $name" >>/etc/hosts; done
mkdir -p "$folder/save"
cat >"$conf" <<EOF
$mark
ClusterName=two-nodes
SlurmctldHost=localhost
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
StateSaveLocation=$folder/save
SlurmdSpoolDir=$folder/spool-%n
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd-%n.log
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd-%n.pid
# Containers have no cgroups to hand out, and the two nodes claim the same cores.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
NodeName=node[1-2] NodeHostname=localhost NodeAddr=127.0.0.1 Port=[17001-17002] CPUs=2 RealMemory=1000 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES
EOF

# SLURM's daemons trust each other by munge's key.
mkdir -p /run/munge
[[ -f /etc/munge/munge.key ]] || head -c 1024 /dev/urandom >/etc/munge/munge.key
chown -R munge:munge /etc/munge /run/munge /var/log/munge /var/lib/munge
chmod 400 /etc/munge/munge.key
if ! munge -n >/dev/null 2>&1; then
  su -s /bin/sh munge -c "/usr/sbin/munged --force --pid-file=/run/munge/munged.pid"
  cp /run/munge/munged.pid "$folder/"
fi

slurmctld
for _ in {1..20}; do if scontrol ping | grep -q UP; then break; fi; sleep 0.5; done
slurmd -N node1
slurmd -N node2
for _ in {1..40}; do
  if [[ $(sinfo -h -N -o %T | grep -c idle) == 2 ]]; then sinfo; exit; fi
  sleep 0.5
done
sinfo
die "the nodes did not come up; see $folder/*.log"
