/* Instructions of the tensor cores and of copies that do not wait, by their documented meaning: PTX ISA 9.0, mma.m16n8k16
 * with BF16, ldmatrix.x4, cp.async.cg of 16 bytes.
 *
 * mma: a product of two BF16 values is exact; the accumulator and the 16 products are added in order of k in double and
 * the sum is rounded to FP32 once, to nearest. The hardware aligns the products to the largest and cuts; neither order
 * nor rounding are documented, so its last bits differ from these.
 *
 * cp.async: the bytes are read when the copy is issued and written by the wait that covers its group. In between the
 * destination holds 0xff, NaN in FP32 and BF16: who reads too early computes NaN. A copy that was not committed is
 * covered by no wait.
 */
#include "convert.h"
#include "warp.h"

#include <string.h>
#include <vector>

namespace cuda_on_cpu
{

/* What all lanes give. A lane that has ended gives 0xff bytes, and its `part` is not 1. */
template <class Operands> static const Operands *exchange_all(const char *name, Operands mine)
{
    mine.part = 1;
    const Operands *lanes = exchange(name, mine);
    if (lanes_alive() != 0xffffffffu)
        for (int lane = 0; lane < 32; lane++)
            if (lanes[lane].part != 1) fail("%s: lane %d has ended, and the whole warp must take part", name, lane);
    return lanes;
}

/* ---- mma ---- */

struct MmaOperands { /* of one lane */
    uint32_t part, a[4], b[2];
};

static float element(uint32_t pair, int which) { return bf16_value((uint16_t)(pair >> 16 * which)); }

/* A[row][k]: rows from 8 on are in the odd registers, k from 8 on in the upper two. */
static float a_element(const MmaOperands *lanes, int row, int k)
{
    return element(lanes[4 * (row % 8) + k % 8 / 2].a[row / 8 + 2 * (k / 8)], k % 2);
}

static float b_element(const MmaOperands *lanes, int k, int col)
{
    return element(lanes[4 * col + k % 8 / 2].b[k / 8], k % 2);
}

/* Each lane computes its four elements of D, in two rows and two columns. */
void mma_m16n8k16_bf16(float d[4], const uint32_t a[4], const uint32_t b[2])
{
    MmaOperands mine;
    memcpy(mine.a, a, sizeof mine.a);
    memcpy(mine.b, b, sizeof mine.b);
    int row = (int)running.lane / 4, col = (int)running.lane % 4 * 2;
    const MmaOperands *lanes = exchange_all("mma.m16n8k16", mine);
    double sum[4] = {d[0], d[1], d[2], d[3]};
    for (int k = 0; k < 16; k++) {
        double left[2] = {a_element(lanes, row, k), a_element(lanes, row + 8, k)};
        double right[2] = {b_element(lanes, k, col), b_element(lanes, k, col + 1)};
        for (int i = 0; i < 4; i++) sum[i] += left[i / 2] * right[i % 2];
    }
    for (int i = 0; i < 4; i++) d[i] = (float)sum[i];
}

/* ---- ldmatrix ---- */

struct MatrixRow { /* that a lane names */
    uint32_t part;
    uint16_t element[8];
};

void ldmatrix_x4(uint32_t r[4], const void *row, bool transposed)
{
    MatrixRow mine;
    check_shared("ldmatrix.x4", row, sizeof mine.element, sizeof mine.element);
    memcpy(mine.element, row, sizeof mine.element);
    int major = (int)running.lane / 4, minor = (int)running.lane % 4 * 2;
    const MatrixRow *rows = exchange_all("ldmatrix.x4", mine);
    for (int m = 0; m < 4; m++, rows += 8) {
        uint16_t low = transposed ? rows[minor].element[major] : rows[major].element[minor];
        uint16_t high = transposed ? rows[minor + 1].element[major] : rows[major].element[minor + 1];
        r[m] = low | (uint32_t)high << 16;
    }
}

/* ---- cp.async ---- */

struct Copy {
    void *to;
    uint8_t bytes[16];
};

struct Copies {                            /* of one thread */
    std::vector<Copy> issued;              /* since the last commit */
    std::vector<std::vector<Copy>> groups; /* committed, oldest first */
};

static Copies &copies()
{
    ThreadHook &hook = thread_hook();
    if (!hook.data) {
        hook.data = new Copies;
        hook.at_end = [](void *data) { delete (Copies *)data; };
    }
    return *(Copies *)hook.data;
}

void cp_async_16(void *shared, const void *device, bool valid)
{
    Copy copy = {shared, {}};
    check_shared("cp.async", shared, sizeof copy.bytes, sizeof copy.bytes);
    if (valid) memcpy(copy.bytes, global_access(device, sizeof copy.bytes, false), sizeof copy.bytes);
    memset(shared, 0xff, sizeof copy.bytes);
    copies().issued.push_back(copy);
}

void cp_async_commit() /* an empty group counts too */
{
    Copies &c = copies();
    c.groups.push_back(std::move(c.issued));
    c.issued.clear();
}

void cp_async_wait(int pending)
{
    Copies &c = copies();
    size_t landed = c.groups.size() > (size_t)pending ? c.groups.size() - (size_t)pending : 0;
    for (size_t g = 0; g < landed; g++)
        for (const Copy &copy : c.groups[g]) memcpy(copy.to, copy.bytes, sizeof copy.bytes);
    c.groups.erase(c.groups.begin(), c.groups.begin() + (ptrdiff_t)landed);
}

} // namespace cuda_on_cpu
