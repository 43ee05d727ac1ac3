/* The CPU's operations, but for attention (test_attention.c): the same bits on every instruction set and thread count,
 * right within a bound, and nothing written that is not an output. What one run is: ops_harness.h; the cases:
 * ops_cases.h.
 */
#include "ops_cases.h"

#include "cpu/cpu.h"

/* What the backend cuts its workspace into, for needs of any size: pieces that are long enough and do not overlap. */
static void test_workspace(void)
{
    Run run = {.random = 5};
    test_case("pieces of the workspace hold what is needed and do not overlap");
    for (int i = 0; i < 400; i++) {
        if (!harness_open(&run, HARNESS_ISAS[i % 4], 1 + i % 3)) continue;
        Need n = {pick(&run, 1, 3000),
                  pick(&run, 1, 600),
                  pick(&run, 1, 900),
                  pick(&run, 1, 5000),
                  pick(&run, 1, 256),
                  pick(&run, 1, 8),
                  0,
                  pick(&run, 1, 16)};
        need(&run, n);
        float *partial_end = cpu.partial + ceil_div(n.N, SUM_ROWS) * 2 * n.cols;
        int32_t *sorted_end = cpu.sorted + round_up(n.V, 128) + 1 + n.N;
        char *a_end = cpu.workspace.a_panels + (size_t)cpu.threads * cpu.workspace.a_panel_bytes;
        CHECK(cpu.workspace.b_panel == run.workspace && (char *)cpu.workspace.c > cpu.workspace.b_panel, "panel of B");
        CHECK(cpu.workspace.a_panels > (char *)cpu.workspace.c && a_end <= (char *)cpu.partial, "panels of A");
        CHECK((char *)partial_end <= (char *)cpu.sorted, "partial sums of %d rows", (int)n.N);
        CHECK((char *)sorted_end <= cpu.attention, "sorted tokens, V %d", (int)n.V);
        CHECK(cpu.attention + (size_t)cpu.threads * cpu.attention_bytes == run.workspace + run.workspace_bytes,
              "attention");
    }
}

int main(void)
{
    skip_missing_isas();
    for (int i = 0; i < OPS_CASE_COUNT; i++) {
        test_case(OPS_CASES[i].name);
        every_way(OPS_CASES[i].one, OPS_CASES[i].rounds * (test_long() ? 20 : 1));
    }
    test_workspace();
    harness_report();
    return test_done();
}
