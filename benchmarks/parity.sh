#!/usr/bin/env bash
# Hardware determinism records: every label of Qwen3.5-0.8B in three precisions against the control, deterministic kernels, one GPU.
#
#   benchmarks/parity.sh OUT [key=value ...]        OUT/{bf16-true,bf16-mixed,32-true}/parity.json, OUT/noise/, OUT/planted/
#
# Then as training runs (fused attention sums in varying order), and with a planted error, which must be found. A run is a process start, the
# tuning of FLA's kernels (about half of its time with an empty Triton cache) and some 40 steps. PYTHON=python3 chooses the interpreter.
set -u
out=${1:?usage: benchmarks/parity.sh OUT [key=value ...]}
shift
cd "$(dirname "$0")/.." || exit 2
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
failed=0

parity() { # NAME, expected exit code, arguments
    local name=$1 expected=$2 start=$SECONDS
    shift 2
    "${PYTHON:-python3}" -m lightning_gdn parity recipes/qwen3_5_0_8b.yaml data.seq_len=2048 --out "$out/$name" "$@"
    local code=$?
    echo "$name: exit code $code, expected $expected, $((SECONDS - start)) s" >&2
    [ "$code" -eq "$expected" ] || failed=1
}

for precision in bf16-true bf16-mixed 32-true; do
    parity "$precision" 0 "trainer.precision=$precision" "$@"
done
parity noise 0 --nondeterministic --arms gdn_norm_out,gdn_conv+gdn_norm_out+layernorm,gdn,full "$@"
parity planted 1 --nondeterministic --arms gdn_norm_out --plant norm_out@9 "$@"
exit "$failed"
