/* Token and position embeddings. Forward: a row of wte, plus one of wpe. Backward: every vocabulary row gets the sum
 * of the gradients of its tokens, from zero in token order, added once.
 *
 * Backward sorts the token numbers by vocabulary row. Counting and placing use integer atomics, which leave the order
 * within a vocabulary row to chance; so a warp a row puts its numbers in order afterwards:
 *
 *     count    a thread a token         end[v] = tokens of row v
 *     scan     one block                end[v] = where row v begins
 *     place    a thread a token         sorted[end[token]++]: beginnings become ends
 *     order    a warp a row             up to 32 numbers by comparing all with all, more by searching all tokens again
 *     add      a warp a row and chunk   sums in order
 *
 * That reads the tokens some times: N 4-byte numbers, and N / 32 of them again for each frequent row, of which there
 * are at most N / 33. For N = 32768, V = 50304 all but `add` move some 10 MB within the L2 cache, nothing beside the 2
 * N C bytes of the gradients.
 */
#include "rows.cuh"

/* ---- forward ---- */

/* A warp a token. Reads the row of wte (and wpe, which stays in the cache), writes x: 4 bytes an element in BF16. */
template <class T, class Table, int W>
__global__ void __launch_bounds__(BLOCK, 2)
    embedding_rows(Matrix<T> x, Matrix<float> stats, gmem<const int32_t> tokens, Matrix<const Table> wte,
                   Matrix<const Table> wpe, uint32_t length, int64_t position0, NormKind kind, float eps)
{
    int64_t r = warp_number(), cols = x.cols;
    if (r >= x.rows) return;
    gmem<const Table> token = wte.row(tokens.ld(r)),
                      position = wpe.row(wpe.absent() ? 0 : position0 + (uint32_t)r % length);
    WarpRow<T, W> row{x.row(r), cols, {}};
    row.fill([&](int64_t c) {
        float a[W], b[W];
        Pack<T, W> sum;
        load_row<W>(a, token, c, cols);
        if (!wpe.absent()) {
            load_row<W>(b, position, c, cols);
#pragma unroll
            for (int j = 0; j < W; j++) a[j] += b[j];
        }
        round_pack(&sum, a);
        return sum;
    });
    row.write_stats(stats.row(r), kind, eps);
}

template <class Row, class Table>
static void embedding_forward(Tensor x, Tensor stats, const int32_t *tokens, Tensor wte, Tensor wpe, int64_t T,
                              int64_t position0, const Norm *first)
{
    bool aligned = is_aligned(x) && is_aligned(wte) && is_aligned(wpe);
    unsigned blocks = blocks_for_warps(x.rows);
    BY_WIDTH(aligned, Row, W,
             embedding_rows<Row, Table, W><<<blocks, BLOCK, 0, cuda.stream>>>(
                 matrix<Row>(x), matrix<float>(stats), gmem<const int32_t>(tokens), matrix<const Table>(wte),
                 matrix<const Table>(wpe), (uint32_t)T, position0, first->kind, first->eps));
}

void cuda_embedding_forward(Tensor x, Tensor stats, const int32_t *tokens, Tensor wte, Tensor wpe, int64_t T,
                            int64_t position0, const Norm *first)
{
    if (wpe.data && wpe.dtype != wte.dtype) die("embedding_forward: tables of two dtypes; this is a bug");
    if (!x.rows) return;
    BY_DTYPE(
        x.dtype, Row,
        BY_DTYPE(wte.dtype, Table, embedding_forward<Row, Table>(x, stats, tokens, wte, wpe, T, position0, first)));
    cuda_check(cudaGetLastError(), "embedding_forward");
}

/* ---- backward: the order of tokens ---- */

__global__ void __launch_bounds__(BLOCK) count_tokens(gmem<int32_t> end, gmem<const int32_t> tokens, int64_t N)
{
    int64_t n = (int64_t)blockIdx.x * BLOCK + threadIdx.x;
    if (n < N) end.atomic_add(tokens.ld(n), 1);
}

enum { SCAN_THREADS = 1024, SCAN_EACH = 8 };

/* Counts to beginnings, in place: one block walks the table, a thread takes SCAN_EACH neighbours at a time. 8 bytes a
 * vocabulary row, some 10 us for 50304 of them: one block, because a second pass over so little would take as long. */
