#!/usr/bin/env bash
# The tables in docs/targets.md, one command each, on one otherwise idle GPU: records into OUT.
#
#   benchmarks/tables.sh OUT [TABLE ...]
#   TABLE of recompute: segments stack stack_2048 whole_16384 whole_4096 4b profile host (the default), profile_large stack_full norm_out_2048
#         of offload:   engine pairs_stack pairs_16384 pairs_4096x4 auto_stack auto_16384 auto_4096x4 combined rivals matrix
#
# Recompute has five alternating rounds, offload three. SECONDS_PER_TABLE (default 120; pairs and stack_2048 want 240, the matrix 400) bounds
# the rounds of each; WARM (default 3) is what a process of a pair runs before its measured steps, with auto until that has settled: 40 gives the
# control about as many. What did not fit is said, and the record holds whole rounds. PYTHON=python3 chooses the interpreter. Where the host
# decides (2048 and 4096 tokens), and in stack_full and auto_*, the control takes turns of one step with every arm. A process start, and kernels that have
# to be tuned, come on top. CUDA_VISIBLE_DEVICES chooses the GPU: bits and bytes may be measured on one while times are measured on another,
# with CPU cores of their own.
set -u
out=${1:?usage: benchmarks/tables.sh OUT [TABLE ...]}
shift
cd "$(dirname "$0")/.." || exit 2
mkdir -p "$out"
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
python=${PYTHON:-python3}
limit=${SECONDS_PER_TABLE:-120}
UNION=gdn_conv+gdn_norm_out+layernorm
FUSED=fused:none,fused:gdn_norm_out,fused:gdn_norm_out+layernorm+mlp_act,fused:$UNION,fused:$UNION+mlp_act,fused:full,fused:checkpoint:sweep,fused:hf_gradient_checkpointing
FUSED_4096=fused:none,fused:gdn_norm_out,fused:$UNION+mlp_act,fused:full,fused:checkpoint:block:12,fused:hf_gradient_checkpointing
NORM_OUT=none,gdn_norm_out,checkpoint:gdn_norm_out
LABELS=gdn_norm_out,gdn_conv,$UNION,gdn_in_proj_conv,gdn_front,full
SMALL=none,$LABELS,checkpoint:gdn_norm_out,checkpoint:gdn_conv,checkpoint:gdn_in_proj_conv,checkpoint:gdn_front,checkpoint:block:10,checkpoint:full
MOVED=offload:gdn_core_attn
QWEN="benchmarks/offload_model.py --model qwen3_5_0_8b --kernels fused --rounds 3 --warm 2 --steps 3"
PAIRS="benchmarks/offload_pairs.py --warm ${WARM:-3}"
STOCK=stock:none,stock:gdn_norm_out,stock:$UNION
COMBINED=none,$MOVED@auto,$UNION+mlp_act,$UNION+mlp_act+$MOVED,$UNION+mlp_act+$MOVED+offload:mlp@auto,full,full+offload:block_input,checkpoint:sweep
AUTO="--beside --steps 10 --arms none,$MOVED@auto,$MOVED"
RIVALS=none,$MOVED,save_on_cpu:gdn_core_attn,$MOVED+offload:gdn_in_proj+offload:gdn_norm_out+offload:core_attn+offload:mlp,full+offload:block_input,save_on_cpu
$python -c "import trl" 2>/dev/null && RIVALS=$RIVALS,trl_offload
failed=0

table() { # NAME, script and arguments
    local name=$1 start=$SECONDS
    shift
    "$python" "$@" --out "$out/$name.json" >"$out/$name.txt" || failed=1
    cat "$out/$name.txt"
    echo "$name: $((SECONDS - start)) s" >&2
}

for name in ${*:-stack whole_16384 stack_2048 segments profile whole_4096 4b host}; do
    case $name in
        segments) table "$name" benchmarks/gdn_stack.py --layers 1 --arms segments --warm 1 --steps 6 --seconds "$limit" ;;
        stack) table "$name" benchmarks/gdn_stack.py --warm 1 --steps 4 --seconds "$limit" ;;
        stack_full) table "$name" benchmarks/gdn_stack.py --warm 3 --steps 6 --beside --arms none,full,checkpoint:full --seconds "$limit" ;;
        stack_2048) table "$name" benchmarks/gdn_stack.py --seq 2048 --batch 1 --warm 3 --steps 8 --beside --arms "$SMALL" --seconds "$limit" ;;
        norm_out_2048) table "$name" benchmarks/gdn_stack.py --seq 2048 --batch 1 --warm 4 --steps 24 --beside --arms "$NORM_OUT" --seconds "$limit" ;;
        whole_16384) table "$name" benchmarks/whole_model.py --seq 16384 --warm 1 --steps 2 --arms "$STOCK,$FUSED" --seconds "$limit" ;;
        whole_4096) table "$name" benchmarks/whole_model.py --seq 4096 --micro-batches 4 --warm 1 --steps 2 --beside --arms "$STOCK,$FUSED_4096" --seconds "$limit" ;;
        4b) table "$name" benchmarks/whole_model.py --recipe qwen3_5_4b --seq 8192 --warm 1 --steps 2 --arms "$FUSED" --seconds "$limit" ;;
        profile) table "$name" benchmarks/profile_check.py gdn_stack_20 --steps 3 ;;
        profile_large) table "$name" benchmarks/profile_check.py gdn_stack_20 data.batch_size=4 --steps 3 --rounds 5 ;;
        engine) table "$name" benchmarks/offload_engine.py --rounds 5 ;;
        pairs_stack) table "$name" $PAIRS --case stack --seconds "$limit" ;;
        pairs_16384) table "$name" $PAIRS --kernels fused --case qwen:16384 --seconds "$limit" ;;
        pairs_4096x4) table "$name" $PAIRS --kernels fused --case qwen:4096x4 --seconds "$limit" ;;
        auto_stack) table "$name" benchmarks/offload_model.py --model stack $AUTO --seconds "$limit" ;;
        auto_16384) table "$name" $QWEN $AUTO --seq 16384 --seconds "$limit" ;;
        auto_4096x4) table "$name" $QWEN $AUTO --seq 4096 --micro-batches 4 --seconds "$limit" ;;
        combined) table "$name" $QWEN --seq 16384 --arms "$COMBINED" --seconds "$limit" ;;
        rivals) table "$name" $QWEN --seq 4096 --arms "$RIVALS" --seconds "$limit" ;;
        matrix) table "$name" benchmarks/offload_matrix.py --kernels fused --parallel 4 --short 20 --seconds "$limit" ;;
        host) table "$name" benchmarks/host_overhead.py --rounds 5 --calls 200 ;;
        *) echo "benchmarks/tables.sh: unknown table $name" >&2 && exit 2 ;;
    esac
done
exit "$failed"
