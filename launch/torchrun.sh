#!/usr/bin/env bash
# Trains on this node, or on several when it is started on each of them with the same MASTER_ADDR and NODES:
#
#   bash launch/torchrun.sh --config my.yaml --save runs/mine                                   one node, all its GPUs
#   NODES=4 NODE_RANK=$i MASTER_ADDR=node0 bash launch/torchrun.sh --config my.yaml ...         on node $i of four
#
# RANKS_PER_NODE (default: the number of GPUs, else 1), MASTER_PORT (29500), MAX_RESTARTS (0).
set -euo pipefail
[ -d .venv ] && source .venv/bin/activate
ranks="${RANKS_PER_NODE:-$(python -c 'import torch; print(max(1, torch.cuda.device_count()))')}"
if [ "${NODES:-1}" -gt 1 ]; then
    where=(--nnodes "$NODES" --node-rank "${NODE_RANK:?which of the nodes is this, from 0}"
           --master-addr "${MASTER_ADDR:?the first node}" --master-port "${MASTER_PORT:-29500}")
else
    where=(--standalone)
fi
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec torchrun "${where[@]}" --nproc-per-node "$ranks" --max-restarts "${MAX_RESTARTS:-0}" pretrain_moe.py "$@"
