/* Attention and rotary positions on the CPU: the same bits on every instruction set and thread count, right against
 * plain loops in FP64 (what one run is: ops_harness.h), for grouped queries, documents, a cache longer than the call,
 * every head size. Then what bounds cannot say: a document behind the mask gives the bits that it gives alone, and a
 * NaN reaches every query that sees it. The cases: attention_cases.h.
 */
#include "attention_cases.h"

int main(void)
{
    int factor = test_long() ? 20 : 1;
    skip_missing_isas();
    test_case("qk_norm_rope_forward");
    every_way(case_rope_forward, 18 * factor);
    test_case("qk_norm_rope_backward");
    every_way(case_rope_backward, 18 * factor);
    test_case("attention_forward");
    every_way(case_attention_forward, 12 * factor);
    test_case("attention_backward");
    every_way(case_attention_backward, 10 * factor);
    for (int s = 0; s < 4; s++)
        for (int act = 0; act < 2; act++) {
            char name[64];
            snprintf(name, sizeof name, "%s, %s: documents alone, NaN", HARNESS_ISAS[s], act ? "bf16" : "fp32");
            test_case(name);
            test_document_alone(HARNESS_ISAS[s], (DType)act, 20);
            if (s > 0 || test_long()) test_nan(HARNESS_ISAS[s], (DType)act, 10);
        }
    harness_report();
    return test_done();
}
