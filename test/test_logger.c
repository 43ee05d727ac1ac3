/* logger.c: what a log holds after writing, killing, resuming, a full disk; reading one number from good and hostile
 * files. */
#include "logger.h"
#include "test.h"
#include "test_files.h"

#include <errno.h>
#include <math.h>
#include <sys/stat.h>

static const char *folder; /* a new folder for the program; every test leaves it with log.jsonl at most */

static char *log_path(void) { return xformat("%s/log.jsonl", folder); }

static void put_log(const char *text, size_t bytes)
{
    char *path = log_path();
    test_write_file(path, text, bytes);
    free(path);
}

static void check_log(const char *expected)
{
    size_t bytes;
    char *path = log_path(), *text = test_read_file(path, &bytes);
    CHECK(bytes == strlen(expected) && strcmp(text, expected) == 0, "the log is \"%s\", not \"%s\"", text, expected);
    free(text);
    free(path);
}

static void check_no_rest(void)
{
    struct stat status;
    char *fresh = xformat("%s/log.jsonl.new", folder);
    CHECK(stat(fresh, &status) == -1 && errno == ENOENT, "%s is left behind", fresh);
    free(fresh);
}

static int write_step(Logger *logger, int64_t step, double loss, Error *error)
{
    Json *line = json_new_object();
    json_add_int(line, "step", step);
    json_add_float(line, "loss", loss);
    int result = logger_write(logger, line, error);
    json_free(line);
    return result;
}

static void test_write(void)
{
    Error error = {""};
    test_case("a new log, opened again, started anew");
    Logger *logger = logger_open(folder, -1, &error);
    if (!CHECK(logger, "%s", error.text)) return;
    for (int step = 1; step <= 3; step++) CHECK(write_step(logger, step, step / 8.0, &error) == 0, "%s", error.text);
    check_log("{\"step\":1,\"loss\":0.125}\n{\"step\":2,\"loss\":0.25}\n{\"step\":3,\"loss\":0.375}\n");
    logger_close(logger);
    logger_close(NULL);

    logger = logger_open(folder, 2, &error);
    CHECK(logger && write_step(logger, 3, NAN, &error) == 0, "%s", error.text);
    check_log("{\"step\":1,\"loss\":0.125}\n{\"step\":2,\"loss\":0.25}\n{\"step\":3,\"loss\":\"nan\"}\n");
    logger_close(logger);

    logger = logger_open(folder, -1, &error);
    CHECK(logger, "%s", error.text);
    check_log("");
    logger_close(logger);
    check_no_rest();

    test_case("a folder that is missing, a log that is a folder");
    CHECK(!logger_open("/nowhere/run", -1, &error) && strstr(error.text, "/nowhere/run/log.jsonl"), "%s", error.text);
    char *path = log_path();
    remove(path);
    CHECK(mkdir(path, 0700) == 0 && !logger_open(folder, -1, &error) && strstr(error.text, "log.jsonl"), "%s",
          error.text);
    rmdir(path);
    free(path);
    check_no_rest();
}

/* The log has this text; after a resume at last_step it has that. */
static void check_cut(const char *text, int64_t last_step, const char *expected)
{
    Error error = {""};
    put_log(text, strlen(text));
    Logger *logger = logger_open(folder, last_step, &error);
    CHECK(logger, "%s", error.text);
    logger_close(logger);
    check_log(expected);
    check_no_rest();
}

static void test_cut(void)
{
    test_case("resume cuts later steps and the broken last line");
    check_cut("{\"step\":1}\n{\"step\":2}\n{\"st", 9, "{\"step\":1}\n{\"step\":2}\n");
    check_cut("{\"step\":1}\n{\"step\":2}", 9, "{\"step\":1}\n");
    check_cut("{\"step\":1}\n{\"step\":2}\n{\"step\":3}\n", 2, "{\"step\":1}\n{\"step\":2}\n");
    check_cut("{\"step\":0}\n{\"step\":1}\n", 0, "{\"step\":0}\n");
    check_cut("{\"step\":5}\n", -1, "");
    check_cut("{\"step\":1}\n{\"step\":4}\n{\"step\":2}\n", 3, "{\"step\":1}\n{\"step\":2}\n");

    test_case("kept lines keep their bytes");
    check_cut("{ \"loss\": 1.50, \"step\" :1 }\r\n", 1, "{ \"loss\": 1.50, \"step\" :1 }\r\n");

    test_case("what is no line of a log goes away");
    check_cut(
        "\n\n# "
        "note\n{\"loss\":1}\n{\"step\":\"1\"}\n{\"step\":1.5}\n{\"step\":-1}\n[1]\n3\n{\"step\":1}{\n{\"step\":2}\n",
        9, "{\"step\":2}\n");
    check_cut("{\"st", 9, "");

    test_case("the rest of an earlier cut that was killed does no harm");
    char *fresh = xformat("%s/log.jsonl.new", folder);
    test_write_file(fresh, "{\"step\":7}\n{\"step\":8}\n{\"step\":9}\n", 33);
    free(fresh);
    check_cut("{\"step\":1}\n", 9, "{\"step\":1}\n");
}

