#!/usr/bin/env bash
# Several ranks on this machine: mpirun with what OpenMPI needs to run as root and with more ranks than cores.
#
#     scripts/run_local.sh -np 4 ./train_gpt --config scripts/configs/demo.json --zero_stage 3 ...
#
# Each rank gets its share of the cores (OMP_NUM_THREADS, unless set).
set -euo pipefail
usage() { sed -n '2,/^set/s/^# \{0,1\}//p' "$0" >&2 && exit 2; }
if [ $# -lt 3 ] || [ "$1" != -np ] || ! [[ $2 =~ ^[1-9][0-9]*$ ]]; then usage; fi
command -v mpirun >/dev/null || { echo "run_local: no mpirun; install it (apt-get install libopenmpi-dev openmpi-bin) and build again" >&2 && exit 1; }
cores=$(getconf _NPROCESSORS_ONLN) ranks=$2
threads=$((cores / ranks > 0 ? cores / ranks : 1))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$threads} OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive}
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
exec mpirun --oversubscribe --bind-to none "$@"
