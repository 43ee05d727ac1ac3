/* The test harness: named cases, checks that print where and why, one last line "N passed, N failed[, N skipped]".
 *
 *     test_case("philox: known answers");
 *     CHECK(x == 3, "x is %d", x);
 *     return test_done();
 *
 * A case fails when one of its checks does. LLMC_TEST_ALL=1 in the environment asks for the long versions.
 */
#ifndef LLMC_TEST_H
#define LLMC_TEST_H

#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static struct {
    char name[128];
    bool open, failed;
    int passed, failures, skipped, printed;
} test_state;

static inline void test_close(void)
{
    if (!test_state.open) return;
    test_state.open = false;
    if (test_state.failed)
        test_state.failures++;
    else
        test_state.passed++;
    if (test_state.failed) printf("FAILED  %s\n", test_state.name);
    fflush(stdout);
}

static inline void test_case(const char *name)
{
    test_close();
    snprintf(test_state.name, sizeof test_state.name, "%s", name);
    test_state.open = true;
    test_state.failed = false;
    test_state.printed = 0;
}

/* The open case cannot run here: says why, and counts it as skipped. */
static inline void test_skip(const char *why)
{
    printf("skipped %s: %s\n", test_state.name, why);
    test_state.open = false;
    test_state.skipped++;
}

__attribute__((format(printf, 5, 6))) static inline bool test_check(bool holds, const char *file, int line,
                                                                    const char *condition, const char *format, ...)
{
    if (holds) return true;
    test_state.failed = true;
    if (test_state.printed++ < 5) { /* the first few of a case tell the story */
        va_list arguments;
        printf("%s:%d: %s: not true: %s: ", file, line, test_state.name, condition);
        va_start(arguments, format);
        vprintf(format, arguments);
        va_end(arguments);
        printf("\n");
    }
    return false;
}

#define CHECK(condition, ...) test_check(condition, __FILE__, __LINE__, #condition, __VA_ARGS__)

static inline bool test_long(void)
{
    const char *all = getenv("LLMC_TEST_ALL");
    return all && strcmp(all, "1") == 0;
}

static inline int test_done(void)
{
    test_close();
    printf("%d passed, %d failed", test_state.passed, test_state.failures);
    if (test_state.skipped) printf(", %d skipped", test_state.skipped);
    printf("\n");
    return test_state.failures ? 1 : 0;
}

#endif
