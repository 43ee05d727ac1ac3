/* See algorithms.h. */
#include "algorithms.h"

#include "file.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static char *path_of(const char *run_dir) { return xformat("%s/algorithms.json", run_dir); }

/* Rank 0's text on every rank, NULL where it has none; owned by the caller. */
static char *share_text(Comm *comm, char *text)
{
    uint64_t bytes = text ? strlen(text) + 1 : 0;
    comm->broadcast(comm, &bytes, sizeof bytes, 0);
    if (bytes && comm->rank > 0) text = xmalloc(bytes);
    if (bytes) comm->broadcast(comm, text, bytes, 0);
    return text;
}

void algorithms_choose(Model *model, const char *run_dir, bool resumed, bool tune)
{
    const Ops *ops = model->ops;
    Comm *comm = model->spec.sharding.comm;
    char *path = path_of(run_dir), *text = NULL;
    Error error;
    bool kept = resumed && ops->tune && access(path, F_OK) == 0;
    if (comm->rank == 0 && kept) {
        text = file_read_text(path, &error);
        if (!text) die("%s", error.text);
    } else if (comm->rank == 0 && tune) {
        gpt_tune(&model->gpt);
        text = ops->choices();
        if (file_write_text(path, text, &error)) die("%s", error.text);
    }
    text = share_text(comm, text);
    if (text && (kept || comm->rank > 0) && ops->choices_set(text, &error))
        note("note: %s is not used: %s; the run goes on with other algorithms, whose sums round otherwise", path,
             error.text);
    free(text);
    free(path);
}

void algorithms_forget(const char *run_dir)
{
    char *path = path_of(run_dir);
    remove(path);
    free(path);
}
