/* train_gpt_nvfp4: the trainer on NVIDIA GPUs.
 *
 * This file only wires, as train_gpt.c does for the CPU: a program is a backend behind the table of operations
 * (llmc/ops.h) and the common main (llmc/program.c). What to read, beside what train_gpt.c names:
 *
 *     llmc/cuda/backend.cu    the device, memory, the step
 *     llmc/cuda/gemm.cu       matrix products by cuBLASLt
 *     llmc/cuda/gmem.cuh      how kernels reach memory; then norm.cu, the simplest of them, and attention.cu
 *     llmc/comm_nccl.cu       many GPUs
 *
 * The same source compiled for the host, through dev/cuda_on_cpu, is train_gpt_nvfp4_cpu.
 */
#include "cuda/backend.h"
#include "program.h"

static void open_collectives(Comm *comm)
{
#ifdef LLMC_NCCL
    comm_nccl_open(comm);
#else
    die("started as one of %d ranks, but built without NCCL: install its header (nccl.h) and library and build again, "
        "or start without mpirun",
        comm->ranks);
#endif
}

int main(int argc, char **argv)
{
    static const Backend BACKEND = {cuda_open, cuda_isa, cuda_threads, cuda_device, open_collectives};
    return program_main(argc, argv, &BACKEND);
}