__global__ void __launch_bounds__(SCAN_THREADS) scan_counts(gmem<int32_t> end, int64_t V)
{
    __shared__ int32_t of_warp[WARP];
    int lane = lane_number(), warp = (int)threadIdx.x / WARP;
    int32_t before = 0; /* all of the earlier rounds */
    for (int64_t base = 0; base < V; base += SCAN_THREADS * SCAN_EACH) {
        int64_t v0 = base + (int64_t)threadIdx.x * SCAN_EACH;
        int32_t count[SCAN_EACH], own = 0, start, total;
#pragma unroll
        for (int i = 0; i < SCAN_EACH; i++) own += count[i] = v0 + i < V ? end.ld(v0 + i) : 0;
        start = own; /* inclusive sums within the warp */
        for (int distance = 1; distance < WARP; distance *= 2) {
            int32_t other = __shfl_up_sync(0xffffffffu, start, distance);
            if (lane >= distance) start += other;
        }
        if (lane == WARP - 1) of_warp[warp] = start;
        __syncthreads();
        total = of_warp[lane]; /* the same over the 32 warps, in every warp */
        for (int distance = 1; distance < WARP; distance *= 2) {
            int32_t other = __shfl_up_sync(0xffffffffu, total, distance);
            if (lane >= distance) total += other;
        }
        start += before - own;
        if (warp) start += __shfl_sync(0xffffffffu, total, warp - 1);
        before += __shfl_sync(0xffffffffu, total, WARP - 1);
#pragma unroll
        for (int i = 0; i < SCAN_EACH; i++) {
            if (v0 + i < V) end.st(v0 + i, start);
            start += count[i];
        }
        __syncthreads(); /* of_warp is free again */
    }
}

__global__ void __launch_bounds__(BLOCK)
    place_tokens(gmem<int32_t> end, gmem<int32_t> sorted, gmem<const int32_t> tokens, int64_t N)
{
    int64_t n = (int64_t)blockIdx.x * BLOCK + threadIdx.x;
    if (n < N) sorted.st(end.atomic_add(tokens.ld(n), 1), (int32_t)n);
}

/* More than 32 tokens of row v, which begin at sorted[first]: found again in the order of their numbers. */
__device__ inline void search_tokens(gmem<int32_t> sorted, int32_t first, int32_t last, gmem<const int32_t> tokens,
                                     int64_t N, int64_t v)
{
    enum { BATCH = 4 };
    int lane = lane_number();
    for (int64_t base = 0; first < last; base += BATCH * WARP) {
        bool hit[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            int64_t n = base + i * WARP + lane;
            hit[i] = n < N && tokens.ld(n) == v;
        }
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            uint32_t hits = __ballot_sync(0xffffffffu, hit[i]), below = hits & ((1u << lane) - 1);
            if (hit[i]) sorted.st(first + __popc(below), (int32_t)(base + i * WARP + lane));
            first += __popc(hits);
        }
    }
}

__global__ void __launch_bounds__(BLOCK)
    order_tokens(gmem<const int32_t> end, gmem<int32_t> sorted, gmem<const int32_t> tokens, int64_t N, int64_t V)
{
    int64_t v = warp_number();
    if (v >= V) return;
    int32_t first = v ? end.ld(v - 1) : 0, last = end.ld(v), count = last - first, rank = 0;
    int lane = lane_number();
    if (count < 2) return;
    if (count > WARP) {
        search_tokens(sorted, first, last, tokens, N, v);
        return;
    }
    int32_t mine = lane < count ? sorted.ld(first + lane) : INT32_MAX;
    for (int i = 0; i < count; i++) rank += __shfl_sync(0xffffffffu, mine, i) < mine;
    if (lane < count) sorted.st(first + rank, mine);
}

/* ---- backward: sums ---- */

/* sum[c ...] += W columns of `count` rows of dx, one after the other from zero: rows index[0], index[1], ..., or
 * without an index row0, row0 + stride, ... */
