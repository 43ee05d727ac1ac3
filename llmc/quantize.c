/* See quantize.h. */
#include "quantize.h"

int quantize_file(const Options *options, Error *error)
{
    (void)options;
    return error_set(error, "not there yet");
}
