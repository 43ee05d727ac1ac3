/* What the programs of this folder share: checks that are counted, and device memory from and to vectors. */
#ifndef CUDA_ON_CPU_CHECK_H
#define CUDA_ON_CPU_CHECK_H

#include "cuda/gmem.cuh"

#include <cstdio>
#include <vector>

inline int passed, failed;

#define CHECK(condition)                                                                                               \
    do {                                                                                                               \
        if (condition)                                                                                                 \
            passed++;                                                                                                  \
        else                                                                                                           \
            failed++, printf("FAILED  %s:%d: %s\n", __FILE__, __LINE__, #condition);                                   \
    } while (0)

template <class T> gmem<T> on_device(const std::vector<T> &values)
{
    T *p;
    cudaMalloc(&p, values.size() * sizeof(T));
    cudaMemcpy(p, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice);
    return gmem<T>(p);
}

template <class T> std::vector<T> to_host(gmem<T> device, size_t n)
{
    std::vector<T> values(n);
    cudaMemcpy(values.data(), device.p, n * sizeof(T), cudaMemcpyDeviceToHost);
    return values;
}

inline gmem<float> floats_on_device(size_t n, float first, float step)
{
    std::vector<float> values(n);
    for (size_t i = 0; i < n; i++) values[i] = first + step * (float)i;
    return on_device(values);
}

#endif
