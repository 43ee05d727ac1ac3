/* One token from logits: see sampler.h. The k-th largest logit comes from a heap of k, so one pass over the vocabulary
 * costs V log k at worst and needs no sorted copy. */
#include "sampler.h"

#include "mathfn.h"
#include "philox.h"

/* The largest, the lowest index of equal ones; -1 when nothing is above -Inf. */
static int64_t argmax(const float *logits, int64_t V)
{
    int64_t best = -1;
    float top = -INFINITY;
    for (int64_t i = 0; i < V; i++) {
        if (!(logits[i] > top)) continue;
        top = logits[i];
        best = i;
    }
    return best;
}

/* heap [k] is a min-heap but for its root: lets the root sink to its place. */
static void heap_sink(float *heap, int64_t k)
{
    float value = heap[0];
    int64_t hole = 0;
    for (int64_t child; (child = 2 * hole + 1) < k; hole = child) {
        if (child + 1 < k && heap[child + 1] < heap[child]) child++;
        if (heap[child] >= value) break;
        heap[hole] = heap[child];
    }
    heap[hole] = value;
}

/* The k-th largest of logits [V], k <= V; NaN counts as -Inf. heap [k] is scratch. */
static float kth_largest(const float *logits, int64_t V, int64_t k, float *heap)
{
    for (int64_t i = 0; i < k; i++) heap[i] = -INFINITY;
    for (int64_t i = 0; i < V; i++) {
        if (!(logits[i] > heap[0])) continue;
        heap[0] = logits[i];
        heap_sink(heap, k);
    }
    return heap[0];
}

static double weight(float logit, float top, double temperature)
{
    double x = ((double)logit - (double)top) / temperature;
    return x > -700 ? f64_exp(x) : 0; /* also NaN and -Inf */
}

int32_t sampler_pick(const float *logits, int64_t V, double temperature, int64_t top_k, uint64_t seed,
                     uint32_t position, float *scratch)
{
    int64_t best = argmax(logits, V);
    if (best < 0 || temperature == 0 || top_k == 1) return (int32_t)best;

    float top = logits[best], edge = -INFINITY;
    int64_t at_edge = V; /* how many logits equal to the edge are in */
    if (top_k > 0 && top_k < V) {
        edge = kth_largest(logits, V, top_k, scratch);
        at_edge = top_k;
        for (int64_t i = 0; i < V; i++) at_edge -= logits[i] > edge;
    }
    double sum = 0;
    for (int64_t i = 0; i < V; i++) {
        bool in = logits[i] > edge || (logits[i] == edge && at_edge-- > 0);
        scratch[i] = in ? logits[i] : -INFINITY;
        sum += weight(scratch[i], top, temperature);
    }
    Philox draw = philox_draw(seed, position, 0, 0, 0, ROLE_SAMPLE, 0);
    uint64_t bits = (uint64_t)draw.word[0] << 32 | draw.word[1];
    double aim = (double)(bits >> 11) * 0x1p-53 * sum, running = 0;
    for (int64_t i = 0; i < V; i++) {
        running += weight(scratch[i], top, temperature);
        if (running > aim) return (int32_t)i;
    }
    return (int32_t)best; /* aim rounded up to the sum itself; or a logit of +Inf, beside which all weigh 0 */
}
