#!/usr/bin/env bash
# Tries `hbmark fleet` on a real Slurm: Debian's slurm-wlm, unpacked and not installed, three emulated nodes of eight fake GPUs on this machine.
# A run is killed, a node is drained, a disk is full, a result is copied; every one of them must show in the report, and nothing else be lost.
#
#   cargo build && scripts/fleet-slurm.sh [PROGRAM]
#
# Needs Debian 12 (Slurm 22.05), root for device nodes and a tmpfs, `apt-get download`, python3. The GPUs are emulated by the CPU engine:
# no time of this means anything. KEEP=1 leaves the folder and prints its name.
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
program=$(realpath "${1:-$root/target/debug/hbmark}")
work=$(mktemp -d "${TMPDIR:-/tmp}/fleet-slurm.XXXXXX")
packages=${PACKAGES:-$work/packages}
gpus=${GPUS:-8}
out=$work/out
nodes="node1 node2 node3"
daemons=()

finish() {
    status=$?
    scancel --quiet --user "$(id -un)" 2>/dev/null || true
    for pid in "${daemons[@]}"; do kill "$pid" 2>/dev/null || true; done
    umount "$out/node3" 2>/dev/null || true
    if [ -n "${KEEP:-}" ]; then echo "kept $work"; else rm -rf "$work"; fi
    exit $status
}
trap finish EXIT

say() { printf '\n== %s\n' "$*"; }
fail() { echo "FAILED: $*" >&2; exit 1; }
# Waits until a command succeeds: `until_true SECONDS COMMAND...`.
until_true() {
    for _ in $(seq "$(($1 * 5))"); do if "${@:2}" >/dev/null 2>&1; then return 0; fi; sleep 0.2; done
    return 1
}

say "Slurm without installation"
mkdir -p "$packages" "$work/slurm" "$work/bin" "$work/dev" "$work/state" "$work/spool"
if ! ls "$packages"/slurmctld_*.deb >/dev/null 2>&1; then
    (cd "$packages" && apt-get download -q slurmctld slurmd slurm-client slurm-wlm-basic-plugins munge libmunge2 libhwloc15 \
        liblua5.1-0 libnuma1)
fi
for package in "$packages"/*.deb; do dpkg-deb -x "$package" "$work/slurm"; done
libraries=$work/slurm/usr/lib/x86_64-linux-gnu
export LD_LIBRARY_PATH=$libraries:$libraries/slurm-wlm SLURM_CONF=$work/slurm.conf
export PATH=$work/bin:$work/slurm/usr/bin:$PATH
# Slurm compares its own name: under Debian's names, which end in -wlm, GPUs of nodes vanish without a word.
for daemon in slurmctld slurmd slurmstepd; do
    file=$(find "$work/slurm/usr/sbin" -name "$daemon" -o -name "$daemon-wlm" | head -1)
    ln -s "$file" "$work/bin/$daemon"
done
for command in sbatch srun sinfo squeue scancel scontrol; do
    found=$(find "$work/slurm/usr/bin" -name "$command" | head -1)
    [ -n "$found" ] || fail "no $command in the packages"
done
for n in $(seq 0 $((gpus - 1))); do [ -e "$work/dev/nvidia$n" ] || mknod "$work/dev/nvidia$n" c 1 3; done
base=$((20000 + RANDOM % 20000))
cat > "$SLURM_CONF" <<END
ClusterName=fleet
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort=$base
AuthType=auth/none
CredType=cred/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
GresTypes=gpu
SlurmUser=root
SlurmdUser=root
PluginDir=$libraries/slurm-wlm
StateSaveLocation=$work/state
SlurmdSpoolDir=$work/spool/%n
SlurmctldPidFile=$work/slurmctld.pid
SlurmdPidFile=$work/slurmd-%n.pid
SlurmctldLogFile=$work/slurmctld.log
SlurmdLogFile=$work/slurmd-%n.log
NodeName=node[1-3] NodeHostname=localhost NodeAddr=127.0.0.1 Port=[$((base + 1))-$((base + 3))] CPUs=8 RealMemory=1000 Gres=gpu:h200:$gpus
PartitionName=gpu Nodes=node[1-3] Default=YES MaxTime=INFINITE State=UP
END
cat > "$work/gres.conf" <<END
AutoDetect=off
NodeName=node[1-3] Name=gpu Type=h200 File=$work/dev/nvidia[0-$((gpus - 1))]
END
for node in $nodes; do mkdir -p "$work/spool/$node"; done
slurmctld -c -D >"$work/slurmctld.out" 2>&1 & daemons+=($!)
for node in $nodes; do
    slurmd -D -N "$node" -d "$work/bin/slurmstepd" >"$work/$node.out" 2>&1 & daemons+=($!)
done
all_idle() { [ "$(sinfo -h -N -o '%T' | grep -c '^idle$')" = 3 ]; }
until_true 60 all_idle || { sinfo -N; tail -5 "$work"/*.log; fail "the nodes did not come up"; }
sinfo -N -o '%N %T %G'

say "plan"
cat > "$work/plan.toml" <<END
name = "try"
processes = 3
at_once = false
gpus_per_node = $gpus
time_limit_minutes = 30
arguments = ["--model", "$root/tests/fixtures/models/qwen3", "--engine", "stock", "--dtype", "f32", "--phase", "decode", "--batch", "1", "--context", "8", "--quick", "--repetitions", "3", "--threads", "1"]
END
echo 'node[1-3] rack-a' > "$work/list"
"$program" fleet plan --launcher slurm --nodes "$work/list" --plan "$work/plan.toml" --out "$out" --program "$program" --emulate

say "node3 is drained, and its disk is full; the jobs are submitted"
mkdir -p "$out/node3"
mount -t tmpfs -o size=64k tmpfs "$out/node3"
scontrol update nodename=node3 state=drain reason="hbmark: test"
sh "$out/submit.sh"
finished() { [ "$(find "$out/$1" -path '*/run-[0-9]/result.json' 2>/dev/null | wc -l)" -ge "$2" ]; }
until_true 300 finished node1 1 || fail "node1 finished nothing"

