/* What bench_gemm measures, and oneDNN as one that does it: C[M, N] = A[M, K] B[N, K]^T, both inputs of one dtype. */
#ifndef LLMC_BENCH_PEERS_H
#define LLMC_BENCH_PEERS_H

#include "tensor.h"

typedef struct {
    int64_t M, K, N;
    DType in, out;
    void *a, *b, *c; /* [M, K], [N, K], [M, N] */
} Product;

bool dnnl_there(void); /* was it built in? */
/* Weights (b) are packed as the library likes them; false: it has no such product. */
bool dnnl_open(const char *isa, const Product *p);
void dnnl_run(const Product *p);
void dnnl_close(void);

#endif
