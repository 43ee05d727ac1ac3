/* RUN/log.jsonl, written and read: see logger.h. Old logs are user input (another program, a full disk or a crash may
 * have had them), so both readers judge every line by itself and share one rule for what a good line is. */
#include "logger.h"

#include "file.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

struct Logger {
    int descriptor;
    char *path;
};

/* ---- lines of an old log ---- */

typedef struct {
    char *map; /* NULL: the file is missing or empty */
    size_t bytes, at;
} LineReader;

static int lines_open(LineReader *reader, const char *path, Error *error)
{
    struct stat status;
    *reader = (LineReader){NULL, 0, 0};
    if (stat(path, &status) ? errno == ENOENT : status.st_size == 0) return 0;
    reader->map = file_map(path, &reader->bytes, error);
    return reader->map ? 0 : -1;
}

/* The next good line: a JSON object with a whole "step" >= 0, ended by a newline. `*line` is its text, `*length` counts
 * the newline. NULL at the end; owned by the caller. */
static Json *lines_next(LineReader *reader, const char **line, size_t *length, int64_t *step)
{
    const char *newline;
    while (reader->map && (newline = memchr(reader->map + reader->at, '\n', reader->bytes - reader->at))) {
        *line = reader->map + reader->at;
        *length = (size_t)(newline + 1 - *line);
        reader->at += *length;
        Json *json = json_parse(*line, *length, "line", NULL);
        if (json && json_int(json_get(json, "step"), step) && *step >= 0) return json;
        json_free(json);
    }
    return NULL;
}

/* ---- writing ---- */

/* Writes the lines of `path` with step <= last_step to `fresh` and renames it over `path`. */
static int cut_log(const char *path, const char *fresh, int64_t last_step, Error *error)
{
    LineReader reader;
    if (lines_open(&reader, path, error)) return -1;

    int result = 0;
    FILE *out = fopen(fresh, "wb");
    if (!out) {
        result = error_set(error, "cannot create %s: %s", fresh, strerror(errno));
    } else {
        const char *line;
        size_t length;
        int64_t step;
        for (Json *json; result == 0 && (json = lines_next(&reader, &line, &length, &step)); json_free(json))
            if (step <= last_step) result = file_write(out, fresh, line, length, error);
        result = file_finish(out, fresh, result ? NULL : error) ? -1 : result;
        if (result == 0 && rename(fresh, path))
            result = error_set(error, "cannot rename %s to %s: %s", fresh, path, strerror(errno));
        if (result) unlink(fresh);
    }
    file_unmap(reader.map, reader.bytes);
    return result;
}

Logger *logger_open(const char *run_dir, int64_t last_step, Error *error)
{
    char *path = xformat("%s/log.jsonl", run_dir), *fresh = xformat("%s/log.jsonl.new", run_dir);
    Logger *logger = NULL;
    if (cut_log(path, fresh, last_step, error) == 0) {
        int descriptor = open(path, O_WRONLY | O_APPEND | O_CLOEXEC);
        if (descriptor < 0) {
            error_set(error, "cannot open %s: %s", path, strerror(errno));
        } else {
            logger = xmalloc(sizeof *logger);
            *logger = (Logger){descriptor, xstrdup(path)};
        }
    }
    free(path);
    free(fresh);
    return logger;
}

int logger_write(Logger *logger, const Json *line, Error *error)
{
    char *object = json_print(line, false), *text = xformat("%s\n", object);
    size_t length = strlen(text);
    off_t start = lseek(logger->descriptor, 0, SEEK_END);
    ssize_t written = write(logger->descriptor, text, length);
    int reason = written < 0 ? errno : ENOSPC; /* a file takes a part of a line only when the disk or a limit is full */
    free(object);
    free(text);
    if (written == (ssize_t)length) return 0;

    bool cut = start >= 0 && ftruncate(logger->descriptor, start) == 0;
    return error_set(error, "cannot write %s: %s%s", logger->path, strerror(reason),
                     cut ? "" : "; its last line may be broken");
}

void logger_close(Logger *logger)
{
    if (!logger) return;
    close(logger->descriptor);
    free(logger->path);
    free(logger);
}

/* ---- reading one number ---- */

static bool line_number(const Json *json, double *value)
{
    const char *text = json_string(json);
    if (!text) return json_number(json, value);
    *value = strcmp(text, "inf") == 0 ? INFINITY : strcmp(text, "-inf") == 0 ? -INFINITY : NAN;
    return isinf(*value) || strcmp(text, "nan") == 0;
}

int64_t log_read(const char *run_dir, const char *key, int64_t **step, double **value, Error *error)
{
    char *path = xformat("%s/log.jsonl", run_dir);
    const char *line;
    size_t length, bytes;
    int64_t good = 0, count = 0, room = 0, at;
    double number;
    LineReader reader = {.map = file_map(path, &bytes, error)};

    *step = NULL;
    *value = NULL;
    reader.bytes = reader.map ? bytes : 0;
    for (Json *json; (json = lines_next(&reader, &line, &length, &at)); json_free(json)) {
        good++;
        if (!line_number(json_get(json, key), &number)) continue;
        if (count == room) {
            room = max_i64(2 * room, 256);
            *step = xrealloc(*step, (size_t)room * sizeof **step);
            *value = xrealloc(*value, (size_t)room * sizeof **value);
        }
        (*step)[count] = at;
        (*value)[count++] = number;
    }
    if (reader.map && good == 0)
        error_set(error, "%s: no line is a JSON object with a \"step\"; is it a run's log?", path);
    file_unmap(reader.map, reader.bytes);
    free(path);
    return good > 0 ? count : -1;
}