say "a run of node1 is killed, and the job of node2 is cancelled in the middle"
victim=$(pgrep -f "$program run .*--out $out/node1/" | head -1)
kill -KILL "$victim"
until_true 300 finished node2 2 || fail "node2 finished nothing"
kept=$(find "$out/node2" -path '*/run-[0-9]/result.json' | wc -l)
scancel --name hbmark-node2
gone() { [ -z "$(squeue -h --name "hbmark-$1" -o %i)" ]; }
until_true 120 gone node2 || fail "the job of node2 stays"
[ "$(find "$out/node2" -path '*/run-[0-9]/result.json' | wc -l)" -ge "$kept" ] || fail "finished runs of node2 were lost"
squeue -o '%j %T %R'
[ "$(squeue -h --name hbmark-node3 -o %T)" = PENDING ] || fail "the drained node was run on"

say "node1 ends, node2 is submitted again and goes on, node3 is back with its full disk"
scontrol update nodename=node3 state=resume
before=$(find "$out/node2" -path '*/run-[0-9]/result.json' -printf '%p %T@\n' | sort)
scancel --quiet --name hbmark-node1x || true
sbatch --job-name=hbmark-node2 --nodelist=node2 --output="$out/logs/node2-%j.out" "$out/fleet.sbatch"
for node in $nodes; do until_true 1500 gone "$node" || fail "the job of $node does not end"; done
for line in $(echo "$before" | cut -d' ' -f1); do
    now=$(find "$line" -printf '%p %T@')
    echo "$before" | grep -qxF "$now" || fail "$line was measured twice"
done
tail -n 3 "$out"/logs/node*.out

say "a result is copied beside the others; the report"
mkdir -p "$out/copy"
cp -r "$out/node2/emulated-node2-0/run-1" "$out/copy/run-1"
set +e
"$program" fleet report "$out" --nagios; nagios=$?
"$program" fleet report "$out" --out "$work/report" > "$work/table.txt"; code=$?
set -e
cut -c1-200 "$work/table.txt"
echo "exit codes: $code, with --nagios $nagios"
[ "$code" = 1 ] || fail "a fleet with failed GPUs ended with $code"
[ "$nagios" = 2 ] || fail "failed GPUs are CRITICAL, and --nagios ended with $nagios"
python3 - "$work/report/fleet-report.json" "$gpus" <<'END'
import json, sys
report, gpus = json.load(open(sys.argv[1])), int(sys.argv[2])
states = {}
for row in report["gpus"]:
    states.setdefault(row["node"], []).append(row["state"])
missing = {row["node"]: row["count"] for row in report["missing"]}
processes = {row["gpu"]: row["processes"] for row in report["gpus"]}
print("processes:", sorted(set(processes.values())), "missing:", missing, "notices:", report["notices"]["counts"])
assert report["emulated"], "an emulated fleet says so"
short = [gpu for gpu, count in processes.items() if gpu.startswith("emulated-node1") and count < 3]
assert len(short) == 1, f"one run of node1 was killed: {short}"
assert all(count == 3 for gpu, count in processes.items() if gpu.startswith("emulated-node2")), "node2 went on to its end"
assert report["notices"]["counts"]["duplicate"] == 1, "the copy is named and counted once"
assert len(states["node1"]) == gpus and len(states["node2"]) == gpus
failed = [f for f in report["findings"] if f.get("node") == "node3" and f["kind"] in ("gpu_failed", "gpu_missing")]
count = sum(missing.get("node3", 0) for _ in [0]) + sum(f["kind"] == "gpu_failed" for f in failed)
assert count == gpus, f"node3 wrote nothing: {count} of {gpus}"
print("node3:", failed[0]["kind"], failed[0]["evidence"][:160])
END
say "all as it should be"
