/* Makes the NVFP4 copies of a source (views.cuh): which kernels run, in which of their forms.
 *
 * Floor 2.
 */
#ifndef LLMC_CUDA_QUANTIZE_SOURCE_CUH
#define LLMC_CUDA_QUANTIZE_SOURCE_CUH

#include "quantize_amax.cuh"
#include "quantize_measure.cuh"
#include "quantize_tile.cuh"

template <class Source, int W, QuantizeMode mode, bool SUMS>
void launch_tiles(const Source &from, const QuantizeJob &job)
{
    dim3 grid((unsigned)ceil_div(job.part_cols, TILE / Source::parts), (unsigned)ceil_div(job.rows, TILE));
    quantize_tile<Source, W, mode, SUMS><<<grid, BLOCK, 0, cuda.stream>>>(from, job);
}

/* The mode that serves all copies of a job: one that is compiled for it, or the one that asks at run time. */
inline QuantizeMode quantize_mode(const QuantizeJob &job)
{
    bool both = job.copy[0].made && job.copy[1].made;
    const Nvfp4Form *a = &job.copy[job.copy[0].made ? 0 : 1].form, *b = &job.copy[1].form;
    if (job.pow2 || a->four_over_six || (both && (a->rounding != b->rounding || b->four_over_six))) return QUANTIZE_ANY;
    if (!job.plain.absent() || a->headroom != 1 || (both && b->headroom != 1)) return QUANTIZE_ANY;
    if (a->rounding == ROUND_NEAREST) return job.partial.absent() ? QUANTIZE_NEAREST : QUANTIZE_ANY;
    return cuda.native_rounding ? QUANTIZE_NATIVE : QUANTIZE_STOCHASTIC;
}

/* `gradient`: the source may come with sums over rows. */
template <bool gradient, class Source> void launch_wide_tiles(const Source &from, const QuantizeJob &job)
{
    constexpr int W = Source::wide;
    bool sums = gradient && !job.partial.absent();
    switch (quantize_mode(job)) {
    case QUANTIZE_NEAREST:
        launch_tiles<Source, W, QUANTIZE_NEAREST, false>(from, job);
        break;
    case QUANTIZE_STOCHASTIC:
        if (sums)
            launch_tiles<Source, W, QUANTIZE_STOCHASTIC, gradient>(from, job);
        else
            launch_tiles<Source, W, QUANTIZE_STOCHASTIC, false>(from, job);
        break;
    case QUANTIZE_NATIVE:
        if (sums)
            launch_tiles<Source, W, QUANTIZE_NATIVE, gradient>(from, job);
        else
            launch_tiles<Source, W, QUANTIZE_NATIVE, false>(from, job);
        break;
    case QUANTIZE_ANY:
        launch_tiles<Source, W, QUANTIZE_ANY, false>(from, job);
        break;
    }
}

/* Makes the copies of a job, its plain view and partial sums. `aligned`: the source's tensors and the plain view are.
 * `element` is the same matrix in one part, for shapes that cannot be read `wide` elements at once. */
template <bool gradient, class Source, class Element>
void quantize_source(const char *op, const Source &from, const Element &element, bool aligned, const QuantizeJob &job)
{
    if (!job.rows || !job.part_cols) return;
    bool wide = aligned && job.part_cols % (Source::parts == 1 ? 16 : 64) == 0;
    QuantizeJob single = job;
    single.part_cols *= Source::parts;
    if (!job.pow2 && wide)
        launch_find_amax<Source, amax_width<Source>>(from, job);
    else if (!job.pow2)
        launch_find_amax<Element, 1>(element, single);
    if (wide)
        launch_wide_tiles<gradient>(from, job);
    else
        launch_tiles<Element, 1, QUANTIZE_ANY, false>(element, single);
    cuda_check(cudaGetLastError(), op);
    quantize_finish(op, wide ? job : single, wide ? Source::parts : 1);
    measure_copies(element, single);
}

#endif
