#!/usr/bin/env bash
# build_cudastf.sh CCCL OUTPUT [ARCHITECTURE]: builds CUDASTF's own benchmark of tasks from a checkout
# of NVIDIA/cccl into the folder OUTPUT: task_bench as it is, task_bench_kernel with an empty kernel
# in each task, and task_bench_graph and task_bench_graph_kernel, the same over CUDA graphs. No GPU is
# needed. ARCHITECTURE is nvcc's -arch (sm_90).
set -euo pipefail
cccl=$1 output=$2 architecture=${3:-sm_90}
source=$cccl/cudax/test/stf/stress/task_bench.cu
cuda=$(dirname "$(dirname "$(readlink -f "$(command -v nvcc)")")")
mkdir -p "$output"

compile() { # SOURCE PROGRAM
    nvcc -std=c++17 -O3 -DNDEBUG -arch="$architecture" --extended-lambda --expt-relaxed-constexpr \
        -I"$cccl"/cudax/include -I"$cccl"/libcudacxx/include -I"$cccl"/cub -I"$cccl"/thrust \
        -cudart static -L"$cuda"/lib64/stubs -lcuda -o "$2" "$1"
}

change() { # SOURCE CHANGED WHAT-IT-HAS-NOW SED-ARGUMENTS
    sed "${@:4}" "$1" >"$2"
    grep -q "$3" "$2" || {
        echo "build_cudastf.sh: $1 is not what it was: it gives no '$3'" >&2
        exit 1
    }
}

with_kernel=$output/task_bench_kernel.cu
change "$source" "$with_kernel" 'empty<<<' \
    -e 's/^using namespace cuda::experimental::stf;/&\n__global__ void empty() {}/' \
    -e 's/tsk->\*\[\](cudaStream_t) {};/tsk->*[](cudaStream_t stream) { empty<<<1, 1, 0, stream>>>(); };/'
for name in task_bench task_bench_kernel; do
    graph=$output/${name/bench/bench_graph}.cu
    [[ $name == task_bench ]] && from=$source || from=$with_kernel
    change "$from" "$graph" 'ctx = graph_ctx' -e 's/^  context ctx;/  context ctx = graph_ctx();/'
    compile "$from" "$output/$name"
    compile "$graph" "${graph%.cu}"
done
