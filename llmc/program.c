/* See program.h. */
#include "program.h"

#include "commands.h"

#include <stdio.h>

int program_main(int argc, char **argv, const Backend *backend)
{
    Options options;
    Error error;
    bool help;
    int code;
    if (options_parse(&options, argc, argv, &help, &error)) die_usage("%s", error.text);

    Comm comm;
    Machine machine = {.comm = &comm};
    bool train = !help && options.verb == VERB_TRAIN;
    if (!train && !help && comm_launched_ranks() > 1)
        die_usage("%s is one process: start it without mpirun; only train runs on several ranks",
                  verb_name(options.verb));
    if (train) comm_open(&comm);
    if (train && comm.rank > 0 && (note_off(), !freopen("/dev/null", "w", stdout))) die("cannot open /dev/null");
    bool computes = !help && options.verb != VERB_TOKENIZE && options.verb != VERB_COMPARE &&
                    options.verb != VERB_QUANTIZE;
    if (train && backend->device) backend->device(comm.local_rank, comm.local_ranks);
    if (computes && backend->open(&machine.ops, options.isa, options.threads, &error)) die_usage("%s", error.text);
    if (computes) machine.isa = backend->isa(), machine.threads = backend->threads();
    if (train && backend->comm_open && comm.ranks > 1) backend->comm_open(&comm);
    if (help) {
        code = 0;
    } else {
        switch (options.verb) {
        case VERB_TRAIN:
            code = command_train(&options, &machine);
            break;
        case VERB_EVAL:
            code = command_eval(&options, &machine);
            break;
        case VERB_GENERATE:
            code = command_generate(&options, &machine);
            break;
        case VERB_PLAN:
            code = command_plan(&options, &machine);
            break;
        case VERB_EXPORT:
            code = command_export(&options, &machine);
            break;
        case VERB_QUANTIZE:
            code = command_quantize(&options);
            break;
        case VERB_TOKENIZE:
            code = command_tokenize(&options);
            break;
        default:
            code = command_compare(&options);
        }
    }
    options_free(&options);
    if (train) comm_close(&comm);
    return code;
}
