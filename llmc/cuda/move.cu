/* Moving data within the device: copies that convert, zeros. */
#include "views.cuh"

void cuda_copy(Tensor dst, Tensor src)
{
    Targets to = {};
    to.aligned = true;
    add_target(&to, dst);
    BY_DTYPE(src.dtype, T,
             make_views("copy", TensorSource<T>{matrix<const T>(src)}, to, is_aligned(src), src.rows, src.cols));
}

/* A slice of columns: a copy without its reads. */
struct ZeroSource {
    static constexpr int wide = 4, parts = 1;
    template <int W> using Columns = NoColumns;
    template <int W> __device__ NoColumns columns(int64_t) const { return {}; }
    template <int W> __device__ void load(float (&out)[1][W], int64_t, int64_t, NoColumns) const
    {
#pragma unroll
        for (int j = 0; j < W; j++) out[0][j] = 0.0f;
    }
};

void cuda_zero(Tensor t)
{
    Targets to = {};
    to.aligned = true;
    add_target(&to, t);
    if (t.rows == 1 || t.ld == t.cols)
        cuda_check(cudaMemsetAsync(t.data, 0, (size_t)(t.rows * t.cols) * dtype_bytes(t.dtype), cuda.stream), "zero");
    else
        make_views("zero", ZeroSource(), to, true, t.rows, t.cols);
}