static void test_full_disk(void)
{
    Error error = {""};
    test_case("a full disk: the write fails, the log ends with whole lines and goes on when there is room");
    Logger *logger = logger_open(folder, -1, &error);
    if (!CHECK(logger, "%s", error.text)) return;
    test_disk_full(100);
    int written = 0;
    while (written < 50 && write_step(logger, written + 1, 0.5, &error) == 0) written++;
    test_disk_normal();
    CHECK(written == 4, "%d lines of 22 bytes in 100", written);
    CHECK(strstr(error.text, "cannot write") && strstr(error.text, "log.jsonl"), "%s", error.text);
    CHECK(!strstr(error.text, "may be broken"), "%s", error.text);
    CHECK(write_step(logger, 5, 0.5, &error) == 0, "%s", error.text);
    logger_close(logger);
    check_log(
        "{\"step\":1,\"loss\":0.5}\n{\"step\":2,\"loss\":0.5}\n{\"step\":3,\"loss\":0.5}\n{\"step\":4,\"loss\":0.5}\n"
        "{\"step\":5,\"loss\":0.5}\n");

    test_case("a full disk while cutting: the old log stays");
    test_disk_full(50);
    logger = logger_open(folder, 4, &error);
    test_disk_normal();
    CHECK(!logger && strstr(error.text, "log.jsonl.new"), "%s", logger ? "opened" : error.text);
    logger_close(logger);
    check_log(
        "{\"step\":1,\"loss\":0.5}\n{\"step\":2,\"loss\":0.5}\n{\"step\":3,\"loss\":0.5}\n{\"step\":4,\"loss\":0.5}\n"
        "{\"step\":5,\"loss\":0.5}\n");
    check_no_rest();
}

static void test_read(void)
{
    Error error = {""};
    int64_t *step;
    double *value;
    test_case("one number of every line that has it");
    const char *text =
        "{\"step\":1,\"loss\":1.5,\"val_loss\":9}\nrubbish\n{\"step\":2,\"loss\":\"nan\"}\n{\"step\":3,\"loss\":\"-"
        "inf\"}\n"
        "{\"step\":4,\"loss\":\"soon\"}\n{\"step\":5,\"loss\":null}\n{\"step\":6,\"lr\":1}\n{\"loss\":8}\n"
        "{\"step\":7,\"loss\":\"inf\"}\n{\"step\":8,\"loss\":2}";
    put_log(text, strlen(text));
    int64_t n = log_read(folder, "loss", &step, &value, &error);
    if (CHECK(n == 4, "%ld values: %s", (long)n, error.text)) {
        CHECK(step[0] == 1 && step[1] == 2 && step[2] == 3 && step[3] == 7, "steps");
        CHECK(value[0] == 1.5 && isnan(value[1]) && value[2] == -INFINITY && value[3] == INFINITY, "values");
    }
    free(step);
    free(value);
    n = log_read(folder, "val_loss", &step, &value, &error);
    CHECK(n == 1 && step[0] == 1 && value[0] == 9, "val_loss: %ld", (long)n);
    free(step);
    free(value);
    CHECK(log_read(folder, "absent", &step, &value, &error) == 0, "a key that no line has");
    free(step);
    free(value);

    test_case("no log, an empty one, one without a good line");
    put_log("", 0);
    CHECK(log_read(folder, "loss", &step, &value, &error) == -1 && strstr(error.text, "empty"), "%s", error.text);
    put_log("{\"step\":1,\"loss\":1}", 19);
    CHECK(log_read(folder, "loss", &step, &value, &error) == -1 && strstr(error.text, "no line is"), "%s", error.text);
    CHECK(log_read("/nowhere", "loss", &step, &value, &error) == -1 && strstr(error.text, "/nowhere/log.jsonl"), "%s",
          error.text);
    CHECK(!step && !value, "arrays after a failure");
}

/* Many lines, mutated: never a crash, never a step or line that was not there. */
static void test_hostile(void)
{
    enum { LINES = 60 };
    char *text = xcalloc(LINES, 64);
    for (int i = 0; i < LINES; i++) sprintf(text + strlen(text), "{\"step\":%d,\"loss\":%d.25,\"lr\":1e-3}\n", i, i);
    test_case("mutated logs are read and cut without harm");
    for (uint32_t i = 0; i < 150; i++) {
        size_t bytes = strlen(text);
        char *mutated = xstrdup(text);
        Error error = {""};
        int64_t *step;
        double *value;
        test_mutate(mutated, &bytes, 64, i);
        put_log(mutated, bytes);
        int64_t before = log_read(folder, "loss", &step, &value, &error);
        free(step);
        free(value);
        CHECK(before >= -1 && before <= LINES + 8 && (before >= 0 || error.text[0]), "mutation %u: %ld", i,
              (long)before);
        Logger *logger = logger_open(folder, INT64_MAX, &error);
        CHECK(logger, "mutation %u: %s", i, error.text);
        logger_close(logger);
        int64_t after = log_read(folder, "loss", &step, &value, &error);
        CHECK(after == before || (before <= 0 && after == -1), "mutation %u: %ld values, %ld after the cut", i,
              (long)before, (long)after);
        free(step);
        free(value);
        free(mutated);
    }
    free(text);

    test_case("deep nesting, NUL bytes and a line of a megabyte");
    size_t bytes = 1 << 20;
    char *big = xmalloc(bytes + 64);
    memset(big, '[', bytes);
    size_t tail = (size_t)sprintf(big + bytes, "\n{\"step\":1}\n");
    big[100] = 0;
    put_log(big, bytes + tail);
    Error error = {""};
    Logger *logger = logger_open(folder, 9, &error);
    CHECK(logger, "%s", error.text);
    logger_close(logger);
    check_log("{\"step\":1}\n");
    free(big);
}

int main(void)
{
    char *own = test_folder();
    folder = own;
    test_write();
    test_cut();
    test_full_disk();
    test_read();
    test_hostile();
    test_folder_remove(own);
    return test_done();
}
