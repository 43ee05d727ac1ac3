/* train_gpt: the trainer on a CPU.
 *
 * This file only wires: a program is the CPU backend behind the table of operations (llmc/ops.h) and the common main
 * (llmc/program.c). What happens in a run, in the order of a first reading:
 *
 *     llmc/program.c     command line, instruction set, verb
 *     llmc/trainer.c     a run: data, step, validation, log, checkpoint
 *     llmc/gpt.c         the transformer: forward and backward over the operations
 *     llmc/cpu/          the operations; linear.c, norm.c and attention.c first
 *     llmc/optimizer.c   AdamW over the table of parameters (params.c)
 */
#include "cpu/backend.h"
#include "program.h"

int main(int argc, char **argv)
{
    static const Backend BACKEND = {cpu_open, cpu_isa, cpu_threads, NULL, NULL};
    cpu_share_cores(argv);
    return program_main(argc, argv, &BACKEND);
}
