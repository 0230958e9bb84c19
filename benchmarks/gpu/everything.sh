#!/usr/bin/env bash
# What needs an NVIDIA card, one part after the other: everything.sh OUT [PART...]
#
# Parts, in this order unless named: tests contexts kernels compare shapes. Each writes its figures
# and its log into the folder OUT. One that fails, or takes longer than LIMIT seconds (600), does not
# stop the next; the last lines say how each ended. A part named alone has no limit.
# PYTHON (python3) has Quire, its test tools and mlx-lm; MODELS (models) is the folder of the random
# models, which are written when they are needed and not there.
set -uo pipefail
self=$(realpath "$0")
out=$(realpath -m "${1:?a folder}")
mkdir -p "$out"
shift
cd "$(dirname "$self")/../.."
python=${PYTHON:-python3} models=${MODELS:-models}
model=$models/gemma-4-26b-a4b formats=(plain page-4 uniform-4 turbo-4)
export PYTHONUNBUFFERED=1
# What one process compiles the next one finds, as with `quire serve`.
export MLX_PTX_CACHE_DIR=${MLX_PTX_CACHE_DIR:-$(realpath -m "$models")/compiled}

own() {  # with what `quire serve` sets for its engine
  MLX_USE_CUDA_GRAPHS=0 MLX_ENABLE_TF32=0 "$python" "$@"
}

steps() {
  [ -e "$model/config.json" ] || own benchmarks/gpu/shapes.py gemma-4-26b-a4b "$model" || return
  own "benchmarks/gpu/$1.py" "$model" "$out/$1.json" "${formats[@]}"
}

compare() {  # sets the same, but not for mlx-lm
  "$python" benchmarks/gpu/compare.py "$out/compare-$1.json" --models "$models" \
    --mlx-lm "$python" --shapes "$@"
}

[ $# -gt 0 ] || set -- tests contexts kernels compare shapes
if [ $# -eq 1 ]; then
  case $1 in
    tests)
      unset MLX_PTX_CACHE_DIR  # nothing was found out about kernels before
      own -m pytest -m gpu -rf --junit-xml "$out/tests.xml" tests/executor/graphs \
        tests/attention tests/device/cuda tests/engine/test_gpu.py ;;
    contexts) steps contexts ;;
    kernels) steps step_kernels ;;
    compare) compare gemma-4-26b-a4b ;;
    shapes) compare qwen3-30b-a3b llama-3.1-8b gemma-4-31b ;;
    *) echo "no part is called $1" >&2; exit 2 ;;
  esac
  exit
fi
ends=()
for each; do
  begun=$SECONDS
  # Interrupted, pytest still says what failed.
  timeout --signal INT --kill-after 20 "${LIMIT:-600}" "$self" "$out" "$each" >"$out/$each.log" 2>&1
  ends+=("$each: exit $?, $((SECONDS - begun)) s")
  tail -n 20 "$out/$each.log"
done
printf '%s\n' "${ends[@]}" | tee "$out/ends.txt"
