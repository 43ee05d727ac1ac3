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

void cuda_zero(Tensor t)
{
    size_t width = (size_t)t.cols * dtype_bytes(t.dtype), pitch = (size_t)t.ld * dtype_bytes(t.dtype);
    if (t.rows == 1 || t.ld == t.cols)
        cuda_check(cudaMemsetAsync(t.data, 0, (size_t)t.rows * width, cuda.stream), "zero");
    else
        cuda_check(cudaMemset2DAsync(t.data, pitch, 0, width, (size_t)t.rows, cuda.stream), "zero");
}
