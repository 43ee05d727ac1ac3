/* Operands of matrix products: a source computed element by element (the tensor itself, a norm, an activation, a
 * gradient through an activation), written to the plain views and quantized into the NVFP4 views that were asked for.
 * The kernels are those of views.cuh and quantize_tile.cuh; a source and its operations are in a file of their own,
 * because kernels of many sources in one file take minutes to compile: operand_tensor.cu, operand_norm.cu,
 * operand_activation.cu. Formulas and what a view is: cpu/linear.c.
 *
 * Floor 2.
 */
#ifndef LLMC_CUDA_OPERAND_CUH
#define LLMC_CUDA_OPERAND_CUH

#include "quantize_source.cuh"

/* ---- views, plain and quantized ---- */

static QuantizePlace step_place(const Operand *o) { return QuantizePlace{true, 0, 0, o->row0}; }

/* The plain view becomes a part of the job, the sums over rows too. */
static void add_outputs(QuantizeJob *job, const Targets &to, Tensor dbias)
{
    if (to.count > 1 || (to.count && !to.to[0].half))
        die("a plain view beside an NVFP4 view is in BF16; this is a bug");
    if (to.count) job->plain = gmem<bf16>(to.to[0].data), job->plain_ld = to.to[0].ld;
    if (dbias.data) job->partial = cuda.partial;
}

/* Makes all views that were asked for of an operand; of a gradient also dbias += the sums over rows, where that is not
 * absent. */
template <bool gradient, class Source, class Element>
static void make_operand(const char *op, const Source &from, const Element &element, Operand *o, unsigned views,
                         const Targets &to, bool aligned, int64_t part_cols, QuantizePlace place, Tensor dbias)
{
    if (!wants_quantized(o, views)) {
        make_views_and_sums(op, from, to, aligned, o->rows, part_cols, dbias);
        return;
    }
    QuantizeJob job = quantize_job(o, views, place, o->rows, part_cols);
    add_outputs(&job, to, dbias);
    quantize_source<gradient>(op, from, element, aligned && to.aligned, job);
    if (dbias.data && o->rows) cuda_add_partial_sums(dbias, ceil_div(o->rows, SUM_ROWS), 0);
}

/* Activations are BF16 wherever something is quantized. */
template <class Source>
static void make_plain(const char *op, const Source &from, const Operand *o, unsigned views, const Targets &to,
                       bool aligned, int64_t part_cols, Tensor dbias)
{
    if (wants_quantized(o, views)) die("%s: an operand in NVFP4 of FP32; this is a bug", op);
    make_views_and_sums(op, from, to, aligned, o->rows, part_cols, dbias);
}

#endif