template <int W, class T>
__device__ inline void add_rows(gmem<float> sum, Matrix<const T> dx, int64_t c, gmem<const int32_t> index,
                                int64_t count, int64_t row0, int64_t stride)
{
    enum { BATCH = 8 }; /* rows whose loads are on their way at once */
    float total[W] = {}, old[W];
    for (int64_t i0 = 0; i0 < count; i0 += BATCH) {
        Pack<T, W> x[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            if (i0 + i >= count) continue;
            int64_t r = index.absent() ? row0 + (i0 + i) * stride : index.ld(i0 + i);
            x[i] = load_pack<W>(dx.row(r), c, dx.cols);
        }
#pragma unroll
        for (int i = 0; i < BATCH; i++)
#pragma unroll
            for (int j = 0; j < W; j++)
                if (i0 + i < count) total[j] += to_f32(x[i].v[j]);
    }
    load_row<W>(old, sum, c, dx.cols);
#pragma unroll
    for (int j = 0; j < W; j++) old[j] += total[j];
    store_row<W>(sum, c, dx.cols, old);
}

/* A warp takes 32 W columns of a vocabulary row; one without tokens ends at once. Every row of dx is read once, 2
 * bytes an element in BF16, and the gradient of every token that occurs is read and written. */
template <class T, int W>
__global__ void __launch_bounds__(BLOCK) add_token_rows(Matrix<float> dwte, Matrix<const T> dx, gmem<const int32_t> end,
                                                        gmem<const int32_t> sorted, uint32_t chunks)
{
    Place place = warp_place(chunks, WARP * W);
    int64_t v = place.row, c = place.col + lane_number() * W;
    if (v >= dwte.rows || c >= dx.cols) return;
    int32_t first = v ? end.ld(v - 1) : 0, last = end.ld(v);
    if (last > first) add_rows<W>(dwte.row(v), dx, c, sorted + first, last - first, 0, 0);
}

/* The same for a position: its rows stand T apart. */
template <class T, int W>
__global__ void __launch_bounds__(BLOCK)
    add_position_rows(Matrix<float> dwpe, Matrix<const T> dx, int64_t positions, uint32_t chunks)
{
    Place place = warp_place(chunks, WARP * W);
    int64_t t = place.row, c = place.col + lane_number() * W;
    if (t >= positions || c >= dx.cols) return;
    add_rows<W>(dwpe.row(t), dx, c, gmem<const int32_t>((const int32_t *)NULL), dx.rows / positions, t, positions);
}

template <class T, int W> static void add_gradients(Tensor dwte, Tensor dwpe, Tensor dx, int64_t positions)
{
    int64_t V = dwte.rows, chunks = ceil_div(dx.cols, WARP * W);
    gmem<const int32_t> end(cuda.sorted.p), sorted(cuda.sorted.p + V + 1);
    add_token_rows<T, W><<<blocks_for_warps(V * chunks), BLOCK, 0, cuda.stream>>>(
        matrix<float>(dwte), matrix<const T>(dx), end, sorted, (uint32_t)chunks);
    if (dwpe.data)
        add_position_rows<T, W><<<blocks_for_warps(positions * chunks), BLOCK, 0, cuda.stream>>>(
            matrix<float>(dwpe), matrix<const T>(dx), positions, (uint32_t)chunks);
}

void cuda_embedding_backward(Tensor dwte, Tensor dwpe, Tensor dx, const int32_t *tokens, int64_t T)
{
    int64_t N = dx.rows, V = dwte.rows;
    gmem<int32_t> end = cuda.sorted, sorted = cuda.sorted + V + 1;
    gmem<const int32_t> token(tokens);
    unsigned blocks = (unsigned)ceil_div(N, BLOCK);
    if (!N) return;
    cuda_check(cudaMemsetAsync(end.p, 0, (size_t)V * sizeof(int32_t), cuda.stream), "embedding_backward");
    count_tokens<<<blocks, BLOCK, 0, cuda.stream>>>(end, token, N);
    scan_counts<<<1, SCAN_THREADS, 0, cuda.stream>>>(end, V);
    place_tokens<<<blocks, BLOCK, 0, cuda.stream>>>(end, sorted, token, N);
    order_tokens<<<blocks_for_warps(V), BLOCK, 0, cuda.stream>>>(gmem<const int32_t>(end.p), sorted, token, N, V);
    bool aligned = is_aligned(dx) && is_aligned(dwte) && is_aligned(dwpe);
    BY_DTYPE(dx.dtype, Row, BY_WIDTH(aligned, Row, W, add_gradients<Row, W>(dwte, dwpe, dx, T)));
    cuda_check(cudaGetLastError(), "embedding_backward");
}
