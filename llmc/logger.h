/* The run's record: RUN/log.jsonl, one JSON object a line.
 *
 *     {"step":12,"tokens":53248,"loss":3.1415,"grad_norm":0.5, ...}\n
 *
 * Lines are written whole with one write() each, so that a killed run leaves at most one broken last line. What does
 * not end with a newline is not a line: readers leave it out, logger_open cuts it off. On resume the log is cut back to
 * the resumed step. Floats are %.9g (round trip for FP32), so equal runs write equal lines but for times.
 *
 * Floor 4.
 */
#ifndef LLMC_LOGGER_H
#define LLMC_LOGGER_H

#include "json.h"

C_BEGIN

typedef struct Logger Logger;

/* Opens RUN/log.jsonl for appending; RUN exists. Of an old log only complete lines whose "step" is in 0 .. last_step
 * stay (-1: start empty). The cut is made in a new file that is renamed over the old one, so a crash leaves one of the
 * two. NULL with the reason on failure. */
Logger *logger_open(const char *run_dir, int64_t last_step, Error *error);
/* One line, at once. -1 when it does not fit on the disk and the like: the log then ends with the line before. */
int logger_write(Logger *logger, const Json *line, Error *error);
void logger_close(Logger *logger); /* NULL is fine */

/* Reads one number of every line that has it: step[i], value[i], in the order of the file; both arrays owned by the
 * caller. The strings "nan", "inf" and "-inf" are numbers (json_add_float writes them). Lines that are not JSON objects
 * with a "step" are skipped, except that a file without any good line is an error. Returns the count, or -1. */
int64_t log_read(const char *run_dir, const char *key, int64_t **step, double **value, Error *error);

C_END
#endif
