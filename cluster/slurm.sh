#!/usr/bin/env bash
# A Ray cluster inside one Slurm allocation, and a run on it.
#
#   python3.11 -m venv ~/rayfed-env && ~/rayfed-env/bin/pip install -c rayfed/cluster/constraints.txt .    # once
#   sbatch cluster/slurm.sh method=fedglad clients.gpu=0.25 out=fedglad-1
#   sbatch cluster/slurm.sh method=fedglad clients.gpu=0.25 out=fedglad-1 resume=auto     # goes on after a time limit
#
# Change the lines below to what your site offers. The environment and RAYFED_HOME must be on storage that all nodes
# see (home folders usually are).
#SBATCH --job-name=rayfed
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --gpus-per-node=4
#SBATCH --time=08:00:00
#SBATCH --output=rayfed-%j.log
#SBATCH --signal=B:TERM@120
set -euo pipefail

# shellcheck disable=SC1091
source "${RAYFED_ENV:-$HOME/rayfed-env}/bin/activate"
export RAYFED_HOME="${RAYFED_HOME:-$HOME/rayfed}" OMP_NUM_THREADS=1
mkdir -p "$RAYFED_HOME"

# Compute nodes are shared: only whoever has the token may talk to this cluster. It lies in ~/.ray/auth_token.
export RAY_AUTH_MODE=token
ray get-auth-token --generate >/dev/null

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head_ip=$(srun --nodes=1 --ntasks=1 --nodelist="${nodes[0]}" hostname --ip-address | awk '{print $1}')
port=$((20000 + SLURM_JOB_ID % 20000)) # two jobs on one node do not meet
pids=()

start_node() { # NODE [options of ray start]
    srun --nodes=1 --ntasks=1 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" --nodelist="$1" \
        ray start --block --num-cpus="${SLURM_CPUS_PER_TASK:-1}" --num-gpus="${SLURM_GPUS_ON_NODE:-0}" \
        --temp-dir="/tmp/ray-$SLURM_JOB_ID" "${@:2}" &
    pids+=($!)
}

stop_nodes() {
    for pid in "${pids[@]}"; do kill -TERM "$pid" 2>/dev/null || true; done
    wait || true
}
trap stop_nodes EXIT

start_node "${nodes[0]}" --head --node-ip-address="$head_ip" --port="$port" --include-dashboard=false
for node in "${nodes[@]:1}"; do
    start_node "$node" --address="$head_ip:$port"
done

# Wait until every node has joined, or say which number did.
python - "$head_ip:$port" "${#nodes[@]}" <<'PYTHON'
import sys
import time

import ray

address, wanted = sys.argv[1], int(sys.argv[2])
deadline = time.monotonic() + 300
while True:
    try:
        ray.init(address=address, logging_level="ERROR")
        break
    except ConnectionError:
        if time.monotonic() > deadline:
            sys.exit(f"no Ray head answered at {address} within 300 s: see the log above")
        time.sleep(2)
while (joined := sum(node["Alive"] for node in ray.nodes())) < wanted:
    if time.monotonic() > deadline:
        sys.exit(f"{joined} of {wanted} nodes joined within 300 s: see the log above")
    time.sleep(2)
PYTHON

# In the background, so that this shell can pass on Slurm's warning before the time limit: the run then ends in order,
# its finished rounds saved.
cd "$RAYFED_HOME"
python -m rayfed.run engine.address="$head_ip:$port" "$@" &
run=$!
trap 'kill -TERM "$run" 2>/dev/null || true' TERM
wait "$run" && status=0 || status=$?
if kill -0 "$run" 2>/dev/null; then wait "$run" && status=0 || status=$?; fi # the first wait ended by the signal
exit "$status"
