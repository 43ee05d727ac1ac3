/* See checkpoint_folder.h. */
#include "checkpoint_folder.h"

#include "file.h"

#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

void checkpoint_test_stop(const char *point)
{
    static int passed;
    const char *asked = getenv("LLMC_TEST_STOP");
    size_t length = strlen(point);
    if (!asked || strncmp(asked, point, length) || (asked[length] && asked[length] != ':')) return;
    if (asked[length] == ':' && passed++ < atoi(asked + length + 1)) return;
    raise(SIGKILL);
}

typedef struct {
    int64_t *step; /* [count] owned, ascending */
    int64_t count;
} StepList;

static int compare_steps(const void *a, const void *b)
{
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

/* Steps of the folders step_XXXXXXXX in a run; also sweeps *.tmp and *.old if asked. */
static StepList list_steps(const char *run_dir, bool sweep)
{
    StepList list = {0};
    char *folder = xformat("%s/checkpoints", run_dir);
    DIR *dir = opendir(folder);
    for (struct dirent *entry; dir && (entry = readdir(dir));) {
        char name[32], *end = entry->d_name + 5;
        if (strncmp(entry->d_name, "step_", 5) || !isdigit((unsigned char)*end)) continue;
        int64_t step = strtoll(entry->d_name + 5, &end, 10);
        snprintf(name, sizeof name, "step_%08" PRId64, step);
        if (strncmp(name, entry->d_name, (size_t)(end - entry->d_name)) || name[end - entry->d_name]) continue;
        if (*end == 0) {
            list.step = xrealloc(list.step, (size_t)(list.count + 1) * sizeof *list.step);
            list.step[list.count++] = step;
        } else if (sweep && (!strcmp(end, ".tmp") || !strcmp(end, ".old"))) {
            char *path = xformat("%s/%s", folder, entry->d_name);
            file_delete_folder(path, NULL);
            free(path);
        }
    }
    if (dir) closedir(dir);
    if (list.count) qsort(list.step, (size_t)list.count, sizeof *list.step, compare_steps);
    free(folder);
    return list;
}

char *checkpoint_folder(const char *run_dir, int64_t step, const char *suffix)
{
    return xformat("%s/checkpoints/step_%08" PRId64 "%s", run_dir, step, suffix);
}

/* step_X to step_X.old, which no longer looks like a checkpoint. */
static int set_aside(const char *run_dir, int64_t step, Error *error)
{
    char *path = checkpoint_folder(run_dir, step, ""), *old = checkpoint_folder(run_dir, step, ".old");
    int status = file_delete_folder(old, error);
    if (!status && rename(path, old)) status = error_set(error, "%s: cannot rename: %s", path, strerror(errno));
    free(path);
    free(old);
    return status;
}

static int delete_checkpoint(const char *run_dir, int64_t step, Error *error)
{
    char *old = checkpoint_folder(run_dir, step, ".old");
    int status = set_aside(run_dir, step, error);
    if (!status) checkpoint_test_stop("delete");
    if (!status) status = file_delete_folder(old, error);
    free(old);
    return status;
}

int64_t checkpoint_before(const char *run_dir, int64_t step)
{
    StepList list = list_steps(run_dir, false);
    int64_t newest = -1;
    for (int64_t i = 0; i < list.count && list.step[i] < step; i++) newest = list.step[i];
    free(list.step);
    return newest;
}

int64_t checkpoint_count(const char *run_dir)
{
    StepList list = list_steps(run_dir, false);
    free(list.step);
    return list.count;
}

int checkpoint_delete_after(const char *run_dir, int64_t step, Error *error)
{
    StepList list = list_steps(run_dir, true);
    int status = 0;
    for (int64_t i = list.count - 1; i >= 0 && list.step[i] > step && !status; i--)
        status = delete_checkpoint(run_dir, list.step[i], error);
    free(list.step);
    return status;
}

void checkpoint_prune(const char *run_dir, int64_t newest, int64_t keep)
{
    StepList list = list_steps(run_dir, false);
    int64_t older = 0;
    Error error;
    for (int64_t i = 0; i < list.count; i++) older += list.step[i] < newest;
    for (int64_t i = 0; keep > 0 && i < older - (keep - 1); i++)
        if (delete_checkpoint(run_dir, list.step[i], &error)) note("note: old checkpoint kept: %s", error.text);
    free(list.step);
}

int checkpoint_begin_folder(const char *run_dir, int64_t step, Error *error)
{
    char *parent = xformat("%s/checkpoints", run_dir), *folder = checkpoint_folder(run_dir, step, ".tmp");
    bool first = access(parent, F_OK) != 0;
    int status = file_make_folder(parent, error);
    if (!status && first) status = file_sync_folder(run_dir, error);
    free(list_steps(run_dir, true).step);
    if (!status) status = file_delete_folder(folder, error);
    if (!status) status = file_make_folder(folder, error);
    free(parent);
    free(folder);
    return status;
}

/* A complete folder of the same step, from before a resume, is exchanged for it at once where the system can, else set
 * aside first. */
static int put_in_place(const char *run_dir, int64_t step, const char *folder, const char *final, Error *error)
{
#ifdef RENAME_EXCHANGE
    if (renameat2(AT_FDCWD, folder, AT_FDCWD, final, RENAME_EXCHANGE) == 0) {
        file_delete_folder(folder, NULL); /* what stays is swept by the next write */
        return 0;
    }
#endif
    if (access(final, F_OK) == 0 && set_aside(run_dir, step, error)) return -1;
    return rename(folder, final) ? error_set(error, "%s: cannot rename: %s", folder, strerror(errno)) : 0;
}

int checkpoint_end_folder(const char *run_dir, int64_t step, Error *error)
{
    char *parent = xformat("%s/checkpoints", run_dir), *folder = checkpoint_folder(run_dir, step, ".tmp");
    char *final = checkpoint_folder(run_dir, step, "");
    int status = file_sync_folder(folder, error);
    if (!status) checkpoint_test_stop("rename");
    if (!status) status = put_in_place(run_dir, step, folder, final, error);
    if (!status) status = file_sync_folder(parent, error);
    if (!status) checkpoint_test_stop("renamed");
    free(parent);
    free(folder);
    free(final);
    return status;
}
